"""The page tells what lies in a run's folder: all of it, nothing else, and whatever is missing by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeal.core.errors import DataError
from pipeal.reporting.page import read_runs, write_report
from pipeal.reporting.page.facts import compared_figures
from pipeal.reporting.page.idle import stage_shares
from pipeal.reporting.page.page import environment
from pipeal.reporting.page.rows import read_rows
from pipeal.reporting.plots import drawn_rows, measure_panels
from pipeal.reporting.recorders import CsvRecorder
from pipeal.training.metric import ACCURACY, LOSS
from pipeal.training.row import EpochRow
from tests.training.run_folders import SUMMARY, held, make_run, rows, tell, write_rows

VOID = ("meta", "img")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Page(HTMLParser):
    """A page taken apart; fails where an element is not closed in its place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(*folders: Path) -> Page:
    path = folders[0].parent / "page.html"
    write_report([run for folder in folders for run in read_runs(folder)], path)
    return Page(path.read_text(encoding="utf-8"))


def test_a_run_is_told_with_its_figures(tmp_path):
    text = report(make_run(tmp_path / "agnews-transformer-al-001")).text
    for told in (
        "agnews-transformer-al-001 finished",
        "test accuracy of the best epoch by held-out accuracy 56.0 %",
        "last test accuracy 76.0 %",
        "samples per second 200.0",
        "tokens per second 5,000",
        "padding of random batches 43.2 %",
        "3 to 64, median 40.50",
        "Associated loss by layer",
        "Autoencoder loss by layer",
        "layer 2",
    ):
        assert told in text
    assert "Missing here" not in text
    assert "batches.png is not there" in text


def test_what_was_left_out_is_told_where_there_was_any(tmp_path):
    folder = make_run(tmp_path / "run")
    assert "left out" not in report(folder).text
    counts = {"batches_left_out": 2, "non_finite_updates_skipped": 0, "updates_in_parts": 5}
    counts["overflowed_updates_skipped"] = 7
    (folder / "summary.json").write_text(json.dumps(SUMMARY | counts))
    text = report(folder).text
    assert "batches left out, after going back 2" in text
    assert "updates in parts, for want of memory 5" in text
    assert "updates left out, for gradients beyond fp16 7" in text
    assert "updates left out, for a loss" not in text


def test_exits_are_told_with_the_epoch_and_the_seed_of_their_weights(tmp_path):
    """Those of epoch 2 were called the last epoch's, where the run had gone on and had not come to its end."""
    folder = make_run(tmp_path / "run", epochs=9)
    (folder / "exits.json").write_text(json.dumps({"seed": 2026, "epoch": 2, "samples": 24, "rows": []}))
    assert "Of 24 test samples, by the weights after epoch 2 of seed 2026; points" in report(folder).text
    (folder / "exits.json").write_text(json.dumps({"samples": 24, "rows": []}))  # as runs of earlier versions have it
    assert "by the weights of the last epoch of the last seed; points" in report(folder).text


def test_the_reasons_of_idle_time_are_shares_of_all_time(tmp_path):
    (run,) = read_runs(make_run(tmp_path / "run"))
    first, second = stage_shares(run)
    assert first.busy == 0.5
    assert first.waiting == pytest.approx({"input": 0.1, "space": 0.3, "join": 0.0, "saving": 0.0, "rest": 0.1})
    assert second.waiting == pytest.approx({"input": 0.05, "space": 0.0, "join": 0.02, "saving": 0.0, "rest": 0.03})
    for stage in (first, second):
        assert stage.busy + sum(stage.waiting.values()) == pytest.approx(1)
        assert sum(stage.actions.values()) == pytest.approx(stage.busy)
    assert "stage 0 · cpu 1 20.0 % 26.7 % 3.3 % 50.0 % 10.0 % 30.0 % 0.0 % 0.0 % 10.0 %" in report(run.folder).text


