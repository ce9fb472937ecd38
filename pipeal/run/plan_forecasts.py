"""The forecasts of a plan, for all its devices and for fewer: what is printed, and what is left in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from pipeal.core.errors import ConfigError, PlacementError
from pipeal.engine.schedule import SCHEDULES
from pipeal.planning.pure.candidates import alone_s
from pipeal.planning.pure.forecast import (
    METHODS,
    RIVALS,
    Forecast,
    Model,
    best_forecast,
    on_fewer,
)
from pipeal.planning.pure.hardware import Setup
from pipeal.planning.pure.layer_cost import Costs, LayerCost
from pipeal.planning.pure.layout import best_layout
from pipeal.reporting.plan_plot import draw_plan
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import print_table

_POINTS = 16
"""Of a curve, at most."""

_MOST_MICRO = 64_000
"""Stages times micro-batches: what can be simulated while one waits."""


@dataclass
class Plan:
    """The forecasts for all devices, and for fewer.

    Args:
        by_kind: What the model costs, by kind of device.
        setup: What it is planned for.
        micro_batches: Into how many pipelined backpropagation cuts a batch; None for the best of those measured.

    Raises:
        ConfigError: So many micro-batches were not measured, or are too many.
        PlacementError: Nothing fits.
    """

    by_kind: dict[str, Costs]
    setup: Setup
    micro_batches: int | None

    def __post_init__(self) -> None:
        al = {kind: costs.layers for kind, costs in self.by_kind.items()}
        bp = _by_micro_batches(self.by_kind, self.setup, self.micro_batches)
        self.model = Model(al, bp, self.micro_batches)
        self.notes: list[str] = []
        best = SCHEDULES["pipelined"].within(self.setup.within_stage)
        best_layout(al, self.setup, by_layer=best.by_layer)  # what does not fit at all is told at once, in one line
        self.forecasts = self._forecasts(self.setup, self.notes)
        self.layout = next(found.layout for found in self.forecasts if found.method == "AL pipelined")
        self.alone = {"AL": alone_s(al, self.setup.devices)}
        if self.model.bp:
            whole = {kind: costs.backprop[1] for kind, costs in self.by_kind.items()}
            self.alone["BP"] = alone_s(whole, self.setup.devices)
        each = len(self.setup.share())
        self.curves: dict[str, list[tuple[int, float]]] = {}
        for count in _some(each):
            fewer = on_fewer(self.setup, count)
            for found in self._forecasts(fewer, []):
                gain = self.alone["AL"] / found.batch_s
                self.curves.setdefault(found.method, []).append((len(fewer.devices), gain))

    def _forecasts(self, setup: Setup, notes: list[str]) -> list[Forecast]:
        found = []
        for method in METHODS:
            if method in RIVALS and not self.model.bp:
                continue
            try:
                found.append(best_forecast(method, self.model, setup))
            except (PlacementError, ConfigError) as error:
                notes.append(f"{method}: {error}")
        return found

    def show(self) -> None:
        """Prints the forecasts and the stages."""
        setup, alone = self.setup, self.alone
        replicas = f", {setup.replicas} replicas" if setup.replicas > 1 else ""
        columns = ["method", "M", "stages", "devices", "ms/batch", "× AL on one", "× BP on one", "idle", "least busy"]
        print_table(
            f"{len(setup.devices)} device{'s' * (len(setup.devices) > 1)}{replicas}, {setup.batches} batches each",
            [*columns, "MiB"],
            [
                [
                    found.method,
                    found.micro_batches if found.method in RIVALS else None,
                    len(found.layout.stages),
                    found.devices,
                    1e3 * found.batch_s,
                    alone["AL"] / found.batch_s,
                    alone["BP"] / found.batch_s if "BP" in alone else None,
                    f"{max(0.0, found.bubble):.1%}",
                    f"{min(found.busy):.1%}",
                    max(found.memory_bytes) / 2**20,
                ]
                for found in self.forecasts
            ],
        )
        order = "" if self.layout.any_order else ", devices in the order given"
        click.echo()
        print_table(
            f"The stages of AL pipelined{order}" + (", in each replica" if replicas else ""),
            ["stage", "devices", "kind", "layers", "ms/batch", "link, ms", "MiB"],
            [
                [
                    number,
                    _span(stage.devices),
                    stage.device.kind,
                    _span(stage.layers),
                    1e3 * stage.seconds,
                    1e3 * stage.sends_s,
                    stage.memory_bytes / 2**20,
                ]
                for number, stage in enumerate(self.layout.stages)
            ],
        )
        click.echo()
        click.echo("\n".join(self._remarks()))

    def _remarks(self) -> Iterator[str]:
        """What to know of the figures."""
        replicas = self.setup.replicas
        if any(len(stage.devices) > 1 for stage in self.layout.stages):
            yield "a stage on several devices is a forecast: a run has every stage as often (--replicas)"
        if replicas > 1:
            yield (
                "each replica is forecast on whole batches; a run's replicas share the samples of each batch: such a "
                f"run has batches {replicas} times as large as these"
            )
        yield from self.notes
        if self.model.bp:
            measured = ", ".join(map(str, sorted(self.model.bp)))
            asked = self.micro_batches
            chosen = f"the best of {measured}, as measured" if asked is None else f"{asked} as asked"
            yield f"M: micro-batches of a batch, {chosen}"
        one = "one" if len(set(self.setup.devices)) == 1 else "one, the fastest"
        yield f"on one: all layers, one after the other, on {one} of the devices, with memory enough"

    def write(self, folder: Path) -> None:
        """Leaves ``plan.json`` and ``plan.png``."""
        write_json(folder / "plan.json", self._figures())
        facts = next(iter(self.by_kind.values())).facts
        what = " ".join(str(facts[key]) for key in ("dataset", "model") if key in facts)
        title = f"{what or 'plan'}, {len(self.model.al[self.setup.devices[0].kind])} AL layers"
        draw_plan(self.curves, folder / "plan.png", title, "sequential AL on one device")

    def _figures(self) -> dict[str, Any]:
        return {
            "facts": {kind: dict(costs.facts) for kind, costs in self.by_kind.items()},
            "devices": len(self.setup.devices),
            "replicas": self.setup.replicas,
            "one_device_s": self.alone,
            "forecasts": [
                {
                    **{name: value for name, value in vars(found).items() if name != "layout"},
                    "devices": found.devices,
                    "gain": self.alone["AL"] / found.batch_s,
                    "idle": found.bubble,
                    "sizes": found.layout.sizes,
                }
                for found in self.forecasts
            ],
            "stages": [
                {**vars(stage), "layers": list(stage.layers), "device": asdict(stage.device), "kind": stage.device.kind}
                for stage in self.layout.stages
            ],
            "curves": self.curves,
        }


def _by_micro_batches(
    by_kind: dict[str, Costs], setup: Setup, wanted: int | None
) -> dict[int, dict[str, Sequence[LayerCost]]]:
    """The costs of backpropagation that all kinds of devices have and that can be simulated while one waits.

    Raises:
        ConfigError: Those asked for were not measured, or are too many.
    """
    measured = set.intersection(*(set(costs.backprop) for costs in by_kind.values()))
    stages = min(len(setup.devices), max(len(costs.layers) for costs in by_kind.values()))
    most = _MOST_MICRO // stages
    if wanted is not None and not measured:
        raise ConfigError(
            f"--micro-batches: found {wanted}, but these costs hold none of backpropagation on every kind of device; "
            "leave it out, or measure again"
        )
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"--micro-batches: {wanted} on up to {stages} stages are too many to simulate; expected at most {most} "
            "with so many stages"
        )
    if wanted is not None and wanted not in measured:
        raise ConfigError(
            f"--micro-batches: found {wanted}, but what they cost was measured for {_span(sorted(measured))}; leave it "
            "out for the best of these, or measure again"
        )
    taken = measured if wanted is None else {1, wanted}
    return {
        number: {kind: costs.backprop[number] for kind, costs in by_kind.items()}
        for number in sorted(taken)
        if number <= most
    }


def _some(most: int) -> list[int]:
    """All numbers up to ``most``, or some of them, closer together where they are small."""
    if most <= _POINTS:
        return list(range(1, most + 1))
    return sorted({round(most ** (number / (_POINTS - 1))) for number in range(_POINTS)})


def _span(numbers: Sequence[int]) -> str:
    """Numbers as briefly as can be: ``3``, ``0-5``, or ``0, 2, 7``."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return str(first)
    return f"{first}-{last}" if list(numbers) == list(range(first, last + 1)) else ", ".join(map(str, numbers))
