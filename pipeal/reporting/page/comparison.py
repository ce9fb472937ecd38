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
    rates = [rate for run in runs.values() for key in _RATES if (rate := number_at(run.summary, key))]
    decimals = 0 if max(rates, default=0.0) >= 100 else 2  # the same all the way down
    found: list[dict[str, object]] = []
    for name, run in runs.items():
        stages = stage_shares(run)
        trained, inferring = (number(weights, 0) for weights in run.parameters)
        tokens = number_at(run.summary, "tokens_per_s")
        found.append(
            {
                "run": name,
                "": run.status,
                "epochs": epochs(run),
                "stages": len(stages) or None,
                "test at best held-out": measured(run, run.at_best),
                "last test": measured(run, run.last),
                "parameters": trained,
                "at inference": inferring,
                "training MFLOPs": number(_mega(run, "training_flops_per_sample"), 2),
                "inference MFLOPs": number(_mega(run, "inference_flops_per_sample"), 2),
                "memory": size(number_at(run.summary, "counted_memory_bytes.all")),
                "s/epoch": seconds(run.epoch_s),
                "samples/s": number(number_at(run.summary, "samples_per_s"), decimals),
                "tokens/s": number(tokens, decimals) if tokens else None,
                "padding": percent(number_at(run.summary, "padding_share")) if tokens else None,
                "mean busy": percent(fmean(stage.busy for stage in stages)) if stages else None,
            }
        )
    heads = [head for head in found[0] if any(one[head] not in (None, "–") for one in found)]
    return heads, [[one[head] for head in heads] for one in found]


def _mega(run: Run, key: str) -> float | None:
    found = number_at(run.summary, key)
    return None if found is None else found / 1e6
