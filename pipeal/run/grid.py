"""Which settings ``--tune`` tries: a grid, and how it grows where the best is at its edge. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import TypeAlias, TypeVar

from pipeal.config import RunConfig, document, load_config
from pipeal.core.errors import ConfigError

Value: TypeAlias = float | int | str | bool | None
"""One of a key; what YAML makes of a word."""

Setting: TypeAlias = Mapping[str, Value]
"""Dotted keys of a configuration, with a value each."""

Grid: TypeAlias = dict[str, tuple[Value, ...]]
"""Dotted keys, with the values to try of each."""

MOST_WIDENINGS = 2
"""How often a range grows on either side."""

_TUNABLE = ("model", "methods", "train.lr", "train.accumulate", "data.batching", "data.batch_size", "data.augmentation")
_FIXED = ("model.name", "model.pretrained", "model.vectors", "model.grouping", "data.batching.kind")
"""What is tried may decide how the model is made and trained, but neither which data it is nor how it is read."""

Config = TypeVar("Config", bound=RunConfig)


def parse_grid(config: RunConfig) -> Grid:
    """The settings that a configuration asks to try.

    Raises:
        ConfigError: A key is unknown, may not be tuned or is given twice, a value does not fit or is given twice, there
            are none, or nothing is held out to choose by.
    """
    grid: Grid = {}
    for text in config.tune.grid:
        key, equals, listed = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ConfigError(f"--tune {text!r}: expected a key, '=' and values, such as train.lr.base=3e-4,1e-3,3e-3")
        words = [word.strip() for word in listed.split(",")]
        if not all(words):
            raise ConfigError(f"--tune {key}: found {listed!r}, expected values with commas between them")
        values = tuple(_value(word, f"--tune {key}") for word in words)
        if key in grid:
            raise ConfigError(f"--tune {key}: given twice; name all of its values in one")
        for place, value in enumerate(values):
            with_setting(config, {key: value})
            if value in values[:place]:
                raise ConfigError(f"--tune {key}: found {words[place]} twice; expected each value once")
        if not is_in(key, _TUNABLE) or is_in(key, _FIXED):
            raise ConfigError(
                f"--tune {key}: it says which data is read, or how the run is carried out; expected a key of "
                f"{', '.join(_TUNABLE)}"
            )
        grid[key] = values
    if grid and not config.data.held_out:
        raise ConfigError(
            "--tune: settings are chosen by held-out samples, but data.held_out is 0; expected a share such as 0.05"
        )
    if config.tune.epochs is not None and not grid:
        raise ConfigError(
            "--tune-epochs: found without --tune, whose trials it is for; give, say, --tune train.lr.base=1e-3,3e-3"
        )
    return grid


def _value(word: str, source: str) -> Value:
    """What YAML makes of a word; or the word, where that is nothing that JSON can hold, as a date is.

    >>> _value("1e-3", "--tune"), _value("2024-01-01", "--tune")
    (0.001, '2024-01-01')
    """
    value: Value = document.parse(word, source=source)
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # bytes, a set, a list that holds itself
        return word
    return value


def settings_of(grid: Grid) -> list[dict[str, Value]]:
    """Every combination.

    >>> settings_of({"a": (1, 2), "b": (3,)})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def with_setting(config: Config, setting: Setting) -> Config:
    """The configuration with other values at some keys.

    Raises:
        ConfigError: A key is unknown, or a value does not fit.
    """
    overrides = [f"{key}={json.dumps(value)}" for key, value in setting.items()]
    try:
        return load_config(type(config), values=asdict(config), overrides=overrides)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--set ", "--tune ", 1)) from None


def widen(
    grid: Grid, best: Sequence[Sequence[Setting]], fits: Callable[[Grid], bool], widened: Counter[tuple[str, bool]]
) -> tuple[Grid, list[str]]:
    """The grid with a further value at every edge where one of the best is, and why it has none where it has not.

    Args:
        grid: What was tried.
        best: For each form the best setting, and those that are as good: a range grows where all of them are at its
            edge.
        fits: Whether all settings of a grid can be trained with.
        widened: How often, by key and whether below; counted up.
    """
    wider, notes = dict(grid), list[str]()
    for key, values in grid.items():
        ordered = numbers(values)
        if len(ordered) < 2:
            continue
        for below in (True, False):
            edge = ordered[0] if below else ordered[-1]
            if not any(all(setting[key] == edge for setting in equals) for equals in best):
                continue
            if widened[key, below] == MOST_WIDENINGS:
                notes.append(f"the best {key} is still at the edge of what was tried, {edge:g}: widened twice, no more")
                continue
            new = beyond(values, below=below)
            if new is None or not fits({**wider, key: (new,)}):
                notes.append(f"the best {key} is at the edge of what was tried, {edge:g}: there is no further value")
                continue
            widened[key, below] += 1
            wider[key] = (new, *wider[key]) if below else (*wider[key], new)
    return wider, notes


def beyond(values: Sequence[Value], *, below: bool) -> float | int | None:
    """The value that comes before the least, or after the greatest, at the ratio of the two outermost.

    >>> beyond((3e-4, 1e-3, 3e-3), below=True), beyond((3e-4, 1e-3, 3e-3), below=False)
    (9e-05, 0.009)
    >>> beyond((64, 32), below=False), beyond((1, 2), below=True), beyond(("relu", "leaky-relu"), below=True)
    (128, None, None)

    Returns:
        None where there is none: of fewer than two values, of what is no range of numbers, next to a 0 or below 1.
    """
    ordered = numbers(values)
    if len(ordered) < 2:
        return None
    edge, inner = ordered[:2] if below else ordered[-1:-3:-1]
    if min(edge, inner) <= 0:
        return None
    found = edge * edge / inner
    if all(isinstance(value, int) for value in ordered):
        whole = round(found)
        return whole if whole > 0 and whole not in values else None
    return float(f"{found:.3g}")


def numbers(values: Sequence[Value]) -> list[float | int]:
    """The values in rising order; none where one is no number."""
    found = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return sorted(found) if len(found) == len(values) else []


def is_inner(value: Value, values: Sequence[Value]) -> bool:
    """Whether a value lies within a range of numbers, at neither of its edges.

    >>> is_inner(2, (1, 2, 3)), is_inner(3, (1, 2, 3)), is_inner("relu", ("relu", "tanh"))
    (True, False, False)
    """
    ordered = numbers(values)
    return value in ordered[1:-1]


def is_in(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of some, or below one.

    >>> is_in("train.lr.base", ["train.lr"]), is_in("train.lr2", ["train.lr"])
    (True, False)
    """
    return any(key == section or key.startswith(f"{section}.") for section in sections)
