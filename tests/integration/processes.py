"""Runs of many processes, ended whatever happens: programs, as users start them, or forks, where that is no matter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

from tests.forks import Fork, forked, run_python

ROOT = Path(__file__).parents[2]
LONG_S = 900.0
"""Far more than anything here takes, on a machine that has other things to do."""

_MARK = "PIPEAL_TEST_MARK"
_doors: deque[socket.socket] = deque()


def held(gate: Path, epoch: int) -> str:
    """Code that holds a training in an epoch, from 0, until there is a file ``gate``, or it is asked to end.

    What is to be done to a run "while it trains" can be done then, however late the test wakes up. That it is held is
    told by another file, ``gate`` with the suffix ``.reached``. A test that has died opens no gate: the run goes on
    after five minutes.
    """
    return f"""
from pathlib import Path
from time import monotonic, sleep
from pipeal.training.checkpoint.policy import CheckpointPolicy

gate, after_batch = Path({str(gate)!r}), CheckpointPolicy.after_batch
def after_batch_held(saves, pipe, position):
    end = monotonic() + 300
    while position.epoch >= {epoch} and saves.asked_to_end() is None and not gate.exists() and monotonic() < end:
        gate.with_suffix(".reached").touch()
        sleep(0.01)
    return after_batch(saves, pipe, position)
CheckpointPolicy.after_batch = after_batch_held
"""


def held_texts(folder: Path, epochs: int) -> tuple[Path, Path]:
    """As ``nlpmain.py``, but held in the last of so many epochs; the script, and the gate."""
    script, gate = folder / "held.py", folder / "gate"
    script.write_text(f"{held(gate, epochs - 1)}\nfrom pipeal.cli.text import main\nmain()\n")
    return script, gate


def environment(**more: str) -> dict[str, str]:
    """That of this process, without what starts processes put there."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "MASTER_", "GLOO_"))}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        own.pop(key, None)
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def torchrun(ranks: int, *options: str) -> list[str]:
    """The command that starts so many ranks on one machine."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]


class Started:
    """A command, and whatever it has started; its words are in a file.

    Attributes:
        process: The command.
        mark: In the environment of all of them, if it is a program.
    """

    def __init__(self, process: subprocess.Popen[str] | Fork, log: Path, mark: str) -> None:
        self.process = process
        self.mark = mark
        self._log = log

    def said(self) -> str:
        """All that they have said so far."""
        return self._log.read_text(errors="replace")

    def end(self, within_s: float = LONG_S) -> int:
        """Waits for the command; its exit code."""
        return self.process.wait(within_s)

    def processes(self, **wanted: str) -> list[int]:
        """The numbers of all that live, or of those with certain values in their environment."""
        needles = [f"{key}={value}".encode() for key, value in {**wanted, _MARK: self.mark}.items()]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    has = (entry / "environ").read_bytes().split(b"\0")
                    if all(needle in has for needle in needles):
                        found.append(int(entry.name))
        return found

    def kill_all(self) -> None:
        """Leaves none of them."""
        self.process.kill()
        end = monotonic() + 120
        while monotonic() < end:
            living = self.processes()
            for number in living:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            if self.process.poll() is not None and not living:
                return
            sleep(0.05)
        raise AssertionError(f"processes left behind: {self.processes()}")


@contextmanager
def started(command: Sequence[str], log: Path, **more: str) -> Iterator[Started]:
    """Starts a program; leaves nothing of it behind."""
    mark = uuid4().hex
    with log.open("w") as words:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=words, stderr=words, text=True, env=environment(**more, **{_MARK: mark})
        )
    with _killed_in_the_end(Started(process, log, mark)) as run:
        yield run


@contextmanager
def started_fork(command: Sequence[str], log: Path, **more: str) -> Iterator[Started]:
    """As :func:`started`, of what comes after ``python``; what it starts in turn is not found."""
    process = forked(log, environment(**more), ROOT, run_python, *command)
    with _killed_in_the_end(Started(process, log, uuid4().hex)) as run:
        yield run


@contextmanager
def _killed_in_the_end(run: Started) -> Iterator[Started]:
    try:
        yield run
    finally:
        run.kill_all()


def checkpoints(folder: Path) -> set[str]:
    """Those of a run, by name."""
    return {path.parent.name for path in (folder / "checkpoints").glob("step-*/manifest.json")}


def until(condition: Callable[[], object], within_s: float = LONG_S) -> None:
    """Waits until something is so."""
    end = monotonic() + within_s
    while not condition():
        assert monotonic() < end
        sleep(0.05)


def free_port() -> int:
    """A port where no process listens.

    It stays bound here, so that no other process is given it before there is a listener: torch's store and ZeroMQ set
    SO_REUSEADDR as well and may share it, while a process that takes any port that is free passes it over.
    """
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind(("127.0.0.1", 0))
    _doors.append(door)
    if len(_doors) > 100:
        _doors.popleft().close()
    return int(door.getsockname()[1])


def each_rank(commands: Sequence[Sequence[str]], folder: Path, size: int | None = None) -> list[tuple[int, str]]:
    """Starts the ranks of a run one by one, each with a command of its own; exit codes, and what they said."""
    size = len(commands) if size is None else size
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    with ExitStack() as stack:
        ranks = []
        for rank, command in enumerate(commands):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            run = started_fork(command, folder / f"rank-{rank}.txt", **where, **numbers)
            ranks.append(stack.enter_context(run))
        return [(rank.end(), rank.said()) for rank in ranks]


def many(folder: Path, ranks: int, *command: str) -> str:
    """Runs a command on so many ranks to a good end; what they said."""
    found = each_rank([command] * ranks, folder)
    said = "".join(said for _, said in found)
    assert {code for code, _ in found} == {0}, said
    return said
