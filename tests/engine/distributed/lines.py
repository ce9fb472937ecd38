"""Distributed pipelines whose ranks are threads of this process: real gloo between them, and no process to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist

from pipeal.engine.distributed import pipeline as front
from pipeal.engine.distributed.follower import OnSnapshot
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.process_groups import Groups, Seat
from pipeal.engine.distributed.world import World

from .ranks import each, ranks

T = TypeVar("T")


class _ThreadGroups(Groups):
    """Goes with the objects: ``torch.distributed`` does not know these groups."""

    def close(self) -> None:
        pass


@contextmanager
def thread_ranks(size: int, replicas: int = 1) -> Iterator[list[World]]:
    """Worlds that have met, and whose pipelines open groups for threads."""
    with ranks(size, replicas) as worlds:
        opened = dict.fromkeys(range(size), 0)

        def open_groups(world: World, seats: list[Seat]) -> Groups:
            opened[world.rank] += 1
            stage = world.mesh.stage_of(world.rank)
            column = world.mesh.column(stage)

            def group(name: str, members: list[int]) -> Any:
                store = dist.PrefixStore(f"{name}/{opened[world.rank]}", world.store)
                return dist.ProcessGroupGloo(store, members.index(world.rank), len(members), timedelta(seconds=60))

            alike = group(f"stage-{stage}", column) if replicas > 1 else None
            return _ThreadGroups(alike)

        with patch.object(front, "open_groups", open_groups):
            yield worlds


def on_each(worlds: list[World], work: Callable[[World], T]) -> list[T]:
    """What every rank's thread gives; raises what the first of them raised."""
    found: list[Any] = each(worlds, work)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def with_pipe(
    worlds: list[World],
    packages: list[Any],
    work: Callable[[DistributedPipeline], Any],
    on_snapshot: OnSnapshot | None = None,
    **more: Any,
) -> Any:
    """What ``work`` gives on rank 0."""
    chosen: dict[str, Any] = {"threads": 1, "stall_timeout_s": 60.0} | more

    def on_rank(world: World) -> Any:
        if world.rank:
            return serve(packages[world.rank], world, on_snapshot=on_snapshot, **chosen)
        with DistributedPipeline(packages[0], world, **chosen) as pipe:
            return work(pipe)

    return on_each(worlds, on_rank)[0]
