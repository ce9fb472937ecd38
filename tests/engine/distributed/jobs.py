"""What ranks that are processes do in these tests."""

from __future__ import annotations

from pipeal.engine.distributed.world import World

from ..cases import reference
from .test_exactness import RICH, trained


def train(world: World) -> list[str]:
    """What differs from one process, on rank 0."""
    found = trained(world, RICH.build(), RICH, "pipelined", sizes=None if world.size == 4 else [2, 2])
    return [] if found is None else found.differences(reference(RICH))
