"""The configuration of runs, value by value: what differs from the defaults, and from each other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pipeal.config import (
    LanguageConfig,
    RunConfig,
    TextConfig,
    VisionConfig,
    find_config,
    is_left_over,
    leaves,
    load_config,
)
from pipeal.core.errors import ConfigError
from pipeal.reporting.page.run import Run, value_at

_WIDEST = 160
"""Characters shown of a value."""


def settings(run: Run) -> dict[str, str]:
    """Each value of a run's configuration under its dotted path, as it would be written."""
    return {path: _shown(value) for path, value in leaves(run.config) if not is_left_over(path, value)}


def default_settings(run: Run) -> dict[str, str]:
    """The values that a run of the same data set and model has if nothing is asked for; empty if they are not known."""
    schema: type[RunConfig] = VisionConfig
    for marking, other in (("data.batching", TextConfig), ("data.estimate_batches", LanguageConfig)):
        if value_at(run.config, marking) is not None:
            schema = other
    try:
        names = {"dataset": run.dataset, "model": {"name": run.model}}
        config = load_config(schema, find_config(run.dataset, run.model), values=names)
    except (ConfigError, OSError, ValueError):  # a name that is no file name, or one of another version of pipeal
        return {}
    return {path: _shown(value) for path, value in leaves(asdict(config))}


def against_default(run: Run) -> tuple[list[list[str]], dict[str, str], bool]:
    """What differs from the default as rows (key, value, default), the other values, and whether a default is known."""
    chosen, usual = settings(run), default_settings(run)
    others = {key: value for key, value in chosen.items() if not usual or usual.get(key) == value}
    changed = [[key, value, usual.get(key, "–")] for key, value in chosen.items() if key not in others]
    return changed, others, bool(usual)


def differences(runs: Iterable[Run]) -> list[list[str]]:
    """One row per key whose values differ between runs: the key, and its value in each."""
    each = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in each for key in one)
    rows = [[key, *(one.get(key, "–") for one in each)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown(value: Any) -> str:
    """A value as YAML has it; a list of equal names as it can be typed.

    >>> _shown(["cpu", "cpu"]), _shown(None), _shown(1e-3), _shown("auto")
    ('cpu, cpu', 'null', '0.001', 'auto')
    """
    if isinstance(value, (list, tuple)):
        words = ", ".join(map(_shown, value[:64])) if len(value) < 64 else f"{len(value)} values"
    else:
        words = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return words if len(words) <= _WIDEST else f"{words[:_WIDEST]}…"
