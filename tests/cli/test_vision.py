"""The vision command as a user meets it; what it shares with the text command is tested there."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from functools import partial
from pathlib import Path

import pytest

from pipeal.cli.vision import command
from pipeal.config import VisionConfig, load_config
from pipeal.core.errors import ConfigError
from pipeal.engine.runner import compiling
from tests.cli.running import run_command, told_one_line

ROOT = Path(__file__).parents[2]
SMALL = (
    "--size=16",
    "--set=model.width=0.05",
    "--set=model.x_hid=16",
    "--set=model.y_hid=16",
    "--set=data.held_out=0.2",
    "--set=train.train_accuracy_samples=100",
)
leaves = partial(run_command, command)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", pytest.param("vgg", marks=pytest.mark.draws)])
def test_a_comparison_leaves_tables_rows_and_pictures(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = leaves(
        capsys, "toyimages", model, "--mode", "compare", "--epochs", "2", "--devices", "cpu,cpu",
        "--out", str(tmp_path), *SMALL,
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / f"toyimages-{model}-compare-001"
    assert re.search(r"AL .*2 .*\d", out)
    assert re.search(r"BP .*1 .*\d", out)
    assert "tokens" not in out + err
    for form in ("al", "bp"):
        rows = list(csv.DictReader((folder / form / "epochs.csv").open()))
        assert [row["epoch"] for row in rows] == ["1", "2"]
        summary = json.loads((folder / form / "summary.json").read_text())
        assert summary["data"]["held_out_samples"] == pytest.approx(summary["data"]["train_samples"] / 4, abs=1)
        for picture in ("curves.png", "timeline.png"):
            assert (folder / form / picture).read_bytes().startswith(b"\x89PNG")
        again = load_config(VisionConfig, folder / form / "config.yaml")
        assert (again.train.mode, again.data.size, again.data.workers) == (form, 16, 0)
    exits = json.loads((folder / "al" / "exits.json").read_text())
    names = [row["name"] for row in exits["rows"]]
    assert names[-2:] == ["full path", "early exit (calibrated)"]
    assert len(names) == (6 if model == "resnet" else 5)
    assert [line for line in out.splitlines() if "early exit" in line]
    assert (folder / "al" / "exits.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "bp" / "exits.json").exists()
    assert len(json.loads((folder / "images.json").read_text())["mean"]) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ResNet"], "training the AL form (local losses) of resnet; --mode bp trains the BP form"),
        (["resnet", "--mode=bp"], "training the BP form (backpropagation) of resnet; --mode al trains the AL form"),
        (["Resnet"], "training the BP form (backpropagation) of resnet, which that spelling stands for; --mode al"),
        (["Resnet", "--mode=al"], "training the AL form (local losses) of resnet; --mode bp trains the BP form"),
        (["VGGAL"], "training the AL form (local losses) of vgg, which that spelling stands for; vgg --mode bp"),
        (["VGG", "--mode=compare"], ""),
    ],
)
def test_one_line_says_which_form_is_trained(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``Resnet`` trained backpropagation and ``ResNet`` the AL form, and nothing told them apart."""
    missing = ("--data-root", str(tmp_path), "--set=data.download=false", "--out", str(tmp_path / "runs"))
    code, _, err = leaves(capsys, "cifar10", *arguments, *missing)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("training the")]
    assert len(lines) == bool(told)
    assert "".join(lines).startswith(told)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_accuracies_under_every_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for schedule, devices, workers in (("sequential", "cpu", 0), ("al-fm", "cpu,cpu", 0), ("pipelined", "cpu*4", 2)):
        code, _, err = leaves(
            capsys, "demo", "ResnetAL", "--schedule", schedule, "--devices", devices, "--epochs", "1",
            "--augmentation=strong", f"--set=data.workers={workers}", "--set=engine.threads=1",
            "--set=train.lr.per=epoch", "--out", str(tmp_path / schedule), *SMALL,
        )  # fmt: skip
        assert code == 0, err
        (row,) = csv.DictReader((tmp_path / schedule / "toyimages-resnet-al-001" / "epochs.csv").open())
        found.append({key: value for key, value in row.items() if key.startswith(("loss", "train_acc", "test_acc"))})
    assert found[0] == found[1] == found[2]


