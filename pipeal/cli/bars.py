"""Progress bars of downloads."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn


class DownloadBar:
    """One bar per file, on standard error; called as :func:`pipeal.data.download` calls its ``progress``.

    The first call shows it, so that a run that fetches nothing shows nothing.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bars.stop()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Moves the bar of a file.

        Args:
            name: The file.
            done: Bytes fetched.
            total: Bytes there are; None if unknown.
        """
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"fetching {name}", total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)
