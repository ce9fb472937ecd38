"""``pipeal plan``: what training would take on devices that one may not have yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeal.cli.text import PRESETS
from pipeal.core.errors import ConfigError
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.planning.measure.contention import contention_of
from pipeal.planning.pure.candidates import Setup, share_of
from pipeal.planning.pure.layer_cost import Costs, LayerCost, save_costs
from pipeal.run.plan_costs import Wanted, deepened, load_all, measure_model
from pipeal.run.plan_devices import devices_of, link_of
from pipeal.run.plan_forecasts import Plan

QUEUE_DEPTH = 2
"""Where no configuration says otherwise."""

_MOST_GROUPS = 100_000
"""Devices times those of a stage: what the search for a layout can go through while one waits."""

_count = click.IntRange(min=1, max=10**9)
_few = click.IntRange(min=1, max=2_000)


@click.command(context_settings={"max_content_width": 110, "show_default": True})
@click.option("--dataset", help="A data set as training takes it.  [default: embedded data, which need no download]")
@click.option("--model", help="A model as training takes it.  [default: transformer]")
@click.option("--preset", type=click.Choice(PRESETS), help="Sizes of charlm, as training takes them.")
@click.option(
    "--costs", "cost_files", multiple=True, metavar="FILE", help="Saved costs instead; one per kind of device."
)
@click.option("--devices", default="8", help="How many, or how many of each kind: a100*4,cpu*2.")
@click.option("--device-speed", default="1", help="How many times as fast as measured: one number, or one per device.")
@click.option("--memory", metavar="GIB", help="Of a device: one number, or one per device.  [default: enough]")
@click.option("--link", type=float, metavar="GB/S", help="Between devices.  [default: takes no time]")
@click.option("--latency", type=float, default=0.0, metavar="US", help="Of a message over a link, in microseconds.")
@click.option(
    "--replicas",
    type=_count,
    default=1,
    help="Pipelines that share the devices, each on whole batches of its own, and average gradients over the link: a "
    "layer's while others of its stage go backward (in backpropagation, with the last micro-batch), as in a run; with "
    "--share-cores after all of them, as work of the cores.",
)
@click.option("--stage-replicas", type=_few, default=1, help="Devices that may share one slow stage.")
@click.option("--share-cores", is_flag=True, help="The devices are this machine's cores, and stages share them.")
@click.option("--layers", type=_few, help="As if the AL form had so many, the later ones repeated.")
@click.option("--batches", type=_count, default=1000, help="How long the run is, for each replica.")
@click.option(
    "--micro-batches", type=_few, help="Into which pipelined backpropagation cuts a batch.  [default: what is best]"
)
@click.option("--queue-depth", type=_count, help="Packets that may wait before a stage.  [default: as configured]")
@click.option("--data-root", help="Folder that holds the data sets.  [default: data]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any configuration key, repeatable; config.yaml of a run lists all.",
)
@click.option("--out", default="plan", help="Folder for costs.json, plan.json and plan.png.")
def command(
    dataset: str | None,
    model: str | None,
    preset: str | None,
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
    micro_batches = given["micro_batches"]
    if cost_files:
        asked = {"--dataset": dataset, "--model": model, "--preset": preset, "--data-root": data_root}
        for option, value in {**asked, "--set": " ".join(overrides) or None}.items():
            if value is not None:
                raise ConfigError(f"{option}: found {value} beside --costs, which were measured already; give one")
        by_kind = load_all(cost_files)
    else:
        _check_numbers(**given)
        wanted = Wanted(dataset, model or "transformer", preset, data_root, overrides, given["share_cores"])
        costs, configured = measure_model(wanted, micro_batches)
        given["queue_depth"] = given["queue_depth"] or configured.engine.queue_depth
        folder.mkdir(parents=True, exist_ok=True)
        save_costs(costs, folder / "costs.json")
        by_kind = {costs.kind: costs}
    if layers is not None:
        by_kind = {kind: deepened(costs, layers) for kind, costs in by_kind.items()}
    plan = Plan(by_kind, _setup(by_kind, **given), micro_batches)
    plan.show()
    plan.write(folder)
    click.echo(f"\n{folder / 'plan.png'} shows fewer devices, too; {folder / 'plan.json'} has every figure")


def _setup(by_kind: dict[str, Costs], **given: Any) -> Setup:
    crowding = None
    if given["share_cores"]:
        costs = next(iter(by_kind.values()))
        if len(by_kind) > 1 or not costs.crowding:
            raise ConfigError("--share-cores: these costs say nothing of stages that share cores; measure anew with it")
        crowding = contention_of(costs.crowding)
    devices = devices_of(given["devices"], given["device_speed"], given["memory"], list(by_kind))
    if len(devices) * given["stage_replicas"] > _MOST_GROUPS:
        raise ConfigError(
            f"--stage-replicas: {given['stage_replicas']} of {len(devices)} devices are too many to search; expected "
            f"at most {_MOST_GROUPS // len(devices)} with so many devices"
        )
    return Setup(
        tuple(devices),
        link_of(given["link"], given["latency"]),
        replicas=given["replicas"],
        stage_replicas=given["stage_replicas"],
        batches=given["batches"],
        queue_depth=given["queue_depth"] or QUEUE_DEPTH,
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


def _folder(out: str) -> Path:
    if not out or "\0" in out or (Path(out).exists() and not Path(out).is_dir()):
        raise ConfigError(f"--out: found {out!r}, expected the name of a folder")
    return Path(out)
