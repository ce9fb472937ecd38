"""Law 4: a run that was ended anywhere and taken up again leaves what a run that was never touched leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from fuzz_cases import write_images
from left_behind import ROOT, left_behind, same

from pipeal.cli import text, vision
from pipeal.config import TextConfig, load_config
from pipeal.reporting.recorders import JsonLinesRecorder
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.store import Checkpoint
from pipeal.training.position import Position
from pipeal.training.row import EpochRow
from tests.cli.running import run_command
from tests.cli.test_text import varied
from tests.integration.law import NEEDS_FP16
from tests.training.test_checkpoint import old_checkpoint

SMALL = (
    "--set=model.embedding_dim=12", "--set=model.n_heads=2", "--set=model.x_hid=8", "--set=model.y_hid=8",
    "--set=data.batching.budget_tokens=256", "--set=train.train_accuracy_samples=50", "--set=engine.threads=1",
    "--epochs=2", "--set=train.lr.warmup=5", "--set=train.checkpoint.every=4",
)  # fmt: skip
FEW = ("--set=data.batching.budget_tokens=4096",)
"""Of the embedded texts, of which small batches are more than five hundred, each fourth with a checkpoint."""

IMAGES = (
    "--set=model.width=0.0625", "--set=model.x_hid=16", "--set=model.y_hid=8", "--size=16", "--epochs=2",
    "--set=train.train_accuracy_samples=50", "--set=engine.threads=1", "--set=data.batch_size=256",
)  # fmt: skip


class Stopping:
    """Asks runs to end before certain batches, as a signal would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[tuple[int, int]] = []
        after_batch = CheckpointPolicy.after_batch

        def patched(saves: CheckpointPolicy, pipe: Any, position: Position) -> bool:
            if self.at and self.at[0] == (position.turn, position.batches):
                self.at.pop(0)
                saves.asked_to_end = lambda: 130
            return after_batch(saves, pipe, position)

        monkeypatch.setattr(CheckpointPolicy, "after_batch", patched)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    return Stopping(monkeypatch)


def assert_same(one: Path, other: Path) -> None:
    (layers, rows), (layers_again, rows_again) = left_behind(one), left_behind(other)
    assert rows == rows_again
    assert same(layers, layers_again)


