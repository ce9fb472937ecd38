"""What a method costs, for methods.py: by counting, the same on every machine, and by the clock, in turns with BP."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from methods_rows import Contestant, Facts, cost_key
from torch import nn

from pipeal.config import RunConfig
from pipeal.core.errors import PlacementError
from pipeal.core.methods import BASELINE
from pipeal.core.tree import batch_size
from pipeal.engine import SCHEDULES
from pipeal.methods.al import ALPackage
from pipeal.planning.pure.forecast import RIVALS, Forecast, Model, best_forecast, forecast
from pipeal.planning.pure.hardware import PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.reporting.environment import environment
from pipeal.run.build import Experiment
from pipeal.run.form_costs import COUNTING, form_costs
from pipeal.run.grid import Setting, with_setting
from pipeal.run.opening import engine_options
from pipeal.run.plan_costs import first_pairs, measure_beside_backprop


class Form(NamedTuple):
    """A contestant in so many parts, with a setting."""

    contestant: Contestant
    parts: int | None
    setting: Setting

    @classmethod
    def of(cls, key: str) -> Form:
        """The form that a key of costs names."""
        name, parts, setting = json.loads(key)
        return cls(Contestant.of(name), parts, setting)

    @property
    def key(self) -> str:
        """Where its costs stand."""
        return cost_key(self.contestant.name, self.parts, self.setting)

    def config(self, base: RunConfig) -> RunConfig:
        """Its configuration."""
        mine = with_setting(base, self.setting)
        model, train = replace(mine.model, parts=self.parts), replace(mine.train, mode=self.contestant.method.name)
        return replace(mine, model=model, train=train)


def counted(experiment: Experiment, form: Form) -> Facts:
    """FLOPs, parameters and bytes, on one device that holds the activations of one part at a time, and by which rules.

    Parameters of inference are those of the exported model; what is trained beside them counts as training's alone.
    """
    config = form.config(experiment.config)
    under = experiment.under(config)
    package = ALPackage(under.layers(config.train.mode, config.train.seed, here=()))
    every = package.effective_parameters() + package.affiliated_parameters()
    at_inference = every if form.contestant.method.is_whole else _numbers(package.to_bp())
    engine = replace(config.engine, sizes=(len(package),))
    return {
        **form_costs(under, replace(config, engine=engine)).summary(),
        "inference_parameters": at_inference,
        "training_only_parameters": every - at_inference,
        "counting": COUNTING,
    }


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def timed(experiment: Experiment, forms: Sequence[Form], parts: int) -> dict[str, Facts]:
    """By the keys of some forms, their seconds per batch and a forecast for as many devices as there are parts.

    All are measured in turns with BP, whose figures stand beside them: on a machine that does other work as well, what
    counts is their ratio. Devices of a forecast are as fast as this one alone, and links take no time.

    Args:
        experiment: With data and configuration.
        forms: In so many parts each, or whole.
        parts: How many devices there are to be; BP takes at most one for each block of its network.
    """
    config = experiment.config
    device, precision = config.engine.devices[0], config.train.precision
    assert precision != "auto"  # chosen by now
    others = [form for form in forms if form.contestant.name != BASELINE.name]
    own = [form.config(config) for form in others]
    packages = [experiment.under(one).package(one.train.mode, config.train.seed) for one in own]
    whole = experiment.package(BASELINE.name, config.train.seed)
    batches, load = first_pairs(experiment), os.getloadavg()[0]
    (bp, *rows), blocks = measure_beside_backprop(
        experiment, [whole, *packages], batches, engine_options(config, precision), device
    )
    by_key = {form.key: layers for form, layers in zip(others, rows, strict=True)}
    samples = fmean(batch_size(x) for x, _ in batches)
    setup = Setup((PlannedDevice(),) * parts)
    rival = _backprop(blocks, setup)
    beside = {
        "bp_batch_s": sum(row.seconds for row in bp),
        "bp_forecast_s": rival.batch_s,
        "bp_micro_batches": rival.micro_batches,
        "devices": parts,
        "load": load,
        "machine": machine(config),
    }
    found = {}
    for form in forms:
        layers = by_key.get(form.key, bp)
        if form.contestant.method.is_whole:
            own_forecast = rival
            sent = [blocks[1][stage.layers.stop - 1].mean_out_bytes for stage in rival.layout.stages[:-1]]
            between = 2.0 * sum(sent)  # a gradient comes back for what goes forward
        else:
            own_forecast = forecast(form.contestant.name, SCHEDULES["pipelined"], {"cpu": layers}, setup)
            between = float(sum(row.mean_out_bytes for row in layers[:-1]))
        found[form.key] = {
            "batch_s": sum(row.seconds for row in layers),
            "forecast_s": own_forecast.batch_s,
            "forecast_device_bytes": max(own_forecast.memory_bytes),
            "between_parts_bytes": between / samples,
            **beside,
        }
    return found


def _backprop(blocks: dict[int, tuple[LayerCost, ...]], setup: Setup) -> Forecast:
    """The fastest way to train by backpropagation on some devices."""
    model = Model({}, {number: {"cpu": rows} for number, rows in blocks.items()})
    found = []
    for name in RIVALS:
        try:
            found.append(best_forecast(name, model, setup))
        except PlacementError:  # of one without micro-batches where these were measured alone
            continue
    return min(found, key=lambda one: one.batch_s)


def machine(config: RunConfig) -> dict[str, Any]:
    """Where a figure is from."""
    threads = config.engine.threads or torch.get_num_threads()
    return {**environment(), "device": config.engine.devices[0], "threads": threads}
