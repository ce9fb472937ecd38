"""The watchdog over all ranks: each says now and then what it does, and whether it has moved."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipeal.core.errors import StallError
from pipeal.engine.distributed.channel import Message
from pipeal.engine.execution.watchdog import dumped

if TYPE_CHECKING:
    from pipeal.engine.distributed.rank import Node

BEAT_S = 1.0
"""How often a rank says what it does."""

_LONGEST = 160


def state_of(node: Node) -> dict[str, Any]:
    """What a rank does, since when, and what waits for it."""
    what, since = node.worker.doing
    return {"does": what[:_LONGEST], "for_s": perf_counter() - since, "waiting": len(node.inbox)}


class Watch:
    """Rank 0's view of them.

    Args:
        node: Rank 0.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._beats: dict[int, dict[str, Any]] = {}

    def hear(self, message: Message) -> None:
        """A beat has come."""
        self._beats[message.source] = dict(message.facts)
        if message.facts["moved"]:
            self._node.progress.moved()

    def require_progress(self, waiting_since: float) -> None:
        """Looks whether anything has moved.

        Raises:
            StallError: Nothing has for too long.
        """
        still = perf_counter() - max(self._node.progress.changed_at, waiting_since)
        limit_s = self._node.options.stall_timeout_s
        if still <= limit_s:
            return
        states = {self._node.rank: state_of(self._node), **self._beats}
        acting = {rank: state for rank, state in states.items() if not state["does"].startswith("waiting")}
        oldest = max(acting or states, key=lambda rank: states[rank]["for_s"])
        seat = self._node.seats[oldest]
        lines = [
            f"stage {self._node.world.mesh.stage_of(oldest)} stands still: {states[oldest]['does']} for "
            f"{states[oldest]['for_s']:.1f} s on {seat.device} of {self._node.world.name_of(oldest)} "
            f"(limit {limit_s:g} s without progress)"
        ]
        lines += [
            f"{self._node.world.name_of(rank)}: {state['does']}, for {state['for_s']:.1f} s, {state['waiting']} waiting"
            for rank, state in sorted(states.items())
        ]
        lines[0] += dumped(self._node.options.dump_folder, [*lines, str(self._node.progress)])
        raise StallError("\n".join(lines))
