"""Several runs beside each other: their figures, their accuracy in one chart, and what was asked differently."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pipeal.reporting.page.curves import compared_curves
from pipeal.reporting.page.folder import Run, number_at
from pipeal.reporting.page.idle import stage_shares
from pipeal.reporting.page.markup import Html, fold, number, percent, size, table, tag
from pipeal.reporting.page.sections import badge, epochs, measured, seconds
from pipeal.reporting.page.settings import differences

_RATES = ("samples_per_s", "tokens_per_s")


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The section that compares runs.

    Args:
        runs: Two or more.
        names: What the page calls each.
    """
    asked = differences(runs)
    if asked:
        settings = table(["key", *names], asked, class_="settings")
    else:
        settings = tag("p", "Nothing: the configurations are the same.", class_="note")
    return tag(
        "section",
        tag("h2", "Comparison"),
        _figures(runs, names),
        compared_curves(runs, names),
        fold("What was asked differently", settings, is_open=True),
    )


def _figures(runs: Sequence[Run], names: Sequence[str]) -> Html:
    heads = ["run", "", "epochs", "stages", "test at best held-out", "last test", "parameters", "at inference"]
    heads += ["training MFLOPs", "inference MFLOPs", "memory", "s/epoch", "samples/s", "tokens/s", "padding"]
    rows = []
    rates = [rate for run in runs for key in _RATES if (rate := number_at(run.summary, key))]
    decimals = 0 if max(rates, default=0.0) >= 100 else 2  # the same all the way down
    for run, name in zip(runs, names, strict=True):
        stages = stage_shares(run)
        tokens = number_at(run.summary, "tokens_per_s")
        rows.append(
            [
                name,
                badge(run),
                epochs(run),
                len(stages) or None,
                measured(run, run.at_best),
                measured(run, run.last),
                *(number(weights, 0) for weights in run.parameters),
                number(_mega(run, "training_flops_per_sample"), 2),
                number(_mega(run, "inference_flops_per_sample"), 2),
                size(number_at(run.summary, "counted_memory_bytes.all")),
                seconds(run.epoch_s),
                number(number_at(run.summary, "samples_per_s"), decimals),
                number(tokens, decimals) if tokens else None,
                percent(number_at(run.summary, "padding_share")) if tokens else None,
                percent(fmean(stage.busy for stage in stages)) if stages else None,
            ]
        )
    heads = [*heads, "mean busy"]
    told = [place for place in range(len(heads)) if any(row[place] not in (None, "–") for row in rows)]
    kept = [[row[place] for place in told] for row in rows]
    return table([heads[place] for place in told], kept, class_="wide")


def _mega(run: Run, key: str) -> float | None:
    found = number_at(run.summary, key)
    return None if found is None else found / 1e6
