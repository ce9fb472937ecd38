"""A run under way, the forms of a model that it compares, and their epochs in turns.

What slows the machine slows all forms:

::

    epoch 1   AL BP Greedy
    epoch 2   BP Greedy AL      another one begins each time
    epoch 3   Greedy AL BP
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from pipeal.config import RunConfig
from pipeal.core.errors import Interrupted
from pipeal.core.methods import COMPARE, METHODS, Method
from pipeal.core.names import Mode
from pipeal.core.spread import blocks_of
from pipeal.engine.devices import device_names
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.reporting.attempts import Attempts
from pipeal.run.build import Experiment
from pipeal.run.run_folder import RunFolder
from pipeal.run.site import Site
from pipeal.run.stopping import StopRequest

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """One form of a model: a row of a comparison's table.

    Attributes:
        name: That of its folder in a comparison: its method's, or that with a hyphen and more behind it.
        label: What tables and pictures call it.
        mode: Which form it is.
        config: Of this form; once devices, threads and precision are chosen, with every choice made.
        is_compared: Whether it is one of several.
    """

    name: str
    label: str
    mode: Mode
    config: RunConfig
    is_compared: bool = False

    def folder(self, run: Path) -> Path:
        """Where its files lie in the folder of a run."""
        return run / self.name if self.is_compared else run


@dataclass(frozen=True)
class Run:
    """A run under way: what all of its forms share, their turns and their trials.

    Attributes:
        experiment: What is to be run.
        folder: Told how the run stands.
        stop: Whether it is to end.
        attempts: What is written beside the checkpoints goes through it.
        site: Where it is carried out; opens the pipelines.
    """

    experiment: Experiment
    folder: RunFolder
    stop: StopRequest
    attempts: Attempts
    site: Site

    def require_wanted(self, goes_on: str) -> None:
        """Raises :class:`Interrupted` where the run is to end; ``goes_on`` says from where it would go on."""
        if (code := self.stop.code()) is not None:
            raise Interrupted(f"interrupted; {self.folder.way_back} goes on {goes_on}", code)


def asked_forms(experiment: Experiment, *, alternates: bool) -> list[Form]:
    """The forms that a run trains, with what is asked of each.

    A comparison on several devices that the user named has a method that trains the network as a whole twice: on the
    first of them, and with its blocks spread over all of them, as the published baseline is.

    Args:
        experiment: What is to be run.
        alternates: Whether all of it is done in this process.
    """
    config = experiment.config
    if config.train.mode != COMPARE:
        method = METHODS[config.train.mode]
        return [Form(method.name, method.label, method.name, config)]
    methods = [METHODS[name] for name in config.train.methods]
    forms = [Form(method.name, method.label, method.name, config, is_compared=True) for method in methods]
    named = config.engine.devices
    devices = device_names(named)
    if named == "auto" or len(devices) < 2 or not alternates:
        return forms
    for method in methods:
        if method.is_whole:
            forms += _spread(experiment, method, devices)
    return forms


def _spread(experiment: Experiment, method: Method, devices: Sequence[str]) -> list[Form]:
    """A method of one layer with its blocks over several devices, if there are as many."""
    config = experiment.config
    if config.engine.compile != "none":
        _log.warning(f"{method.label} over several devices is not compared: engine.compile is for layers on one")
        return []
    (layer,) = experiment.layers(method.name, config.train.seed, here=())
    devices = devices[: blocks_of(layer)]
    if len(devices) < 2:
        return []
    engine = replace(config.engine, devices=tuple(devices), sizes=None)
    spread = replace(config, engine=engine, train=replace(config.train, mode=method.name))
    label = f"{method.label} over {len(devices)}"
    return [Form(f"{method.name}-spread", label, method.name, spread, is_compared=True)]


def in_turns(trainings: Sequence[Generator[int, None, T]]) -> list[T]:
    """Drives trainings side by side, epoch by epoch, to their ends.

    Each has the intra-op threads of the calling thread to itself: what one sets there, as a pipeline does that the
    caller works for, is set again before it goes on, and no other sees it. If one fails, or is ended, all others are
    closed where they stand, between two epochs.

    Args:
        trainings: Each yields how many epochs are behind it, once before the first one, then after each.

    Returns:
        What each of them returned.
    """
    threads = [torch.get_num_threads()] * len(trainings)

    def advance(place: int) -> int:
        with intra_op_threads(threads[place]):
            try:
                return next(trainings[place])
            finally:
                threads[place] = torch.get_num_threads()

    ended: dict[int, T] = {}
    with ExitStack() as at_the_end:
        for training in trainings:
            at_the_end.enter_context(closing(training))
        try:
            behind = {place: advance(place) for place in range(len(trainings))}
            while behind:
                place = next_in_turn(behind)
                try:
                    behind[place] = advance(place)
                except StopIteration as end:
                    ended[place] = end.value
                    del behind[place]
        except (KeyboardInterrupt, SystemExit) as error:  # a second signal: none waits for what is still to be written
            for training in trainings:
                with suppress(type(error)):
                    training.throw(error)
            raise
    return [ended[place] for place in range(len(trainings))]


def next_in_turn(behind: Mapping[int, int]) -> int:
    """Which training comes next: one with the fewest epochs behind it, and of these in every epoch another first.

    >>> next_in_turn({0: 0, 1: 0}), next_in_turn({0: 1, 1: 0})
    (0, 1)
    >>> next_in_turn({0: 1, 1: 1}), next_in_turn({0: 1, 1: 2})
    (1, 0)

    Args:
        behind: By the place of each training that has not ended, its epochs.
    """
    fewest = min(behind.values())
    places = max(behind) + 1
    return min((place for place in behind if behind[place] == fewest), key=lambda place: (place - fewest) % places)
