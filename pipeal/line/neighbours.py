"""The neighbours of a stage: the links to them, how long it waits for one that is away, and what it says of them."""

from __future__ import annotations

import logging
from pathlib import Path
from time import monotonic

from pipeal.core.errors import PeerLostError
from pipeal.line.incoming import Incoming
from pipeal.line.line_file import LineFile, keys_of
from pipeal.line.outgoing import Outgoing
from pipeal.line.retained import Retained

_log = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often a stage that waits looks whether it is to end."""

_AWAY_S = 30.0
"""After so long something may be wrong that waiting does not mend; until then a first stage may be reading its data."""

_STOP_S = 5.0
"""How long a stage that stops the line waits for its neighbours to hear it."""


class Neighbours:
    """Those of one stage.

    Args:
        line: The line.
        number: Of the stage.
        key: The file with its secret key.

    Attributes:
        before: The end of the link from the stage before; None for the first stage, and while there is no link.
        after: The end of the link to the next stage; None for the last one, and while there is no link.
    """

    def __init__(self, line: LineFile, number: int, key: Path) -> None:
        self.before: Incoming | None = None
        self.after: Outgoing | None = None
        self._line = line
        self._number = number
        self._key = key
        self._begun: str | None = None
        self._said: list[tuple[Incoming | Outgoing, Neighbour]] = []

    @property
    def ends(self) -> list[tuple[Incoming | Outgoing, int]]:
        """The ends there are, each with the number of the neighbour."""
        pairs = ((self.before, self._number - 1), (self.after, self._number + 1))
        return [(end, neighbour) for end, neighbour in pairs if end is not None]

    def set_begun(self, begun: str) -> None:
        """Notes which beginning the stage's items count from: neighbours of another one are refused."""
        self._begun = begun
        if self.before is not None:
            self.before.begun = begun
        if self.after is not None:
            self.after.set_begun(begun)

    def connect(self, done: int, retained: Retained) -> None:
        """Opens the links that are not open.

        Args:
            done: The items behind the stage.
            retained: Those for the next stage.

        Raises:
            ConfigError: A key is not there, or others can read it; or the address cannot be listened at.
        """
        line, number = self._line, self._number
        if number and self.before is None:
            address, keys = self._address(number), keys_of(line, self._key, number, number - 1)
            most, room = line.largest_bytes, line.retain_bytes
            self.before = Incoming(
                number, address, keys, line.line, done, self._begun, largest_bytes=most, room_bytes=room
            )
            self.before.start()
            self._said.append((self.before, Neighbour(number - 1, address, listens=False)))
            _log.info(f"stage {number} listens at {address} for stage {number - 1}")
        if number < len(line.stages) - 1 and self.after is None:
            address, keys = self._address(number + 1), keys_of(line, self._key, number, number + 1)
            self.after = Outgoing(number, address, keys, retained, line.line, self._begun, line.connections)
            self.after.start()
            self._said.append((self.after, Neighbour(number + 1, address, listens=True)))

    def _address(self, listener: int) -> str:
        address = self._line.stages[listener].address
        assert address is not None
        return address

    def leave(self) -> None:
        """Closes the links."""
        for end, _ in reversed(self.ends):
            end.close()
        self.before = self.after = None
        self._said.clear()

    def stop(self, why: str) -> None:
        """Has the neighbours stop the line, as far as they hear it within some seconds, and leaves them."""
        for end, _ in self.ends:
            end.stop(why)
        until = monotonic() + _STOP_S
        for end, _ in self.ends:
            end.await_told(max(0.0, until - monotonic()))
        self.leave()

    @property
    def failure(self) -> BaseException | None:
        """What a link failed with, if one did."""
        return next((end.failure for end, _ in self.ends if end.failure is not None), None)

    def raise_failure(self) -> None:
        """Raises it."""
        if (failure := self.failure) is not None:
            raise failure

    def require(self) -> None:
        """Waits for them no longer than the line says.

        Raises:
            PeerLostError: One was away for longer.
            Exception: What a link failed with.
        """
        self.raise_failure()
        if self._line.wait_s is None:
            return
        for end, neighbour in self.ends:
            if not end.parted and end.lost_s > self._line.wait_s:
                raise PeerLostError(
                    f"stage {neighbour} was away for {self._line.wait_s:g} s (wait_s); start it, and this one again",
                    neighbour,
                )

    def look(self) -> None:
        """Says in the log what is new of them."""
        for end, neighbour in self._said:
            neighbour.look(connected=end.connected, away_s=end.lost_s)


def shown(end: Incoming | Outgoing | None) -> str:
    """Whether a neighbour is there, for the status."""
    return "-" if end is None else "connected" if end.connected else f"away for {end.lost_s:.0f} s"


class Neighbour:
    """Says in the log when a neighbour has come, and once for each absence what to look at; the end of the link says
    when it has gone.

    Args:
        stage: Its number.
        address: Where the two meet.
        listens: Whether it is the one that listens there.
    """

    def __init__(self, stage: int, address: str, *, listens: bool) -> None:
        self._stage = stage
        self._address = address
        self._listens = listens
        self._was_there = self._told = False

    def look(self, *, connected: bool, away_s: float) -> None:
        """Says what is new.

        Args:
            connected: Whether the link works.
            away_s: For how many seconds it has not.
        """
        if connected and not self._was_there:
            _log.info(f"stage {self._stage} is there")
        if not connected and not self._told and away_s > _AWAY_S:
            where = f"stage {self._stage} {'does not answer' if self._listens else 'has not come'} at {self._address}"
            hint = "is it started, is this its address on all machines, does a firewall let this link through?"
            _log.warning(f"{where} for {away_s:.0f} s, and is waited for: {hint}")
            self._told = True
        self._told = self._told and not connected
        self._was_there = connected
