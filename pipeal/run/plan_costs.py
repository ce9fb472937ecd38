"""Where a plan's costs come from: a model trained on a few real batches here, or files of an earlier measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pipeal.config import RunConfig, leaves
from pipeal.config.load import parsed_override
from pipeal.core.errors import ConfigError
from pipeal.core.methods import BASELINE, DEFAULT
from pipeal.core.options import EngineOptions
from pipeal.core.samples import pair_of
from pipeal.core.tree import Tree, batch_size
from pipeal.engine.devices import fastest_precision
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.parts import UncuttableError, cut, samples_in
from pipeal.methods.al import ALPackage
from pipeal.methods.bp_parts import bp_parts
from pipeal.planning.measure.contention import crowds, measure_contention
from pipeal.planning.measure.layers import WARM_UP, measure_in_turns
from pipeal.planning.pure.layer_cost import Costs, LayerCost, load_costs, repeated, takes_no_time
from pipeal.reporting.environment import environment
from pipeal.run.build import Experiment
from pipeal.run.build_language import language_experiment
from pipeal.run.build_text import text_experiment
from pipeal.run.build_vision import vision_experiment
from pipeal.run.choices import sample_batches
from pipeal.run.configure import named_config
from pipeal.run.opening import engine_options

_log = logging.getLogger(__name__)

BATCHES = 10
"""Counted, of each round."""

MICRO_BATCHES = (2, 4, 8, 16, 32)
"""Into so many, backpropagation is tried to cut a batch."""

PLANNED = {
    "engine.devices": "--devices",
    "engine.replicas": "--replicas",
    "engine.sizes": "none: layers are laid out by what they cost",
    "engine.schedule": "none: all of them are forecast",
    "train.mode": "none: both forms are measured",
    "train.methods": "none: both forms are measured",
}
"""Keys of a configuration that a plan chooses, and what to give instead."""


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        dataset: None for the embedded one.
        model: In any spelling; None for the transformer.
        preset: Of a language model's sizes; None for those of the lesson.
        data_root: None for the usual folder.
        overrides: What ``--set`` was given.
    """

    dataset: str | None
    model: str | None
    preset: str | None
    data_root: str | None
    overrides: tuple[str, ...]


def load_all(paths: Sequence[str]) -> dict[str, Costs]:
    """Saved costs, by kind of device.

    Raises:
        DataError: A file is not there, or not one of costs.
        ConfigError: Two of them are of one kind of device, or not of one model trained on the same batches.
    """
    found: dict[str, Costs] = {}
    for path in paths:
        costs = load_costs(Path(path))
        if costs.kind in found:
            raise ConfigError(f"--costs: {path} holds costs of the kind {costs.kind!r}, as another file does; give one")
        for other in found.values():
            _require_alike(paths[0], other, path, costs)
        found[costs.kind] = costs
    return found


def _require_alike(first: str, one: Costs, path: str, other: Costs) -> None:
    """Precision and versions may differ from device to device; what is trained may not."""
    for what, (before, now) in {
        **{f"the {key}": (one.facts.get(key), other.facts.get(key)) for key in ("dataset", "model", "packet")},
        "samples in a batch": (one.samples, other.samples),
        "AL layers": (len(one.layers), len(other.layers)),
        "bytes of weights in each layer": tuple(
            [row.parameter_bytes for row in costs.layers] for costs in (one, other)
        ),
    }.items():
        if before != now:
            raise ConfigError(f"--costs: {first} and {path} are of different models: {what}: {before} and {now}")


def measure_model(wanted: Wanted, micro_batches: int | None, *, crowding: bool) -> tuple[Costs, RunConfig]:
    """Trains both forms of the model on the first batches of its data, on a GPU if there is one.

    Args:
        wanted: Which model.
        micro_batches: Into how many backpropagation is to cut a batch; None for some numbers to choose from.
        crowding: Whether stages are to share this machine's cores.

    Returns:
        The costs, and the configuration that they are of.

    Raises:
        PipealError: As for a training.
    """
    refuse_chosen(wanted.overrides, PLANNED)
    experiment = experiment_of(wanted)
    config = experiment.config
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    _require_measurable(config, device, crowding)
    return costs_of(experiment, device, micro_batches, crowding=crowding), config