def test_a_gpu_is_host_open_and_kernel_busy(tmp_path):
    """Prediction 6 of the GPU reading: what was called busy is that its host had work open there."""
    folder = make_run(tmp_path / "run")
    first, second = SUMMARY["stages"]
    on_gpu = {"devices": ["cuda:0", "cpu"], "stages": [first | {"kernel_busy_share_at_least": 0.25}, second]}
    (folder / "summary.json").write_text(json.dumps(SUMMARY | on_gpu))
    text = report(folder).text
    assert "update host-open kernel-busy input" in text
    assert "stage 0 · cuda:0 1 20.0 % 26.7 % 3.3 % 50.0 % ≥ 25.0 % 10.0 %" in text
    assert "for so much of it, at least, there were kernels to run" in text
    on_cpus = make_run(tmp_path / "other")
    heads, (first_row, second_row) = compared_figures({"gpu": read_runs(folder)[0], "cpu": read_runs(on_cpus)[0]})
    both = {name: (first_row[place], second_row[place]) for place, name in enumerate(heads)}
    assert [value is None for value in both["mean host-open"]] == [False, True]
    assert [value is None for value in both["mean busy"]] == [True, False]
    text = report(folder, on_cpus).text
    assert "mean busy mean host-open" in text
    assert "kernel-busy" not in report(make_run(tmp_path / "another")).text


def test_parameters_are_those_of_training_and_those_of_an_inference(tmp_path):
    """A run's own section called those of an inference the parameters, the comparison all that are trained."""
    whole = tmp_path / "runs"
    runs = [make_run(whole / name) for name in ("new", "old")]
    told = {key: value for key, value in SUMMARY.items() if not key.endswith("_parameters")}
    told |= {"effective_parameters": 123456, "affiliated_parameters": 7890}  # as it was told before
    (runs[1] / "summary.json").write_text(json.dumps(told))
    text = report(*runs).text
    assert text.count("parameters 131,346 at inference 123,456") == 2
    assert text.count("131346 123456") + text.count("131,346 123,456") == 2, "in the table that compares them"


def test_a_form_has_one_name_everywhere(tmp_path):
    """The third of a comparison was ``BP`` in the list of runs, and ``BP-SPREAD`` in a report."""
    whole = tmp_path / "agnews-transformer-compare-001"
    for name in ("al", "bp", "bp-spread"):
        make_run(whole / name, mode=name[:2])
    path = whole / "bp-spread" / "summary.json"
    path.write_text(json.dumps(SUMMARY | {"form": "BP over 2"}))
    assert [run.form for run in read_runs(whole)] == ["AL", "BP", "BP over 2"]
    page = report(whole)
    assert "key AL BP BP over 2 train.mode al bp bp" in page.text
    path.unlink()  # it has not ended: its label is not known yet
    assert "bp-spread" in report(whole).text


def test_forms_stand_in_the_order_of_their_methods(tmp_path):
    """As in the tables of the run: by name, BP over several devices stood before Greedy."""
    whole = tmp_path / "agnews-transformer-compare-001"
    for name, mode in (("al", "al"), ("bp", "bp"), ("bp-spread", "bp"), ("greedy", "greedy")):
        make_run(whole / name, mode=mode)
    assert [run.folder.name for run in read_runs(whole)] == ["al", "bp", "greedy", "bp-spread"]
    (whole / "asked.yaml").write_text("train: {mode: compare, methods: [greedy, bp, al]}")
    assert [run.folder.name for run in read_runs(whole)] == ["greedy", "bp", "al", "bp-spread"]


def test_only_what_differs_from_the_default_of_that_experiment_stands_first(tmp_path):
    text = report(make_run(tmp_path / "run")).text
    changed, _, rest = text.partition("Configuration")[2].partition("values as by default")
    assert "model.x_hid 48" in changed
    assert "engine.devices cpu, cpu auto" in changed
    assert "dropout" not in changed
    assert "model.dropout" in rest


def test_an_option_that_there_is_no_more_is_shown_where_it_was_used(tmp_path):
    """A run of an earlier version has every key that there was in its file."""
    for value, shown in (("false", False), ("true", True)):
        folder = make_run(tmp_path / value)
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace("engine:\n", f"engine:\n  cuda_graphs: {value}\n"))
        assert ("engine.cuda_graphs" in report(folder).text) is shown


