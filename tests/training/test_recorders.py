"""Whatever moment a run dies at, what lies on the disk is whole."""

import csv
import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.atomic import replacing, replacing_folder
from pipeal.core.errors import DataError
from pipeal.core.methods import METHODS
from pipeal.reporting.recorders import CsvRecorder, JsonLinesRecorder, write_json
from pipeal.training.row import EpochRow

ROW = EpochRow(1, 1, 0.5, 0.25, 10.0, 10.0, 1656.8, 65432.1, ((0.1, 0.2), (0.3, 0.4)))
PUBLISHED = ["turn", "train_acc", "test_acc", "train_time"]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_published_columns_come_first_and_then_ours(tmp_path):
    with CsvRecorder(tmp_path / "new" / "epochs.csv", METHODS["al"].losses) as recorder:
        recorder.write(ROW)
    header = (tmp_path / "new" / "epochs.csv").read_text().splitlines()[0].split(",")
    assert header == [
        *PUBLISHED,
        *("epoch", "epoch_time", "samples_per_s", "tokens_per_s"),
        *("loss_1_enc", "loss_1_ae", "loss_2_enc", "loss_2_ae"),
    ]


@pytest.mark.parametrize(
    ("losses", "names"),
    [((), []), (((0.5,),), ["loss_1"]), (((1.0, 2.0, 3.0),), ["loss_1_1", "loss_1_2", "loss_1_3"])],
)
def test_models_with_other_losses_have_other_columns(tmp_path, losses, names):
    with CsvRecorder(tmp_path / "x.csv") as recorder:
        recorder.write(replace(ROW, losses=losses))
    assert list(read(tmp_path / "x.csv")[0])[8:] == names


