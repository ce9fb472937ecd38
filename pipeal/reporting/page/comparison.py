"""The figures of several runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from pipeal.reporting.page.facts import epochs, measured, seconds
from pipeal.reporting.page.folder import Run, number_at
from pipeal.reporting.page.idle import stage_shares
from pipeal.reporting.page.shown import number, percent, size

_RATES = ("samples_per_s", "tokens_per_s")


def compared_figures(runs: Mapping[str, Run]) -> tuple[list[str], list[list[object]]]:
    """Heads and rows of the table that compares runs, by what the page calls each; without columns that are empty."""
    heads = ["run", "", "epochs", "stages", "test at best held-out", "last test", "parameters", "at inference"]
    heads += ["training MFLOPs", "inference MFLOPs", "memory", "s/epoch", "samples/s", "tokens/s", "padding"]
    rows: list[list[object]] = []
    rates = [rate for run in runs.values() for key in _RATES if (rate := number_at(run.summary, key))]
    decimals = 0 if max(rates, default=0.0) >= 100 else 2  # the same all the way down
    for name, run in runs.items():
        stages = stage_shares(run)
        tokens = number_at(run.summary, "tokens_per_s")
        rows.append(
            [
                name,
                run.status,
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
    return [heads[place] for place in told], [[row[place] for place in told] for row in rows]


def _mega(run: Run, key: str) -> float | None:
    found = number_at(run.summary, key)
    return None if found is None else found / 1e6
