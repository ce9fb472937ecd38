"""Where a plan's costs come from: a model trained on a few real batches here, or files of an earlier measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pipeal.al.bp_parts import bp_parts
from pipeal.cli.build import Experiment
from pipeal.cli.build_text import text_experiment
from pipeal.cli.build_vision import vision_experiment
from pipeal.cli.choices import sample_batches
from pipeal.cli.options import configure
from pipeal.config import TextConfig, VisionConfig
from pipeal.data import canonical_image_name, canonical_text_name
from pipeal.engine.crowding import measure_crowding
from pipeal.engine.device import fastest_precision
from pipeal.engine.layercost import Costs, LayerCost, load_costs
from pipeal.engine.measure import WARM_UP, measure_in_turns
from pipeal.engine.threads import cores
from pipeal.errors import ConfigError, unknown_name
from pipeal.models import TEXT_MODELS, VISION_MODELS, canonical_text_model, canonical_vision_model
from pipeal.packet import batch_size, pair_of
from pipeal.train.environment import environment

BATCHES = 10
"""Counted, of each round."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        dataset: None for the embedded one.
        model: In any spelling.
        data_root: None for the usual folder.
        overrides: What ``--set`` was given.
        crowds: Whether stages are to share this machine's cores.
    """

    dataset: str | None
    model: str
    data_root: str | None
    overrides: tuple[str, ...]
    crowds: bool


def load_all(paths: Sequence[str]) -> dict[str, Costs]:
    """Saved costs, by kind of device.

    Raises:
        DataError: A file is not there, or not one of costs.
        ConfigError: Two of them are of one kind.
    """
    found: dict[str, Costs] = {}
    for path in paths:
        costs = load_costs(Path(path))
        if costs.kind in found:
            raise ConfigError(f"--costs: {path} holds costs of the kind {costs.kind!r}, as another file does; give one")
        found[costs.kind] = costs
    return found


def measure_model(wanted: Wanted, say: Say) -> Costs:
    """Trains both forms of the model on the first batches of its data, on a GPU if there is one.

    Raises:
        PipealError: As for a training.
    """
    experiment = _experiment(wanted, say)
    config = experiment.config
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    kind = torch.cuda.get_device_name(0) if device != "cpu" else "cpu"
    precision = fastest_precision(device) if config.train.precision == "auto" else config.train.precision
    with closing(experiment.train_batches(config.train.seed)) as feed:
        batches = sample_batches(feed, WARM_UP + BATCHES)
    say(f"measuring {config.dataset} {config.model.name} and its form for backpropagation on {kind}, {precision}")
    package = experiment.package("al", config.train.seed)
    parts = bp_parts(list(experiment.package("bp", config.train.seed)))
    layers, backprop = measure_in_turns([package, parts], batches, device=device, precision=precision)
    crowding: dict[int, float] = {}
    if wanted.crowds:
        if device != "cpu":
            raise ConfigError("--share-cores: stages on a GPU do not share the cores; leave it out")
        numbers = [number for number in (2, 2 * cores()) if number <= len(package)]
        say(f"measuring how much {' and '.join(map(str, numbers)) or 'no'} stages at once slow each other")
        crowding = measure_crowding(package, batches, sorted(set(numbers)), precision=precision)
    facts = {"dataset": config.dataset, "model": config.model.name, "precision": precision, **environment()}
    samples = fmean(batch_size(pair_of(batch)[0]) for batch in batches)
    return Costs(kind, layers, backprop, crowding, samples, facts)


def deepened(costs: Costs, layers: int) -> Costs:
    """As if the model had so many layers: those after the first come again and again.

    Raises:
        ConfigError: There is nothing to repeat.
    """
    if len(costs.layers) < 2 and layers > len(costs.layers):
        raise ConfigError(f"--layers: {layers} of a model of {len(costs.layers)}; expected one with a layer to repeat")
    return replace(costs, layers=_repeated(costs.layers, layers), backprop=_with_head(costs, layers))


def _with_head(costs: Costs, layers: int) -> tuple[LayerCost, ...]:
    """The blocks for backpropagation, repeated likewise; what they have more than AL layers is the head."""
    blocks, head = costs.backprop[: len(costs.layers)], costs.backprop[len(costs.layers) :]
    return (*_repeated(blocks, layers), *head) if blocks else ()


def _repeated(rows: Sequence[LayerCost], count: int) -> tuple[LayerCost, ...]:
    return tuple(islice(chain(rows[:1], cycle(rows[1:])), count))


def _experiment(wanted: Wanted, say: Say) -> Experiment:
    given: dict[str, Any] = {"mode": None, "data_root": wanted.data_root}
    text, vision = (_named(find, wanted.model) for find in (canonical_text_model, canonical_vision_model))
    if text is not None:
        name = canonical_text_name(wanted.dataset or "toynews")
        config = configure(TextConfig, name, text, None, wanted.overrides, given)
        return text_experiment(config, say)
    if vision is None:
        raise ConfigError(unknown_name("model", wanted.model, (*TEXT_MODELS, *VISION_MODELS)))
    name = canonical_image_name(wanted.dataset or "toyimages")
    return vision_experiment(configure(VisionConfig, name, vision, None, wanted.overrides, given), say)


def _named(find: Callable[[str], tuple[str, Any]], model: str) -> tuple[str, None] | None:
    """The canonical name; a spelling that implies a form does not matter, since both are measured."""
    try:
        return find(model)[0], None
    except ConfigError:
        return None