def test_nothing_held_out_means_no_early_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = leaves(
        capsys, "toyimages", "VGGAL", "--epochs=1", "--devices=cpu", "--out", str(tmp_path), *SMALL,
        "--set=data.held_out=0",
    )  # fmt: skip
    assert code == 0, err
    assert "exit" not in out
    assert not list(tmp_path.rglob("exits.*"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tinyimagnet", "resnet"], r"unknown data set 'tinyimagnet'; did you mean 'tinyimagenet'\?"),
        (["toyimages", "resne"], r"unknown model 'resne'; did you mean 'resnet'\?"),
        (["toyimages", "resnet", "--size", "40"], r"data.size: found 40, expected a multiple of 16, from 16"),
        (
            ["toyimages", "resnet", "--augmentation", "weak"],
            r"data.augmentation: found 'weak', expected none, basic or",
        ),
        (["toyimages", "resnet", "--batch-size", "0"], r"data.batch_size: found 0, expected a whole number"),
        (["toyimages", "resnet", "--devices", "cpu*6"], r"6 devices for 5 layers of the AL form"),
        (["toyimages", "vgg", "--set=model.bridges=flt"], r"model.bridges: found 'flt', expected pooled, flat, "),
        (["toyimages", "vgg", "--set=engine.compile=some"], r"engine.compile: found 'some', expected none, static or"),
        (["toyimages", "vgg", "--set=data.held_out=0.00001"], r"data.held_out: 1e-05 of \d+ samples is 0"),
        (
            ["toyimages", "vgg", "--set=data.workers=9999"],
            r"data.workers: 9999 processes on \d+ cores; expected at most",
        ),
        (["toyimages", "resnetal", "--mode", "bp"], r"AL form"),
        (["toyimages", "resnet", "--max-len", "3"], r"No such option.*--max-len"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_exit_code_2(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *leaves(capsys, *arguments, "--out", str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_without_a_compiler_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_here(device: object) -> None:
        raise ConfigError(f"nothing can be compiled for device '{device}' here")

    monkeypatch.setattr(compiling, "_check_compiler", none_here)
    code, _, err = leaves(
        capsys,
        "toyimages",
        "vgg",
        "--devices=cpu",
        "--set=engine.compile=static",
        "--out",
        str(tmp_path / "runs"),
        *SMALL,
    )
    assert code == 2
    assert "nothing can be compiled for device 'cpu' here" in err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_bad_data_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(what: str) -> str:
        code, _, err = leaves(
            capsys, "tinyimagenet", "resnet", "--data-root", str(tmp_path), "--set=data.download=false"
        )
        assert code == 2, what
        return err.splitlines()[-1]

    assert re.search(r"tiny-imagenet-200.zip", told("nothing there"))
    archive = tmp_path / "tiny-imagenet-200.zip"
    archive.write_bytes(b"PK not really")
    assert re.search(r"tiny-imagenet-200.zip: .*broken", told("a broken archive"))
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("tiny-imagenet-200/train/n01/images/n01_0.JPEG", b"")
        made.writestr("tiny-imagenet-200/val/images/val_0.JPEG", b"")
    assert re.search(r"val_annotations.txt", told("no annotations"))


@pytest.mark.data
@pytest.mark.slow
def test_real_images_from_the_zip_as_it_is(
    real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):  # the second reads the cache
        code, _, err = leaves(
            capsys, "tinyImageNet", "VGGAL", "--data-root", str(real_data), "--epochs", "1", "--devices", "cpu*2",
            "--out", str(tmp_path), *SMALL,
        )  # fmt: skip
        assert code == 0, err
    first, second = (
        list(csv.DictReader((tmp_path / f"tinyimagenet-vgg-al-00{n}" / "epochs.csv").open())) for n in (1, 2)
    )
    assert first[0]["test_acc"] == second[0]["test_acc"]
    summary = json.loads((tmp_path / "tinyimagenet-vgg-al-001" / "summary.json").read_text())
    assert (summary["data"]["classes"], summary["data"]["test_samples"]) == (200, 2000)
