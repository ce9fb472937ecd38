"""How many messages may be on their way to a peer: enough that it never waits for one that is there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

_MOST_UNDER_WAY = 1 << 28
"""A window does not grow beyond so many bytes, on each wire to each peer."""

_TRIPS = 3.0
"""How many round trips of messages a window holds."""


@dataclass(frozen=True)
class _UnderWay:
    """A message on its way: when it was sent; how many had been taken by then, and when the last of them."""

    sent: float
    taken: int
    taken_at: float


class Window:
    """How many messages may be on their way to a peer, and how many are.

    It holds what a peer takes in three round trips. One that is too small lets the peer take as many as it holds in one
    round trip, and so triples in each, until the peer takes no more in that time: because its steps, or the link's
    rate, are what takes time. What is more than one round trip lies at the peer and covers steps that vary, and the 0.2
    s in which TCP may measure a link instead of using it, each of several connections at its own time (over 100 ms two
    round trips were too few for four connections: 88 % of what steps allow, three 94 %). The round trip is the shortest
    one, without what a message waited for at the peer, so that a queue before a slow link, which a larger window makes
    longer, does not make the window larger.

    Args:
        fills: So many messages fill the peer's queue: it takes them at once, and they say nothing of its steps.
        least: So many may be on their way whatever is measured, where they have room. Several connections that each
            carry a message now and then are slow, since TCP begins again after a pause, and it would stay like that.

    Attributes:
        size: How many may be on their way.
        trip_s: The shortest round trip; infinite before the first.
        rate: The most that the peer takes, in messages per second of a round trip or longer.
    """

    def __init__(self, fills: int = 0, least: int = 1) -> None:
        self.size = self._least = least
        self._fills = fills
        self.trip_s = inf
        self.rate = 0.0
        self._under_way: deque[_UnderWay] = deque()
        self._taken = 0
        self._taken_at = 0.0
        self._largest = 1

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_open(self) -> bool:
        """Whether another message may be sent."""
        return len(self) < self.size

    def sent(self, size: int, now: float) -> None:
        """A message of so many bytes is on its way."""
        last = self._taken_at if self._under_way else now  # what a pause took is no message's
        self._under_way.append(_UnderWay(now, self._taken, last))
        self._largest = max(self._largest, size)
        self._resize(self.size)

    def withdraw(self) -> None:
        """The newest was not sent after all."""
        self._under_way.pop()

    def taken(self, waited_s: float, now: float) -> None:
        """The oldest was taken, after it had waited there for so long."""
        if not self._under_way:
            return
        message = self._under_way.popleft()
        self._taken, self._taken_at = self._taken + 1, now
        self.trip_s = min(self.trip_s, max(0.0, now - message.sent - waited_s))
        if self._taken <= self._fills:
            return
        self.rate = max(self.rate, (self._taken - message.taken) / max(now - message.taken_at, 1e-6))
        wanted = max(self._least, ceil(_TRIPS * self.rate * self.trip_s))
        self._resize(wanted)

    def _resize(self, wanted: int) -> None:
        self.size = max(1, min(wanted, _MOST_UNDER_WAY // self._largest))
