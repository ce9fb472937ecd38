"""The command as a user meets it: what it leaves, and the one line for each mistake."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipeal.cli.text import command
from pipeal.config import BatchingConfig, TextConfig, TextDataConfig, check_effects, load_config
from pipeal.core.errors import ConfigError, DataError, PlacementError
from pipeal.data import Grouped
from pipeal.data.batching import Known, make_sampler
from pipeal.engine.devices import device_names
from pipeal.methods.pooling import MaskedMean
from pipeal.planning.pure.layer_cost import load_costs
from pipeal.reporting.batches import Batches
from pipeal.run.build import hold_out
from pipeal.run.build_text import text_experiment
from tests.cli.running import run_command, told_one_line

ROOT = Path(__file__).parents[2]
FEED = (ROOT / "docs" / "feed.md").read_text(encoding="utf-8")
SMALL = (
    "--set=model.embedding_dim=12",
    "--set=model.n_heads=2",
    "--set=model.x_hid=8",
    "--set=model.y_hid=8",
    "--set=data.batching.budget_tokens=256",
    "--set=train.train_accuracy_samples=100",
)
UNBUDGETED = tuple(key for key in SMALL if "budget_tokens" not in key)

leaves = partial(run_command, command)


def agnews(folder: Path, *rows: str, count: int = 5) -> Path:
    """A small AG News under ``folder``, with ``rows`` at the end of its training file."""
    home = folder / "ag_news_csv"
    home.mkdir(parents=True)
    labels = [1, 2, 3, 4] * count
    good = [f'"{label}","title {label}","word{label} news of the day {n}"' for n, label in enumerate(labels)]
    (home / "train.csv").write_text("\n".join([*good, *rows]) + "\n")
    (home / "test.csv").write_text("\n".join(good) + "\n")
    return folder


def varied(folder: Path) -> Path:
    """An AG News whose texts have 1 to 40 words."""
    rows = (f'"{1 + n % 4}","{"word" + str(n)}","{"news " * (n * n % 40)}"' for n in range(200))
    return agnews(folder, *rows, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("lstm", marks=pytest.mark.draws), "transformer"])
def test_a_comparison_leaves_tables_rows_and_pictures(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = leaves(
        capsys, "agnews", model, "--mode", "compare", "--epochs", "2", "-r", "2", "--devices", "cpu,cpu",
        "--data-root", str(agnews(tmp_path / "data", count=100)), "--out", str(tmp_path), *SMALL,
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / f"agnews-{model}-compare-001"
    assert str(folder / "curves.png") in out
    placement = (folder / "placement.txt").read_text()
    assert re.search(r"AL on cpu: \d layers? \| cpu: \d layers? .*\nBP on cpu: 1 layer ", placement)
    assert re.search(r"AL .*2 .*\d", out)
    assert re.search(r"BP .*1 .*\d", out)
    end = out.partition("in short\n")[2]
    if model == "lstm":  # as for users
        assert re.findall(r"(?m)^(\w+):", end) == ["timeline", "devices", "memory", "accuracy", "terms", "machine"]
        assert load_costs(folder / "costs.json").layers
    else:
        assert "no forecast: it would take about" in out
        assert re.findall(r"(?m)^(\w+):", end) == ["timeline", "accuracy", "terms", "machine"]
    for form in ("al", "bp"):
        rows = list(csv.DictReader((folder / form / "epochs.csv").open()))
        assert [(row["turn"], row["epoch"]) for row in rows] == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
        assert list(rows[0])[:4] == ["turn", "train_acc", "test_acc", "train_time"]
        summary = json.loads((folder / form / "summary.json").read_text())
        assert summary["environment"]["torch"]
        assert 0 <= summary["padding_share"] < 0.5
        assert len(summary["stages"]) == (2 if form == "al" else 1)
        assert all(0 < stage["busy_share"] <= 1.01 for stage in summary["stages"])
        for picture in ("curves.png", "timeline.png", "batches.png"):
            assert (folder / form / picture).read_bytes().startswith(b"\x89PNG")
        again = load_config(TextConfig, folder / form / "config.yaml")
        assert (again.train.mode, len(again.engine.devices)) == (form, 2 if form == "al" else 1)
        assert again.train.precision in ("fp32", "bf16")
        first, second = ([float(row["train_time"]) for row in rows if row["turn"] == turn] for turn in "12")
        assert first[0] < first[1]
        assert second[0] < first[1] + second[1], "each turn counts its own seconds"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_accuracies_under_every_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", count=100)
    found = []
    for schedule, devices in (("sequential", "cpu"), ("al-fm", "cpu,cpu"), ("pipelined", "cpu*4")):
        code, _, err = leaves(
            capsys, "AG_NEWS", "TransformerAL", "--schedule", schedule, "--devices", devices, "--epochs", "1",
            "--data-root", str(root), "--set=engine.threads=1", "--out", str(tmp_path / schedule), *SMALL,
        )  # fmt: skip
        assert code == 0, err
        (row,) = csv.DictReader((tmp_path / schedule / "agnews-transformer-al-001" / "epochs.csv").open())
        found.append({key: value for key, value in row.items() if key.startswith(("loss", "train_acc", "test_acc"))})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plan", ["shapes=3", "spare_batches=2"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fixed", ["batch_size=16"]),
                ("bucket", ["batch_size=16", "bucket_width=4", "bucket_samples=8", "largest_first=true"]),
                ("size-aware", ["cost=sum", "oversize=single"]),
                ("token-budget", ["max_samples=16"]),
                ("stream", ["bounds=4", "buffer_samples=50", "max_wait=80", "pad_to=longest"]),
            )
        ),
    ],
)
def test_every_kind_of_batching_trains_on_all_samples_and_says_what_its_batches_were(
    kind: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = varied(tmp_path / "data")
    code, out, err = leaves(
        capsys, "agnews", "transformer", "--epochs", "2", "--devices", "cpu", "--data-root", str(root),
        "--out", str(tmp_path), *(UNBUDGETED if kind in ("fixed", "bucket") else SMALL),
        f"--set=data.batching.kind={kind}", *(f"--set=data.batching.{option}" for option in options),
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "agnews-transformer-al-001"
    summary = json.loads((folder / "summary.json").read_text())
    samples, batches = summary["data"]["train_samples"], summary["batches"]
    assert summary["data"]["batching"] == kind
    assert summary["batches_per_epoch"] * summary["samples_per_batch"] == pytest.approx(samples)
    assert 1 <= batches["samples"]["least"] <= batches["samples"]["most"]
    assert batches["padded_length"]["most"] <= 40
    assert 0 < batches["padding_share_of_random_batches"] < 0.8
    if kind in ("bucket", "plan", "stream"):
        assert summary["padding_share"] < batches["padding_share_of_random_batches"] / 2
    if kind == "plan":
        assert batches["padded_lengths"] == 3
    assert "padding:" in out
    assert (folder / "batches.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["al", "bp"])
def test_layers_run_grouped_where_the_configuration_says_so(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, found, calls = varied(tmp_path / "data"), [], []
    forward = Grouped.forward
    monkeypatch.setattr(Grouped, "forward", lambda self, x: calls.append(self) or forward(self, x))
    # It looks at models of its own; a run goes without its figures where memory does not suffice for them.
    monkeypatch.setattr("pipeal.run.training.form_costs", Mock(side_effect=MemoryError))
    for grouping in ("0", "3"):
        code, _, err = leaves(
            capsys, "agnews", "lstm", "--mode", form, "--epochs", "1", "--devices", "cpu", "--data-root", str(root),
            "--out", str(tmp_path), "--set=data.batching.kind=fixed", "--set=data.batching.batch_size=16", *UNBUDGETED,
            f"--set=model.grouping.thresholds={grouping}", "--set=model.dropout=0", "--set=train.precision=fp32",
            "--set=engine.threads=1",  # nothing is tried
        )  # fmt: skip
        assert code == 0, err
        folder = tmp_path / f"agnews-lstm-{form}-00{len(found) + 1}"
        thresholds = json.loads((folder / "summary.json").read_text())["data"].get("grouped_at", "").split()
        assert len(thresholds) == int(grouping)
        assert len(set(calls)) == int(grouping), "three blocks above the embedding"
        (row,) = csv.DictReader((folder / "epochs.csv").open())
        found.append([float(value) for key, value in row.items() if key.startswith("loss")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


OPTIONS = {
    "batch_size": 9, "budget_tokens": 300, "max_samples": 5, "bucket_width": 3, "bucket_samples": 40, "cost": "sum",
    "oversize": "single", "largest_first": True, "shapes": 3, "spare_batches": 4, "bounds": 3, "pad_to": "longest",
    "buffer_samples": 20, "max_wait": 30,
}  # fmt: skip


def documented() -> dict[str, set[str]]:
    """Kinds and their options, from the table in ``docs/feed.md``."""
    rows = re.findall(r"^\| `([a-z-]+)`[^|]*\|[^|`]*\| ((?:`[a-z_]+`(?:, )?)+) \|$", FEED, flags=re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", options)) for kind, options in rows}


@pytest.mark.parametrize("kind", ["fixed", "bucket", "size-aware", "token-budget", "plan", "stream"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_of_a_kind_changes_its_batches_and_all_others_are_refused(kind: str, option: str) -> None:
    """``batch_size`` under ``plan``, and ``max_samples`` under ``size-aware``, were taken and changed nothing."""
    assert {field.name for field in fields(BatchingConfig)} == {"kind", *OPTIONS}
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    own = documented()[kind]
    usual = {"budget_tokens": 50 if option == "oversize" else 600, "buffer_samples": 100, "bounds": 12}
    usual = {name: value for name, value in usual.items() if name in own}

    def batches(**options: Any) -> list[tuple[list[int], int]] | str:
        config = BatchingConfig(kind=kind, **{**usual, **options})
        try:
            sampler = make_sampler(kind, Known(lengths, 60, seed=0), **config.heeded)
        except DataError:
            return "over the budget"
        padded = getattr(sampler, "padded_lengths", lengths)
        return [(batch, int(padded[batch].max())) for batch in sampler]

    if option in own:
        assert batches() != batches(**{option: OPTIONS[option]})
    else:
        asked = TextConfig(data=TextDataConfig(batching=BatchingConfig(kind=kind, **{option: OPTIONS[option]})))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{option}: found .*, but kind {kind} does not have it"):
            check_effects(asked, {f"data.batching.{option}"})


def test_dropped_samples_pad_no_random_batch_that_a_run_is_compared_with() -> None:
    """With one sample of 900 words dropped, the run of 3-word texts was said to have saved 97 % of padding."""
    lengths = np.array([3] * 30 + [900])
    assert Batches(Counter({(10, 3): 3}), lengths).padding_of_random == 0
    assert Batches(Counter({(10, 3): 3, (1, 900): 1}), lengths).padding_of_random > 0.5


@pytest.mark.parametrize("kind", ["plan", "size-aware"])
def test_how_many_samples_are_dropped_is_told_and_kept(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    code, _, err = leaves(
        capsys, "agnews", "lstm", "--epochs", "1", "--devices", "cpu", "--data-root", str(varied(tmp_path / "data")),
        "--out", str(tmp_path), *SMALL, "--set=data.batching.budget_tokens=21",
        f"--set=data.batching={{kind: {kind}, oversize: drop}}",
    )  # fmt: skip
    assert code == 0, err
    data = json.loads((tmp_path / "agnews-lstm-al-001" / "summary.json").read_text())["data"]
    longer = [1 + max(0, n - 4) ** 2 % 40 > 21 for n in range(204)]  # some have 21 words, and just fit
    dropped = sum(longer[row] for row in hold_out(204, 0.05)[0] if row >= 4)
    assert data["dropped_samples"] == dropped < data["train_samples"]
    assert f"dropping {data['dropped_samples']} of {data['train_samples']} training samples" in err
    assert not [warning for warning in recwarn if "dropped" in str(warning.message)]


def test_samples_that_are_all_dropped_are_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``size-aware`` packs while it is iterated: a run left files, trained on nothing, divided by no seconds."""
    root = agnews(tmp_path / "data", count=5)
    for kind in ("size-aware", "plan"):
        told_one_line(
            r"all \d+ samples are over the budget of 1",
            *leaves(
                capsys, "agnews", "lstm", "--devices", "cpu", "--data-root", str(root), "--out", str(tmp_path / "runs"),
                f"--set=data.batching={{kind: {kind}, oversize: drop, budget_tokens: 1}}",
            ),
        )  # fmt: skip
    assert not (tmp_path / "runs").exists()


