"""A process whose memory has a limit: a control group (version 1) of its own."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from time import sleep
from types import TracebackType

ROOT = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()


class MemoryGroup:
    """A control group while a ``with`` lasts. What a process takes after it has joined counts, the page cache of files
    that it reads and writes included; that the kernel takes back before it ends a process.

    Args:
        limit: Bytes.

    Raises:
        SystemExit: No such group can be made here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.path = ROOT / f"pipeal-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> MemoryGroup:
        try:
            self.path.mkdir()
            (self.path / "memory.limit_in_bytes").write_text(str(self.limit))
            swap = self.path / "memory.memsw.limit_in_bytes"
            if swap.exists():
                swap.write_text(str(self.limit))  # else memory would move to swap instead
        except OSError as error:
            raise SystemExit(f"{self.path}: {error}; this needs root, and control groups of version 1") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(100):  # its last process may still be on its way out
            try:
                self.path.rmdir()
            except OSError:
                sleep(0.05)
            else:
                return
        raise SystemExit(f"{self.path} is still in use; remove it with rmdir once its processes have ended")

    def join(self) -> None:
        """Has the calling process, with all its threads, in it."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """How many of its processes the kernel has ended because memory ran out."""
        found = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(found["oom_kill"])
