"""Progress bars of the work before training: downloads, what is read and made of it, and trials."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_BEGUN = ""
"""The name of what was only begun."""


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

    def __exit__(self, *raised: object) -> None:
        self.close()

    def begin(self, what: str) -> None:
        """In a terminal, shows that something is being done of which nothing is known; the first bar replaces it."""
        if self._bars.console.is_terminal:
            self._bars.start()
            self._tasks[_BEGUN] = self._bars.add_task(what, total=None)

    def close(self) -> None:
        """Leaves the terminal to others."""
        if self._tasks:
            self._forget_begun()
            self._bars.stop()

    def _forget_begun(self) -> None:
        if _BEGUN in self._tasks:
            self._bars.remove_task(self._tasks.pop(_BEGUN))

    def __call__(self, name: str, done: int, total: int | None) -> None:
        """Moves the bar of ``name``; ``total`` is None where it is not known."""
        self._forget_begun()
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"{self.verb} {name}", total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)


def downloads() -> Bars:
    """For :func:`pipeal.data.loading.download`, which counts bytes."""
    return Bars("fetching", DownloadColumn(), TransferSpeedColumn())


def decodings() -> Bars:
    """For :func:`pipeal.data.load_images`, which counts images."""
    return Bars("decoding", MofNCompleteColumn(), TimeRemainingColumn())


class Steps:
    """One line in a terminal for what takes a while, with how long it has been; moves by itself, and goes in the end.

    Args:
        what: What is being done.
        lines: Whether each step is a line of its own where there is no terminal.
        console: Where to show it; standard error if None.
    """

    def __init__(self, what: str, *, lines: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._what = what
        self._lines = lines
        self._task: TaskID | None = None

    def __enter__(self) -> Steps:
        if self._console.is_terminal:
            self._bars.start()
            self._task = self._bars.add_task(self._what, total=None)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._task is not None:
            self._bars.stop()

    def __call__(self, step: str, done: float = 0.0, total: float | None = None) -> None:
        """Begins a step; ``done`` of ``total``, in any unit, are behind it."""
        if self._task is not None:
            self._bars.update(self._task, description=f"{self._what}: {step}", completed=done, total=total)
        elif self._lines:
            self._console.print(f"  {step}", soft_wrap=True, markup=False)


def trials(what: str) -> Steps:
    """For trials, whose bar is the time that they may take."""
    return Steps(what, lines=True)
