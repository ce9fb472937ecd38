"""Intra-op threads: who gets how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeal.engine.devices.cpus import cores, omp_threads
from pipeal.engine.schedule import Schedule


def threads_each(devices: Sequence[str | torch.device], schedule: Schedule, wanted: int | None = None) -> int:
    """Intra-op threads per CPU worker: as many as wanted; else all cores for one at a time, each CPU stage its share.

    One where no stage is on a CPU. Unless wanted, no more than ``OMP_NUM_THREADS`` says.
    """
    if wanted is not None:
        return wanted
    on_cpu = sum(torch.device(device).type == "cpu" for device in devices)
    if not on_cpu:
        return 1  # what is left of operators for the host of a GPU is small
    share = cores() if schedule.serial or on_cpu <= 1 else max(1, cores() // on_cpu)
    return min(share, omp_threads() or share)


def set_intra_op_threads(count: int | None) -> None:
    """From here on, operators that the calling thread runs on a CPU run on that many threads; None leaves it."""
    if count is None:
        return
    # A thread's first look at the number takes over what any thread has set last, so it comes before the own setting.
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """Within it, operators on a CPU run on that many threads, whatever the caller's own number is; None leaves it."""
    before = torch.get_num_threads()
    set_intra_op_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
