"""What a run leaves beside its weights: where that cannot be written, the training goes on, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pipeal.core.errors import DataError, first_line, listed

_log = logging.getLogger(__name__)

_NAMED = 6
"""Files that one line names; more are counted."""


class Attempts:
    """Writes that may fail, on a full disk or one that has become read-only: told now and then, and in the end named.

    Attributes:
        missing: What could not be written when it was tried last, and why not.
    """

    def __init__(self) -> None:
        self.missing: dict[Path, str] = {}
        self._in_a_row = 0

    def make(self, path: Path, write: Callable[[], object]) -> bool:
        """Tries to write a file or a folder; whether that went well."""
        try:
            write()
        except (OSError, DataError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            self.missing[path] = getattr(cause, "strerror", None) or first_line(cause)
            return False
        self.missing.pop(path, None)
        return True

    def tell(self) -> None:
        """Logs what is missing at the first, second, fourth, eighth … call in a row at which something is."""
        if self.missing:
            self._in_a_row += 1
            if self._in_a_row & (self._in_a_row - 1) == 0:
                row = f" ({self._in_a_row} times in a row now)" if self._in_a_row > 1 else ""
                _log.warning(f"cannot write {self}; the training goes on{row}")
        elif self._in_a_row:
            self._in_a_row = 0
            _log.info("what could not be written is written now")

    def __str__(self) -> str:
        """The files that are missing, and why.

        >>> attempts = Attempts()
        >>> attempts.make(Path("run/a.csv"), lambda: Path("no/such/folder").mkdir())
        False
        >>> str(attempts)
        'run/a.csv (No such file or directory)'
        """
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.missing.items():
            by_reason.setdefault(reason, []).append(str(path))
        return "; ".join(f"{listed(paths, _NAMED)} ({reason})" for reason, paths in by_reason.items())
