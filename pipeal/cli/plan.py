"""``pipeal plan``: what training would take on devices that one may not have yet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeal.cli.plan_costs import Wanted, deepened, load_all, measure_model
from pipeal.cli.plan_devices import devices_of, link_of
from pipeal.engine.allocator import keep_freed_memory
from pipeal.engine.crowding import crowding_of
from pipeal.engine.forecast import Forecast, Setup, alone_s, forecast, lay_out, methods, on_fewer, share_of
from pipeal.engine.layercost import Costs, LayerCost, save_costs
from pipeal.engine.layout import Layout
from pipeal.errors import ConfigError, PlacementError
from pipeal.train.plan_plot import draw_plan
from pipeal.train.recorders import write_json
from pipeal.train.tables import print_table

_POINTS = 16
"""Of a curve, at most."""

CostsByForm = dict[str, dict[str, Sequence[LayerCost]]]
"""``AL`` and ``BP``, by kind of device."""

_MOST_GROUPS = 100_000
"""Devices times those of a stage: what the search for a layout can go through while one waits."""

_MOST_MICRO = 64_000
"""Stages times micro-batches: what can be simulated while one waits."""

_count = click.IntRange(min=1, max=10**9)
_few = click.IntRange(min=1, max=2_000)


@click.command(context_settings={"max_content_width": 110, "show_default": True})
@click.option("--dataset", help="A data set as training takes it.  [default: embedded data, which need no download]")
@click.option("--model", default="transformer", help="A model as training takes it.")
@click.option(
    "--costs", "cost_files", multiple=True, metavar="FILE", help="Saved costs instead; one per kind of device."
)
@click.option("--devices", default="8", help="How many, or how many of each kind: a100*4,cpu*2.")
@click.option("--device-speed", default="1", help="How many times as fast as measured: one number, or one per device.")
@click.option("--memory", metavar="GIB", help="Of a device: one number, or one per device.  [default: enough]")
@click.option("--link", type=float, metavar="GB/S", help="Between devices.  [default: takes no time]")
@click.option("--latency", type=float, default=0.0, metavar="US", help="Of a message over a link, in microseconds.")
@click.option("--replicas", type=_count, default=1, help="Pipelines that share the devices and average gradients.")
@click.option("--stage-replicas", type=_few, default=1, help="Devices that may share one slow stage.")
@click.option("--share-cores", is_flag=True, help="The devices are this machine's cores, and stages share them.")
@click.option("--layers", type=_few, help="As if the AL form had so many, the later ones repeated.")
@click.option("--batches", type=_count, default=1000, help="How long the run is, for each replica.")
@click.option("--micro-batches", type=_few, default=8, help="Into which pipelined backpropagation cuts a batch.")
@click.option("--queue-depth", type=_count, default=2, help="Packets that may wait before a stage.")
@click.option("--data-root", help="Folder that holds the data sets.  [default: data]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any configuration key, repeatable.")
@click.option("--out", default="plan", help="Folder for costs.json, plan.json and plan.png.")
def command(
    dataset: str | None,
    model: str,
    cost_files: tuple[str, ...],
    layers: int | None,
    data_root: str | None,
    overrides: tuple[str, ...],
    out: str,
    **given: Any,
) -> None:
    """Forecasts training on any number of devices.

    Measures what each layer of a model costs here, on a few real batches; finds the stages for the devices asked for
    that are best; and simulates every schedule of Associated Learning, and of pipelined backpropagation, on them.
    Where there is no GPU here, a device is one core.
    """
    folder = _folder(out)
    keep_freed_memory()
    if cost_files:
        if dataset is not None:
            raise ConfigError("--dataset: found one beside --costs, which were measured already; give one of the two")
        by_kind = load_all(cost_files)
        _setup(by_kind, **given)  # what does not fit is told before anything is done
    else:
        _check_numbers(**given)
        costs = measure_model(Wanted(dataset, model, data_root, overrides, given["share_cores"]), _say)
        folder.mkdir(parents=True, exist_ok=True)
        save_costs(costs, folder / "costs.json")
        by_kind = {costs.kind: costs}
    if layers is not None:
        by_kind = {kind: deepened(costs, layers) for kind, costs in by_kind.items()}
    plan = _Plan(by_kind, _setup(by_kind, **given))
    plan.show()
    plan.write(folder)
    click.echo(f"\n{folder / 'plan.png'} shows fewer devices, too; {folder / 'plan.json'} has every figure")


@dataclass
class _Plan:
    """The forecasts for all devices, and for fewer."""

    by_kind: dict[str, Costs]
    setup: Setup

    def __post_init__(self) -> None:
        self.costs: CostsByForm = {"AL": {kind: costs.layers for kind, costs in self.by_kind.items()}}
        if all(costs.backprop for costs in self.by_kind.values()):
            self.costs["BP"] = {kind: costs.backprop for kind, costs in self.by_kind.items()}
        self.notes: list[str] = []
        self.layout = lay_out(self.costs["AL"], self.setup)
        self.forecasts = self._forecasts(self.setup, self.notes)
        first = self.setup.devices[0]
        self.alone = {form: alone_s(costs, first) for form, costs in self.costs.items()}
        each = len(share_of(self.setup))
        self.curves: dict[str, list[tuple[int, float]]] = {}
        for count in _some(each):
            fewer = on_fewer(self.setup, count)
            for found in self._forecasts(fewer, []):
                gain = self.alone["AL"] / found.batch_s
                self.curves.setdefault(found.method, []).append((len(fewer.devices), gain))

    def _forecasts(self, setup: Setup, notes: list[str]) -> list[Forecast]:
        found = []
        layouts: dict[str, Layout] = {}
        for method, schedule in methods(setup.micro_batches).items():
            form = method[:2]
            if form not in self.costs:
                continue
            try:
                layouts[form] = layouts.get(form) or lay_out(self.costs[form], setup)
            except PlacementError as error:
                notes.append(f"{method}: {error}")
                continue
            found.append(forecast(method, schedule, self.costs[form], setup, layouts[form]))
        return found

    def show(self) -> None:
        """Prints the forecasts and the stages."""
        setup, alone = self.setup, self.alone
        replicas = f", {setup.replicas} replicas" if setup.replicas > 1 else ""
        columns = ["method", "stages", "devices", "ms/batch", "× AL on one", "× BP on one", "idle", "least busy", "MiB"]
        print_table(
            f"{len(setup.devices)} device{'s' * (len(setup.devices) > 1)}{replicas}, {setup.batches} batches each",
            columns,
            [
                [
                    found.method,
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
            f"The stages of AL{order}" + (", in each replica" if replicas else ""),
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
        if any(len(stage.devices) > 1 for stage in self.layout.stages):
            click.echo("a stage on several devices is a forecast: a run has every stage as often (--replicas)")
        for note in self.notes:
            click.echo(note)
        if "BP" in self.costs and setup.micro_batches > 1:
            click.echo("a micro-batch of BP is taken to cost its share of the batch and no more, which favours BP")

    def write(self, folder: Path) -> None:
        """Leaves ``plan.json`` and ``plan.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", self._figures())
        facts = next(iter(self.by_kind.values())).facts
        what = " ".join(str(facts[key]) for key in ("dataset", "model") if key in facts)
        title = f"{what or 'plan'}, {len(self.costs['AL'][self.setup.devices[0].kind])} AL layers"
        draw_plan(self.curves, folder / "plan.png", title, "sequential AL on one device")

    def _figures(self) -> dict[str, Any]:
        return {
            "facts": {kind: dict(costs.facts) for kind, costs in self.by_kind.items()},
            "devices": len(self.setup.devices),
            "replicas": self.setup.replicas,
            "one_device_s": self.alone,
            "forecasts": [
                {
                    "method": found.method,
                    "devices": found.devices,
                    "batch_s": found.batch_s,
                    "gain": self.alone["AL"] / found.batch_s,
                    "idle": found.bubble,
                    "sizes": found.layout.sizes,
                    "busy": list(found.busy),
                    "memory_bytes": list(found.memory_bytes),
                }
                for found in self.forecasts
            ],
            "stages": [
                {
                    "layers": list(stage.layers),
                    "devices": list(stage.devices),
                    "kind": stage.device.kind,
                    "seconds": stage.seconds,
                    "sends_s": stage.sends_s,
                    "memory_bytes": stage.memory_bytes,
                }
                for stage in self.layout.stages
            ],
            "curves": self.curves,
        }