def test_texts_have_exits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = leaves(
        capsys, "agnews", "lstm", "--epochs", "1", "--devices", "cpu*2", "--set=data.held_out=0.25",
        "--set=train.exit_tolerance=0.015",
        "--data-root", str(agnews(tmp_path / "data", count=100)), "--out", str(tmp_path), *SMALL,
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "agnews-lstm-al-001"
    summary = json.loads((folder / "summary.json").read_text())
    data = summary["data"]
    assert (data["train_samples"], data["held_out_samples"]) == (300, 100)
    exits = json.loads((folder / "exits.json").read_text())
    assert [row["name"] for row in exits["rows"]][-2:] == ["full path", "early exit (calibrated)"]
    assert (exits["calibration"]["held_out_samples"], exits["calibration"]["tolerance"]) == (100, 0.015)
    # Of one run, one figure: those of the held-out texts, padded in large batches, once stood beside it.
    assert exits["calibration"]["full_path_flops_per_sample"] == summary["inference_flops_per_sample"]
    assert "early exit" in out


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = agnews(tmp_path / "data")
    for number in (1, 2):
        code, out, _ = leaves(
            capsys,
            "AGNews",
            "LSTM",
            "--epochs",
            "1",
            "--devices",
            "cpu",
            "--data-root",
            str(root),
            "--out",
            str(tmp_path),
            *SMALL,
        )
        assert code == 0
        assert f"agnews-lstm-bp-00{number}" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["agnew", "lstm"], r"unknown data set 'agnew'; did you mean 'agnews'\?"),
        (["toynews", "transfomer"], r"unknown model 'transfomer'; did you mean 'transformer'\?"),
        (["toynews", "lstm", "--schedule", "pipeline"], r"engine.schedule: found 'pipeline', expected .*pipelined"),
        (["toynews", "lstm", "--mode", "apl"], r"train.mode: unknown method 'apl'; did you mean 'al'\?"),
        (["toynews", "lstm", "--set=model.vectors=glove.txt"], r"model.vectors: found a file"),
        (["toynews", "lstm", "--set=data.batching.budget_tokens=20", "--devices=cpu"], r"budget"),
        (
            ["toynews", "lstm", "--set=data.batching.kind=length"],
            r"unknown kind of batching 'length' \(known: bucket, ",
        ),
        (
            ["toynews", "lstm", "--set=data.batching.kind=token_budget"],
            r"kind of batching 'token_budget'; did you mean 'token-budget'\?",
        ),
        (
            ["toynews", "lstm", "--set=data.batching={kind: fixed, shapes: 4}", "--devices=cpu"],
            r"data.batching.shapes: found 4, but kind fixed does not have it; it is for plan$",
        ),
        (
            ["toynews", "lstm", "--set=data.batching.batch_size=64", "--devices=cpu"],
            r"data.batching.batch_size: found 64, but kind plan does not have it; it is for fixed, bucket$",
        ),
        (
            ["toynews", "lstm", "--set=data.batching={kind: size-aware, max_samples: 9}", "--devices=cpu"],
            r"data.batching.max_samples: found 9, but kind size-aware does not have it",
        ),
        (
            ["toynews", "lstm", "--set=data.batching={kind: size-aware, budget_tokens: 20}", "--devices=cpu"],
            r"sample \d+ has size \d+, more than the limit of 20",
        ),
        (
            ["toynews", "lstm", "--set=data.batching={kind: stream, budget_tokens: 100}", "--devices=cpu"],
            r"budget_tokens: found 100, but a text may have 128 words.* raise the budget or cut the texts",
        ),
        (
            ["toynews", "lstm", "--set=model.grouping.thresholds=900"],
            r"thresholds: found 900, but .* lengths",
        ),
        (
            ["toynews", "lstm", "--set=model.grouping.layers=[2]"],
            r"model.grouping: found layers or cost, but thresholds",
        ),
        (
            ["toynews", "lstm", "--set=model.grouping={thresholds: 2, layers: [5]}", "--devices=cpu"],
            r"no layer 5 to group; wanted layers from 1 to 4",
        ),
        (["toynews", "lstm", "--devices", "cpu*5"], r"5 devices for 4 layers"),
        (["toynews", "lstm", "--mode", "bp", "--devices", "cpu*6"], r"6 devices for 5 blocks of the BP form"),
        (["toynews", "lstm", "--devices", "cuda:99"], r"device 'cuda:99' does not exist"),
        (["toynews", "lstm", "--devices", "tpu"], r"'tpu' is not a device"),
        (["toynews", "lstm", "--devices", "cpu*0"], r"devices: found 'cpu\*0', expected auto, or names"),
        (
            ["toynews", "lstm", "--devices=cpu", "--set=engine.threads=1000"],
            r"engine.threads: 1000 threads per stage on \d+ cores; expected at most \d+$",
        ),
        (["toynews", "lstm", "--set=train.repeat=1:30"], r"train.repeat: found '1:30', expected a whole number"),
        (["toynews", "lstm", "--set", 3_000 * "a" + "=1"], r"--set a+ … a+: unknown key; expected one of dataset, "),
        (["toynews", "lstm\x1b[31m\n"], r"unknown model 'lstm\\x1b\[31m\\n'; did you mean 'lstm'\?"),
        (["toynews", "lstm", "--set", "train.lr.bas=1"], r"train.lr.bas: unknown key; did you mean 'train.lr.base'\?"),
        (["toynews", "lstm", "--set", "train.epochs=many"], r"train.epochs: found 'many', expected a whole number"),
        (["toynews", "lstm", "--config", "nowhere.yaml"], r"nowhere.yaml: no such file"),
        (["toynews", "lstm", "--epochs", "0"], r"train.epochs: found 0, expected a whole number, at least 1"),
        (["toynews", "lstm", "--set=model.x_hid=1" + "0" * 30], r"model.x_hid: found 1.*expected .*below 2\^31"),
        (["toynews", "lstm", "--data-root", "a\0b"], r"data.root: found 'a.x00b', expected text"),
        (["toynews", "lstm", "--set=data.held_out=1"], r"data.held_out: found 1, expected a number.*below 1"),
        (["toynews", "lstm", "--size", "32"], r"No such option.*--size"),
        (["toynews", "transformer", "--set", "model.n_heads=7"], r"7 heads do not divide"),
        (["toynews", "lstm", "--set=engine.sizes=[1,1]", "--devices", "cpu,cpu"], r"sizes \[1, 1\] cover 2 layers"),
        (["toynews", "lstmal", "--mode", "bp"], r"AL form"),
        (["toynews"], r"Missing argument 'MODEL'"),
        (["toynews", "lstm", "--epoch", "2"], r"No such option.*--epoch"),
        (["toynews", "lstm", "--epochs", "two"], r"'two' is not a valid integer"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_exit_code_2(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told_one_line(line, *leaves(capsys, *arguments, "--out", str(tmp_path / "runs")))
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (['"1","only two"'], r"train.csv.*21.*column"),
        (['"5","title","text"'], r"train.csv.*21.*5"),
        (['"x","title","text"'], r"train.csv.*21.*'x'"),
        (['"1","",""'], r"train.csv.*21.*empty"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    rows: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = agnews(tmp_path / "data", *rows)
    code, _, err = leaves(capsys, "agnews", "lstm", "--data-root", str(root), "--out", str(tmp_path / "runs"))
    assert code == 2
    assert re.search(line, err.splitlines()[-1])


def test_missing_data_says_what_to_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = leaves(
        capsys, "agnews", "lstm", "--data-root", str(tmp_path), "--set=data.download=false", "--out", str(tmp_path)
    )
    assert code == 2
    assert re.search(r"no train.csv.*fetch http.*put it there", err.splitlines()[-1])


def test_vectors_of_a_wrong_width_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = tmp_path / "glove.6B.50d.txt.gz"
    with gzip.open(vectors, "wt") as out:
        out.write("news " + " ".join(["0.5"] * 50) + "\n")
    root = agnews(tmp_path / "data")
    arguments = ("agnews", "lstm", "--data-root", str(root), "--set=model.pretrained=glove", *SMALL)
    arguments = (*arguments, f"--set=model.vectors={vectors}")
    code, _, err = leaves(capsys, *arguments, "--out", str(tmp_path / "runs"))
    assert code == 2
    assert re.search(r"50.*12|12.*50", err.splitlines()[-1])
    code, _, err = leaves(
        capsys, *arguments, "--set=model.embedding_dim=50", "--epochs=1", "--devices=cpu", "--out", str(tmp_path / "r")
    )
    assert code == 0, err


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("lstm", "--set model.pretrained=glove --set model.embedding_dim=50"),
        ("transformer", "--set model.pretrained=glove --set model.embedding_dim=50 --set model.n_heads=5"),
    ],
)
def test_vectors_that_lie_there_are_mentioned(model: str, wanted: str, tmp_path: Path, said: list[str]) -> None:
    root = agnews(tmp_path)
    (root / "glove").mkdir()
    vectors = root / "glove" / "glove.6B.50d.txt"
    for name in (vectors.name, "glove.6B.25d.txt"):
        (root / "glove" / name).write_text("news " + " ".join(["0.5"] * int(name[9:11])) + "\n")
    asked = {"dataset": "agnews", "model": {"name": model}, "data": {"root": str(root)}}
    experiment = text_experiment(load_config(TextConfig, None, values=asked))
    assert [line for line in said if "vectors" in line] == [
        f"word vectors are learnt from scratch; to begin with those of {vectors}: {wanted}"
    ]
    assert experiment.models.pretrained is None

    overrides = tuple(wanted.replace("--set ", "").split())
    said.clear()
    experiment = text_experiment(load_config(TextConfig, None, values=asked, overrides=overrides))
    assert not [line for line in said if "from scratch" in line]
    assert experiment.facts["words_with_pretrained_vectors"] == 1
    assert len(experiment.package("al", 0)) == 4


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = leaves(capsys, "toynews", "lstm", "--out", str(tmp_path / "file"), *SMALL)
    assert code == 2
    assert f"--out {tmp_path / 'file'}: " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("; choose another")


def test_what_may_not_be_written_is_told_before_any_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a large data set minutes were lost."""
    (tmp_path / "file").write_text("")
    given = ["agnews", "lstm", "--data-root", str(tmp_path / "nowhere"), *SMALL, "--out"]
    assert f"--out {tmp_path / 'file'}: " in leaves(capsys, *given, str(tmp_path / "file"))[2]
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "nothing may be written in" in leaves(capsys, *given, str(tmp_path / "a" / "b"))[2]
    assert not (tmp_path / "a").exists()
    assert "nothing may" not in leaves(capsys, *given, str(tmp_path / "a"), "--resume", str(tmp_path))[2]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "option"), [("nlpmain.py", "--schedule"), ("cvmain.py", "--augmentation")])
def test_a_script_shows_its_options(script: str, option: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert option in shown.stdout


def test_devices_as_typed() -> None:
    assert device_names(" cuda:0 , cpu * 2") == ["cuda:0", "cpu", "cpu"]
    with pytest.raises(PlacementError):
        device_names("cpu,,cpu")


@pytest.mark.data
@pytest.mark.slow
def test_real_news_are_learnt(real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = leaves(
        capsys, "ag_news", "TransformerAL", "--data-root", str(real_data), "--epochs", "1", "--devices", "cpu*2",
        "--out", str(tmp_path), "--set=train.train_accuracy_samples=500", "--set=model.embedding_dim=96",
        "--set=model.x_hid=96", "--set=model.y_hid=64", "--set=train.lr.base=4e-3",
    )  # fmt: skip
    assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "agnews-transformer-al-001" / "epochs.csv").open()))
    assert float(rows[-1]["test_acc"]) > 0.8


def test_a_folder_that_leads_nowhere_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: the command counted for ever. Cause: the parent's FileExistsError was taken for the folder's."""
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    root = agnews(tmp_path / "data")
    code, _, err = leaves(
        capsys, "agnews", "lstm", "--data-root", str(root), "--devices=cpu", "--out", str(tmp_path / "dangling"), *SMALL
    )
    assert code == 2
    assert f"--out {tmp_path / 'dangling'}: " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("; choose another")


def test_the_last_seed_has_a_successor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = leaves(
        capsys, "agnews", "lstm", "--data-root", str(agnews(tmp_path / "data")), "--devices=cpu", "--epochs=1",
        f"--seed={2**63 - 1}", "-r", "2", "--out", str(tmp_path / "runs"), *SMALL,
    )  # fmt: skip
    assert code == 0, err


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "agnews", "lstm", "--epochs", "2", "--devices", "cpu*2", "--data-root", str(varied(tmp_path / "data")),
        *SMALL, "--set=train.lr.base=1e38", "--set=train.lr.warmup=0",
    )  # fmt: skip
    code, _, err = leaves(capsys, *arguments, "--out", str(tmp_path))
    folder = tmp_path / "agnews-lstm-al-001"
    (kept,) = folder.glob("non-finite-batch-*.pt")
    assert code == 1
    assert re.search(
        rf"pipeal: .*layer \d.*batch {int(kept.stem[-9:])}\b.*the batch is kept in {re.escape(str(kept))}", err
    )
    found = torch.load(kept, weights_only=True)
    assert found["x"].shape[0] == len(found["y"]) == len(found["indices"])
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"


def test_updates_that_meet_a_loss_that_is_not_finite_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = MaskedMean.forward
    calls = []

    def sometimes(self: MaskedMean, x: Any) -> torch.Tensor:
        calls.append(self)
        return forward(self, x) * (torch.nan if self.training and len(calls) == 3 else 1.0)

    monkeypatch.setattr(MaskedMean, "forward", sometimes)
    code, out, err = leaves(
        capsys, "agnews", "lstm", "--epochs", "1", "--devices", "cpu", "--data-root", str(varied(tmp_path / "data")),
        *SMALL, "--set=train.on_non_finite=skip", "--set=engine.threads=1", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0, err
    folder = tmp_path / "agnews-lstm-al-001"
    assert json.loads((folder / "summary.json").read_text())["non_finite_updates_skipped"] == 1
    assert "skipped:  1 updates of AL layers" in out
    assert "nan" not in (folder / "epochs.csv").read_text()
