"""``pipeal plan``: what training would take on devices that one may not have yet."""

from __future__ import annotations

from typing import Any, get_args

import click

from pipeal.cli import entry
from pipeal.cli.options import OVERRIDES, PATH, model_options
from pipeal.core.options import WithinStage

_count = click.IntRange(min=1, max=10**9)
_few = click.IntRange(min=1, max=2_000)


@click.command(context_settings={"max_content_width": 110, "show_default": True})
@model_options
@click.option(
    "--costs",
    "cost_files",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Saved costs instead; one per kind of device.",
)
@click.option("--devices", default="8", help="How many, or how many of each kind: a100*4,cpu*2.")
@click.option("--device-speed", default="1", help="How many times as fast as measured: one number, or one per device.")
@click.option("--memory", metavar="GIB", help="Of a device: one number, or one per device.  [default: enough]")
@click.option(
    "--link",
    metavar="GB/S",
    help="Between devices: one number, or one from each device to the next.  [default: takes no time]",
)
@click.option(
    "--latency",
    default="0",
    metavar="US",
    help="Of a message over a link, in microseconds: likewise one number or all.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(0, 10),
    default=0.0,
    metavar="SHARE",
    help="Of the steps: their standard deviation over their mean.",
)
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
@click.option(
    "--queue-depth",
    type=click.IntRange(min=0, max=10**9),
    help="Packets that may wait before a stage; 0: as many as its link needs, as in `pipeal line`, and "
    "without their memory.  "
    "[default: as configured]",
)
@click.option(
    "--within-stage", type=click.Choice(get_args(WithinStage)), help="Order of layers.  [default: as configured]"
)
@click.option("--data-root", help="Folder that holds the data sets.  [default: data]")
@OVERRIDES
@click.option("--out", default="plan", help="Folder for costs.json, plan.json and plan.png.")
def command(**given: Any) -> None:
    """Forecasts training on any number of devices.

    Measures what each layer of a model costs here, on a few real batches; finds the stages for the devices asked for
    that are best; and simulates every schedule of Associated Learning, and of pipelined backpropagation, on them.
    Where there is no GPU here, a device is one core.
    """
    with entry.loading():
        from pipeal.run.plan import plan

    plan(**given)