def run(command: click.Command, capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    found, _, err = run_command(command, capsys, *arguments)
    assert found == code, err
    return err


def ended(
    command: click.Command, capsys: pytest.CaptureFixture[str], stopping: Stopping, folder: Path,
    arguments: tuple[str, ...], *stops: tuple[int, int],
) -> list[str]:  # fmt: skip
    """Carries a command out: whole, in ``untouched``, and in ``stopped`` until it has ended before each of some
    batches; what it says at these."""
    run(command, capsys, 0, *arguments, f"--out={folder / 'untouched'}")
    stopping.at = [*stops]
    return [run(command, capsys, 130, *arguments, f"--out={folder / 'stopped'}") for _ in stops]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--set=train.precision=fp32",),
        ("--set=train.precision=fp32", "--set=engine.packet=int8-stochastic"),
        pytest.param(("--set=train.precision=fp16", "--set=model.embedding_updates=touched"), marks=NEEDS_FP16),
    ],
    ids=["fp32", "thin packets", "fp16"],
)
def test_updates_of_several_batches(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """A run ends and is saved after an update: every batch of it is behind, or none."""
    data = "--data-root", str(varied(tmp_path / "data"))
    arguments = ("agnews", "transformer", *data, "--devices=cpu*2", *SMALL, *options, "--set=train.accumulate=3")
    said = ended(text.command, capsys, stopping, tmp_path, arguments, (1, 3), (1, 6))
    assert all("and saved" in err for err in said)
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert_same(*(tmp_path / out / "agnews-transformer-al-001" for out in ("untouched", "stopped")))


@pytest.mark.parametrize(
    ("model", "kind", "stops"),
    [
        ("lstm", "plan", [(1, 3), (1, 4), (1, 17), (2, 1)]),
        ("transformer", "stream", [(1, 1), (1, 14), (2, 6)]),
        pytest.param("lstm", "bucket", [(1, 5)], marks=pytest.mark.slow),
        pytest.param("transformer", "size-aware", [(1, 9)], marks=pytest.mark.slow),
        pytest.param("lstm", "fixed", [(2, 1)], marks=pytest.mark.slow),
        pytest.param("transformer", "token-budget", [(1, 2), (2, 2)], marks=pytest.mark.slow),
    ],
)
def test_texts(
    model: str, kind: str, stops: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    stopping: Stopping,
) -> None:  # fmt: skip
    small = [key for key in SMALL if "budget_tokens" not in key or kind not in ("fixed", "bucket")]
    size = ["--set=data.batching.batch_size=16"] if kind in ("fixed", "bucket") else []
    arguments = (
        "agnews", model, "--data-root", str(varied(tmp_path / "data")), "--devices=cpu*2", "-r", "2", *small, *size,
        f"--set=data.batching.kind={kind}", f"--set=data.prefetch={2 * (kind in ('plan', 'stream'))}",
    )  # fmt: skip
    said = ended(text.command, capsys, stopping, tmp_path, arguments, *stops)
    assert all("and saved; the same command goes on from there" in err for err in said)
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    name = f"agnews-{model}-al-001"
    assert_same(tmp_path / "untouched" / name, tmp_path / "stopped" / name)
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == [name]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_images(workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping) -> None:
    arguments = ("toyimages", "resnet", "--devices=cpu*2", *IMAGES, f"--set=data.workers={workers}")
    said = ended(vision.command, capsys, stopping, tmp_path, arguments, (1, 2), (1, 3))
    said.append(run(vision.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}", "--retry"))
    told = ["--retry: without effect, since a run is taken up" in err for err in said]
    assert told == [False, False, True]
    untouched, stopped = (tmp_path / out / "toyimages-resnet-al-001" for out in ("untouched", "stopped"))
    placed = (stopped / "placement.txt").read_text()
    assert placed.startswith("AL on cpu"), "in its place there was that line"
    assert_same(untouched, stopped)


@pytest.mark.slow
def test_a_comparison_goes_on_in_the_form_it_was_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = (
        "agnews",
        "lstm",
        "--mode=compare",
        "--data-root",
        str(varied(tmp_path / "data")),
        *SMALL,
        "--devices=cpu",
    )
    ended(text.command, capsys, stopping, tmp_path, arguments, (1, 5), (1, 7))
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    for form in ("al", "bp"):
        assert_same(*(tmp_path / out / "agnews-lstm-compare-001" / form for out in ("untouched", "stopped")))


@pytest.mark.slow
def test_a_comparison_that_is_ended_in_any_forms_epoch_leaves_what_an_untouched_one_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of the forms come in turns: AL 1, BP 1, BP 2, AL 2, and the next turn as well."""
    trained: list[str] = []
    write = JsonLinesRecorder.write

    def noted(recorder: JsonLinesRecorder, row: EpochRow) -> None:
        trained.append(f"{recorder.path.parent.name} {row.turn}.{row.epoch}")
        write(recorder, row)

    monkeypatch.setattr(JsonLinesRecorder, "write", noted)
    arguments = (
        "agnews", "lstm", "--mode=compare", "-r", "2", "--data-root", str(varied(tmp_path / "data")), *SMALL,
        "--devices=cpu",
    )  # fmt: skip
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'untouched'}")
    order = ["al 1.1", "bp 1.1", "bp 1.2", "al 1.2", "al 2.1", "bp 2.1", "bp 2.2", "al 2.2"]
    assert trained == order
    trained.clear()
    name = "agnews-lstm-compare-001"
    lines = (tmp_path / "untouched" / name / "al" / "epochs.jsonl").read_text().splitlines()
    batches = json.loads((tmp_path / "untouched" / name / "al" / "summary.json").read_text())["batches_per_epoch"]
    assert len(lines) == 4
    second = int(batches) + 3
    # In AL's first epoch, BP's first and second, AL's second, and each form's of the second turn.
    stopping.at = [(1, 3), (1, 3), (1, second), (1, second), (2, 2), (2, 2)]
    for code in (130,) * 6 + (0,):
        run(text.command, capsys, code, *arguments, f"--out={tmp_path / 'stopped'}")
    assert trained == order
    for form in ("al", "bp"):
        assert_same(*(tmp_path / out / name / form for out in ("untouched", "stopped")))


def test_a_checkpoint_goes_on_on_any_number_of_stages_in_any_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = ("agnews", "transformer", "--data-root", str(varied(tmp_path / "data")), *SMALL)
    ended(text.command, capsys, stopping, tmp_path, (*arguments, "--devices=cpu"), (1, 6))
    name = "agnews-transformer-al-001"
    for number, (schedule, stages) in enumerate([("pipelined", 2), ("al-fm", 3), ("backward-overlap", 4)]):
        out = tmp_path / f"stopped-{number}"
        shutil.copytree(tmp_path / "stopped", out)
        err = run(
            text.command, capsys, 0, *arguments, f"--devices=cpu*{stages}", f"--schedule={schedule}",
            f"--resume={out / name}", f"--out={out}",
        )  # fmt: skip
        assert "goes on after batch" in err
        assert_same(tmp_path / "untouched" / name, out / name)


def test_a_run_that_an_earlier_version_began_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """Its files hold options that there are no more."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu")
    stopping.at = [(1, 6)]
    run(text.command, capsys, 130, *arguments, f"--out={tmp_path}")
    folder = tmp_path / "agnews-lstm-al-001"

    def begun_with(value: str) -> None:
        for name in ("asked.yaml", "config.yaml"):
            kept = "".join(line for line in (folder / name).open() if "cuda_graphs" not in line)
            (folder / name).write_text(kept.replace("engine:\n", f"engine:\n  cuda_graphs: {value}\n"))

    begun_with("true")
    err = run(text.command, capsys, 2, *arguments, f"--out={tmp_path}", f"--resume={folder}")
    assert "engine.cuda_graphs: found true, but CUDA graphs were removed after commit 05345d3" in err.splitlines()[-1]
    begun_with("false")
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path}")
    assert f"going on with {folder}" in err
    assert "cuda_graphs" not in err


