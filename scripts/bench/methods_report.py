"""What methods.py found: tables of what was learnt and what it costs, and a picture of both.

    python scripts/bench/methods_report.py FILE [FILE …] [--plot FILE] [--over CONTESTANT] [--gain-over CONTESTANT]
                                            [--seeds N]

Files of the same data, model and budget are put together; others have a table, and a row of the picture, of their own.
``--over "bp methods.bp.same_start=true"`` holds all against that form of BP; ``--gain-over "bp model.layers=1"`` also
shows which share of what BP gains over that contestant each line gains.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi, sin, sqrt, tan
from pathlib import Path
from statistics import covariance, fmean, stdev, variance
from textwrap import fill
from typing import Any

from methods_rows import Facts, Row, best_try, cost_key, joined, key_of, read_table, row_of, seeds_of, shown, tries

from pipeal.core.errors import ConfigError, PipealError, unknown_name
from pipeal.core.methods import BASELINE, METHODS
from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save
from pipeal.reporting.tables import Cell, print_table
from pipeal.training.metric import MeanSd

MIB = 2**20
SURE = 0.95
"""So sure is an interval to hold the mean."""

_ABOUT_RESULTS = f"""\
test: of the epoch that is best on held-out samples, mean ± sd over seeds (a text's loss is that of all of it); over BP:
{{}}, the mean difference to {{}} of the same seeds, and its {SURE:.0%} interval (t; that of a share of a gain is
Fieller's); edge: the best rate is the lowest or the highest that was tried"""

_ABOUT_COSTS = """\
per sample: FLOPs of training and of an answer, and what parts hand on to the next (of BP with its gradients); MiB:
counted, on one device with the activations of one part, and of the fullest of as many devices as parts (K); ms: of a
batch, on one device, and forecast for K with links that take no time (BP at its fastest, with micro-batches), and over
plain BP in the same turns"""

_STYLES = ("-", "--", ":", "-.")
_DOTS = ("o", "s", "^")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what methods.py wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the picture there")
    parser.add_argument(
        "--over", metavar="CONTESTANT", default=BASELINE.name, help="the form of BP that others are held against (bp)"
    )
    parser.add_argument(
        "--gain-over", metavar="CONTESTANT", help="one that BP gains something over, such as a shallow one"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="of the seeds below N alone (all)")
    options = parser.parse_args(arguments)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds: found {options.seeds}, expected 1 or more")
    try:
        report(options.files, options.plot, options.gain_over, options.seeds, options.over)
    except PipealError as error:
        parser.exit(2, f"methods_report.py: {error}\n")


def report(
    files: Iterable[Path],
    plot: Path | None = None,
    gain_over: str | None = None,
    seeds: int | None = None,
    over: str = BASELINE.name,
) -> None:
    """Prints all of it, and draws what a picture is wanted of.

    Raises:
        DataError: A file is none that methods.py wrote.
        ConfigError: The contestant to gain something over is in none of them, or the form of BP.
    """
    tables = [Found(table, seeds, over) for table in joined(map(read_table, files))]
    names = list(dict.fromkeys(line.name for table in tables for line in table.lines))
    if gain_over is not None and gain_over not in names:
        raise ConfigError(unknown_name("contestant", gain_over, names))
    if over not in (forms := {BASELINE.name, *(name for name in names if _method(name) == BASELINE.name)}):
        raise ConfigError(unknown_name("form of BP", over, forms))
    for table in tables:
        show(table, gain_over)
    if plot is not None:
        draw(tables, plot)


@dataclass(frozen=True)
class Line:
    """A contestant in so many parts: a line of a table.

    Attributes:
        name: Of the contestant.
        parts: Into how many it is divided; None for one that is trained as a whole.
        tries: Its tries.
        chosen: The best of these; None where all diverged.
        by_seed: Its trainings with that setting; those that diverged have no figure.
    """

    name: str
    parts: int | None
    tries: list[Row]
    chosen: Row | None
    by_seed: dict[int, Row]

    @property
    def figures(self) -> dict[int, float]:
        """By seed, the test figure of the epoch that was chosen."""
        return {seed: row.test for seed, row in self.by_seed.items() if row.test is not None}


class Found:
    """A table, by contestant and parts.

    Args:
        table: As it stands in the file.
        seeds: Only trainings of seeds below that count; None: all.
        over: The form of BP that the others are held against.
    """

    def __init__(self, table: Facts, seeds: int | None = None, over: str = BASELINE.name) -> None:
        self.over = over
        self.of, self.costs, self.times = table["of"], table["costs"], table["times"]
        rows = map(row_of, table["rows"])
        self.rows = [row for row in rows if row.kind == "try" or seeds is None or row.seed < seeds]

    @property
    def is_loss(self) -> bool:
        """Whether it is measured by a loss; else by accuracies."""
        return bool(self.of["measure"] == "loss")

    @property
    def title(self) -> str:
        """What it is of."""
        return f"{self.trained}, {self.of['epochs']} epochs of BP, equal {self.of['budget']}"

    @property
    def trained(self) -> str:
        """What is trained, on what."""
        of, config = self.of, self.of["config"]
        width = f", width {config['model.width']:g}" if "model.width" in config else ""
        limit = f", {of['data']['train_samples']:,} training samples" if of["limit_train"] else ""
        return f"{of['dataset']} {of['model']}{width}{limit}"

    @cached_property
    def lines(self) -> list[Line]:
        """Every contestant in every number of parts: first those that are trained as a whole, and of the others those
        in the fewest parts."""
        order = list(METHODS)

        def place(pair: tuple[str, int | None]) -> tuple[int, int, str]:
            name, parts = pair
            return parts or 0, order.index(_method(name)), name

        pairs = dict.fromkeys((row.name, row.parts) for row in self.rows)
        return [self._line(*pair) for pair in sorted(pairs, key=place)]

    def _line(self, name: str, parts: int | None) -> Line:
        chosen = best_try(self.rows, name, parts, is_loss=self.is_loss)
        by_seed = {} if chosen is None else seeds_of(self.rows, chosen)
        return Line(name, parts, tries(self.rows, name, parts), chosen, by_seed)

    @property
    def baseline(self) -> Line | None:
        """BP, which the others are held against."""
        return next((line for line in self.lines if line.name == self.over), None)

    def beside(self, parts: int | None) -> list[Line]:
        """Those in so many parts, and those in none."""
        return [line for line in self.lines if line.parts in (None, parts)]

    @property
    def parts(self) -> list[int]:
        """The numbers of parts that there are."""
        return sorted({line.parts for line in self.lines if line.parts is not None})

    def cost(self, line: Line) -> Facts:
        """By counting; empty where it is not known."""
        found: Facts = {} if line.chosen is None else self.costs.get(self._cost_key(line), {})
        return found

    def time(self, line: Line, devices: int) -> Facts:
        """By the clock, and forecast for so many devices; empty where it was not measured."""
        found: Facts = {} if line.chosen is None else self.times.get(key_of(self._cost_key(line), devices), {})
        return found

    def _cost_key(self, line: Line) -> str:
        assert line.chosen is not None
        return cost_key(line.name, line.parts, line.chosen.setting)


def _method(name: str) -> str:
    return name.split()[0]


def show(found: Found, gain_over: str | None) -> None:
    """Prints it."""
    for facts in {key_of(row.machine): row.machine for row in found.rows}.values():
        print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print_table(found.title, *_columns(_results(found, gain_over)))
    named = ("dataset", "model.name")
    print(f"all with: {shown({key: one for key, one in found.of['config'].items() if key not in named})}")
    print(_ABOUT_RESULTS.format("nats per character" if found.is_loss else "points of accuracy", found.over))
    print_table("costs", *_columns(_costs(found)))
    print(_ABOUT_COSTS)
    for facts in {key_of(time["machine"], time["load"]): time for time in found.times.values()}.values():
        told = "  ".join(f"{key} {value}" for key, value in facts["machine"].items())
        print(f"times: {told}  load {facts['load']:.1f}")


def _columns(rows: Iterable[dict[str, Cell]]) -> tuple[list[str], list[list[Cell]]]:
    rows = list(rows)
    return list(rows[0]) if rows else [], [list(row.values()) for row in rows]


def _results(found: Found, gain_over: str | None) -> Iterator[dict[str, Cell]]:
    """What each line has learnt."""
    baseline = found.baseline
    low = next((line for line in found.lines if line.name == gain_over), None)
    for line in found.lines:
        chosen = line.chosen
        options = {} if chosen is None else dict(chosen.setting)
        rate = options.pop("train.lr.base", None)
        yield {
            "method": _method(line.name),
            "parts": line.parts,
            "rate": None if rate is None else f"{rate:g}",
            "options": shown(options),
            "tries": f"{len(line.tries)}{', edge' if _is_at_edge(line) else ''}",
            "epochs": _epochs(line, found),
            "seeds": _seeds(line),
            "test": str(MeanSd.of(line.figures.values())) if line.figures else "diverged" if chosen is None else None,
            "over BP": _over(line, baseline, 1.0 if found.is_loss else 100.0),
            **(
                {}
                if low is None
                else {f"of BP's gain over {low.name}": _of_gain(line, low, baseline, is_loss=found.is_loss)}
            ),
            "train TFLOPs": _total_flops(line, found),
        }


def _costs(found: Found) -> Iterator[dict[str, Cell]]:
    """What each line costs, beside BP on as many devices."""
    baseline = found.baseline
    of_bp = {} if baseline is None else found.cost(baseline)
    for parts in found.parts or [1]:
        for line in found.beside(parts):
            cost, time = found.cost(line), found.time(line, parts)
            between = time.get("between_parts_bytes") if line.parts is None else cost.get("packet_bytes_per_sample")
            yield {
                "method": line.name,
                "parts": parts,
                "train MFLOPs": _per(cost.get("training_flops_per_sample"), 1e6),
                "over BP": _times(cost, of_bp, "training_flops_per_sample"),
                "infer MFLOPs": _per(cost.get("inference_flops_per_sample"), 1e6),
                "parameters": _count(cost.get("inference_parameters")),
                "training only": _count(cost.get("training_only_parameters")),
                "MiB": _per(cost.get("counted_memory_bytes", {}).get("all"), MIB),
                "MiB of K": _per(time.get("forecast_device_bytes"), MIB),
                "KiB between": _per(between, 2**10),
                "ms": _per(time.get("batch_s"), 1e-3),
                "ms / BP": _ratio(time.get("batch_s"), time.get("bp_batch_s")),
                "ms on K": _per(time.get("forecast_s"), 1e-3),
                "on K / BP": _ratio(time.get("forecast_s"), time.get("bp_forecast_s")),
            }


def _per(value: float | None, unit: float) -> float | None:
    return None if value is None else float(value) / unit


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _ratio(value: float | None, other: float | None) -> str | None:
    return f"{value / other:.2f}×" if value and other else None


def _times(cost: Facts, other: Facts, key: str) -> str | None:
    return _ratio(cost.get(key), other.get(key))


def _is_at_edge(line: Line) -> bool:
    """Whether a further rate might have been better still."""
    rates = sorted({float(str(row.setting["train.lr.base"])) for row in line.tries if "train.lr.base" in row.setting})
    chosen = None if line.chosen is None else line.chosen.setting.get("train.lr.base")
    return len(rates) > 1 and chosen in (rates[0], rates[-1])


def _epochs(line: Line, found: Found) -> str | None:
    """Those of a whole pass over the data that its batches come to."""
    row = next(iter(line.by_seed.values()), None)
    return None if row is None else f"{row.epochs * row.batches / found.of['batches']:.3g}"


def _seeds(line: Line) -> str:
    """How many there are, and how many of these diverged."""
    diverged = len(line.by_seed) - len(line.figures)
    return f"{len(line.by_seed)}" + (f", {diverged} diverged" if diverged else "")


def _total_flops(line: Line, found: Found) -> float | None:
    """Of one training, in 1e12."""
    per_sample, row = found.cost(line).get("training_flops_per_sample"), next(iter(line.by_seed.values()), None)
    return None if per_sample is None or row is None else per_sample * row.samples / 1e12


def _over(line: Line, baseline: Line | None, unit: float) -> str | None:
    """The mean difference to BP of the seeds that both have, and its interval."""
    if baseline is None or baseline is line:
        return None
    shared = sorted({*line.figures} & {*baseline.figures})
    if not shared:
        return None
    mean, sides = paired([unit * (line.figures[seed] - baseline.figures[seed]) for seed in shared])
    form: Callable[[float], str] = "{:+.2f}".format if unit > 1 else "{:+.4f}".format
    return form(mean) if sides is None else f"{form(mean)} ({form(sides[0])} to {form(sides[1])})"


def _of_gain(line: Line, low: Line, baseline: Line | None, *, is_loss: bool) -> str | None:
    """Which share of BP's gain over a contestant a line has, of the seeds that all three have, and its interval; None
    where BP gains nothing."""
    if baseline is None or line in (low, baseline):
        return None
    shared = sorted({*line.figures} & {*low.figures} & {*baseline.figures})
    if not shared:
        return None
    sign = -1 if is_loss else 1
    gains, whole = ([sign * (one.figures[seed] - low.figures[seed]) for seed in shared] for one in (line, baseline))
    if fmean(whole) <= 0:
        return None
    share, sides = share_of(gains, whole)
    return f"{share:.0%}" if sides is None else f"{share:.0%} ({sides[0]:.0%} to {sides[1]:.0%})"


def share_of(gains: Sequence[float], whole: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The ratio of the means of two paired samples, and the two sides of its interval after Fieller (1954); None where
    the divisor may be zero, or of a single pair. The mean of the divisor is not zero.

    >>> share, (low, high) = share_of([0.8, 0.9, 1.0], [1.0, 1.1, 1.0])
    >>> round(share, 3), round(low, 3), round(high, 3)
    (0.871, 0.616, 1.16)
    """
    part, all_of_it, count = fmean(gains), fmean(whole), len(gains)
    share = part / all_of_it
    if count < 2:
        return share, None
    unsure = student_t(count - 1) ** 2 / count
    square = all_of_it**2 - unsure * variance(whole)
    if square <= 0:
        return share, None
    middle = part * all_of_it - unsure * covariance(gains, whole)
    half = sqrt(max(0.0, middle**2 - square * (part**2 - unsure * variance(gains))))
    return share, ((middle - half) / square, (middle + half) / square)


def paired(differences: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The mean of differences of pairs, and the two sides of its interval; None of a single pair.

    >>> mean, (low, high) = paired([1.0, 2.0, 3.0])
    >>> mean, round(low, 3), round(high, 3)
    (2.0, -0.484, 4.484)
    """
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return mean, None
    half = student_t(count - 1) * stdev(differences) / sqrt(count)
    return mean, (mean - half, mean + half)


def student_t(freedom: int, sure: float = SURE) -> float:
    """The value that the absolute value of Student's t stays below so surely, by halving.

    >>> [round(student_t(freedom), 3) for freedom in (1, 2, 4, 7, 30)]
    [12.706, 4.303, 2.776, 2.365, 2.042]
    """
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _within(middle, freedom) > sure else (middle, high)
    return sqrt(freedom) * tan(low)


def _within(angle: float, freedom: int) -> float:
    """The probability that t is within ``± sqrt(freedom) · tan(angle)``: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    term, total = cos(angle) ** (freedom % 2), 0.0
    for power in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power + 1) / (power + 2)
    return (angle + sin(angle) * total) * 2 / pi if freedom % 2 else sin(angle) * total


def draw(tables: Sequence[Found], path: Path) -> None:
    """A picture of test figures over FLOPs of training: a panel for each number of parts of each table.

    A line goes through the epochs, in the mean over seeds; its dot is the figure that the table has, ± sd, at what the
    whole training took. On the way the learning rate is still high: a shorter training would end higher than the line.
    """
    wanted = [(table, parts) for table in tables for parts in (*table.parts,) or (None,)]
    names = list(dict.fromkeys(line.name for table, parts in wanted for line in table.beside(parts)))
    across = max(min(len(wanted), 2), *(len(table.parts) for table in tables))
    down, width = -(-len(wanted) // across), max(7.5, 5.2 * across)
    legend = {name: fill(name, int(12.5 * width), subsequent_indent="    ", break_on_hyphens=False) for name in names}
    lines = sum(label.count("\n") + 1 for label in legend.values())
    figure = new_figure(width, 4.0 * down + 0.3 + 0.2 * lines, "Test figures over FLOPs of training")
    panels = figure.subplots(down, across, squeeze=False).flat
    dots: dict[str, Any] = {}
    for (table, parts), title, panel in zip(wanted, _titles(wanted), panels, strict=False):
        for line in table.beside(parts):
            if (dot := _draw_line(panel, table, line, names.index(line.name))) is not None:
                dots.setdefault(line.name, dot)
        finish(panel, title, "TFLOPs of training", "loss, nats" if table.is_loss else "accuracy")
    for panel in panels:  # those that are left
        panel.set_visible(False)
    drawn = [name for name in names if name in dots]
    figure.legend([dots[name] for name in drawn], [legend[name] for name in drawn], loc="outside lower left", **LEGEND)
    save(figure, path)


def _titles(panels: Sequence[tuple[Found, int | None]]) -> Iterator[str]:
    """What each panel is of, with the options in which it differs from another that would be called the same."""
    titles = [
        f"{table.trained}{'' if parts is None else f', {parts} parts'}, {table.of['epochs']} epochs"
        for table, parts in panels
    ]
    for title, (table, _) in zip(titles, panels, strict=True):
        configs = [other.of["config"] for same, (other, _) in zip(titles, panels, strict=True) if same == title]
        own = {key: one for key, one in table.of["config"].items() if any(one != of.get(key) for of in configs)}
        yield ", ".join(filter(None, [title, shown(own)]))


def _draw_line(panel: Any, table: Found, line: Line, number: int) -> Any:
    """A line of a panel, and its dot, which it gives; nothing where no seed was trained yet."""
    total, rows = _total_flops(line, table), [row for row in line.by_seed.values() if row.best is not None]
    if total is None or not rows:
        return None
    again = number // len(COLOURS)
    colour, style = COLOURS[number % len(COLOURS)], _STYLES[again % len(_STYLES)]
    curves = [[test for _, test in row.measured if test is not None] for row in rows]
    whole = [curve for curve, row in zip(curves, rows, strict=True) if len(curve) == len(row.measured)]
    means = [fmean(tests) for tests in zip(*whole, strict=True)]
    at = [total * (epoch + 1) / len(means) for epoch in range(len(means))]
    panel.plot(at, means, style, color=colour, linewidth=1.1, alpha=0.7)
    reported = MeanSd.of(line.figures.values())
    dot = {"fmt": _DOTS[again % len(_DOTS)], "color": colour, "markersize": 5, "capsize": 3}
    return panel.errorbar([total], [reported.mean], yerr=reported.sd or 0.0, **dot)


if __name__ == "__main__":
    main()
