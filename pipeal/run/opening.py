"""What a configuration with every choice made stands for: a pipeline, a course of training, batches to trace."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipeal.config import EngineConfig, RunConfig
from pipeal.core.methods import METHODS
from pipeal.core.names import BACKPROP_SCHEDULES
from pipeal.core.options import EngineOptions, Precision
from pipeal.core.protocols import TrainableLayer
from pipeal.data import EpochBatches
from pipeal.engine import Pipeline, Window
from pipeal.engine.runner.precision import make_ready
from pipeal.engine.schedule import Schedule, schedule_named
from pipeal.engine.state.layer_state import State, load_layer_state
from pipeal.run.build import Experiment, Models
from pipeal.training.learning_rate import Course
from pipeal.training.position import Position

TRACE_FROM = 10
"""The batch from which the timeline is recorded: the pipeline is full by then."""


def open_pipeline(
    model: Iterable[TrainableLayer],
    config: RunConfig,
    seed: int,
    first_batch: int = 0,
    traced: Window | None = None,
    dump_folder: Path | None = None,
) -> Pipeline:
    """The pipeline that a configuration with every choice made describes; see :func:`new_layers`."""
    return Pipeline(model, config.engine.devices, **settings_of(config, seed, first_batch, traced, dump_folder))


def settings_of(
    config: RunConfig, seed: int, first_batch: int, traced: Window | None, dump_folder: Path | None
) -> dict[str, Any]:
    """What a pipeline is given beside its layers and devices, in one process or in each of many."""
    return {
        "schedule": schedule_of(config),
        "sizes": config.engine.sizes,
        "seed": seed,
        "first_batch": first_batch,
        "trace": traced,
        "options": engine_options(config, dump_folder=dump_folder),
    }


def as_it_runs(engine: EngineConfig, form: str) -> EngineConfig:
    """The engine of a form: where that is one layer, nothing leaves memory or is handed on, and nothing overlaps but
    its micro-batches."""
    if not METHODS[form].is_whole:
        return engine
    schedule = engine.schedule if engine.schedule in BACKPROP_SCHEDULES else "sequential"
    return replace(engine, schedule=schedule, offload="none", packet="as_is")


def engine_options(
    config: RunConfig, precision: Precision | None = None, dump_folder: Path | None = None
) -> EngineOptions:
    """How the engine is to run a configuration: an option of it has the same name under ``engine`` there.

    Args:
        config: All of it.
        precision: What was chosen where the configuration leaves it open.
        dump_folder: Where the watchdog leaves a file; None for none.
    """
    engine, train = config.engine, config.train
    if precision is None:
        assert train.precision != "auto"  # chosen by now
        precision = train.precision
    named = {field.name: getattr(engine, field.name) for field in fields(EngineOptions) if hasattr(engine, field.name)}
    named["offload_folder"] = engine.offload_folder or dump_folder
    return EngineOptions(
        **named,
        precision=precision,
        # To go back is not the pipeline's to do: it ends.
        on_non_finite="skip" if train.on_non_finite == "skip" else "raise",
        dump_folder=dump_folder,
    )


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule of a configuration's layers, with the order within stages that it asks for."""
    name = config.engine.schedule
    # Pipelined backpropagation is a single layer.
    return schedule_named("sequential" if name in BACKPROP_SCHEDULES else name).within(config.engine.within_stage)


def new_layers(
    models: Models | Experiment,
    config: RunConfig,
    turn: int,
    *,
    states: Mapping[int, State] | None = None,
    here: Container[int] | None = None,
) -> Iterator[TrainableLayer]:
    """The layers that a turn begins with, each made when it is asked for; states of the run fit them.

    A pipeline that offloads its layers takes each away before it asks for the next: the model never is whole in memory.

    Args:
        models: Makes them.
        config: With every choice made.
        turn: Of the run, from 1.
        states: What they go on with, which was found to fit them; None for their first weights.
        here: The numbers of those that are wanted; others are on the meta device. None for all.
    """
    layers = models.layers(config.train.mode, seed_of(config, turn), here)
    return made_ready(layers, config, states=states, here=here)


def made_ready(
    layers: Iterable[TrainableLayer],
    config: RunConfig,
    *,
    states: Mapping[int, State] | None = None,
    here: Container[int] | None = None,
) -> Iterator[TrainableLayer]:
    """Layers as states of the run fit them, and with these; the arguments are those of :func:`new_layers`."""
    for number, layer in enumerate(layers):
        make_ready([layer], config.train.precision)
        if states is not None and (here is None or number in here):
            load_layer_state(layer, states[number])
        yield layer


def course_of(config: RunConfig) -> Course:
    """How long a run trains, and with what learning rates."""
    rate = config.train.lr
    assert rate.base is not None  # chosen by now, by the length of the run
    assert rate.warmup is not None
    return Course(
        config.train.epochs, rate.decay, rate.per, (rate.end or 0.0) / rate.base, rate.warmup, config.train.accumulate
    )


def seed_of(config: RunConfig, turn: int) -> int:
    """That of a turn of a run; turns count from 1."""
    return (config.train.seed + turn - 1) % 2**63


def window_of(config: RunConfig, batches: EpochBatches, position: Position) -> Window | None:
    """Steady state, if an epoch is long enough to reach it; None where no batch is still to come.

    Counted from where the training goes on: in the rest of the epoch under way if that is long enough, or else in the
    next one if there is one.
    """
    epochs, count = config.train.epochs - position.epoch, config.engine.trace_batches
    if epochs < 1:
        return None
    done = position.part.batches
    batches.set_epoch(position.epoch)
    left = first = len(batches) - done
    if left >= count + TRACE_FROM or not done or epochs == 1:
        first = 0
    else:
        batches.set_epoch(position.epoch + 1)
        left = len(batches)
    count = min(count, left)
    return Window(first + min(TRACE_FROM, left - count), count) if count else None