def costs_of(
    experiment: Experiment, device: str, micro_batches: int | None = None, *, crowding: bool = False, **how: Any
) -> Costs:
    """Trains both forms of an experiment's model on its first batches, in turns.

    Args:
        experiment: Of which model and data.
        device: Where to measure.
        micro_batches: As for :func:`measure_model`.
        crowding: Whether to measure, too, how much stages that share this machine's cores slow each other.
        how: ``rounds`` and ``alone``, as for :func:`pipeal.planning.measure.layers.measure_in_turns`.

    Raises:
        ConfigError: As :func:`measure_beside_backprop`.
    """
    config = experiment.config
    kind = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
    precision = fastest_precision(device) if config.train.precision == "auto" else config.train.precision
    package = experiment.package(DEFAULT.name, config.train.seed)
    if crowding and len(package) < 2:
        raise ConfigError("--share-cores: the model has one layer, so that no two stages share cores; leave it out")
    batches = first_pairs(experiment)
    _log.info(f"measuring {config.dataset} {config.model.name} and its form for backpropagation on {kind}, {precision}")
    options = engine_options(config, precision)
    (layers,), blocks = measure_beside_backprop(experiment, [package], batches, options, device, micro_batches, **how)
    slowed: dict[int, float] = {}
    if crowding:
        numbers = " and ".join(map(str, crowds(len(package)))) or "no"
        _log.info(f"measuring how much {numbers} stages at once slow each other")
        slowed = measure_contention(package, batches, crowds(len(package)), options=options)
    facts = {
        "dataset": config.dataset,
        "model": config.model.name,
        "precision": precision,
        "compile": options.compile,
        "threads": options.threads or 1,
        "matmul": config.engine.matmul,
        "packet": options.packet,
        **environment(),
    }
    return Costs(kind, layers, blocks, slowed, fmean(batch_size(x) for x, _ in batches), facts)


def first_pairs(experiment: Experiment) -> list[tuple[Tree, Tree]]:
    """The first training batches, as many as costs are measured with: some to warm up, and :data:`BATCHES`."""
    with closing(experiment.train_batches(experiment.config.train.seed)) as feed:
        return [pair_of(batch) for batch in sample_batches(feed, WARM_UP + BATCHES)]


def measure_beside_backprop(
    experiment: Experiment,
    packages: Sequence[ALPackage],
    batches: Sequence[tuple[Tree, Tree]],
    options: EngineOptions,
    device: str,
    micro_batches: int | None = None,
    *,
    rounds: int = 3,
    alone: bool = False,
) -> tuple[list[tuple[LayerCost, ...]], dict[int, tuple[LayerCost, ...]]]:
    """What layers cost, and the blocks of the same network for backpropagation, in turns.

    Args:
        experiment: Makes the form for backpropagation.
        packages: Forms of its model; copies of them are trained.
        batches: Of :func:`first_pairs`.
        options: How they will be run.
        device: Where to measure.
        micro_batches: Into how many backpropagation is to cut a batch; None for some numbers to choose from.
        rounds: As for :func:`pipeal.planning.measure.layers.measure_in_turns`; one where something is compiled for it.
        alone: Likewise.

    Returns:
        The costs of each package's layers; and by the number of micro-batches, what one of them costs each block.

    Raises:
        ConfigError: The network is no row of blocks, or a batch cannot be cut into so many.
    """
    samples = [batch_size(x) for x, _ in batches]
    cuts = _cuts(micro_batches, min(samples))
    parts = bp_parts(list(experiment.package(BASELINE.name, experiment.config.train.seed)))
    cut_up = [[_micro_batch(batch, number) for batch in batches] for number in cuts]
    found = measure_in_turns(
        [*((package, batches) for package in packages), *((parts, pieces) for pieces in cut_up)],
        # Backpropagation hands on what it is: a gradient comes back through it.
        [*(options for _ in packages), *(replace(options, packet="as_is") for _ in cut_up)],
        device=device,
        rounds=rounds if options.compile == "none" else 1,  # each compiles again
        **({"alone": True} if alone else {}),
    )
    forms, backprop = found[: len(packages)], found[len(packages) :]
    blocks = {
        number: _in_the_mean(rows, backprop[0], samples[WARM_UP:], number)
        for rows, number in zip(backprop, cuts, strict=True)
    }
    return forms, blocks


def _require_measurable(config: RunConfig, device: str, crowding: bool) -> None:
    """Before minutes go by: refuses what a plan has no words for, and stages that cannot share cores."""
    engine, accumulate = config.engine, config.train.accumulate
    if accumulate > 1:
        raise ConfigError(
            f"train.accumulate: found {accumulate}, but a plan has an update after every batch; expected 1"
        )
    wrong = {
        "stages on a GPU do not share the cores; leave it out": device != "cpu",
        f"found engine.threads={engine.threads}; expected 1 for stages that share cores": (engine.threads or 1) > 1,
        f"found engine.compile={engine.compile}; expected none, or a plan without it": engine.compile != "none",
    }
    for why, is_so in wrong.items():
        if crowding and is_so:
            raise ConfigError(f"--share-cores: {why}")
    check_compile(engine.compile, [torch.device(device)])