def test_the_timeline_is_of_the_stages_that_a_run_goes_on_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """Symptom: a report showed four stages, and the picture of the two that there were before."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, f"--out={tmp_path}")
    folder = tmp_path / "agnews-lstm-al-001"
    for code, stages in ((130, 1), (0, 2)):
        stopping.at = [(1, 18)] if code else []
        run(
            text.command,
            capsys,
            code,
            *arguments,
            f"--devices=cpu*{stages}",
            f"--resume={folder if not code else 'auto'}",
        )
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert len({event["pid"] for event in events if event["ph"] == "X"}) == stages


@pytest.mark.parametrize(("name", "fact"), [("train.csv", "fingerprint"), ("test.csv", "test_fingerprint")])
def test_other_data_than_the_checkpoints_is_refused(
    name: str, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    root = varied(tmp_path / "data")
    arguments = ("agnews", "lstm", "--data-root", str(root), *SMALL, "--devices=cpu", f"--out={tmp_path}")
    stopping.at = [(1, 6)]
    run(text.command, capsys, 130, *arguments)
    file = root / "ag_news_csv" / name
    file.write_text(file.read_text().replace("news", "olds"))
    err = run(text.command, capsys, 2, *arguments)
    assert f"the data has {fact} " in err
    assert "--resume never" in err


def test_a_bad_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu")
    ended(text.command, capsys, stopping, tmp_path, arguments, (1, 6))
    folder = tmp_path / "stopped" / "agnews-lstm-al-001"
    newest = max((folder / "checkpoints").glob("step-*"))
    file = newest / "layer-001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert str(newest) in err
    assert "AL goes on after batch 4 of epoch 1" in err
    assert_same(tmp_path / "untouched" / folder.name, folder)


def test_a_checkpoint_of_the_first_format_is_taken_up_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """With the losses of the epoch under way, which lay in the file of its first layer."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu")
    ended(text.command, capsys, stopping, tmp_path, arguments, (1, 6))
    folder = tmp_path / "stopped" / "agnews-lstm-al-001"
    for path in (folder / "checkpoints").glob("step-*"):
        found = Checkpoint.open(path)
        layers, epoch, facts = dict(found.layers()), found.epoch(), vars(found)
        losses = [*epoch["losses"].values()]
        assert {len(of_layer) for of_layer in losses} == {found.position["batch"]}
        shutil.rmtree(path)
        kept = {name: facts[name] for name in ("number", "best", "position", "state")}
        old_checkpoint(path.parent, found.step, layers, losses, epoch["splits"], **kept)
    err = run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert "AL goes on after batch 6 of epoch 1" in err
    assert_same(tmp_path / "untouched" / folder.name, folder)


