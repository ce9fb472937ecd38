"""States of layers that rank 0 has read, for ranks that cannot read the files themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeal.engine.distributed.channel import BrokenWireError, Wire
from pipeal.engine.distributed.remote_errors import rebuilt, told
from pipeal.engine.distributed.world import World
from pipeal.engine.state.layer_state import State

_STATES = -1
"""The number of the wire for states, which only some ranks use."""


def hand_out(world: World, ranks: Iterable[int], states: Mapping[int, State]) -> None:
    """Gives other ranks the states that they ask for, until each has said that it needs no more; rank 0 calls it.

    Args:
        world: The processes.
        ranks: Those that have an :class:`Asked`.
        states: Of all layers. One is looked up at a time, and let go of when it was sent.

    Raises:
        PeerLostError: A rank is lost.
    """
    wire, left = _wire_for_states(world), set(ranks)

    def serve() -> None:
        while left:
            wanted = wire.receive(left)
            if wanted.kind == "enough":
                left.discard(wanted.source)
                continue
            try:
                wire.send(wanted.source, "state", {}, states[wanted.facts["layer"]])
            except BrokenWireError:
                raise
            except Exception as error:  # noqa: BLE001  it cannot be read: who asked ends with that, and so do all
                wire.send(wanted.source, "refused", told(error))

    with world.naming_lost():
        world.guarded(serve)


class Asked(dict[int, State]):
    """States that rank 0 hands out: each is asked for when it is looked up, and not kept.

    Args:
        world: The processes.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._wire = _wire_for_states(world)

    def __missing__(self, layer: int) -> State:
        def ask() -> State:
            self._wire.send(0, "wanted", {"layer": layer})
            message = self._wire.receive([0])
            state: State = self._wire.body(message)
            if message.kind == "refused":
                raise rebuilt(message.facts, self._world.name_of(0))
            return state

        with self._world.naming_lost():
            return self._world.guarded(ask)

    def close(self) -> None:
        """Lets rank 0 know that no more are needed."""
        with self._world.naming_lost():
            self._world.guarded(lambda: self._wire.send(0, "enough", {}))


def _wire_for_states(world: World) -> Wire:
    return Wire(world.endpoint, _STATES)
