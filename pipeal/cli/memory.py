"""``pipeal memory``: what training takes on one device, end to end and layer by layer, and how much of it fits."""

from __future__ import annotations

import os
from typing import Any

import click

from pipeal.cli import entry
from pipeal.cli.options import OVERRIDES, model_options


@click.command(context_settings={"max_content_width": 110, "show_default": True})
@model_options
@click.option(
    "--batch",
    type=click.IntRange(min=1, max=2**24),
    metavar="SAMPLES",
    help="Texts are padded to the length of the largest batch.  [default: the largest of the first 4,096]",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1, max=2**14),
    help="As if the AL form had so many, the later ones repeated.  [default: as they are]",
)
@click.option("--memory", type=float, metavar="GIB", help="Find the largest batch and the greatest depth that fit.")
@click.option("--measure", is_flag=True, help="Also train by each way, in a fresh process, and measure.")
@click.option("--data-root", help="Folder that holds the data sets.  [default: data]")
@OVERRIDES
@click.option("--out", default="memory", help="Folder for memory.json and memory.png.")
def command(**given: Any) -> None:
    """Says what memory training takes, by part.

    Compares backpropagation, backpropagation with activation checkpointing on every block, and Associated Learning
    with all forwards of a stage first, layer by layer, and with layers that are not at work on a disk (CPUs), each on
    one device. Every block is looked at alone, on two batches; depths and batches beyond are computed from that.
    Memory is that above the idle process.
    """
    # Nothing is timed here. Threads of an operator that wait for each other in loops take many times as long where the
    # machine is busy; PyTorch's OpenMP reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with entry.loading():
        from pipeal.run.memory import memory

    memory(**given)
