"""The public way to a measured placement: a few batches are tried, and a pipeline is given what was best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle, islice
from typing import Any

from torch import nn

from pipeal.core.errors import DataError
from pipeal.core.options import EngineOptions, with_keywords
from pipeal.core.protocols import TrainableLayer
from pipeal.core.samples import iterate, pair_of
from pipeal.engine.devices import device_names
from pipeal.engine.schedule import Schedule
from pipeal.planning.measure.layers import WARM_UP
from pipeal.planning.placement import Placement, place
from pipeal.planning.pure.trials import MOST

TRIAL_BATCHES = WARM_UP + MOST
"""So many batches are drawn, and each candidate is tried on all of them."""


def plan(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Iterable[Any],
    schedule: str | Schedule = "pipelined",
    *,
    devices: str | None = None,
    on_trial: Callable[[Placement], None] | None = None,
    options: EngineOptions | None = None,
    **keywords: Any,
) -> Placement:
    """The fastest placement of a model on this machine, by trial of some on a copy of its layers.

    ::

        placement = pipeal.plan(package, batches)
        print(placement)                                   # cpu × 2 | cpu × 1 (1 thread each)
        with pipeal.Pipeline(package, placement) as pipe:
            pipe.run(batches)

    Args:
        model: As for :class:`pipeal.Pipeline`; it is not changed.
        batches: Pairs ``(x, y)``, or objects with attributes ``x`` and ``y``. The first :data:`TRIAL_BATCHES` are
            drawn, which are gone from an iterator; fewer are gone through several times.
        schedule: The schedule it is for.
        devices: Which may be used: ``"cpu"``, or GPUs such as ``"cuda:0,cuda:1"``; None for all GPUs, or the CPU
            without any.
        on_trial: Called with each candidate and its time.
        options: Give the pipeline the same. Where they leave ``threads`` open, several numbers are tried.
        keywords: As for :class:`pipeal.Pipeline`.

    Returns:
        What the ``devices`` of a pipeline takes: devices, sizes of stages, and threads.

    Raises:
        DataError: There are no batches, or one is no pair.
        PlacementError: The devices are not here, or not of one kind.
        OutOfMemoryError: Memory suffices for no placement.
    """
    wanted = with_keywords(options, keywords)
    few = [pair_of(batch) for batch in islice(iterate(batches), TRIAL_BATCHES)]
    if not few:
        raise DataError("found no batches to plan with; expected at least one")
    return place(
        model,
        list(islice(cycle(few), TRIAL_BATCHES)),
        schedule,
        wanted,
        devices=None if devices is None else device_names(devices),
        on_trial=on_trial,
    )
