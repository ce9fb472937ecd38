"""What a ladder leaves: a table, its figures as JSON, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, TypeAlias

from matplotlib.figure import Figure
from rung_data import Task
from rung_training import Measured
from rungs import ONE_THREAD, Form, Rung, Setting

from pipeal.train.recorders import write_json
from pipeal.train.tables import Cell

Found: TypeAlias = Mapping[Setting, Sequence[Measured]]
"""The turns of each rung."""

COLUMNS = [
    "form", "technique", "ms/step", "samples/s", "tokens/s", "× plain", "× before", "spread", "of matrix rate",
    "peak MiB", "loss", "± seeds",
]  # fmt: skip

_COLOURS = {"al": "#0072B2", "bp": "#D55E00"}  # of Okabe and Ito
_ASIDE = "#BBBBBB"


@dataclass(frozen=True)
class Results:
    """All that was measured so far.

    Attributes:
        task: What was trained.
        ladders: The rungs of each form.
        found: The turns of each rung; rungs without turns are left out of everything.
        most: The most operations per second that a device was seen to do.
    """

    task: Task
    ladders: Sequence[Sequence[Rung]]
    found: dict[Setting, list[Measured]]
    most: float

    @property
    def rungs(self) -> list[Rung]:
        """All of them, measured or not."""
        return [rung for ladder in self.ladders for rung in ladder]

    @property
    def measured(self) -> list[list[Rung]]:
        """Those with turns, of each form that has some."""
        ladders = ([rung for rung in ladder if self.found[rung.setting]] for ladder in self.ladders)
        return [ladder for ladder in ladders if ladder]

    @property
    def table(self) -> list[list[Cell]]:
        """Under :data:`COLUMNS`."""
        work = self.task.work
        return [
            row
            for ladder in self.measured
            for row in rows_of(self.task, ladder, self.found, work[ladder[0].setting.form], self.most)
        ]

    @property
    def gains_of_processes(self) -> dict[Form, float]:
        """How much more samples per second data parallel learns from than one process with one thread, by form."""
        gains: dict[Form, float] = {}
        for ladder in self.measured:
            alone = [rung.setting for rung in ladder if ONE_THREAD in rung.name]
            many = [rung.setting for rung in ladder if rung.setting.processes > 1 and not rung.setting.staged]
            for one, all_of_them in zip(alone, many, strict=False):
                rates = [median(turn.samples_per_s for turn in self.found[setting]) for setting in (one, all_of_them)]
                gains[one.form] = rates[1] / rates[0]
        return gains

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Writes every figure as JSON, with what they were found under."""
        rungs = [
            {
                "name": named(self.task, rung),
                "aside": rung.aside,
                "setting": asdict(rung.setting),
                "placement": asdict(self.task.placement(rung.setting)) if rung.setting.staged else None,
                "turns": [asdict(one) for one in self.found[rung.setting]],
            }
            for ladder in self.measured
            for rung in ladder
        ]
        own = {"data_parallel_over_one_thread": self.gains_of_processes, "work_per_token_or_image": self.task.work}
        write_json(path, {**own, **facts, "columns": COLUMNS, "table": self.table, "rungs": rungs})

    def draw(self, path: Path, title: str) -> None:
        """A bar for each rung, as long as its rate; the ends of a line are the turns' extremes."""
        ladders = self.measured
        figure = Figure(
            figsize=(11, 0.9 + 0.34 * max(map(len, ladders))), dpi=130, facecolor="white", layout="constrained"
        )
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", parse_math=False)
        for axes, ladder in zip(figure.subplots(1, len(ladders), squeeze=False)[0], ladders, strict=True):
            form = ladder[0].setting.form
            plain = step_rate(self.found[ladder[0].setting])
            for place, rung in enumerate(ladder):
                rates = [each_rate(turn) / plain for turn in self.found[rung.setting]]
                middle = median(rates)
                axes.barh(place, middle, 0.65, color=_ASIDE if rung.aside else _COLOURS[form])
                axes.plot([min(rates), max(rates)], [place, place], color="#222222", linewidth=1)
                axes.annotate(
                    f"{middle:.2f}×", (max(rates), place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
                )
            axes.set_yticks(range(len(ladder)), [named(self.task, rung) for rung in ladder])
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_title(f"{form.upper()}, over plain PyTorch", loc="left", fontsize=10.5)
            axes.tick_params(labelsize=9)
            axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.savefig(path, format="png")


def rows_of(task: Task, ladder: Sequence[Rung], found: Found, work: float, most: float) -> list[list[Cell]]:
    """A form's part of the table, from the work per token or image and the most operations per second of a device."""
    plain = step_rate(found[ladder[0].setting])
    before = plain
    rows: list[list[Cell]] = []
    for rung in ladder:
        turns = found[rung.setting]
        rate = step_rate(turns)
        rates = [each_rate(turn) for turn in turns]
        tokens = median(turn.tokens_per_s for turn in turns)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        losses = [turn.loss for turn in turns]
        rows.append(
            [
                rung.setting.form,
                named(task, rung),
                f"{1e3 * median(turn.step_s for turn in turns):,.1f}",
                f"{median(turn.samples_per_s for turn in turns):,.0f}",
                f"{tokens:,.0f}" if tokens else None,
                f"{rate / plain:.2f}×",
                f"{rate / before:.2f}×",
                f"{(max(rates) - min(rates)) / rate:.0%}",
                f"{rate * work / (most * task.devices(rung.setting)):.1%}",
                f"{median(peaks) / 2**20:,.0f}" if peaks else None,
                f"{fmean(losses):.3f}",
                f"{stdev(losses):.3f}" if len(losses) > 1 else None,
            ]
        )
        if not rung.aside:
            before = rate
    return rows


def named(task: Task, rung: Rung) -> str:
    """What a rung adds; of stages also which: how many layers each has, and with how many threads or on which GPUs."""
    if not rung.setting.staged:
        return rung.name
    placement = task.placement(rung.setting)
    sizes = "+".join(map(str, placement.sizes)) if len(placement.sizes) > 1 else "(all layers in one)"
    threads = f"{placement.threads} thread{'s' if placement.threads > 1 else ''} each"
    where = threads if task.device.type == "cpu" else ", ".join(dict.fromkeys(placement.devices))
    return f"{rung.name} {sizes}, {where}"


def each_rate(turn: Measured) -> float:
    """Tokens per second, or images."""
    return turn.tokens_per_s or turn.samples_per_s


def step_rate(turns: Sequence[Measured]) -> float:
    """The median of the turns."""
    return median(map(each_rate, turns))
