"""Real processes as ranks: each runs a job of a module, and leaves what it found in a file."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.world import World, open_world
from tests.forks import Fork, forked

LIMIT_S = 900.0
Job = Callable[[World], Any]


class Ranks:
    """The processes of a run, and what each of them left."""

    def __init__(self, folder: Path, processes: list[Fork]) -> None:
        self.folder = folder
        self.processes = processes

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """The exit codes, by rank."""
        until = time.monotonic() + limit_s
        return [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]

    def found(self, rank: int) -> Any:
        return torch.load(self.folder / f"{rank}.pt", weights_only=True)

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")

    def wait_for(self, name: str, limit_s: float = LIMIT_S) -> None:
        """Until a job has left a file of that name in the folder."""
        until = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            assert time.monotonic() < until, self.said(0)
            time.sleep(0.02)


@contextmanager
def started(job: Job, size: int, folder: Path, replicas: int = 1, timeout_s: float = 120.0) -> Iterator[Ranks]:
    """Starts a job on so many ranks; none of them outlives the block."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes: list[Fork] = []
    try:
        for rank in range(size):
            launch = Launch(rank, size, rank, size, "127.0.0.1", store.port, hosted=True)
            log = folder / f"{rank}.log"
            processes.append(forked(log, os.environ, folder, _work, job, launch, replicas, timeout_s))
        yield Ranks(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(job: Job, size: int, folder: Path, replicas: int = 1) -> list[Any]:
    """What a job gives, by rank."""
    with started(job, size, folder, replicas) as ranks:
        codes = ranks.wait()
        assert codes == [0] * size, "\n".join(ranks.said(rank) for rank in range(size))
        return [ranks.found(rank) for rank in range(size)]


def _work(job: Job, launch: Launch, replicas: int, timeout_s: float) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with open_world(launch, {}, replicas=replicas, timeout_s=timeout_s) as world:
            torch.save(job(world), f"{launch.rank}.pt")
    except BaseException:  # noqa: BLE001  looked at by the test
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
