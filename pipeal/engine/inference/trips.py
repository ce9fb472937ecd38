"""Inference as trips: a batch climbs the stages to an exit and comes down again, a visit to one stage at a time.

::

            stage 0     stage 1     stage 2
    x  ───► f1  f2 ───► f3 ───────► f4
                                    b4
    logits ◄ h1 h2 ◄─── h3 ◄─────── h4

A trip is a generator: it yields the visit that comes next and is sent what came of it. It is pure planning and knows
no thread; its driver (the caller, or :class:`pipeal.engine.inference.drivers.Drivers`) makes the visits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeal.core.errors import ConfigError, add_note
from pipeal.core.protocols import DOWN, TURN, UP, Path, TrainableLayer
from pipeal.core.tree import Tree, batch_size, describe, map_tensors, shapes_of
from pipeal.engine.devices import Ready
from pipeal.engine.inference.exit_policy import EarlyExits, ExitPolicy, decide
from pipeal.engine.stage import Stage


@dataclass(frozen=True, slots=True)
class Visit:
    """What a stage is to do next for one trip.

    Attributes:
        stage: Where.
        work: Called with the tree once it has arrived on the stage's device; returns what is handed on.
        tree: What to bring.
        ready: When that may be read.
        does: In words, for a stall report.
    """

    stage: Stage
    work: Callable[[Tree], Tree]
    tree: Tree
    ready: Ready
    does: str


Arrived: TypeAlias = tuple[Any, Ready]
"""What came of a visit or of a whole trip, and when it may be read."""

Trip: TypeAlias = Generator[Visit, Arrived, Arrived]


def make(visit: Visit) -> Arrived:
    """Makes a visit in the calling thread, with the stage's own device, streams and precision."""
    device = visit.stage.device
    with device.active(), torch.no_grad(), visit.stage.autocast():
        result = visit.work(brought(visit.stage, visit.tree, visit.ready, visit.does))
        return result, device.mark_ready(result)


def brought(stage: Stage, tree: Tree, ready: Ready, does: str) -> Tree:
    """A tree on a stage's device, from another one's; says of an error on the way what it was for."""
    try:
        return stage.device.receive(tree, ready)
    except BaseException as error:
        where = f"stage {stage.number}, device {stage.device}"
        add_note(error, f"on the way to {where}, for {does}; input {describe(shapes_of(tree))}")
        raise


def drive(trip: Trip) -> Arrived:
    """Makes all visits of a trip, one after the other, in the calling thread."""
    visit = next(trip)
    while True:
        arrived = make(visit)
        try:
            visit = trip.send(arrived)
        except StopIteration as end:
            return end.value


Step: TypeAlias = tuple[Path, int, TrainableLayer]


@dataclass(frozen=True)
class Journey:
    """Where all batches of a prediction go.

    Attributes:
        depth: How many layers are climbed at most.
        every: Whether each exit on the way is taken as well.
        policy: Where each sample leaves, if that is asked.
    """

    depth: int
    every: bool = False
    policy: ExitPolicy | None = None

    @property
    def turns(self) -> Sequence[int]:
        """The exits that are computed, from 1."""
        if self.policy is not None:
            return self.policy.tried
        return range(1, self.depth + 1) if self.every else [self.depth]


