"""Rows beside the CSV: JSON lines, and TensorBoard where it is installed."""

import errno
import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.reporting.peak_memory import peak_memory_bytes
from pipeal.reporting.recorders import JsonLinesRecorder
from pipeal.reporting.tensorboard import TensorBoardRecorder
from tests.training.run_folders import rows


def test_each_line_is_the_row_by_name_and_on_the_disk_when_write_returns(tmp_path):
    path = tmp_path / "new" / "epochs.jsonl"
    with JsonLinesRecorder(path) as recorder:
        for number, row in enumerate(rows(), start=1):
            recorder.write(row)
            lines = path.read_text().splitlines()
            assert len(lines) == number
            assert json.loads(lines[-1]) == json.loads(json.dumps(asdict(row)))
    recorder.close()


def test_json_has_no_nan_and_no_infinity(tmp_path):
    with JsonLinesRecorder(tmp_path / "x.jsonl") as recorder:
        recorder.write(replace(rows()[0], test_acc=math.nan, losses=((1.0, math.inf),)))
    found = json.loads((tmp_path / "x.jsonl").read_text(), parse_constant=pytest.fail)
    assert (found["test_acc"], found["losses"]) == (None, [[1.0, None]])


def test_a_new_recorder_begins_the_file_anew(tmp_path):
    for _ in range(2):
        with JsonLinesRecorder(tmp_path / "x.jsonl") as recorder:
            recorder.write(rows()[0])
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 1


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"TensorBoard is not installed .*pip install 'pipeal\[tensorboard\]'"):
        TensorBoardRecorder(tmp_path / "tensorboard")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_back_every_scalar_of_every_turn(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'pipeal[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second replaces what the first left
        with TensorBoardRecorder(tmp_path, METHODS["al"].losses) as recorder:
            for row in rows(epochs=3, turns=2):
                recorder.write(row)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["turn-1", "turn-2"]
    for turn in (1, 2):
        wanted = [row for row in rows(epochs=3, turns=2) if row.turn == turn]
        read = EventAccumulator(str(tmp_path / f"turn-{turn}"))
        read.Reload()
        accuracy = [(event.step, event.value) for event in read.Scalars("accuracy/test")]
        assert accuracy == [(row.epoch, pytest.approx(row.test_acc)) for row in wanted]
        loss = [event.value for event in read.Scalars("loss/layer_2/autoencoder")]
        assert loss == pytest.approx([row.losses[1][1] for row in wanted])


@pytest.mark.parametrize("room", [0, 30])  # nothing more, or a part of an event
def test_events_that_the_disk_did_not_take_come_with_the_next_ones(tmp_path, small_files, room):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'pipeal[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, *lost, last = rows(epochs=4)
    with TensorBoardRecorder(tmp_path) as recorder:
        recorder.write(first)
        (file,) = tmp_path.glob("turn-1/*")
        whole = file.stat().st_size
        with small_files(whole + room):
            for row in lost:
                with pytest.raises(OSError, match="File too large"):
                    recorder.write(row)
        assert file.stat().st_size == whole
        recorder.write(last)
        recorder.rewrite([first, *lost])
        recorder.write(last)
    read = EventAccumulator(str(tmp_path / "turn-1"))
    read.Reload()
    assert [event.step for event in read.Scalars("accuracy/test")] == [1, 2, 3, 4]


def test_rows_are_written_though_older_files_cannot_be_removed_and_those_go_when_they_can(tmp_path, monkeypatch):
    """A disk that was read-only when a run went on cost the epochs before it, and ended a run that just began."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'pipeal[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    first, second, third = rows(epochs=3)
    with TensorBoardRecorder(tmp_path) as recorder:
        recorder.write(replace(first, test_acc=0.0))
    with monkeypatch.context() as protected:
        protected.setattr(Path, "unlink", refuse)
        recorder = TensorBoardRecorder(tmp_path)
        with pytest.raises(OSError, match="Read-only"):
            recorder.rewrite([first])
        with pytest.raises(OSError, match="Read-only"):
            recorder.write(second)
    recorder.write(third)
    (file,) = tmp_path.glob("turn-*/*")
    read = EventAccumulator(str(file))
    read.Reload()
    found = [(event.step, event.value) for event in read.Scalars("accuracy/test")]
    assert found == [(row.epoch, pytest.approx(row.test_acc)) for row in (first, second, third)]


def test_the_peak_of_memory_is_at_least_what_was_touched():
    block = bytearray(b"x") * (64 << 20)
    assert list(peak_memory_bytes(["cpu", "cpu"])) == ["process"]
    assert peak_memory_bytes(["cpu"])["process"] >= len(block)


@pytest.mark.cuda
def test_a_gpu_tells_its_own_peak():
    import torch

    block = torch.ones(1 << 20, device="cuda:0")
    assert peak_memory_bytes(["cuda:0", "cpu", "cuda:0"])["cuda:0"] >= block.nbytes
