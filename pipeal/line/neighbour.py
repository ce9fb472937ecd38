"""What a stage says of a neighbour: that it is there, or why it may not be."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

_AWAY_S = 30.0
"""After so long something may be wrong that waiting does not mend; until then a first stage may be reading its data."""


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
