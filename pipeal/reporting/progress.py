"""How far a run is: a live line in a terminal, one plain line per epoch anywhere else.

The line is redrawn some times a second, so that its clock goes on while a batch, or an evaluation, takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeal.training.metric import measure_of
from pipeal.training.row import EpochRow

_DRAWN_PER_S = 4


@dataclass(kw_only=True, eq=False)
class Progress:
    """Shows a run's epochs on standard error. Used with ``with``, which gives the terminal back as it was.

    The live line is there from the beginning of an epoch to its end: between two, the terminal is another's, such as
    another form's whose epochs come in turns with these.

    Attributes:
        epochs: How many there will be in a turn.
        turns: How many trainings there will be.
        label: Begins each line, such as ``al``.
        console: Where to show it; by default, standard error.
        clock: Seconds that only grow.

    >>> with Progress(epochs=1) as progress:  # doctest: +SKIP
    ...     progress.begin_epoch(1, batches=100)
    ...     progress.advance(samples=256, tokens=8000)
    ...     progress.end_epoch(row)
    """

    epochs: int
    turns: int = 1
    label: str = ""
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    clock: Callable[[], float] = time.monotonic
    _where: str = field(default="", init=False)
    _batches: int = field(default=0, init=False)
    _done: int = field(default=0, init=False)
    _samples: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _last: str = field(default="", init=False)
    _live: Live | None = field(default=None, init=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave_terminal()

    def begin_epoch(self, epoch: int, *, batches: int, turn: int = 1) -> None:
        """Starts the line of an epoch (from 1) of a turn (from 1)."""
        self._where, self._batches = self._place(turn, epoch), batches
        self._done, self._samples, self._tokens = 0, 0, 0
        self._began = self.clock()
        self._take_terminal()

    def advance(self, *, samples: int, tokens: int) -> None:
        """Counts a batch. Cheap enough for every one."""
        self._done += 1
        self._samples += samples
        self._tokens += tokens

    def note(self, text: str) -> None:
        """Prints a line of its own, above the live one."""
        self.console.print(Text(text), soft_wrap=True)

    def end_epoch(self, row: EpochRow) -> None:
        """Prints the line that stays."""
        told, last = self.figures(row)
        tokens = f"  {row.tokens_per_s:,.0f} tokens/s" if row.tokens_per_s else ""  # images have none
        self.note(
            f"{self._place(row.turn, row.epoch)}  {told}  "
            f"{row.epoch_time:.2f} s  {row.samples_per_s:,.0f} samples/s{tokens}"
        )
        self._leave_terminal()
        self._last = f"last {last}"

    def figures(self, row: EpochRow) -> tuple[str, str]:
        """How an epoch is told, and how it is in the live line of the next one."""
        measure = measure_of([row])
        kind = "" if measure.is_share else f"{measure.name}: "
        test = f"{measure.unseen} {measure.test(row):.4f}"
        held = measure.held(row)
        chosen_by = "" if held is None else f"held-out {held:.4f}  "
        return f"{kind}train {measure.train(row):.4f}  {chosen_by}{test}", test

    def _take_terminal(self) -> None:
        if self._live is None and self.console.is_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=lambda: self._line(self.console.width),
                refresh_per_second=_DRAWN_PER_S,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=False,  # what is printed there may be on its way to a file
            )
            self._live.start(refresh=True)

    def _leave_terminal(self) -> None:
        live, self._live = self._live, None
        if live:
            live.stop()  # shows the cursor again

    def _line(self, width: int) -> Text:
        """The live line, its parts dropped from the right until it fits."""
        elapsed = max(self.clock() - self._began, 1e-9)
        parts = [
            self._where,
            _bar(self._done, self._batches),
            f"{self._done}/{self._batches}",
            _minutes(elapsed),
            f"{self._samples / elapsed:,.0f} samples/s",
            self._last,
            f"{self._tokens / elapsed:,.0f} tokens/s" if self._tokens else "",
        ]
        line = ""
        for part in filter(None, parts):
            longer = f"{line}  {part}" if line else part
            if len(longer) >= width:
                break
            line = longer
        return Text(line, no_wrap=True, overflow="crop", end="")

    def _place(self, turn: int, epoch: int) -> str:
        turns = f"turn {turn}/{self.turns}" if self.turns > 1 else ""
        return "  ".join(filter(None, (self.label, turns, f"epoch {epoch}/{self.epochs}")))


def _minutes(seconds: float) -> str:
    """Minutes and seconds.

    >>> _minutes(61.9)
    '1:01'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _bar(done: int, total: int, width: int = 12) -> str:
    """A bar of text.

    >>> _bar(1, 2, width=8)
    '━━━━────'
    """
    full = width * min(done, total) // max(total, 1)
    return "━" * full + "─" * (width - full)
