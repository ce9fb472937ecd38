"""What of a configuration decides the weights, and so may not change when a run is taken up again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from pipeal.config import RunConfig

_FREE = (
    *("engine", "out", "train.epochs", "train.checkpoint", "train.on_non_finite", "train.tensorboard"),
    *("train.exit_tolerance", "data.root", "data.text", "data.download", "data.workers"),
    *("data.prefetch", "data.cache", "data.cache_dir"),
)
"""How a run is executed, where its data is, how long it goes: what may differ when it is taken up again."""


def decisive(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every such key of a configuration, dotted, with its value."""
    for key, value in _flat(config):
        if not any(key == free or key.startswith(f"{free}.") for free in _FREE):
            yield key, value


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    found = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(found, dict):
        yield path, found
        return
    for key, inner in found.items():
        yield from _flat(inner, f"{path}.{key}" if path else key)
