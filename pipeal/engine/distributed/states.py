"""What layers have learnt, from rank 0 to the ranks that go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist

from pipeal.core.protocols import TrainableLayer
from pipeal.engine.distributed.channel import BrokenWireError, Wire
from pipeal.engine.distributed.world import World
from pipeal.engine.state.layer_state import layer_state, load_layer_state

_NUMBER = 100
"""Of the wire, among those of the group of all."""


def hand_out_states(world: World, layers: Sequence[TrainableLayer], sizes: Sequence[int]) -> None:
    """Brings the layers of every rank to where those of rank 0 are; every rank calls it.

    Args:
        world: The processes.
        layers: All layers of the model, on the CPU. On other ranks than 0, those of its own stage are changed.
        sizes: The number of layers of each stage.

    Raises:
        PeerLostError: A rank is lost.
    """
    assert dist.group.WORLD is not None
    wire, ends = Wire(dist.group.WORLD, _NUMBER), list(accumulate(sizes))
    of_stage = [list(layers)[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def send() -> None:
        for rank in range(1, world.size):
            for layer in of_stage[world.mesh.stage_of(rank)]:
                wire.send(rank, "state", {}, layer_state(layer))

    def receive() -> None:
        for layer in of_stage[world.mesh.stage_of(world.rank)]:
            load_layer_state(layer, wire.body(wire.receive(0)))

    try:
        world.guarded(receive if world.rank else send)
    except BrokenWireError as error:
        raise world.peer_lost(error.peer, error) from error
