"""What pipelined backpropagation does not go with is told before anything is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from pipeal.config import EngineConfig, TextConfig, load_config
from pipeal.core.errors import ConfigError
from pipeal.run.backprop import check_backprop, check_transport


@pytest.mark.parametrize(
    ("settings", "processes", "line"),
    [
        (["train.mode=al"], 2, r"engine.schedule: found gpipe, a schedule of backpropagation, but train.mode is al; "),
        (["train.mode=compare"], 2, r"but train.mode is compare; expected --mode bp"),
        ([], 1, r"found gpipe, whose stages are processes, but this is one process; start it with torchrun"),
        (["engine.replicas=2"], 4, r"engine.replicas: found 2, which does not go with .*expected 1$"),
        (["train.accumulate=3"], 2, r"train.accumulate: found 3, .*raise the batch size"),
        (["train.on_non_finite=skip"], 2, r"train.on_non_finite: found skip, .*expected raise$"),
        (["engine.on_oom=split"], 2, r"engine.on_oom: found split, .*raise engine.micro_batches"),
        (["engine.recompute=blocks"], 2, r"engine.recompute: found blocks, "),
        (["engine.compile=static"], 2, r"engine.compile: found static, "),
        (["train.precision=fp16"], 2, r"train.precision: found fp16, .*expected auto or bf16 or fp32$"),
        (["engine.schedule=1f1b", "engine.micro_batches=3"], 4, r"found 3 for 4 stages; .*or engine.schedule gpipe$"),
    ],
    ids=str,
)  # fmt: skip
def test_what_excludes_each_other_is_told(settings: list[str], processes: int, line: str) -> None:
    base = ["dataset=agnews", "model.name=lstm", "train.mode=bp", "engine.schedule=gpipe"]
    with pytest.raises(ConfigError, match=line):
        check_backprop(load_config(TextConfig, overrides=[*base, *settings]), processes=processes)
    check_backprop(load_config(TextConfig, overrides=base), processes=processes if processes > 1 else 2)


@pytest.mark.parametrize("mode", ["al", "bp", "compare"])
def test_other_schedules_are_let_through(mode: str) -> None:
    settings = ["dataset=agnews", "model.name=lstm", f"train.mode={mode}", "engine.schedule=al-fm"]
    check_backprop(load_config(TextConfig, overrides=[*settings, "train.accumulate=3"]), processes=1)


def test_1f1b_on_cpus_wants_a_pytorch_that_waits_for_all_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: under PyTorch 2.6 three ranks stood in Schedule1F1B until they were killed."""
    engine = EngineConfig(schedule="1f1b")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cu124"))
    with pytest.raises(ConfigError, match=r"found 1f1b on CPUs under PyTorch 2.6.0\+cu124, .*2.8 or newer, or gpipe$"):
        check_transport(engine, "cpu")
    check_transport(engine, "cuda:0")
    check_transport(replace(engine, schedule="gpipe"), "cpu")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    check_transport(engine, "cpu")
