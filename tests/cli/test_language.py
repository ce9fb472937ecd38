"""Language models as a user meets them: trained, measured by loss, taken up again, and writing."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from pipeal.cli import generate, text
from pipeal.cli.main import command as pipeal
from pipeal.config import LanguageConfig, find_config, load_config
from pipeal.engine.stage import Stage
from pipeal.reporting.page import read_runs
from pipeal.run.build_language import language_experiment
from pipeal.training.metric import MeanSd
from tests.cli.running import run_command, told_one_line

SMALL = (
    "--set=model.block=8", "--set=model.width=12", "--set=model.heads=2", "--set=data.steps=12", "--epochs=2",
    "--set=data.batch_size=4", "--set=data.estimate_batches=3", "--set=engine.threads=1", "--devices=cpu",
    "--set=train.lr.warmup=2",
)  # fmt: skip

leaves = partial(run_command, text.command)
writes = partial(run_command, generate.command)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "verses.txt"
    path.write_text("so it goes, and so it went.\n" * 40, encoding="utf-8")
    return path


def train(capsys: pytest.CaptureFixture[str], corpus: Path, *arguments: str) -> tuple[Path, str]:
    out_folder = corpus.parent / "runs"
    code, out, err = leaves(capsys, "text", "charlm", f"--text={corpus}", f"--out={out_folder}", *SMALL, *arguments)
    assert code == 0, err
    return Path(re.search(r"^files: +(.+)$", out, re.MULTILINE)[1]), out  # type: ignore[index]


@pytest.mark.slow
def test_a_comparison_is_told_in_losses_and_ends_with_a_sample(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = train(capsys, corpus, "--mode=compare")
    assert "val loss at best held-out" in out
    assert "acc" not in out
    exits = re.search(r"^exits: +validation loss (\d\.\d+) (\d\.\d+)$", out, re.MULTILINE)
    full_path = json.loads((folder / "al" / "summary.json").read_text())["last_validation_loss"]
    assert float(exits[2]) == pytest.approx(full_path, abs=1e-4) != float(exits[1])  # type: ignore[index]
    assert out.count("sample:\n") == 2
    assert re.findall(r"^(AL|BP) after epoch 2 of seed 0:$", out, re.MULTILINE) == ["AL", "BP"]
    for form in ("al", "bp"):
        rows = list(csv.DictReader((folder / form / "epochs.csv").open()))
        assert len(rows) == 2
        summary = json.loads((folder / form / "summary.json").read_text())
        losses, held = ([float(row[name]) for row in rows] for name in ("test_loss", "held_loss"))
        assert summary["validation_loss_at_best_held_out"] == losses[held.index(min(held))]
        assert summary["last_validation_loss"] == losses[-1] > 0
        assert not [name for name in summary if "accuracy" in name]
        assert 0 <= float(rows[0]["test_acc"]) <= 1, "the share of next characters that are told rightly"
        assert (folder / form / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert not (folder / form / "batches.png").exists()
        assert load_config(LanguageConfig, folder / form / "config.yaml").train.mode == form
    al, bp = read_runs(folder)
    assert al.measure.name == bp.measure.name == "loss"
    best = min(al.rows, key=lambda row: row.held_loss or 0)
    assert al.at_best == MeanSd((best.test_loss,))  # type: ignore[arg-type]


def test_the_report_and_the_list_of_runs_speak_of_losses(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = train(capsys, corpus)
    code, _, err = run_command(pipeal, capsys, "report", str(folder))
    assert code == 0, err
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "validation loss of the best epoch by held-out loss" in page
    assert "Loss over epochs" in page
    assert "accuracy" not in page.lower().replace("train_accuracy_samples", "")
    code, out, err = run_command(pipeal, capsys, "runs", str(folder.parent))
    assert code == 0, err
    assert re.search(r"text +\| charlm +\| AL .*\| loss \d\.\d{4}", out)


def test_parts_of_a_text_have_no_character_in_common(corpus: Path) -> None:
    """The published split stays; held out is the end of what is trained on, and no block reaches into another part."""
    config = load_config(LanguageConfig, values={"dataset": "text", "data": {"text": str(corpus)}})
    experiment = language_experiment(config)
    whole = len(corpus.read_text())
    assert experiment.held is not None
    train, held, validation = (part.characters for part in (experiment.train, experiment.held, experiment.test))
    assert torch.equal(torch.cat((train, held, validation)), experiment.alphabet.encode(corpus.read_text()))
    assert (len(train) + len(held), len(validation)) == (whole * 9 // 10, whole - whole * 9 // 10)
    assert len(held) == round(0.05 * (whole * 9 // 10))
    parts = experiment.train_evaluation(), experiment.held_out(), experiment.test_evaluation()
    for blocks, part in zip(parts, (train, held, validation), strict=True):
        assert blocks is not None
        assert torch.equal(blocks.text, part)
    assert language_experiment(replace(config, data=replace(config.data, held_out=0.0))).held_out() is None


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_the_sample_is_of_one_shape(
    devices: str, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with ``engine.compile: static`` came to its end and then stood for minutes: the sample grows by a character
    at a time, and the pipeline compiled its layers for each of these lengths."""
    lengths: set[tuple[int, ...]] = set()
    infer = Stage.infer

    def watch(stage: Stage, index: int, path: Any, x: torch.Tensor, **options: Any) -> Any:
        lengths.add(tuple(x.shape[:2]))
        return infer(stage, index, path, x, **options)

    monkeypatch.setattr(Stage, "infer", watch)
    _, out = train(capsys, corpus, f"--devices={devices}")
    assert "sample:" in out
    assert lengths == {(4, 8), (1, 8)}, "the shape of the estimates, and one more"


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_and_leaves_what_an_untouched_one_leaves(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.integration.test_resume import Stopping, assert_same

    whole, _ = train(capsys, corpus, "--set=train.checkpoint.every=5")
    stopping = Stopping(monkeypatch)
    stopping.at = [(1, 7), (1, 15)]
    ended = ("text", "charlm", f"--text={corpus}", f"--out={corpus.parent / 'ended'}", *SMALL,
             "--set=train.checkpoint.every=5")  # fmt: skip
    for _ in range(2):
        code, _, err = leaves(capsys, *ended)
        assert code == 130, err
    code, _, err = leaves(capsys, *ended)
    assert code == 0, err
    assert "going on with" in err
    assert_same(whole, corpus.parent / "ended" / "text-charlm-al-001")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 8), (1, 8)], ids=["exits", "sample"])
