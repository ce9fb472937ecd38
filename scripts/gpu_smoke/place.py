"""Where a probe measures: the first GPU, or the CPU in its stead, and the small things that all probes need."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any, TypeVar

from gpu_smoke.commands import Command, Ended, read_json, run

Found = TypeVar("Found")


class Place:
    """Where to measure.

    Args:
        stand_in: Whether the CPU stands in for a GPU: sizes are small, and figures say nothing about one.

    Attributes:
        device: The name of the first GPU, or of the CPU.
        stand_in: As given.
    """

    def __init__(self, stand_in: bool) -> None:
        self.stand_in = stand_in
        self.device = "cpu" if stand_in else "cuda:0"

    def wait(self) -> None:
        """Until all work given so far has ended."""
        if not self.stand_in:
            import torch  # not at the top: what asks for no figures of it begins at once

            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """What some work takes, on the device as well."""
        self.wait()
        begin = perf_counter()
        work()
        self.wait()
        return perf_counter() - begin

    def host_us(self, work: Callable[[], object]) -> float:
        """Microseconds of the host for one call, the median of 20 rounds of 20: so few that no launch has to wait."""
        work()
        rounds = calls = self.size(20, 3)
        found = []
        for _ in range(rounds):
            self.wait()
            begin = perf_counter()
            for _ in range(calls):
                work()
            found.append((perf_counter() - begin) / calls)
        self.wait()
        return 1e6 * median(found)

    def size(self, on_gpu: int, stand_in: int) -> int:
        """One of two sizes."""
        return stand_in if self.stand_in else on_gpu


def in_new_thread(work: Callable[[], Found]) -> Found:
    """What a call returns on a thread that has done nothing before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def apart(
    probe: str, place: Place, environment: Mapping[str, str] | None = None, processes: int = 1, limit_s: float = 30.0
) -> Any:
    """What a function returns in a process of its own, which may have another environment.

    Args:
        probe: ``module:function``; it takes a place and returns what JSON can hold.
        place: Whether to stand in.
        environment: Of the process, beside this one's.
        processes: How many; more than one are started by torchrun, and the first one's answer counts.
        limit_s: How long it may take.

    Raises:
        ApartError: It failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        ranks = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        )
        arguments = [sys.executable, *ranks, "-m", "gpu_smoke.probe", probe, str(answer)]
        command = Command(
            probe, [*arguments, "--stand-in"] if place.stand_in else arguments, limit_s, environment or {}
        )
        (ended,) = run([command], monotonic() + limit_s)
        if ended.code != 0:
            raise ApartError(ended)
        found, why = read_json(answer)
        if why:
            raise ApartError(replace(ended, code=None, why=f"it ended well, but {why}"))
        return found


class ApartError(Exception):
    """A process of :func:`apart` that failed.

    Attributes:
        ended: How.
    """

    def __init__(self, ended: Ended) -> None:
        super().__init__(f"{ended.command.name}: {ended.how}: {ended.last_line}")
        self.ended = ended
