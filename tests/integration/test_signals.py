"""Runs of the real command in sessions of their own, to which and to whose workers things are done."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
from fuzz_cases import write_images
from left_behind import kill, left_behind, same, start, written

from pipeal.cli import vision
from pipeal.training.checkpoint.writer import HURRY_S
from tests.cli.running import run_command
from tests.integration.processes import held

NAME = "cifar10-vgg-al-001"
HANGING = """
import sys, time
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter

save, saved = CheckpointStore.save, []
def hang(self, step, *rest):
    if saved:
        time.sleep(600)
    saved.append(step)
    return save(self, step, *rest)
CheckpointStore.save = hang
close = CheckpointWriter.close
def tell(self):
    print(f"closes within {self._patience_s:g} s", file=sys.stderr, flush=True)
    close(self)
CheckpointWriter.close = tell
"""
MAIN = """
from pipeal.cli import vision
vision.main()
"""


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """What is started from a shell's background job would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def images(folder: Path) -> list[str]:
    """A command that trains on twenty batches an epoch, of two small images each."""
    write_images(folder)
    return [
        "cifar10", "vgg", f"--data-root={folder}", f"--set=data.cache={folder}", "--devices=cpu*2", "--size=16",
        "--set=model.width=0.0625", "--set=model.x_hid=8", "--set=model.y_hid=8", "--set=engine.threads=1",
        "--epochs=10", "--batch-size=2", "--set=data.workers=2", "--set=data.held_out=0", "--augmentation=basic",
        "--set=train.checkpoint.every=2",
    ]  # fmt: skip


def said(out: Path) -> str:
    return (out / "log.txt").read_text()


def told(out: Path) -> str:
    """The one line that a process ended with, the last one so far."""
    return said(out).rsplit("pipeal: ", 1)[-1].rstrip()


def wait_for(seen: Callable[[], object], process: subprocess.Popen[bytes], out: Path, within_s: float = 120.0) -> None:
    until = monotonic() + within_s
    while not seen():
        assert process.poll() is None, said(out)
        assert monotonic() < until, said(out)
        sleep(0.01)


@contextmanager
def under_way(arguments: list[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that has written a checkpoint; whatever is left of it in the end is killed."""
    before = written(out)
    process = start(arguments, out)
    try:
        wait_for(lambda: written(out) - before, process, out)
        yield process
    finally:
        kill(process)


def session_of(process: subprocess.Popen[bytes]) -> list[int]:
    """All other processes that are alive in the session of one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rsplit(")", 1)[1].split()
            if int(session) == process.pid and state != "Z" and int(path.parent.name) != process.pid:
                found.append(int(path.parent.name))
    return found


def left_nothing(process: subprocess.Popen[bytes], out: Path, within_s: float = 120.0) -> None:
    until = monotonic() + within_s
    while session_of(process) and monotonic() < until:
        sleep(0.02)
    assert session_of(process) == []
    assert [str(path) for path in out.rglob("*.aside*")] == []
    assert "Traceback" not in said(out)


@pytest.mark.slow
def test_whatever_signals_a_run_and_its_workers_get_it_goes_on_as_if_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, out = images(tmp_path / "data"), tmp_path / "signalled"
    out.mkdir()
    # Each is held in an epoch of its own until it is met: none is over by then, and each has batches to save before.
    signalled_as_a_group(signal.SIGTERM, command, out, epoch=2)
    robbed_of_a_worker(command, out, epoch=4)
    saving_to_a_disk_that_hangs(command, out, epoch=6)
    signalled_as_a_group(signal.SIGINT, command, out, epoch=8)
    for folder in (out, tmp_path / "untouched"):
        code, _, err = run_command(vision.command, capsys, *command, f"--out={folder}")
        assert code == 0, err
    (layers, rows), (layers_again, rows_again) = left_behind(tmp_path / "untouched" / NAME), left_behind(out / NAME)
    assert rows == rows_again
    assert same(layers, layers_again)
    assert [path.name for path in out.iterdir() if path.is_dir()] == [NAME]


def signalled_as_a_group(number: signal.Signals, command: list[str], out: Path, epoch: int) -> None:
    """Symptom: the loader's workers died of it first, and the run of that, with nothing saved."""
    with under_way(["-c", held(out.parent / "never", epoch) + MAIN, *command], out) as process:
        assert len(session_of(process)) == 2
        os.killpg(process.pid, number)
        assert process.wait(600) == 128 + number, said(out)
        assert "and saved; the same command goes on from there" in told(out)
        left_nothing(process, out)


def robbed_of_a_worker(command: list[str], out: Path, epoch: int) -> None:
    """What the kernel does when memory runs out."""
    gate = out.parent / "gate"
    with under_way(["-c", held(gate, epoch) + MAIN, *command], out) as process:
        os.kill(session_of(process)[0], signal.SIGKILL)
        gate.touch()
        assert process.wait(600) == 1, said(out)
        assert "a worker process that prepares batches died" in told(out)
        left_nothing(process, out)


def saving_to_a_disk_that_hangs(command: list[str], out: Path, epoch: int) -> None:
    """Symptom: the first signal waited without end, and the second one 300 seconds."""
    with under_way(["-c", held(out.parent / "never", epoch) + HANGING + MAIN, *command], out) as process:
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: "saving; another signal ends the run at once" in said(out), process, out)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(600) == 143, said(out)
        assert f"closes within {HURRY_S:g} s" in said(out), "and not within the patience of an end that was wanted"
        left_nothing(process, out)
