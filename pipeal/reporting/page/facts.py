"""What the page says of a run, and of several beside each other: names and values, which its templates lay out.

A new function is listed in ``page._CALLED``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import fmean

from pipeal.reporting.page.idle import stage_shares
from pipeal.reporting.page.run import Run, number_at, value_at
from pipeal.reporting.page.shown import number, percent, size
from pipeal.training.metric import MeanSd

_AT_BEST, _LAST = "test at best held-out", "last test"
_NAMES = {
    "s/epoch": "seconds per epoch",
    "samples/s": "samples per second",
    "tokens/s": "tokens per second",
    "training MFLOPs": "training, MFLOPs per sample",
    "inference MFLOPs": "inference, MFLOPs per sample",
}
"""What a run's own section calls the figures whose heads in a table are short."""

_MISHAPS = {
    "batches left out, after going back": "batches_left_out",
    "updates left out, for a loss that is not finite": "non_finite_updates_skipped",
    "updates left out, for gradients beyond fp16": "overflowed_updates_skipped",
    "updates in parts, for want of memory": "updates_in_parts",
}


def headline(run: Run) -> list[str]:
    """What it was, how far it came, when and where."""
    stages = run.summary.get("stages")
    return [
        f"{run.dataset} · {run.model} · {run.form}",
        _epochs_and_turns(run),
        *([f"{len(stages)} stage{'s' * (len(stages) != 1)}"] if isinstance(stages, list) and stages else []),
        *(str(run.summary[key]) for key in ("schedule", "precision") if isinstance(run.summary.get(key), str)),
        f"{run.when:%Y-%m-%d %H:%M}",
        str(run.folder),
    ]


def epochs(run: Run) -> str:
    """Epochs done, of those asked for."""
    done, asked = run.epochs
    return f"{done} of {asked}" if asked else f"{done}"


def _epochs_and_turns(run: Run) -> str:
    done, asked = run.epochs
    turns = number_at(run.config, "train.repeat") or 1
    return f"{epochs(run)} epoch{'s' * ((asked or done) != 1)}" + f" in {turns:g} turns" * (turns > 1)


def measured(run: Run, value: MeanSd | None) -> str:
    """An accuracy in percent, a loss as it is; of several turns with its standard deviation."""
    if value is None:
        return percent(None)
    return value.shown(percent if run.measure.is_share else partial(number, decimals=4))


def seconds(value: MeanSd | None) -> str:
    """The mean and the standard deviation over epochs."""
    return number(None) if value is None else value.shown(partial(number, decimals=2))


def figures(run: Run) -> dict[str, object]:
    """The figures that are looked for first, by their heads in a table of runs; None where they are not told."""
    tokens = number_at(run.summary, "tokens_per_s")
    trained, inferring = (None if weights is None else number(weights, 0) for weights in run.parameters)
    return {
        _AT_BEST: measured(run, run.at_best),
        _LAST: measured(run, run.last),
        "s/epoch": seconds(run.epoch_s),
        "samples/s": number_at(run.summary, "samples_per_s"),
        "tokens/s": tokens or None,
        "padding": percent(number_at(run.summary, "padding_share")) if tokens else None,
        "parameters": trained,
        "at inference": inferring,
        "training MFLOPs": _mega(run, "training_flops_per_sample"),
        "inference MFLOPs": _mega(run, "inference_flops_per_sample"),
    }


def named_figures(run: Run) -> dict[str, object]:
    """The same under their whole names, for the run's own section."""
    measure = run.measure
    names = _NAMES | {
        _AT_BEST: f"{measure.test_name} of the best epoch by {measure.held_name}",
        _LAST: f"last {measure.test_name}",
    }
    return {names.get(head, head): value for head, value in figures(run).items() if value is not None}


def compared_figures(runs: Mapping[str, Run]) -> tuple[list[str], list[list[object]]]:
    """Heads and rows of the table that compares runs, by what the page calls each; without columns that are empty."""
    found: list[dict[str, object]] = []
    for name, run in runs.items():
        stages = stage_shares(run)
        busy = percent(fmean(stage.busy for stage in stages)) if stages else None
        on_gpus = any(stage.kernels is not None for stage in stages)
        found.append(
            {
                "run": name,
                "": run.status,
                "epochs": epochs(run),
                "stages": len(stages) or None,
                **figures(run),
                "memory": size(number_at(run.summary, "counted_memory_bytes.all")),
                "mean busy": None if on_gpus else busy,
                "mean host-open": busy if on_gpus else None,
            }
        )
    heads = [head for head in found[0] if any(one[head] not in (None, "–") for one in found)]
    return heads, [[one[head] for head in heads] for one in found]


def batch_facts(run: Run) -> dict[str, object]:
    """Shapes of the batches, of texts also their padding; empty where the summary does not tell."""
    told = run.summary.get("batches")
    if not isinstance(told, Mapping):
        return {}
    found: dict[str, object] = {
        "batches per epoch": whole_at(run.summary, "batches_per_epoch"),
        "different shapes": whole_at(told, "shapes"),
        "samples per batch": _spread(told.get("samples")),
    }
    if "padded_length" in told:
        found |= {
            "padded length": _spread(told.get("padded_length")),
            "different padded lengths": whole_at(told, "padded_lengths"),
            "padding": percent(number_at(run.summary, "padding_share")),
            "padding of random batches": percent(number_at(told, "padding_share_of_random_batches")),
        }
    return found | {name: count for name, key in _MISHAPS.items() if (count := whole_at(run.summary, key))}


def exit_rows(run: Run) -> list[list[object]] | None:
    """A row for each exit; None where ``exits.json`` has none."""
    rows = run.exits.get("rows")
    if not isinstance(rows, list):
        return None
    return [
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


def weights_of_exits(run: Run) -> str:
    """Which weights the exits are of: those of an earlier end, where the run went on and has not come to its end."""
    epoch, seed = (run.exits.get(key) for key in ("epoch", "seed"))
    if isinstance(epoch, int) and isinstance(seed, int):
        return f"after epoch {epoch} of seed {seed}"
    return "of the last epoch of the last seed"  # as those of earlier versions are, which do not say


def memory_facts(run: Run) -> dict[str, str]:
    """What was measured and what was counted."""
    found = {}
    for name, key in (("peak of", "peak_memory_bytes"), ("counted,", "counted_memory_bytes")):
        told = run.summary.get(key)
        for part in told if isinstance(told, Mapping) else ():
            found[f"{name} {str(part).removesuffix('_bytes')}"] = size(number_at(told, part))
    return found


def circumstances(run: Run, key: str) -> dict[str, object]:
    """What a part of the summary says of data or machine."""
    told = run.summary.get(key)
    pairs = told.items() if isinstance(told, Mapping) else ()
    return {
        str(name).replace("_", " "): (", ".join(map(str, value)) or "none") if isinstance(value, list) else value
        for name, value in pairs
    }


def whole_at(mapping: object, path: str) -> float | int | None:
    """As :func:`number_at`; a whole number without decimals."""
    value = number_at(mapping, path)
    return int(value) if value is not None and value.is_integer() else value


def _mega(run: Run, key: str) -> str | None:
    found = number_at(run.summary, key)
    return None if found is None else number(found / 1e6, 2)


def _spread(told: object) -> str:
    least, median, most = (number(whole_at(told, part)) for part in ("least", "median", "most"))
    return f"{least} to {most}, median {median}"
