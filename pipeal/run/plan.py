"""A plan for devices that one may not have yet: costs, measured or saved, and what each schedule makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pipeal.core.errors import ConfigError
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.planning.pure.layer_cost import save_costs
from pipeal.reporting.page import is_run, require_no_part
from pipeal.run.find_run import require_out
from pipeal.run.plan_costs import Wanted, deepened, load_all, measure_model
from pipeal.run.plan_forecasts import Plan
from pipeal.run.plan_setup import check_numbers, setup_of


def plan(
    *,
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
    """Makes a plan, shows it, and leaves it in a folder.

    Args:
        dataset: What to measure on; of the arguments, as of those below, ``pipeal plan --help`` tells.
        model: What to measure.
        preset: Its sizes.
        cost_files: Costs that were measured already, instead.
        layers: As if there were so many.
        data_root: The folder that holds the data sets.
        overrides: What ``--set`` was given.
        out: The folder.
        given: What is planned for: devices, links, replicas, how long the run is.

    Raises:
        PipealError: One of them does not fit; nothing has been written then.
    """
    folder = folder_for(out)
    keep_freed_memory()
    micro_batches = given["micro_batches"]
    if cost_files:
        asked = {"--dataset": dataset, "--model": model, "--preset": preset, "--data-root": data_root}
        for option, value in {**asked, "--set": " ".join(overrides) or None}.items():
            if value is not None:
                raise ConfigError(f"{option}: found {value} beside --costs, which were measured already; give one")
        by_kind = load_all(cost_files)
    else:
        check_numbers(given)
        wanted = Wanted(dataset, model, preset, data_root, overrides)
        costs, configured = measure_model(wanted, micro_batches, crowding=given["share_cores"])
        for key in ("queue_depth", "within_stage"):
            if given[key] is None:
                given[key] = getattr(configured.engine, key)
        save_costs(costs, folder / "costs.json")
        by_kind = {costs.kind: costs}
    if layers is not None:
        by_kind = {kind: deepened(costs, layers) for kind, costs in by_kind.items()}
    found = Plan(by_kind, setup_of(by_kind, given), micro_batches)
    found.show()
    found.write(folder)
    click.echo(f"\n{folder / 'plan.png'} shows fewer devices, too; {folder / 'plan.json'} has every figure")


def folder_for(out: str) -> Path:
    """The folder that ``--out`` names, which need not be there.

    Raises:
        ConfigError: It is no name of a folder; or a run is there, which has a ``costs.json`` of its own, or what a run
            has in its folder.
    """
    if not out or "\0" in out:
        raise ConfigError(f"--out: found {out!r}, expected the name of a folder")
    require_out(out)
    if is_run(Path(out)):
        raise ConfigError(f"--out {out}: a run is there; choose another")
    require_no_part(Path(os.path.realpath(out)), [])  # what is written goes into the folder that a link leads to
    return Path(out)