def _setup(by_kind: dict[str, Costs], **given: Any) -> Setup:
    crowding = None
    if given["share_cores"]:
        costs = next(iter(by_kind.values()))
        if len(by_kind) > 1 or not costs.crowding:
            raise ConfigError("--share-cores: these costs say nothing of stages that share cores; measure anew with it")
        crowding = crowding_of(costs.crowding)
    devices = devices_of(given["devices"], given["device_speed"], given["memory"], list(by_kind))
    if len(devices) * given["stage_replicas"] > _MOST_GROUPS:
        raise ConfigError(
            f"--stage-replicas: {given['stage_replicas']} of {len(devices)} devices are too many to search; expected "
            f"at most {_MOST_GROUPS // len(devices)} with so many devices"
        )
    stages = min(len(devices), max(len(costs.layers) for costs in by_kind.values()))
    if stages * given["micro_batches"] > _MOST_MICRO:
        raise ConfigError(
            f"--micro-batches: {given['micro_batches']} on up to {stages} stages are too many to simulate; expected at "
            f"most {_MOST_MICRO // stages} with so many stages"
        )
    return Setup(
        tuple(devices),
        link_of(given["link"], given["latency"]),
        replicas=given["replicas"],
        stage_replicas=given["stage_replicas"],
        batches=given["batches"],
        queue_depth=given["queue_depth"],
        micro_batches=given["micro_batches"],
        crowding=crowding,
    )


def _check_numbers(**given: Any) -> None:
    """Before minutes go by: all that can be told without costs. Kinds cannot, where they are yet to be measured."""
    if not given["devices"].isascii() or not given["devices"].isdigit():
        raise ConfigError(
            f"--devices: found {given['devices']!r}; expected a number, since kinds have names in --costs"
        )
    setup_given = {**given, "share_cores": False}
    share_of(_setup({"any": Costs("any", (LayerCost(0.0, 0.0),))}, **setup_given))


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


def _folder(out: str) -> Path:
    if not out or "\0" in out or (Path(out).exists() and not Path(out).is_dir()):
        raise ConfigError(f"--out: found {out!r}, expected the name of a folder")
    return Path(out)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
