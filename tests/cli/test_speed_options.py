"""Options that make a step faster, as a user asks for them: one line of YAML each."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeal import AL, ALPackage, ConfigError, Pipeline
from pipeal.cli.text import command
from pipeal.config import TextConfig, load_config
from pipeal.core.options import Compile
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.regions import CompileWarning
from pipeal.methods.al import BP, TouchedAdam
from pipeal.run.build_text import TextExperiment, text_experiment
from tests.cli.running import run_command, told_one_line

SMALL = (
    "model.embedding_dim=12",
    "model.n_heads=2",
    "model.x_hid=8",
    "model.y_hid=8",
    "data.batching.budget_tokens=2048",
    "train.train_accuracy_samples=100",
    "engine.threads=1",
)


def built(*options: str) -> TextExperiment:
    return text_experiment(load_config(TextConfig, overrides=["dataset=toynews", *SMALL, *options]))


@pytest.mark.parametrize("mode", ["al", "bp"])
def test_touched_rows_are_one_line_of_yaml(mode: str) -> None:
    package = built("model.embedding_updates=touched").package(mode, 0)
    assert next(part for part in package.modules() if isinstance(part, nn.Embedding)).sparse
    layer = package[0]
    assert isinstance(layer.opt if isinstance(layer, BP) else layer.enc_opt, TouchedAdam)


@pytest.fixture
def compiler() -> None:
    try:
        check_compile("static", [torch.device("cpu")])
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_touched_rows_go_with_compiled_layers() -> None:
    """The gradient of a table is sparse in a compiled backward, too: rows that no batch looks up keep their bits."""
    draw = torch.Generator().manual_seed(0)
    known = 50
    batches = [(torch.randint(1, known, (6, 9), generator=draw), torch.randint(4, (6,), generator=draw)) for _ in "abc"]

    def trained(compile: Compile, schedule: str) -> ALPackage:
        package = built("model.embedding_updates=touched", "model.dropout=0.0").package("al", 0)[:1]
        with warnings.catch_warnings(), Pipeline(package, ["cpu"], schedule, threads=1, compile=compile) as pipe:
            warnings.simplefilter("error", CompileWarning)
            pipe.run(batches)
        return package

    plain, compiled, pipelined = (
        trained(*how) for how in (("none", "sequential"), ("static", "sequential"), ("static", "pipelined"))
    )
    for one, other, same in zip(plain.parameters(), compiled.parameters(), pipelined.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        assert torch.equal(same, other)
    (table,) = (part for part in compiled.modules() if isinstance(part, nn.Embedding))
    new = next(built("model.embedding_updates=touched").package("al", 0).parameters())
    assert len(new) == len(table.weight) > known
    assert torch.equal(table.weight[known:], new[known:])
    assert not torch.equal(table.weight[:known], new[:known])
    layer = compiled[0]
    assert isinstance(layer, AL)
    assert not layer.enc_opt.state[table.weight]["exp_avg"][known:].any()


def test_replicas_of_touched_rows_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    told_one_line(
        "model.embedding_updates: found touched, whose gradients replicas cannot average",
        *run_command(
            command, capsys, "toynews", "transformer", "--replicas", "2", "--set=model.embedding_updates=touched"
        ),
    )


@pytest.mark.slow
def test_all_of_them_together_train_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        f"--set={option}"
        for option in (*SMALL, "model.embedding_updates=touched", "train.accumulate=3", "engine.matmul=medium")
    ]
    code, _, err = run_command(
        command,
        capsys,
        "toynews",
        "transformer",
        "--epochs",
        "2",
        "--devices",
        "cpu*2",
        "--out",
        str(tmp_path),
        *options,
    )
    assert code == 0, err
    kept = load_config(TextConfig, next(tmp_path.glob("*/config.yaml")))
    assert (kept.model.embedding_updates, kept.train.accumulate, kept.engine.matmul) == ("touched", 3, "medium")
    assert len(next(tmp_path.glob("*/epochs.csv")).read_text().splitlines()) == 3