def test_a_comparison_stands_side_by_side_with_what_was_asked_differently(tmp_path):
    whole = tmp_path / "agnews-transformer-compare-001"
    for mode in ("al", "bp"):
        make_run(whole / mode, mode=mode)
    (whole / "config.yaml").write_text("train: {mode: compare}")
    page = report(whole)
    assert "Comparison" in page.text
    assert "key AL BP train.mode al bp" in page.text
    assert "tokens/s" in page.text
    for mode in ("al", "bp"):
        (whole / mode / "summary.json").unlink()
    assert "tokens/s" not in report(whole).text, "a column without a figure"
    assert "Accuracy over epochs" in page.text
    assert page.text.count("AL BP test train held-out") == 2, "the colours of the runs, and what is dashed and dotted"
    assert "Loss, end to end" in page.text
    assert [words["id"] for name, words in page.tags if name == "section" and "id" in words] == ["run-1", "run-2"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"epochs": 1, "done": 1}, "1 of 1 epoch "),
        ({"done": 2}, "2 of 3 epochs "),
        ({"turns": 2}, "6 of 6 epochs in 2 turns"),
    ],
)
def test_a_run_says_how_far_it_came(tmp_path, asked, words):
    assert words in report(make_run(tmp_path / "run", **asked)).text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    page = report(make_run(tmp_path / "monday" / "run-001"), make_run(tmp_path / "tuesday" / "run-001", done=1))
    assert "monday/run-001 finished" in page.text
    assert "tuesday/run-001" in page.text


@pytest.mark.parametrize("left", ["config.yaml", "epochs.csv", "summary.json"])
def test_a_run_with_one_file_alone_has_a_page_that_names_the_others(tmp_path, left):
    folder = make_run(tmp_path / "run")
    for path in folder.iterdir():
        if path.name != left:
            path.unlink()
    text = report(folder).text
    missing = text.partition("Missing here")[2].partition("Accuracy and losses")[0]
    for name in {"config.yaml", "epochs.csv", "summary.json"} - {left}:
        assert f"{name}: " in missing
    assert "timeline.png is not there" in text


@pytest.mark.parametrize("name", ["config.yaml", "epochs.csv", "summary.json", "exits.json", "timeline.png"])
@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"\xff\xfe\x00{", b"{" * 5000, b"a: [", b"turn\n1\n\n\n"])
def test_a_broken_file_is_named_and_never_an_error(tmp_path, name, content):
    folder = make_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    text = report(folder).text
    # A CSV without lines is whole: the run has not come to its first row.
    assert name in text or (name, content) in {("epochs.csv", b"")}


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "exits.json", "epochs.csv", "timeline.png"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    folder = make_run(tmp_path / "run-001")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    page = report(folder)
    if name != "status.json":  # nobody misses what an older run did not write either
        assert f"{name}: not a regular file" in page.text or f"{name} cannot be shown" in page.text


def test_a_row_cut_in_half_is_left_out_and_counted(tmp_path):
    write_rows(tmp_path, rows(epochs=3))
    path = tmp_path / "epochs.csv"
    path.write_bytes(path.read_bytes()[:-30])
    found, broken = read_rows(path)
    assert (found, broken) == (rows(epochs=3)[:2], 1)


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))
def test_rows_are_read_back_as_they_were_written(tmp_path_factory, epochs, layers, parts, turns):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, rows(epochs, turns, layers, parts))
    assert read_rows(folder / "epochs.csv") == (rows(epochs, turns, layers, parts), 0)


def test_text_from_files_stays_text(tmp_path):
    """A run's files may come from anywhere: what they hold must not become a part of the page."""
    evil = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    folder = make_run(tmp_path / "a<b onclick='x'>&amp;")
    summary = {**SUMMARY, "schedule": evil, "devices": [evil] * 2, "environment": {evil: evil}, "form": evil}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "exits.json").write_text(json.dumps({"samples": 1, "rows": [{"name": evil}, 3, None]}))
    (folder / "config.yaml").write_text(json.dumps({"dataset": evil, "model": {"name": evil}, "train": {evil: evil}}))
    tell(folder, "failed", message=evil)
    page = report(folder)
    assert {name for name, _ in page.tags}.isdisjoint({"script", "iframe", "object", "link", "form", "b onclick"})
    assert not [words for _, words in page.tags if {"onclick", "onerror"} & set(words)]
    assert all(str(words["src"]).startswith("data:image/png;base64,") for name, words in page.tags if name == "img")
    assert page.text.count("<script>alert(1)</script>") >= 8


