"""``--mode bp --devices a,b``: the network's blocks over several devices, in the same run as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeal.cli.text import command
from pipeal.config import TextConfig, load_config
from pipeal.engine.state.layer_state import layer_state
from pipeal.run.build_text import text_experiment
from pipeal.run.choices import choose
from pipeal.run.remembered import PlacementCache
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore
from tests.cli.running import run_command, told_one_line

SMALL = [
    f"--set={key}"
    for key in (
        *("model.embedding_dim=12", "model.n_heads=2", "model.x_hid=8", "model.y_hid=8", "engine.threads=1"),
        *("data.batching.budget_tokens=8192", "train.train_accuracy_samples=100", "train.precision=fp32"),
    )
]


def run(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> tuple[int, str, str]:
    return run_command(command, capsys, "toynews", "transformer", "--mode=bp", f"--out={out}", *SMALL, *arguments)


def kept(folder: Path) -> list[tuple[str, object]]:
    """The newest checkpoint's weights and optimizer state, in order."""
    found = CheckpointStore(folder / "checkpoints").newest(lambda _: None)
    assert found is not None
    experiment = text_experiment(load_config(TextConfig, folder / "config.yaml"))
    package = experiment.package("bp", 0)
    ResumedTraining.of(found).load_into(package)
    state = layer_state(package[0])
    values = [*state["module"].items()]
    for number, own in state["optimizers"]["opt"]["state"]["state"].items():
        values += [(f"{number}.{name}", value) for name, value in own.items()]
    return values


@pytest.mark.slow
def test_a_run_that_moves_from_two_devices_to_three_leaves_that_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name / "toynews-transformer-bp-001" for name in ("one", "several")]
    for folder, devices in zip(folders, ("cpu", "cpu*2"), strict=True):
        code, _, err = run(capsys, folder.parent, "--epochs=2", f"--devices={devices}")
        assert code == 0, err
    assert_equal(*folders)
    first = min((folders[1] / "checkpoints").glob("step-*"))  # of its first epoch
    code, _, err = run(capsys, folders[1].parent, "--epochs=2", "--devices=cpu*3", f"--resume={first}")
    assert code == 0, err
    assert "BP goes on after epoch 1" in err
    assert_equal(*folders)
    summary = json.loads((folders[1] / "summary.json").read_text())
    assert (summary["devices"], sum(summary["sizes"]), len(summary["stages"])) == (["cpu"] * 3, 5, 3)
    assert (folders[1] / "timeline.png").exists()


def assert_equal(one: Path, other: Path) -> None:
    """Rows, times aside, and all that the model has learnt."""
    rows = [
        [
            [json.loads(line)[key] for key in ("train_acc", "test_acc", "losses")]
            for line in (folder / "epochs.jsonl").read_text().splitlines()
        ]
        for folder in (one, other)
    ]
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]
    assert all(
        name == same and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for (name, a), (same, b) in zip(kept(one), kept(other), strict=True)
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--devices=cpu*6"], "6 devices for 5 blocks of the BP form; expected at most 5"),
        (["--devices=cpu*2", "--set=engine.sizes=[2,2]"], r"sizes \[2, 2\] cover 4 layers"),
        (["--devices=cpu*2", "--set=engine.sizes=[1,2,2]"], r"3 sizes \[1, 2, 2\] for 2 stages"),
        (["--devices=cpu*2", "--set=engine.compile=static"], "compile='static' needs a layer on one device"),
    ],
)
def test_what_does_not_fit_gets_one_line(
    options: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *run(capsys, tmp_path, *options))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_can_ask_for_it_as_a_form_of_its_own(tmp_path: Path) -> None:
    """Backpropagation beside a pipeline: on its first device, or over all that the pipeline has."""
    keys = ["dataset=toynews", "train.mode=compare", "engine.devices=[cpu, cpu]", "engine.threads=1", f"out={tmp_path}"]
    config = load_config(TextConfig, overrides=keys)
    experiment = text_experiment(config)
    alone = choose(experiment, "bp")
    over = choose(experiment, "bp", load_config(TextConfig, overrides=[*keys, "train.mode=bp"]))
    assert (alone.engine.devices, alone.engine.sizes, alone.engine.threads) == (("cpu",), (1,), 1)
    assert (over.engine.devices, sum(over.engine.sizes or ()), over.engine.threads) == (("cpu", "cpu"), 5, 1)
    assert over.engine.schedule == alone.engine.schedule == "sequential"


@pytest.mark.parametrize("form", ["al", "bp"])
def test_threads_bind_every_form_and_are_otherwise_found_the_same_way(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backpropagation beside a pipeline took all cores, untried, whatever ``engine.threads`` said."""
    tried: list[int] = []

    def trial(_: object, candidate: object, __: object) -> float:
        threads = getattr(candidate, "threads")  # noqa: B009
        tried.append(threads)
        return {4: 3.0, 2: 1.0, 1: 2.0}[threads]

    monkeypatch.setattr("pipeal.planning.search.Search._measure", trial)
    monkeypatch.setattr("pipeal.engine.devices.threads.cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    keys = ["dataset=toynews", "train.mode=compare", "engine.devices=cpu"]
    experiment = text_experiment(load_config(TextConfig, overrides=keys))
    fresh = PlacementCache(retry=True)
    assert choose(experiment, "al" if form == "al" else "bp", cache=fresh).engine.threads == 2
    assert tried == [4, 2, 1]
    bound = text_experiment(load_config(TextConfig, overrides=[*keys, "engine.threads=3"]))
    assert choose(bound, "al" if form == "al" else "bp", cache=fresh).engine.threads == 3
    assert tried == [4, 2, 1]
