"""What the length of a run decides where nothing is given: its learning rate and its warm-up."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from math import ceil
from typing import TypeVar

from pipeal.config import RunConfig
from pipeal.config.effects import refuse_rising
from pipeal.config.schema import USUAL_RATE
from pipeal.run.build import Experiment
from pipeal.training.learning_rate import WARM_UP_MOST, UsualCourse, usual_course

_log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


def at_its_length(experiment: Experiment, config: Config, *, quiet: bool = False) -> Config:
    """:func:`at_length` of a training on the data of an experiment.

    Args:
        experiment: Its data is batched as ``config`` says.
        config: See there, as for ``quiet``.

    Raises:
        ConfigError: As there, or the configuration does not fit the data.
    """
    with closing(experiment.under(config).train_batches(config.train.seed)) as batches:
        return at_length(config, len(batches), quiet=quiet)


def at_length(config: Config, batches: int, *, quiet: bool = False) -> Config:
    """The configuration with the learning rate and the warm-up that its run takes; what is given stays.

    Args:
        config: As asked for.
        batches: Of an epoch.
        quiet: Whether nothing is logged of what is other than in a long run, nor of a given warm-up that takes most of
            the run.

    Raises:
        ConfigError: The rate is to decay to one that is above what is chosen.
    """
    lr, train = config.train.lr, config.train
    updates = train.epochs * ceil(batches / train.accumulate)
    here, long = usual_course(updates), UsualCourse(USUAL_RATE, WARM_UP_MOST)
    usual_warmup = _in_batches(here.warmup, batches, train.accumulate)
    chosen = replace(
        lr,
        base=here.rate if lr.base is None else lr.base,
        warmup=usual_warmup if lr.warmup is None else lr.warmup,
    )
    of_long_run = {"base": long.rate, "warmup": _in_batches(long.warmup, batches, train.accumulate)}
    changed = [
        f"train.lr.{key} {getattr(chosen, key):g} instead of {value:g}"
        for key, value in of_long_run.items()
        if getattr(lr, key) is None and getattr(chosen, key) != value
    ]
    if changed and not quiet:
        _log.info(f"a run of {updates} update{'s' * (updates > 1)}: {', '.join(changed)}")
    all_batches = train.epochs * batches
    if not quiet and chosen.warmup and lr.warmup is not None and 2 * lr.warmup > all_batches:
        _log.warning(
            f"the run has {all_batches} batches, {min(lr.warmup, all_batches)} of them warm-up: it will learn little; "
            f"with --set train.lr.warmup=null they are {usual_warmup}"
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