@dataclass(eq=False)
class Traveller:
    """Plans the trip of one batch.

    Attributes:
        stages: All stages of the model.
        batch: The batch's number, for messages; None where it is the only one.
        abandoned: Ends a visit's wait for the compiler when it is set; None where no one would set it.
    """

    stages: Sequence[Stage]
    batch: int | None = None
    abandoned: threading.Event | None = None

    def __post_init__(self) -> None:
        self._layers = [numbered for stage in self.stages for numbered in stage.layers]
        self._stage_of = {number: stage for stage in self.stages for number, _ in stage.layers}

    def trip(self, journey: Journey, x: Tree, ready: Ready) -> Trip:
        """Climbs each layer once, and at each turn comes down with the logits of that exit.

        Brings the logits; with ``every`` a list of them; with a policy, under which only those samples climb on that
        are not sure enough, :class:`EarlyExits`.
        """
        found: list[Any] = []
        answers: Tree = None
        climbed = 0
        whole = True
        for depth in journey.turns:
            x, ready = yield from self._climb(x, ready, climbed, depth, whole=whole)
            logits, done = yield from self._descend(x, ready, depth, whole=whole)
            climbed = depth
            if journey.policy is None:
                found.append(logits)
                continue
            threshold = journey.policy.thresholds[depth - 1] if depth < journey.depth else -inf
            weigh = partial(decide, depth, threshold, journey.policy.temperatures[depth - 1])
            visit = Visit(self.stages[0], weigh, (logits, answers), done, self._named(f"decision at exit {depth}"))
            (answers, staying), done = yield visit
            if not len(staying):
                break
            if len(staying) < len(logits):
                here, does = self._stage_of[depth - 1], self._named(f"choice at exit {depth}")
                # What tells who stays was computed from x: its mark is good for both.
                x, ready = yield Visit(here, select, (x, staying), done, does)
                whole = False
        if journey.policy is not None:
            return EarlyExits(*answers[:2]), done
        # All logits were made on one stage, one after the other: the last mark is good for all.
        return found if journey.every else found[0], done

    def _climb(self, x: Tree, ready: Ready, climbed: int, depth: int, *, whole: bool) -> Trip:
        """From the output of layer ``climbed`` (counted from 1) to that of layer ``depth``.

        What is left of a batch is not ``whole``, and of any size: no size to compile anything for.
        """
        return self._go([(UP, *layer) for layer in self._layers[climbed:depth]], x, ready, "climb", whole=whole)

    def _descend(self, x: Tree, ready: Ready, depth: int, *, whole: bool) -> Trip:
        """From the output of layer ``depth`` over its bridge to the logits."""
        down: list[Step] = [(DOWN, *layer) for layer in reversed(self._layers[:depth])]
        return self._go([(TURN, *self._layers[depth - 1]), *down], x, ready, "descent", whole=whole)

    def _go(self, steps: Sequence[Step], tree: Tree, ready: Ready, what: str, *, whole: bool) -> Trip:
        """One visit for all the steps in a row that are of one stage."""
        for stage, own in groupby(steps, key=lambda step: self._stage_of[step[1]]):
            work = partial(walk, stage, list(own), whole=whole, batch=self.batch, abandoned=self.abandoned)
            tree, ready = yield Visit(stage, work, tree, ready, self._named(what))
        return tree, ready

    def _named(self, what: str) -> str:
        return f"inference ({what})" if self.batch is None else f"inference ({what}), batch {self.batch}"


def walk(
    stage: Stage,
    steps: Sequence[Step],
    tree: Tree,
    *,
    whole: bool,
    batch: int | None,
    abandoned: threading.Event | None,
) -> Tree:
    """Takes a tree through blocks of one stage, and says where it was if one fails."""
    climbs = steps[0][0] == UP
    if climbs:
        stage.device.limit_run_ahead()
    for path, index, layer in steps:
        try:
            tree = stage.infer(index, path, tree, compiled=whole, abandoned=abandoned)
        except BaseException as error:
            which = "" if batch is None else f"batch {batch}, "
            add_note(
                error,
                f"in the inference ({path}) of stage {stage.number}, layer {index} ({type(layer).__name__}), "
                f"{which}device {stage.device}; input {describe(shapes_of(tree))}",
            )
            raise
    if climbs:
        stage.device.end_batch()
    return tree


def select(tree: Tree) -> Tree:
    """The chosen rows of every tensor of a packet."""
    x, staying = tree
    rows = batch_size(x)

    def choose(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] == 1:
            return tensor  # the same for every sample
        if tensor.shape[0] != rows:
            raise ConfigError(
                f"a packet of {rows} samples holds a tensor of shape {tuple(tensor.shape)}, of which no rows can be "
                "chosen for those who climb on; put the batch first, or predict without an exit policy"
            )
        return tensor.index_select(0, staying)

    return map_tensors(choose, x)
