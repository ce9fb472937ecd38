"""``pipeal memory``: a table, a picture and figures of the memory that each way to train takes on one device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import click

from pipeal.core.errors import ConfigError
from pipeal.core.tree import batch_size
from pipeal.planning.pure.memory import WAYS, Model, Parts, Way
from pipeal.reporting.environment import environment
from pipeal.reporting.memory_plot import MemoryCurve, draw_memory
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table
from pipeal.run.memory_rows import Configured, Measured, forecast
from pipeal.run.memory_rows import measure as measured_alone
from pipeal.run.plan import folder_for
from pipeal.run.plan_costs import Wanted, refuse_chosen

_log = logging.getLogger(__name__)

_MOST_SAMPLES, _MOST_LAYERS = 2**24, 2**14
"""Beyond these nothing is looked for."""

_DEEPEST = 512
"""Layers of the picture, or as many as are asked for."""

CHOSEN = {
    "engine.devices": "none: it is one device",
    "engine.replicas": "none: it is one device",
    "engine.sizes": "none: it is one device",
    "engine.schedule": "none: all ways are compared",
    "engine.within_stage": "none: both orders are compared",
    "engine.recompute": "none: that of all blocks is a row of its own",
    "engine.offload": "none: offloaded layers are a row of their own",
    "train.mode": "none: both forms are compared",
    "train.methods": "none: both forms are compared",
}
"""Keys of a configuration that the command sets, and what to give instead."""


def memory(
    *,
    dataset: str | None,
    model: str | None,
    preset: str | None,
    batch: int | None,
    layers: int | None,
    memory: float | None,
    measure: bool,
    data_root: str | None,
    overrides: tuple[str, ...],
    out: str,
) -> None:
    """Forecasts, measures if asked, shows, and leaves figures in a folder.

    Args:
        dataset: Whose batch; of the arguments, as of those below, ``pipeal memory --help`` tells.
        model: Which.
        preset: Its sizes.
        batch: Samples; None for those of the configured batch.
        layers: As if there were so many.
        memory: GiB that there are.
        measure: Whether to train, too.
        data_root: The folder that holds the data sets.
        overrides: What ``--set`` was given.
        out: The folder.

    Raises:
        PipealError: One of them does not fit; nothing has been written then.
    """
    folder = folder_for(out)
    if memory is not None and not (isfinite(memory) and memory > 0):
        raise ConfigError(f"--memory: found {memory:g}, expected GiB, a number above 0")
    if measure and layers is not None:
        raise ConfigError("--measure: found it beside --layers, but only the model as it is can be measured; give one")
    refuse_chosen(overrides, CHOSEN, "pipeal memory chooses")
    subject = Configured(Wanted(dataset, model, preset, data_root, overrides))
    config = subject.config
    what = f"{config.dataset} {config.model.name}"
    if config.train.accumulate > 1:
        raise ConfigError(f"train.accumulate: found {config.train.accumulate}; expected 1: an update after every batch")
    if config.engine.compile != "none":
        raise ConfigError(f"engine.compile: found {config.engine.compile}; expected none: of graphs it cannot be said")
    samples = batch or batch_size(subject.batch()[0])
    _log.info(f"looking at each block of {what} on {subject.device}")
    blocks = forecast(subject, samples)
    limit = None if memory is None else round(memory * 2**30)
    on_disk = subject.device == "cpu"  # where layers of GPUs do not go
    ways = {name: way for name, way in WAYS.items() if on_disk or not way.offloaded}
    found = Found(blocks, samples, blocks.depth if layers is None else layers, limit, ways)
    found.require_room()
    if measure:
        for name in ways:
            _log.info(f"training {name} in a process of its own")
            found.measured[name] = measured_alone(subject, name, samples)
    found.show(what)
    facts = {"dataset": config.dataset, "model": config.model.name, "device": subject.device}
    found.write(folder, what, {**facts, "precision": subject.options.precision, **environment()})
    click.echo(f"\n{folder / 'memory.png'} shows other depths; {folder / 'memory.json'} has every figure")


@dataclass
class Found:
    """What each way takes, and how much of it fits.

    Attributes:
        model: Whose blocks were looked at.
        samples: Of the batch.
        depth: Layers, or as if there were so many.
        limit: Bytes that there are; None where that was not asked for.
        ways: Those that are compared.
        measured: By way; empty where nothing was measured.
    """

    model: Model
    samples: int
    depth: int
    limit: int | None = None
    ways: Mapping[str, Way] = field(default_factory=lambda: WAYS)
    measured: dict[str, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forecasts = {name: self.model.parts(way, self.samples, self.depth) for name, way in self.ways.items()}

    def require_room(self) -> None:
        """Refuses a memory that no way gets by with.

        Raises:
            ConfigError: It holds not even one layer, by any of them, on one sample or on this batch.
        """
        if self.limit is None or any(any(self._most(way)) for way in self.ways.values()):
            return
        least = {name: self.model.parts(way, self.samples, 1).peak for name, way in self.ways.items()}
        name = min(least, key=least.__getitem__)
        raise ConfigError(
            f"--memory: {self.limit / 2**30:g} GiB hold no layer of this model, even on one sample; {name} of one "
            f"layer takes {least[name] / 2**30:.3g} GiB on {self.samples} samples"
        )

    def show(self, what: str) -> None:
        """Prints a table: bytes by part, at once, and what fits."""
        columns = ["MiB", *_PARTS, "at once", "resident"]
        columns += ["resident, kept"] if self.measured else []
        columns += ["largest batch", "greatest depth"] if self.limit is not None else []
        rows: list[list[Cell]] = []
        for name, way in self.ways.items():
            blank: list[Cell] = [None] if self.measured else []
            fits = (
                [] if self.limit is None else [_told(*pair) for pair in zip(self._most(way), self._bounds, strict=True)]
            )
            rows.append([name, *_mib(self.forecasts[name]), *blank, *fits])
            if name in self.measured:
                found = self.measured[name]
                rows.append(["  measured", *_mib(found.parts), found.resident_kept / 2**20, *[None] * len(fits)])
        layers = f"{self.depth} layer{'s' * (self.depth > 1)}"
        print_table(f"{what}, {self.samples} samples, {layers}", columns, rows)
        click.echo()
        click.echo("\n".join(self._remarks()))

    def write(self, folder: Path, what: str, facts: dict[str, Any]) -> None:
        """Leaves ``memory.json`` and ``memory.png``."""
        depths = self._depths()
        over = {
            name: [self.model.parts(way, self.samples, depth) for depth in depths] for name, way in self.ways.items()
        }
        fits = {name: dict(zip(("batch", "depth"), self._most(way), strict=True)) for name, way in self.ways.items()}
        write_json(
            folder / "memory.json",
            {
                "facts": facts,
                "samples": self.samples,
                "layers": self.depth,
                "kernels_bytes": dict(zip(("AL", "BP"), self.model.kernels, strict=True)),
                "forecast": {name: asdict(parts) for name, parts in self.forecasts.items()},
                "measured": {name: asdict(found) for name, found in self.measured.items()},
                "depths": depths,
                "over_depth": {name: [asdict(parts) for parts in row] for name, row in over.items()},
                "memory_bytes": self.limit,
                "fits": fits if self.limit is not None else None,
            },
        )
        curves = {
            name: MemoryCurve(
                depths,
                [parts.activations for parts in row],
                [parts.peak for parts in row],
                (self.depth, self.measured[name].parts.activations, self.measured[name].parts.peak)
                if name in self.measured
                else None,
            )
            for name, row in over.items()
        }
        draw_memory(curves, folder / "memory.png", f"{what}, {self.samples} samples", self.limit)

    @property
    def _bounds(self) -> tuple[int, int]:
        """Beyond these numbers of samples and layers nothing is looked for."""
        return _MOST_SAMPLES, _MOST_LAYERS if self.model.depth > 1 else 1

    def _most(self, way: Way) -> tuple[int, int]:
        """The largest batch, at this depth, and the greatest depth, with this batch, that fit; 0 for none."""
        if self.limit is None:
            return 0, 0
        samples, layers = self._bounds
        return (
            self.model.largest_batch(way, self.limit, self.depth, samples),
            self.model.greatest_depth(way, self.samples, self.limit, layers),
        )

    def _depths(self) -> list[int]:
        if self.model.depth == 1:
            return [1]
        doubled = [2**power for power in range(_DEEPEST.bit_length()) if 2**power < max(_DEEPEST, self.depth)]
        return sorted({*doubled, self.model.depth, max(_DEEPEST, self.depth)})

    def _remarks(self) -> Iterator[str]:
        """What to know of the figures."""
        yield "at once: the most of all parts at the same moment, above the idle process; a part is largest at its own"
        al, bp = (size / 2**20 for size in self.model.kernels)
        yield "resident: physical memory, where freed blocks are given back at once; with kernels that libraries keep"
        yield f"for each size of a batch: of one, {al:.1f} MiB of the AL form and {bp:.1f} of the BP form"
        if any(way.offloaded for way in self.ways.values()):
            kept = self.forecasts["AL by layer"]
            size = (kept.weights + kept.optimizer) / 2**20
            yield "AL offloaded: weights and optimizer states of the layer at work; those of all layers are on a disk,"
            yield f"{size:,.0f} MiB, and in the page cache as far as there is room: it is fast with two or more there"
        if self.model.depth > 1 and (self.limit is not None or self.depth != self.model.depth):
            yield f"other depths than {self.model.depth}: as if the layers after the first came again and again"
        if self.samples > self.model.sizes[1]:
            small, large = self.model.sizes
            yield f"looked at on batches of {small} and {large} samples, and extended from there"
        if self.measured:
            yield "resident, kept: with freed memory kept, as commands train"


_PARTS = ("weights", "gradients", "optimizer", "activations")


def _mib(parts: Parts) -> list[Cell]:
    return [getattr(parts, part) / 2**20 for part in (*_PARTS, "peak", "resident")]


def _told(most: int, bound: int) -> Cell:
    return "none" if not most else f"{most:,}" + (" or more" if most == bound > 1 else "")
