"""How a stage that has done all parts from its neighbours, and what it keeps of that, so that a later life of it waits
for none that has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from pipeal.core.atomic import write_whole
from pipeal.core.errors import Interrupted
from pipeal.line.neighbours import LOOK_S, Neighbours
from pipeal.line.retained import Retained
from pipeal.run.stopping import StopRequest

_log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""How long a stage that has done all stays, so that the one before hears of it."""

PARTED, LEFT = "parted", "left"
"""The neighbour need not be waited for; and it knows that, so that nothing is to be said to it."""


class Partings:
    """Those of one stage, in a file for each neighbour.

    Args:
        folder: Of the stage.
        begun: The name of the line's beginning; what is kept of another one counts for nothing.
    """

    def __init__(self, folder: Path, begun: str) -> None:
        self._folder = folder
        self._begun = begun

    def keep(self, neighbour: int, word: str) -> None:
        """Keeps a word of a neighbour, unless it is kept, or that it has left."""
        if self.of(neighbour) not in (word, LEFT):
            write_whole(self._path(neighbour), f"{self._begun} {word}")

    def of(self, neighbour: int) -> str:
        """The word that is kept of a neighbour; an empty one where there is none, or the file is damaged."""
        with suppress(FileNotFoundError):
            begun, _, word = self._path(neighbour).read_text(encoding="utf-8", errors="replace").partition(" ")
            return word if begun == self._begun and word in (PARTED, LEFT) else ""
        return ""

    def _path(self, neighbour: int) -> Path:
        return self._folder / f"parting-{neighbour}"


class Parting:
    """Parts a stage that has done all from its neighbours, once both know that they need nothing more of it.

    Args:
        number: Of the stage.
        neighbours: Its own; those that an earlier life parted from are not waited for.
        partings: What is kept.
        stop: Whether the stage is to end.
        tell: Shows where it stands; called in every turn.
    """

    def __init__(
        self, number: int, neighbours: Neighbours, partings: Partings, stop: StopRequest, tell: Callable[[], None]
    ) -> None:
        self._number = number
        self._neighbours = neighbours
        self._partings = partings
        self._stop = stop
        self._tell = tell
        for end, neighbour in neighbours.ends:
            end.parted = end.parted or bool(partings.of(neighbour))

    def hand_over(self, retained: Retained) -> None:
        """Waits until the next stage has saved all that is retained for it.

        Raises:
            Interrupted: The stage is to end.
            PeerLostError: A neighbour was away for longer than ``wait_s``.
            Exception: What a link failed with.
        """
        while retained.first < retained.next:
            with retained.changed:
                retained.changed.wait(LOOK_S)
            self._keep()
            self._neighbours.require()
            self._tell()
            self._raise_if_asked("is saved")

    def part(self) -> None:
        """Stays until both neighbours know that they need nothing more: the one before may have to do its last items
        again, and the next one does not end before it is told.

        Raises:
            Interrupted, PeerLostError, Exception: As those of :meth:`hand_over`.
        """
        before, after, told = self._neighbours.before, self._neighbours.after, False
        if after is not None:
            after.bye()
        while waits := [(end, neighbour) for end, neighbour in self._neighbours.ends if not end.parted]:
            self._raise_if_asked(f"is saved, but stage {waits[0][1]} does not know that it has done its part")
            self._neighbours.require()
            away = [neighbour for end, neighbour in waits if end.lost_s > _GRACE_S]
            if away and not told:
                told = True
                _log.warning(
                    f"stage {self._number} has done its part; stage {away[0]} is away, and has not said that it has, "
                    "too: it is waited for; if it has ended with 0, end this one"
                )
            self._turn()
        self._keep()
        until = monotonic() + _GRACE_S
        while before is not None and self._partings.of(self._number - 1) != LEFT and self._stop.code() is None:
            if monotonic() > until and before.lost_s > _GRACE_S:
                return
            self._turn()

    def _raise_if_asked(self, state: str) -> None:
        if (code := self._stop.code()) is not None:
            raise Interrupted(f"stage {self._number} was interrupted, and {state}", code)

    def _turn(self) -> None:
        """Hears what the neighbours say, for a moment, and keeps and shows it."""
        before, after = self._neighbours.before, self._neighbours.after
        if before is not None:
            before.wants_snapshot = False
            before.take(LOOK_S)
        elif after is not None:
            with after.changed:
                after.changed.wait_for(lambda: after.parted, LOOK_S)
        self._keep()
        self._tell()

    def _keep(self) -> None:
        """Keeps what neighbours say of their end: a later life of this stage does not wait for them."""
        before, after = self._neighbours.before, self._neighbours.after
        if before is not None and before.bye:
            self._partings.keep(self._number - 1, PARTED)
            before.part()
        if before is not None and before.left:
            self._partings.keep(self._number - 1, LEFT)
        if after is not None and after.parted:
            self._partings.keep(self._number + 1, LEFT)
            after.leave()
