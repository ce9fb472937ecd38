"""Runs commands that may fail, hang or crash: each until its limit, with all it starts, and with its output kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any
from uuid import uuid4

ROOT = Path(__file__).parents[2]
"""Of the repository, where commands run whatever folder they are asked for from."""
_KEPT = 200_000
"""Bytes of a command's output, from its end."""
_LEAST_S = 2.0
"""With less time than this left nothing is started."""
_GRACE_S = 3.0
"""How long a command that is told to end may take; torchrun ends its processes in it."""
_KILL_S = 5.0
"""How long a killed process is waited for: one that a driver holds in the kernel outlives SIGKILL."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Command:
    """What to run.

    Attributes:
        name: For the page.
        arguments: Of the process.
        limit_s: How long it may take.
        environment: What it has beside this process's.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How it ended.

    Attributes:
        command: What was run.
        code: The exit code, below 0 for a signal; None where it was stopped or not started.
        seconds: How long it took.
        output: The end of what it printed.
        why: Where there is no code: why.
    """

    command: Command
    code: int | None
    seconds: float
    output: str
    why: str = ""

    @property
    def how(self) -> str:
        """In words; empty where it ended well."""
        if self.why or self.code == 0:
            return self.why
        assert self.code is not None
        return f"signal {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"

    @property
    def last_line(self) -> str:
        """The last line that it printed, which of a Python program that raised is the error."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(commands: Iterable[Command], until: float, jobs: int = 1) -> Generator[Ended, None, None]:
    """Runs all commands, so many at once, and yields them as they end.

    Close it to end those under way, as when the caller is interrupted.

    Args:
        commands: In the order in which they start.
        until: On the clock of ``time.monotonic``; what runs then is stopped, what comes later is not started.
        jobs: How many at once.
    """
    waiting = deque(commands)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                command = waiting.popleft()
                left = until - monotonic()
                if left < _LEAST_S:
                    yield Ended(command, None, 0.0, "", "not run: no time was left")
                else:
                    running.append(_Running(command, min(command.limit_s, left)))
            for one in list(running):
                if (ended := one.look()) is not None:
                    running.remove(one)
                    yield ended
            sleep(_POLL_S)
    finally:
        for one in running:
            one.stop()


class _Running:
    def __init__(self, command: Command, limit_s: float) -> None:
        self._command = command
        self._limit_s = limit_s
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed when it has been read
        self._begin = monotonic()
        # All that it starts inherits this, however it is started: torchrun's processes have groups of their own.
        self._mark = f"GPU_SMOKE_{uuid4().hex}"
        self._process = subprocess.Popen(
            command.arguments,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment, self._mark: "1"},
            start_new_session=True,
        )

    def look(self) -> Ended | None:
        """How it ended; None while it runs. Past its limit it is stopped."""
        code = self._process.poll()
        seconds = monotonic() - self._begin
        if code is None and seconds < self._limit_s:
            return None
        why = "" if code is not None else f"stopped at its limit of {self._limit_s:.0f} s"
        if not self.stop():  # also what an ended command left behind
            why += "; could not be ended"
        with self._output:
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - _KEPT))
            output = self._output.read().decode(errors="replace")
        return Ended(self._command, code, seconds, output, why)

    def stop(self) -> bool:
        """Ends it and all processes that it has started; returns whether it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._process.kill()  # does nothing where it has ended
        for pid in _marked(self._mark):
            with suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        return self._process.poll() is not None


def read_json(path: Path) -> tuple[Any, str]:
    """What a command left in a file; it may have ended before it wrote, or while it did.

    Returns:
        The value and an empty text; or None, and why there is no value.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8")), ""
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    except ValueError as error:  # of JSON, or of a character that was cut in two
        return None, f"{path.name} is not whole: {error}"


def _marked(name: str) -> list[int]:
    """The processes that have an environment variable, as Linux lists them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is someone else's
            if f"{name}=".encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found
