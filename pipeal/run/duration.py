"""What the length of a run decides where nothing is given: its learning rate and its warm-up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import ceil
from typing import TypeVar

from pipeal.config import RunConfig
from pipeal.config.effects import refuse_rising
from pipeal.config.schema import USUAL_RATE
from pipeal.run.build import Experiment
from pipeal.run.say import Say
from pipeal.training.learning_rate import WARM_UP_MOST, UsualCourse, usual_course

Config = TypeVar("Config", bound=RunConfig)


def at_its_length(experiment: Experiment, config: Config, say: Say) -> Config:
    """:func:`at_length` of a training on the data of an experiment.

    Args:
        experiment: Its data is batched as ``config`` says.
        config: See there, as for ``say``.

    Raises:
        ConfigError: As there, or the configuration does not fit the data.
    """
    with closing(experiment.under(config).train_batches(config.train.seed)) as batches:
        return at_length(config, len(batches), say)


def at_length(config: Config, batches: int, say: Say) -> Config:
    """The configuration with the learning rate and the warm-up that its run takes; what is given stays.

    Args:
        config: As asked for.
        batches: Of an epoch.
        say: Told what is other than in a long run, and of a given warm-up that takes most of the run.

    Raises:
        ConfigError: The rate is to decay to one that is above what is chosen.
    """
    lr, train = config.train.lr, config.train
    updates = train.epochs * ceil(batches / train.accumulate)
    here, long = usual_course(updates), UsualCourse(USUAL_RATE, WARM_UP_MOST)
    chosen = replace(
        lr,
        base=here.rate if lr.base is None else lr.base,
        warmup=_in_batches(here.warmup, batches, train.accumulate) if lr.warmup is None else lr.warmup,
    )
    usual = {"base": long.rate, "warmup": _in_batches(long.warmup, batches, train.accumulate)}
    changed = [
        f"train.lr.{key} {getattr(chosen, key):g} instead of {value:g}"
        for key, value in usual.items()
        if getattr(lr, key) is None and getattr(chosen, key) != value
    ]
    if changed:
        say(f"a run of {updates} updates: {', '.join(changed)}")
    all_batches = train.epochs * batches
    if chosen.warmup and lr.warmup is not None and 2 * lr.warmup > all_batches:
        say(
            f"the run has {all_batches} batches, {min(lr.warmup, all_batches)} of them warm-up: it will learn little; "
            f"without train.lr.warmup, which was given, they are {_in_batches(here.warmup, batches, train.accumulate)}"
        )
    found = replace(config, train=replace(train, lr=chosen))
    refuse_rising(found)
    return found


def _in_batches(updates: int, batches: int, accumulate: int) -> int:
    """The batches that so many updates take, where an epoch has so many and ends with an update of what is left.

    >>> _in_batches(4, batches=10, accumulate=1), _in_batches(4, batches=10, accumulate=4)  # of 4, 4, 2 and 4 batches
    (4, 14)
    """
    epochs, left = divmod(updates, ceil(batches / accumulate))
    return epochs * batches + left * accumulate
