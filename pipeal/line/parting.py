"""What a stage keeps of how it parted from its neighbours, so that a later life of it waits for none that has ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipeal.core.atomic import write_whole

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
        """The word that is kept of a neighbour; an empty one where there is none."""
        with suppress(FileNotFoundError):
            begun, _, word = self._path(neighbour).read_text(encoding="utf-8").partition(" ")
            return word if begun == self._begun else ""
        return ""

    def _path(self, neighbour: int) -> Path:
        return self._folder / f"parting-{neighbour}"
