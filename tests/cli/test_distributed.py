"""What the ranks of a run compare before they begin."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeal.config import TextConfig, load_config
from pipeal.core.errors import ConfigError
from pipeal.engine.distributed.consistency import require_same
from pipeal.run import distributed, experiment
from pipeal.run.distributed import carry_out
from pipeal.run.forms import Run
from pipeal.run.train import KINDS
from tests.engine.distributed.ranks import store_port


class _MetError(Exception):
    """Ends a command where it meets the others."""


def facts_of(monkeypatch: pytest.MonkeyPatch, *settings: str) -> Any:
    """What a rank started with these settings says to the others."""
    found: list[Any] = []

    def open_world(_: object, facts: Any, **__: Any) -> Any:
        found.append(json.loads(json.dumps(facts)))
        raise _MetError

    monkeypatch.setattr(distributed, "open_world", open_world)
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    config = load_config(TextConfig, overrides=["dataset=agnews", "model.name=lstm", *settings])
    kind: Any = None
    with pytest.raises(_MetError):
        carry_out(kind, config, "auto")
    return found[0]


def test_devices_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: those of rank 0 were taken, and another's were not even looked at, where both were GPUs."""
    here = facts_of(monkeypatch, "engine.devices=cuda:0,cuda:1")
    there = facts_of(monkeypatch, "engine.devices=cuda:1,cuda:0")
    line = r"rank 1 has engine\.devices cuda:1,cuda:0, rank 0 has cuda:0,cuda:1"
    with pytest.raises(ConfigError, match=line):
        require_same([here, there])


def test_the_queues_of_cuda_are_settled_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 10 of the GPU reading. Data is read later, which asks CUDA for a GPU to pin memory for."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # and back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    facts_of(monkeypatch, "engine.devices=cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_devices_that_are_left_open_are_compared_by_what_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "gpu_count", lambda: 1)
    left_open = facts_of(monkeypatch)
    require_same([left_open, facts_of(monkeypatch, "engine.devices=cpu")])
    monkeypatch.setattr(distributed, "gpu_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"rank 1 has engine\.devices cuda, rank 0 has cpu"):
        require_same([left_open, facts_of(monkeypatch)])


@pytest.mark.parametrize(
    ("visible", "seen", "wanted"), [(None, 1, "cpu"), (None, 2, "cuda"), ("3", 1, "cuda"), ("", 0, "cpu")]
)
def test_a_process_that_was_given_one_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: int, wanted: str
) -> None:
    """Prediction 11 of the GPU reading: of two processes that each see one GPU, both trained on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # and back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES") if visible is None else monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", visible
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "gpu_count", lambda: seen)
    assert facts_of(monkeypatch)["engine.devices"] == wanted


@pytest.mark.parametrize("same", ["cpu,cpu", "[cpu, cpu]"])
def test_devices_are_the_same_however_they_are_written(monkeypatch: pytest.MonkeyPatch, same: str) -> None:
    require_same([facts_of(monkeypatch, "engine.devices=cpu*2"), facts_of(monkeypatch, f"engine.devices={same}")])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["engine.schedule=al-fm"], "needs layers that end one before the next"),
        (["engine.within_stage=stage"], "needs layers that end one before the next"),
        (["engine.devices=cuda:0"], "not for stages on cuda"),
    ],
    ids=str,
)
def test_what_does_not_go_with_offloading_is_told_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        facts_of(monkeypatch, "engine.offload=disk", *settings)
    assert facts_of(monkeypatch, "engine.offload=disk", "train.mode=bp", "engine.schedule=al-fm")


def test_never_counts_for_the_first_attempt_of_a_command_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Symptom: after each restart by torchrun --max-restarts, a command with --resume never began another run."""
    found: list[Path] = []

    def begin(run: Run, *_: object) -> None:
        found.append(run.folder.path)
        raise _MetError

    monkeypatch.setattr(experiment, "_begin", begin)
    schema, kind = KINDS["text"]
    settings = ["dataset=toynews", "model.name=lstm", "engine.devices=cpu", "engine.threads=1", f"out={tmp_path}"]
    config = load_config(schema, overrides=settings)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # commands, each with a torchrun of its own
        with store_port() as port:
            monkeypatch.setenv("MASTER_PORT", str(port))
            for _ in range(2):  # attempts
                with pytest.raises(_MetError):
                    carry_out(kind, config, "never")
            shutil.rmtree(found[-1])  # as where rank 0 has come to another machine
            with pytest.raises(_MetError):
                carry_out(kind, config, "never")
    assert [path.name[-3:] for path in found] == ["001", "001", "001", "002", "002", "002"]