@given(st.text(), st.text())
def test_any_text_is_read_back_from_the_markup_as_it_was(content, attribute):
    page = Page(
        environment().from_string('<p title="{{ title }}">{{ text }}</p>').render(title=attribute, text=content)
    )
    told = "".join(str(words["title"]) for _, words in page.tags)
    assert told.replace("\r\n", "\n") == CONTROL.sub("\N{REPLACEMENT CHARACTER}", attribute).replace("\r\n", "\n")
    shown = CONTROL.sub("\N{REPLACEMENT CHARACTER}", content)
    assert "".join(page.words).replace("\r\n", "\n") == shown.replace("\r\n", "\n")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(SUMMARY)), json_values, max_size=8), json_values, json_values)
def test_a_summary_of_any_values_has_a_page(tmp_path_factory, changed, stage, peaks):
    folder = make_run(tmp_path_factory.mktemp("any") / "run", done=0)
    summary = {**SUMMARY, "stages": [stage, *SUMMARY["stages"]], "peak_memory_bytes": peaks, **changed}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "exits.json").write_text(json.dumps({"rows": [stage], "samples": peaks}))
    (folder / "config.yaml").write_text(json.dumps({"train": changed, "model": stage, "dataset": peaks}))
    tell(folder, str(stage), message=str(peaks), started=str(peaks))
    report(folder)


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1e-300, 5e-324, 1e89, 1.0000000000000002])


@given(st.lists(st.tuples(st.integers(0, 10**6), numbers, numbers), max_size=5), st.sampled_from([ACCURACY, LOSS]))
def test_a_chart_of_any_numbers_can_be_drawn_within_its_frame(points, measure):
    made = [
        EpochRow(1, epoch, value, value, second, 1.0, 1.0, 1.0, (), train_loss=value, test_loss=value)
        for epoch, value, second in points
    ]
    for panel in measure_panels({"a": made}, measure):
        svg = panel.svg()
        assert "nan" not in svg
        assert "inf" not in svg
        page = Page(svg)
        (width, height) = (float(size) for size in page.tags[0][1]["viewbox"].split()[2:])
        for name, words in page.tags:
            if name == "use":
                assert 0 <= float(words["x"]) <= width
                assert 0 <= float(words["y"]) <= height


@pytest.mark.slow
def test_many_runs_with_large_pictures_stay_below_two_megabytes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), dtype=np.uint8)
    folders = [make_run(tmp_path / f"run-{number}", turns=2) for number in range(5)]
    for folder in folders:
        for picture in ("timeline.png", "batches.png"):
            Image.fromarray(noise).save(folder / picture)
    page = report(*folders)
    assert 1_000_000 < (tmp_path / "page.html").stat().st_size < 2_000_000
    assert "left out to keep this page small" in page.text
    assert "run-4" in page.text


def test_of_many_epochs_the_first_the_last_the_best_and_a_sample_are_drawn(tmp_path):
    """Symptom: 20 s for the page of 10,000 epochs. Cause: each of them was looked for in all rows, for each line."""
    many = [replace(row, held_acc=0.7 if row.epoch == 5001 else 0.6) for row in rows(epochs=10_000)]
    drawn = drawn_rows(many, 200)
    epochs = [row.epoch for row in drawn]
    assert len(epochs) == 200
    assert {1, 5001, 10_000} <= set(epochs)
    assert max(after - before for before, after in pairwise(epochs)) < 60
    assert drawn_rows(rows(epochs=7, turns=2), 200) == rows(epochs=7, turns=2)
    folder = make_run(tmp_path / "run", done=0)
    CsvRecorder(folder / "epochs.csv").rewrite(many)
    began = process_time()
    page = report(folder)
    assert process_time() - began < 15  # of the processor, one or two; whatever else it has to do
    assert "Drawn are 200 of 10,000 epochs" in page.text
    assert str(folder / "epochs.csv") in page.text


def test_a_page_stays_small_whatever_lies_in_the_folder(tmp_path):
    """Pictures alone were left out: names, exits, stages and settings of a strange run made it as large as they are."""
    layers = 3000
    deep = make_run(tmp_path / "deep", done=0)
    write_rows(deep, rows(epochs=1, layers=layers))
    (deep / "exits.json").write_text(json.dumps({"rows": [{"name": f"exit {n}"} for n in range(layers)]}))
    (deep / "summary.json").write_text(json.dumps({**SUMMARY, "stages": SUMMARY["stages"] * layers}))
    (deep / "config.yaml").write_text(json.dumps({"model": {f"option{n}": n for n in range(layers)}}))
    wordy = make_run(tmp_path / "wordy", done=1)
    tell(wordy, "failed", "word " * 10**6)
    page = report(deep, wordy)
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    for told in ("200 of 3000 rows", "200 of 6000 rows", "exit 2999", "layer 3000", "200 of 3000 values"):
        assert told in page.text
    assert "wordy is left out to keep this page small" in page.text


