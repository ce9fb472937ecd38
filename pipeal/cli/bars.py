"""Progress bars of the work before training: downloads, and images decoded for the first time."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bars:
    """One bar per thing, on standard error.

    The first call shows it, so that a run that has nothing to do shows nothing.

    Args:
        verb: What is being done, before the name of each thing.
        columns: What stands behind the bar.
    """

    def __init__(self, verb: str, *columns: ProgressColumn) -> None:
        self.verb = verb
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bars.stop()

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Moves the bar of ``name``; ``total`` is None where nobody knows it."""
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"{self.verb} {name}", total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)


def downloads() -> Bars:
    """For :func:`pipeal.data.download`, which counts bytes."""
    return Bars("fetching", DownloadColumn(), TransferSpeedColumn())


def decodings() -> Bars:
    """For :func:`pipeal.data.load_images`, which counts images."""
    return Bars("decoding", MofNCompleteColumn(), TimeRemainingColumn())
