"""An error that comes a second time at the same item: no restart mends it, and the line is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeal.core.atomic import write_whole
from pipeal.core.checked import checked
from pipeal.core.errors import DataError, LineError, exit_code, first_line

_FAILURE = TypeAdapter(dict[str, Any])


class Failures:
    """What a stage's last life ended with.

    Args:
        folder: Of the stage.
        stage: Its number.
    """

    def __init__(self, folder: Path, stage: int) -> None:
        self._path = folder / "failure.json"
        self._stage = stage

    def forget(self) -> None:
        """Its cause is mended, or it has ended well."""
        self._path.unlink(missing_ok=True)

    @property
    def stopped_by(self) -> str | None:
        """What stopped the line, until :meth:`forget`."""
        before = self._before()
        return str(before["error"]) if before.get("stopped") else None

    def keep(self, error: Exception, items: int) -> str | None:
        """Keeps what a life ends with; gives what the line is to be stopped with, where it is.

        Args:
            error: What was raised.
            items: How many were behind the stage.
        """
        why = str(error) if isinstance(error, LineError) else f"stage {self._stage} failed: {first_line(error)}"
        # A user's mistake does not mend itself; and those who start stages again may let such a one lie.
        stopped = isinstance(error, LineError) or exit_code(error) == 2 or self._before().get("item") == items
        write_whole(self._path, json.dumps({"item": items, "error": why, "stopped": stopped}) + "\n")
        return why if stopped else None

    def _before(self) -> dict[str, Any]:
        try:
            return checked(_FAILURE, json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataError(f"{self._path}: {first_line(error)}; remove it") from error