def test_nothing_on_the_page_asks_for_a_network(tmp_path):
    make_run(tmp_path / "run")
    report(tmp_path / "run")
    html = (tmp_path / "page.html").read_text()
    assert "url(" not in html
    assert "@import" not in html
    asked = [words[key] for _, words in Page(html).tags for key in ("src", "href", "srcset", "data") if key in words]
    assert all(where.startswith(("data:", "#")) for where in asked)
    assert "default-src 'none'" in Page(html).tags[3][1]["content"]


def test_a_column_of_numbers_stands_to_the_right_and_one_of_words_to_the_left():
    table = environment().get_template("macros.html").module.table
    page = Page(table(["run", "test", "more"], [["a", "94.8 %", 1234.5], ["b", "–", None]]))
    kinds = [words["class"] for name, words in page.tags if name == "td"]
    assert kinds == ["words", "number", "number"] * 2
    assert Page(table(["run"], [])).text == "run"


def test_a_command_that_reads_runs_needs_no_pillow():
    """It was loaded with all data sets, for the lock of a run's folder."""
    code = "import sys, pipeal.reporting.page; sys.exit('PIL' in sys.modules or 'pipeal.data' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_no_run_is_said_in_one_line(tmp_path):
    make_run(tmp_path / "run-001")
    with pytest.raises(DataError, match=r"no run: .*; it holds 1, such as .*run-001"):
        read_runs(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_runs(tmp_path / "none")


@pytest.mark.parametrize(
    ("told", "state"),
    [("finished", "finished"), ("interrupted", "interrupted"), ("failed", "failed"), ("so-so", "unknown")],
)
def test_a_run_is_as_it_says(tmp_path, told, state):
    tell(make_run(tmp_path / "run", done=1), told, "a word")
    (run,) = read_runs(tmp_path / "run")
    assert (run.status.state, run.status.message) == (state, "a word")


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_a_run_that_ended_badly_after_its_last_epoch_is_not_finished(tmp_path, state):
    """Symptom: "finished", and nothing of the last checkpoint, for which the disk was full."""
    tell(make_run(tmp_path / "run", done=3), state, "a word")
    (run,) = read_runs(tmp_path / "run")
    assert (run.status.state, run.status.message) == (state, "a word")


def test_a_run_whose_process_was_killed_has_died(tmp_path):
    folder = make_run(tmp_path / "run", done=1)
    tell(folder, "running")
    with held(folder / "run.lock"):
        assert read_runs(folder)[0].status.state == "running"
    assert read_runs(folder)[0].status.state == "died"


@pytest.mark.parametrize(("done", "state"), [(3, "finished"), (1, "unknown"), (0, "unknown")])
def test_an_older_run_without_a_status_is_judged_by_what_it_left(tmp_path, done, state):
    assert read_runs(make_run(tmp_path / "run", done=done))[0].status.state == state


def test_an_older_run_that_was_stopped_left_a_summary_and_too_few_epochs(tmp_path):
    folder = make_run(tmp_path / "run", done=1)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    assert read_runs(folder)[0].status.state == "interrupted"


def test_of_an_interrupted_comparison_the_form_that_ended_is_finished(tmp_path):
    make_run(tmp_path / "run" / "al")
    make_run(tmp_path / "run" / "bp", mode="bp", done=1)
    tell(tmp_path / "run", "interrupted", "told to stop")
    for folder in (tmp_path / "run", tmp_path / "run" / "al"):
        assert (read_runs(folder)[0].name, read_runs(folder)[0].status.state) == ("run/al", "finished")
    assert read_runs(tmp_path / "run")[1].status.state == "interrupted"


def test_of_a_comparison_that_ended_badly_when_both_forms_had_ended_neither_is_finished(tmp_path):
    """Nobody knows of which of them the last checkpoint was not written."""
    make_run(tmp_path / "run" / "al")
    make_run(tmp_path / "run" / "bp", mode="bp")
    tell(tmp_path / "run", "failed", "No space left")
    for folder in (tmp_path / "run", tmp_path / "run" / "bp"):
        assert {(run.status.state, run.status.message) for run in read_runs(folder)} == {("failed", "No space left")}