def test_a_part_of_what_was_chosen_is_not_taken_for_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    """A file that was cut is a configuration, too: its threads or precision were others, and the weights with them."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), *SMALL, "--devices=cpu")
    ended(text.command, capsys, stopping, tmp_path, arguments, (1, 6))
    folder = tmp_path / "stopped" / "agnews-lstm-al-001"
    chosen = folder / "config.yaml"
    whole = chosen.read_text()
    for damaged, line in {
        whole[: whole.index("  precision:")]: "leaves choices open: put it back, or remove it",
        whole[: whole.index("  threads:")]: "leaves choices open: put it back, or remove it",
        whole.replace("seed: 0", "seed 0"): "put it back, or remove it",
        whole.replace("- cpu", "- cqu"): "'cqu' is not a device",
    }.items():
        assert damaged != whole
        chosen.write_text(damaged)
        err = run(text.command, capsys, 2, *arguments, f"--out={tmp_path / 'stopped'}")
        assert re.search(rf"^pipeal: .*config\.yaml.*{line}", err, re.MULTILINE), err
    chosen.unlink()
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'stopped'}")
    assert_same(tmp_path / "untouched" / folder.name, folder)


@pytest.mark.slow
def test_runs_killed_at_random_moments() -> None:
    command = [sys.executable, "scripts/stress_resume.py", "--quick", "--kills=3", "--cases", "transformer-plan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert "DIFFERENT" not in done.stdout


@pytest.mark.slow
def test_a_comparison_is_taken_up_on_other_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    arguments = ("agnews", "lstm", "--mode=compare", "--data-root", str(varied(tmp_path / "data")), *SMALL)
    stops = (1, 7), (1, 7)  # in the AL form, then in the BP form
    ended(text.command, capsys, stopping, tmp_path, (*arguments, "--devices=cpu"), *stops)
    folder = tmp_path / "stopped" / "agnews-lstm-compare-001"
    chosen = load_config(TextConfig, folder / "bp" / "config.yaml").engine
    run(text.command, capsys, 0, *arguments, "--devices=cpu*2", f"--resume={folder}", f"--out={folder.parent}")
    # Symptom: backpropagation took all cores, whatever was asked for.
    assert load_config(TextConfig, folder / "bp" / "config.yaml").engine.threads == chosen.threads == 1
    for form in ("al", "bp"):
        assert_same(tmp_path / "untouched" / folder.name / form, folder / form)


@pytest.mark.slow
def test_a_signal_that_comes_after_the_last_epoch_is_heeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while the row was written, and the whole next turn was trained."""
    arguments = ("agnews", "lstm", "--data-root", str(varied(tmp_path / "data")), "-r", "2", *SMALL, "--devices=cpu")
    run(text.command, capsys, 0, *arguments, f"--out={tmp_path / 'untouched'}")
    write, rows = JsonLinesRecorder.write, []

    def and_signal(self: JsonLinesRecorder, row: EpochRow) -> None:
        write(self, row)
        rows.append(row)
        if len(rows) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(JsonLinesRecorder, "write", and_signal)
    for code in (143, 0):
        run(text.command, capsys, code, *arguments, f"--out={tmp_path / 'stopped'}")
    assert_same(*(tmp_path / out / "agnews-lstm-al-001" for out in ("untouched", "stopped")))


def test_a_sample_that_breaks_is_named_and_the_run_goes_on_once_it_is_mended_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopping: Stopping
) -> None:
    root, out = tmp_path / "data", tmp_path / "out"
    write_images(root)
    arguments = (
        "cifar10", "vgg", f"--data-root={root}", "--set=data.cache=false", "--devices=cpu", "--size=16",
        "--set=model.width=0.0625", "--set=model.x_hid=8", "--set=model.y_hid=8", "--set=engine.threads=1",
        "--set=data.held_out=0", "--epochs=1", "--batch-size=10", f"--out={out}",
    )  # fmt: skip
    broken = root / "cifar-10-images" / "train" / "class3" / "13.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:40])
    err = run(vision.command, capsys, 2, *arguments)
    assert "broken image train/class3/13.png" in err
    assert "on_broken: skip" in err
    assert not out.exists(), "a mistake that is told before anything is written"
    broken.write_bytes(whole)
    stopping.at = [(1, 2)]
    run(vision.command, capsys, 130, *arguments)
    broken.write_bytes(whole[:40])
    assert "broken image train/class3/13.png" in run(vision.command, capsys, 2, *arguments)
    broken.write_bytes(whole)
    assert "goes on after batch 2" in run(vision.command, capsys, 0, *arguments)
    broken.write_bytes(whole[:40])
    err = run(vision.command, capsys, 0, *arguments, "--set=data.on_broken=skip")
    assert "left out 1 broken images, the first train/class3/13.png" in err
    assert len([path for path in out.iterdir() if path.is_dir()]) == 2
