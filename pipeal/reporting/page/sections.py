"""The parts of the page that speak of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from pipeal.core.artifacts import BATCHES, EXITS_PICTURE, TIMELINE, TRACE
from pipeal.reporting.page.curves import run_curves
from pipeal.reporting.page.folder import Run, number_at, value_at
from pipeal.reporting.page.idle import idle_reasons
from pipeal.reporting.page.markup import Html, fold, number, percent, size, table, tag
from pipeal.reporting.page.pictures import Album
from pipeal.reporting.page.settings import default_settings, settings
from pipeal.training.metric import MeanSd


def run_section(run: Run, name: str, anchor: str, album: Album) -> Html:
    """All there is to say of a run.

    Args:
        run: The run.
        name: What the page calls it.
        anchor: Its id in the page.
        album: Where its pictures go.
    """
    return tag("section", *_parts(run, name, album), id=anchor, class_="run")


def badge(run: Run) -> Html:
    """The state of a run, as a coloured word."""
    return tag("span", run.status.state, class_=f"badge {run.status.state}")


def epochs(run: Run) -> str:
    """Epochs done, of those asked for."""
    done, asked = run.epochs
    return f"{done} of {asked}" if asked else f"{done}"


def measured(run: Run, value: MeanSd | None) -> str:
    """An accuracy in percent, a loss as it is; of several turns with its standard deviation."""
    if value is None:
        return percent(None)
    return value.shown(percent if run.measure.is_share else partial(number, decimals=4))


def seconds(value: MeanSd | None) -> str:
    """The mean and the standard deviation over epochs."""
    return number(None) if value is None else value.shown(partial(number, decimals=2))


def _parts(run: Run, name: str, album: Album) -> Iterator[Html]:
    yield tag("h2", name, " ", badge(run))
    stages = run.summary.get("stages")
    facts = [
        f"{run.dataset} · {run.model} · {run.form}",
        f"{epochs(run)} epochs",
        *([f"{len(stages)} stage{'s' * (len(stages) != 1)}"] if isinstance(stages, list) and stages else []),
        *(str(run.summary[key]) for key in ("schedule", "precision") if isinstance(run.summary.get(key), str)),
        f"{run.when:%Y-%m-%d %H:%M}",
        str(run.folder),
    ]
    yield tag("p", "   ".join(facts), class_="facts")
    if run.status.message:
        yield tag("p", run.status.message, class_="message")
    yield _figures(run)
    if run.missing:
        yield tag("div", tag("b", "Missing here"), tag("ul", *(tag("li", line) for line in run.missing)), class_="gaps")
    yield fold("Accuracy and losses" if run.measure.is_share else "Losses", run_curves(run), is_open=True)
    yield fold("Where the time went", idle_reasons(run), is_open=True)
    trace = TRACE.at(run.folder)
    yield fold(
        "Timeline of the stages",
        album.picture(TIMELINE.at(run.folder), "forwards, backwards and updates of each stage over time"),
        *([tag("p", "The same, to zoom into: open ", tag("code", str(trace)), " in Perfetto.", class_="note")]
          if trace.is_file() else []),
        is_open=True,
    )  # fmt: skip
    yield from _batches(run, album)
    yield from _exits(run, album)
    yield from _memory(run)
    yield from _configuration(run)
    yield from _circumstances(run)


def _figures(run: Run) -> Html:
    """The figures that are looked for first."""
    figures = {
        f"{run.measure.test_name} of the best epoch by {run.measure.held_name}": measured(run, run.at_best),
        f"last {run.measure.test_name}": measured(run, run.last),
        "seconds per epoch": seconds(run.epoch_s),
        "samples per second": number(number_at(run.summary, "samples_per_s")),
    }
    if number_at(run.summary, "tokens_per_s"):
        figures["tokens per second"] = number(number_at(run.summary, "tokens_per_s"))
        figures["padding"] = percent(number_at(run.summary, "padding_share"))
    for name, weights in zip(("parameters", "at inference"), run.parameters, strict=True):
        if weights is not None:
            figures[name] = _count(weights)
    for kind in ("training", "inference"):
        flops = number_at(run.summary, f"{kind}_flops_per_sample")
        if flops is not None:
            figures[f"{kind}, MFLOPs per sample"] = number(flops / 1e6, 2)
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", told)) for name, told in figures.items()), class_="figures"
    )


def _batches(run: Run, album: Album) -> Iterator[Html]:
    told = run.summary.get("batches")
    if not isinstance(told, Mapping):
        return
    facts = {
        "batches per epoch": number(_whole(number_at(run.summary, "batches_per_epoch"))),
        "different shapes": number(_whole(number_at(told, "shapes"))),
        "samples per batch": _spread(told.get("samples")),
    }
    parts: list[Html] = []
    if "padded_length" in told:
        facts |= {
            "padded length": _spread(told.get("padded_length")),
            "different padded lengths": number(_whole(number_at(told, "padded_lengths"))),
            "padding": percent(number_at(run.summary, "padding_share")),
            "padding of random batches": percent(number_at(told, "padding_share_of_random_batches")),
        }
        parts.append(album.picture(BATCHES.at(run.folder), "lengths of samples, shapes of batches, padding"))
    facts |= {name: number(count) for name, key in _MISHAPS.items() if (count := number_at(run.summary, key))}
    yield fold("Batches and padding" if parts else "Batches", _facts(facts), *parts, is_open=True)


_MISHAPS = {
    "batches left out, after going back": "batches_left_out",
    "updates left out, for a loss that is not finite": "non_finite_updates_skipped",
    "updates left out, for gradients beyond fp16": "overflowed_updates_skipped",
    "updates in parts, for want of memory": "updates_in_parts",
}


def _exits(run: Run, album: Album) -> Iterator[Html]:
    rows = run.exits.get("rows")
    if not isinstance(rows, list):
        return
    heads = ["exit", "accuracy", "points", "MFLOPs/sample", "cost", "ms/sample", "leave here"]
    cells = [
        [
            str(value_at(row, "name")),
            percent(number_at(row, "accuracy")),
            number(number_at(row, "points"), 2),
            number(number_at(row, "mflops"), 2),
            percent(number_at(row, "relative_cost")),
            number(number_at(row, "ms"), 4),
            percent(number_at(row, "share")),
        ]
        for row in rows
    ]
    samples = number(_whole(number_at(run.exits, "samples")))
    note = tag("p", f"Of {samples} test samples; points and cost beside the full path.", class_="note")
    picture = album.picture(EXITS_PICTURE.at(run.folder), "accuracy over cost of each exit")
    yield fold("Exits", table(heads, cells), note, picture, is_open=True)


def _memory(run: Run) -> Iterator[Html]:
    facts = {}
    for name, key in (("peak of", "peak_memory_bytes"), ("counted,", "counted_memory_bytes")):
        told = run.summary.get(key)
        if isinstance(told, Mapping):
            for part in told:
                facts[f"{name} {str(part).removesuffix('_bytes')}"] = size(number_at(told, part))
    if facts:
        yield fold("Memory", _facts(facts), is_open=True)


def _configuration(run: Run) -> Iterator[Html]:
    chosen = settings(run)
    if not chosen:
        return
    usual = default_settings(run)
    changed = [[key, value, usual.get(key, "–")] for key, value in chosen.items() if usual.get(key) != value]
    others = {key: value for key, value in chosen.items() if not usual or usual.get(key) == value}
    parts = []
    if changed and usual:
        parts.append(table(["key", "this run", "default"], changed, class_="settings"))
    elif usual:
        parts.append(tag("p", "Every value is the default of this data set and model.", class_="note"))
    if others:
        title = f"{len(others)} values as by default" if usual else f"All {len(others)} values"
        parts.append(fold(title, _facts(others)))
    yield fold("Configuration", *parts, is_open=True)


def _circumstances(run: Run) -> Iterator[Html]:
    for title, key in (("Data", "data"), ("Environment", "environment")):
        told = run.summary.get(key)
        if isinstance(told, Mapping) and told:
            yield fold(title, _facts({str(name).replace("_", " "): _said(value) for name, value in told.items()}))


def _facts(facts: Mapping[str, str]) -> Html:
    pairs = (tag("div", tag("dt", name), tag("dd", told)) for name, told in facts.items())
    return tag("dl", *pairs, class_="facts-list")


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return number(value)
    return number(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _spread(told: object) -> str:
    least, median, most = (number(_whole(number_at(told, part))) for part in ("least", "median", "most"))
    return f"{least} to {most}, median {median}"


def _whole(value: float | None) -> float | int | None:
    return int(value) if value is not None and value.is_integer() else value


def _count(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e7 else number(int(count))