def _cuts(wanted: int | None, fewest: int) -> list[int]:
    """Into how many micro-batches a batch is cut: not at all, and as asked, or into some numbers to choose from.

    Raises:
        ConfigError: The smallest batch has fewer samples than that.
    """
    if wanted is not None and wanted > fewest:
        raise ConfigError(
            f"--micro-batches: {wanted} of a batch of {fewest} samples; expected at most one for each sample"
        )
    if wanted is not None:
        return sorted({1, wanted})
    # Of two samples at least: of one, batch norm has no variance.
    return sorted({1, *(number for number in MICRO_BATCHES if 2 * number <= fewest)})


def _micro_batch(batch: Any, count: int) -> Any:
    """The first of so many parts of a batch, as even as they can be: the largest, which decides about memory.

    Raises:
        ConfigError: The batch cannot be cut.
    """
    if count == 1:
        return batch
    try:
        samples = samples_in(batch)
    except UncuttableError as error:
        raise ConfigError(f"--micro-batches: a batch cannot be cut: {error}; expected 1") from error
    return cut(batch, range(ceil(samples / count)))


def _in_the_mean(
    rows: Sequence[LayerCost], wholes: Sequence[LayerCost], samples: Sequence[int], count: int
) -> tuple[LayerCost, ...]:
    """From what the largest of so many parts of each batch cost, what its parts cost in the mean: all of them together
    have the samples of the batch and no more. Seconds are on the line through those of the largest part and of the
    whole batch, so that what every part takes for itself, however small, counts in full.

    >>> whole, largest = LayerCost(9.0, 18.0), LayerCost(4.0, 8.0, update_s=1.0, activation_bytes=300)
    >>> _in_the_mean([largest], [whole], [8], 3)[0]  # of 3, 3 and 2 samples, each 1 s and 2 s; 1 s and 2 s for itself
    LayerCost(forward_s=3.66..., backward_s=7.33..., update_s=1.0, ..., activation_bytes=300, mean_out_bytes=0)
    """
    all_of_it, largest = fmean(samples), fmean(ceil(own / count) for own in samples)
    mean = all_of_it / count

    def mean_s(largest_s: float, whole_s: float) -> float:
        each_s = (whole_s - largest_s) / (all_of_it - largest) if largest < all_of_it else 0.0
        return largest_s - (largest - mean) * min(max(each_s, 0.0), largest_s / largest)

    return tuple(
        replace(
            row,
            forward_s=mean_s(row.forward_s, whole.forward_s),
            backward_s=mean_s(row.backward_s, whole.backward_s),
            mean_out_bytes=round(row.mean_out_bytes * mean / largest),
        )
        for row, whole in zip(rows, wholes, strict=True)
    )


def refuse_chosen(overrides: Sequence[str], chosen: Mapping[str, str], what: str = "a plan finds") -> None:
    """Refuses keys of the configuration that a command chooses by itself.

    Args:
        overrides: What ``--set`` was given.
        chosen: By key, what to give instead.
        what: Who chooses them.

    Raises:
        ConfigError: One of them is among these, or is no key, ``=`` and YAML.
    """
    for key, value in map(parsed_override, overrides):
        for leaf, _ in leaves({key: value}):
            if leaf in chosen:
                raise ConfigError(f"--set: found {leaf}, which {what} by itself; expected {chosen[leaf]}")


def deepened(costs: Costs, layers: int) -> Costs:
    """As if the model had so many layers: those after the first come again and again.

    Raises:
        ConfigError: There is nothing to repeat, or the first layers alone take no time.
    """
    before = len(costs.layers)
    found = replace(
        costs,
        layers=repeated(costs.layers, layers, of=before),
        backprop={number: repeated(rows, layers, of=before) for number, rows in costs.backprop.items()},
    )
    if takes_no_time(found):
        raise ConfigError(f"--layers: found {layers}, but the first {layers} of {before} take no time; expected more")
    return found


def experiment_of(wanted: Wanted) -> Experiment:
    """The data and the model that are asked for.

    Raises:
        PipealError: As for a training.
    """
    # Whatever form a spelling implies: both are measured.
    kind, config = named_config(
        wanted.dataset,
        wanted.model,
        wanted.preset,
        None,
        wanted.overrides,
        {"data.root": wanted.data_root},
        any_form=True,
    )
    read: Mapping[str, Callable[[Any], Experiment]] = {
        "language": language_experiment,
        "text": text_experiment,
        "vision": vision_experiment,
    }
    return read[kind](config)