def test_what_comes_after_the_last_epoch_ends_where_the_run_is_asked_to(
    shape: tuple[int, int], corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: after the last epoch Ctrl-C waited for the losses of all exits and the whole sample."""
    seen: list[tuple[int, ...]] = []
    asked: list[int] = []
    infer = Stage.infer
    before = 2 * 3 * 9 if shape == (4, 8) else 0  # the estimates of two epochs, of three parts of the text
    form = "--mode=al" if shape == (4, 8) else "--mode=bp"

    def watch(stage: Stage, index: int, path: Any, x: torch.Tensor, **options: Any) -> Any:
        if index == 0:
            seen.append(tuple(x.shape[:2]))
        if not asked and seen.count(shape) > before:
            asked.append(len(seen))
            os.kill(os.getpid(), signal.SIGTERM)  # SIGINT is not heard in jobs that a shell runs in the background
        return infer(stage, index, path, x, **options)

    def run() -> tuple[int, str]:
        arguments = ("text", "charlm", f"--text={corpus}", f"--out={corpus.parent / 'runs'}", *SMALL, form)
        code, out, err = leaves(capsys, *arguments, "--set=data.estimate_batches=9")
        return code, out + err

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "infer", watch)
        code, said = run()
    assert code == 143, said
    assert len(seen) - asked[0] <= 2
    code, said = run()
    assert code == 0, said
    assert "going on with" in said
    assert "sample:" in said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_goes_on_where_its_text_has_moved_to(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = train(capsys, corpus)
    moved = corpus.rename(corpus.with_name("moved.txt"))
    resume = ("text", "charlm", f"--text={moved}", f"--resume={folder}", *SMALL, "--epochs=3")
    code, _, err = leaves(capsys, *resume)
    assert code == 0, err
    verses, before = moved.read_text(encoding="utf-8"), contents(folder)
    for instead, fact in (("gose", "fingerprint"), ("gums", "characters")):
        moved.write_text(verses.replace("goes", instead), encoding="utf-8")
        code, _, err = leaves(capsys, *resume, "--epochs=4")
        assert code == 2
        assert f"the data has {fact}" in err
        assert contents(folder) == before, "another alphabet was left, and the name of the wrong text"


def test_a_model_that_has_no_answers_leaves_its_run_without_a_sample(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    infer = Stage.infer

    def spoil(stage: Stage, index: int, path: Any, x: torch.Tensor, **options: Any) -> Any:
        return infer(stage, index, path, x, **options) * (torch.nan if len(x) == 1 else 1)

    monkeypatch.setattr(Stage, "infer", spoil)
    _, out = train(capsys, corpus, "--mode=bp")
    assert "sample:   none, the model's answers are not finite" in out


def test_a_trained_model_writes_from_every_exit(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = train(capsys, corpus, "--mode=compare")
    wish = ("--prompt=so it", "--length=20")
    code, out, err = writes(capsys, str(folder / "al"), *wish)
    assert code == 0, err
    assert out.startswith("so it")
    assert len(out) == len("so it") + 20 + len("\n")
    assert set(out) <= set(corpus.read_text())
    assert writes(capsys, str(folder / "al"), *wish)[1] == out, "the same seed writes the same"
    assert writes(capsys, str(folder / "al"), *wish, "--seed=1")[1] != out
    for depth in ("1", "2"):
        code, _, err = writes(capsys, str(folder / "al"), *wish, f"--exit={depth}", "--temperature=0", "--top-k=3")
        assert code == 0, err
    assert writes(capsys, str(folder / "bp"), *wish)[0] == 0
    for arguments, line in (
        ((folder / "al", "--exit=3"), "--exit: found 3, but the model in .* has 2"),
        ((folder / "bp", "--exit=1"), "--exit: found 1, but the form in .* has no exits; leave it out"),
        ((folder / "al", "--prompt=ÄÖ"), "never seen, such as 'ÄÖ'"),
        ((folder / "al", "--prompt="), "the prompt is empty"),
        ((folder / "al", "--temperature=-1"), "temperature is -1"),
        ((folder,), "it compares several; name .*al or .*bp"),
        ((folder.parent,), "no run of one form"),
    ):
        told_one_line(line, *writes(capsys, *map(str, arguments)))
    for saved in (folder / "al" / "checkpoints").glob("step-*"):
        saved.rename(saved.with_name(f"away-{saved.name}"))
    told_one_line("no checkpoint", *writes(capsys, str(folder / "al")))


@pytest.mark.slow
def test_a_text_without_line_ends_is_written_on_from_its_first_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pipeal generate RUN`` without options went on from a line end, "which the model has never seen"."""
    corpus = tmp_path / "line.txt"
    corpus.write_text("so it goes, and so it went. " * 40, encoding="utf-8")
    folder, out = train(capsys, corpus)
    assert "sample:" in out
    said: list[str] = []
    monkeypatch.setattr(click, "echo", lambda text="", nl=True: said.append(text + "\n" * nl))
    code, _, err = writes(capsys, str(folder), "--length=20")
    assert code == 0, err
    assert len(said) == 1 + 20 + 1, "each character as it comes"
    assert "".join(said).startswith(min(corpus.read_text()))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("agnews", "charlm"), "agnews is for lstm and transformer; expected shakespeare, text for charlm"),
        (("shakespeare", "lstm"), "shakespeare is for charlm; expected agnews, dbpedia"),
        (("text", "charlm"), "data.text: found null, .* name the file with --text FILE"),
        (("shakespeare", "charlm", "--text=x.txt"), "data.text: found x.txt, but the data set is shakespeare"),
        (("text", "charlm", "--text=/nowhere/x.txt"), "cannot read /nowhere/x.txt"),
        (("text", "charlm", "--text=CORPUS", "--set=model.block=500"), "958 .*, 50 held out and 112 .* 501"),
        (("text", "charlm", "--text=CORPUS", "--set=data.held_out=1e-5"), "data.held_out: 1e-05 of 1,008 .* is 0"),
        (("text", "charlm", "--text=CORPUS", "--set=data.held_out=0.005"), "5 held out .* hold out another share"),
        (("text", "charlm", "--text=CORPUS", "--set=train.exit_tolerance=0.1"), "exit_tolerance: found 0.1"),
        (("text", "charlm", "--text=CORPUS", "--set=data.cache_dir=x"), "cache_dir: found x, but characters are not"),
        (("text", "charlm", "--text=CORPUS", "--set=train.train_accuracy_samples=9"), "accuracy_samples: found 9"),
        (("text", "charlm", "--text=CORPUS", "--set=model.width=0"), "model.width: found 0"),
        (("text", "charlm", "--text=CORPUS", "--max-len=9"), "data.max_len: unknown key"),
        (("agnews", "lstm", "--text=CORPUS"), "data.text: unknown key"),
        (("agnews", "lstm", "--preset=cpu"), "--preset: found cpu, but lstm has none"),
        (("text", "charlm", "--preset=cpu", "--config=x.yaml"), "either is a whole configuration; give one"),
        (("shakespeare", "charlm", "--data-root=EMPTY", "--set=data.download=false"), "fetch https://.*put it there"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], line: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [one.replace("CORPUS", str(corpus)).replace("EMPTY", str(corpus.parent)) for one in arguments]
    told_one_line(line, *leaves(capsys, *given, f"--out={corpus.parent / 'runs'}"))
    assert not (corpus.parent / "runs").exists()


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_a_preset_is_a_whole_configuration_that_options_change(preset: str) -> None:
    assert text.PRESETS == ("cpu", "gpu")
    config = load_config(
        LanguageConfig, find_config("shakespeare", f"charlm-{preset}"), values={"train": {"epochs": 1}}
    )
    assert (config.model.block, config.train.epochs) == ({"cpu": 64, "gpu": 256}[preset], 1)