@given(st.lists(st.floats(), min_size=9, max_size=9))
def test_every_number_is_read_back_as_it_was(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with CsvRecorder(path) as recorder:
        recorder.write(EpochRow(1, 2, *numbers[:6], losses=(tuple(numbers[6:]),)))
    row = read(path)[0]
    back = [float(row[name]) for name in list(row)[1:4] + list(row)[5:]]
    assert list(map(repr, back)) == list(map(repr, numbers))


def test_a_row_is_on_the_disk_when_write_returns(tmp_path):
    with CsvRecorder(tmp_path / "x.csv") as recorder:
        for epoch in (1, 2, 3):
            recorder.write(replace(ROW, epoch=epoch))
            assert [row["epoch"] for row in read(tmp_path / "x.csv")] == [str(n) for n in range(1, epoch + 1)]


def test_a_killed_run_leaves_only_whole_rows(tmp_path):
    code = (
        "from pipeal.reporting.recorders import *; import itertools\n"
        f"recorder = CsvRecorder({str(tmp_path / 'x.csv')!r}); recorder.rewrite([]); print('ready', flush=True)\n"
        "for n in itertools.count(1): recorder.write(EpochRow(1, n, .1, .2, .3, .4, .5, .6, ((1/3, 2/3),) * 9))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            while len((tmp_path / "x.csv").read_bytes()) < 10_000:
                assert process.poll() is None
        finally:
            process.kill()
    text = (tmp_path / "x.csv").read_text()
    assert text.endswith("\n")
    assert [int(row["epoch"]) for row in read(tmp_path / "x.csv")] == list(range(1, text.count("\n")))
    assert {len(line.split(",")) for line in text.splitlines()} == {8 + 18}


def test_a_row_that_the_disk_did_not_take_comes_with_the_next_one(tmp_path, small_files):
    """A file that grew row by row was left with a part of one, and later rows were put behind it."""
    rows = [replace(ROW, epoch=epoch) for epoch in range(1, 5)]
    with CsvRecorder(tmp_path / "x.csv") as csv_file, JsonLinesRecorder(tmp_path / "x.jsonl") as json_file:
        for recorder in (csv_file, json_file):
            recorder.write(rows[0])
            before = recorder.path.read_bytes()
            with small_files(len(before) + 20):
                for row in rows[1:3]:
                    with pytest.raises(DataError, match=r"cannot write .*File too large"):
                        recorder.write(row)
            assert recorder.path.read_bytes() == before
            recorder.write(rows[3])
    assert [row["epoch"] for row in read(tmp_path / "x.csv")] == ["1", "2", "3", "4"]
    assert [json.loads(line)["epoch"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.jsonl"]


def test_rows_are_replaced_as_a_whole(tmp_path):
    with CsvRecorder(tmp_path / "x.csv") as recorder:
        for epoch in (1, 2, 3):
            recorder.write(replace(ROW, epoch=epoch))
        recorder.rewrite([ROW])
        recorder.write(replace(ROW, epoch=2))
        assert [row["epoch"] for row in read(tmp_path / "x.csv")] == ["1", "2"]
        recorder.rewrite([])
        assert (tmp_path / "x.csv").read_text() == ""


def test_a_row_of_another_shape_is_refused_and_not_written(tmp_path):
    with CsvRecorder(tmp_path / "x.csv") as recorder:
        recorder.write(ROW)
        with pytest.raises(ValueError, match=r"the row has columns .*, but the file turn,"):
            recorder.write(replace(ROW, losses=()))
    assert len(read(tmp_path / "x.csv")) == 1


def test_json_is_read_back_and_replaces_what_was_there(tmp_path):
    for summary in ({"a": [1, 2.5, None]}, {"ä": "×"}):
        write_json(tmp_path / "new" / "summary.json", summary)
        assert json.loads((tmp_path / "new" / "summary.json").read_text(encoding="utf-8")) == summary


def test_json_of_a_run_that_diverged_is_json(tmp_path):
    """Symptom: summary.json held NaN, which other readers of JSON than Python's refuse."""
    write_json(tmp_path / "x.json", {"a": {"b": [math.nan, (1.5, -math.inf)]}, "c": 1})
    found = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert found == {"a": {"b": [None, [1.5, None]]}, "c": 1}


def test_what_fails_halfway_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(DataError), replacing(path) as aside:  # noqa: PT012  (what fails is the block)
        aside.write_text("ne")
        (tmp_path / "none").read_text()
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x", "x" * 60])
@pytest.mark.parametrize("kind", [replacing, replacing_folder])
def test_what_a_kill_left_is_removed_with_the_next_write_of_the_name(tmp_path, kind, name):
    """Symptom: each kill during an export, or while a cache was made, left a file of its size for good."""

    def write(path):
        (path / "part" if kind is replacing_folder else path).write_text("whole")

    endings = ("aside", "before") if kind is replacing_folder else ("aside",)
    old = [tmp_path / f".{name[:40]}.{number:012x}.{ending}" for number, ending in enumerate(endings)]
    others = [tmp_path / f".{other}.{0:012x}.aside" for other in ("y", f"{name[:38]}.y")]
    kept = [*others, tmp_path / f".{name[:40]}.{9:012x}.aside"]
    for left in (*old, *kept):
        with kind(left) as aside:
            write(aside)
    for left in (*old, *others):
        for path in (left, *left.glob("*")):
            os.utime(path, (1, 1))
    if kind is replacing_folder:  # one that has still been written into is in the making
        os.utime(kept[-1], (1, 1))
    with kind(tmp_path / name) as aside:
        write(aside)
    assert set(tmp_path.iterdir()) == {*kept, tmp_path / name}


@pytest.mark.parametrize("name", ["", ".", "folder", "pipe", "link"])
def test_what_is_no_file_is_not_replaced(tmp_path, monkeypatch, name):
    """As root, a device node gave way to a file; no name at all ended in a bare ValueError."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    with pytest.raises(DataError, match=r"^cannot write .*(expected the name of a file|choose another name)$"):
        write_json(Path(name), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    assert Path("pipe").is_fifo()
    assert Path("link").is_symlink()


def test_a_file_in_the_place_of_a_folder_is_not_a_matter_of_room(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*(Not a directory|File exists); choose another folder"):
        write_json(tmp_path / "file" / "x", {})


def test_a_file_written_aside_has_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_json(tmp_path / "json", {})
    assert (tmp_path / "json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["n" * 300, "n" * 250])
def test_a_name_that_is_too_long_is_told_and_one_that_is_not_is_written(tmp_path, name):
    """The name aside is longer: 250 letters could not be written, and 300 ended in a bare OSError."""
    if len(name) > 255:
        with pytest.raises(DataError, match=r"cannot write .*File name too long"):
            write_json(tmp_path / name, {})
    else:
        write_json(tmp_path / name, {})
    assert [path.name for path in tmp_path.iterdir()] == [name] * (len(name) <= 255)


def test_a_name_is_on_the_disk_when_the_block_ends(tmp_path, monkeypatch):
    """After a power cut a file that is not synced in its folder may be absent, though it was renamed."""
    calls = []
    monkeypatch.setattr(os, "replace", lambda *_, real=os.replace: (calls.append("rename"), real(*_)))
    monkeypatch.setattr(
        os, "fsync", lambda file: calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
    )
    write_json(tmp_path / "new" / "x.json", {})
    assert calls == ["file", "rename", "folder"]
