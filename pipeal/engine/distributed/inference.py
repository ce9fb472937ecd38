"""Predictions over processes: a batch climbs from rank to rank, turns, and comes down to rank 0 by the same way.

::

            rank 0      rank 1      rank 2
    x  ───► f1  f2 ═══► f3 ═══════► f4                 a leg: what one stage does of it, and then hands on
                                    b4
    logits ◄ h1 h2 ◄═══ h3 ◄═══════ h4

With every exit wanted, a batch turns at each layer and climbs on as well. With a policy it waits where it turned until
rank 0 has decided: a choice of samples follows it up, and those climb on. How many batches are under way is bounded by
rank 0, so that nobody ever waits to hand one on, and nothing can deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipeal.core.modules import in_mode
from pipeal.core.protocols import DOWN, TURN, UP
from pipeal.core.tree import Tree
from pipeal.engine.devices import Ready
from pipeal.engine.distributed.channel import Message
from pipeal.engine.distributed.remote_errors import told
from pipeal.engine.inference.predictor import modules_below
from pipeal.engine.inference.trips import Step, brought, select, walk
from pipeal.engine.stage import Stage

if TYPE_CHECKING:
    from pipeal.engine.distributed.rank import Node


@dataclass(frozen=True)
class Leg:
    """A part of a batch's way, to be made on one stage; travels as a request.

    Attributes:
        way: ``up`` climbs on from what it brings, ``down`` comes from above, ``choice`` brings the rows that climb on
            from where the batch has turned (None for all), ``forget`` says that none do.
        trip: The batch's number, counted over all predictions.
        depth: The exit it is about: to climb to, to come down from, or to go on from.
        onward: For a choice, the exit to climb to.
        whole: Whether the batch has all of its samples.
        tree: What it brings.
        ready: When that may be read.
        guide: Of the rank where it is.
    """

    way: Literal["up", "down", "choice", "forget"]
    trip: int
    depth: int
    whole: bool
    tree: Tree
    ready: Ready
    guide: Guide
    onward: int = 0

    goes_on = False

    @property
    def does(self) -> str:
        """In words."""
        return f"inference ({'descent' if self.way == 'down' else 'climb'})"

    def __call__(self, stage: Stage) -> None:
        """Makes it, and hands on what comes of it."""
        self.guide.make(self, stage)

    def message(self) -> tuple[str, Mapping[str, Any], Tree, Ready]:
        """For another rank."""
        facts = {"way": self.way, "trip": self.trip, "depth": self.depth, "whole": self.whole, "onward": self.onward}
        return "leg", facts, self.tree, self.ready


class Guide:
    """A rank's part in predictions. Used by its worker's thread.

    Args:
        node: The rank.

    Attributes:
        stopped: Ends a wait for the compiler.
        arrived: On rank 0, told of the logits of an exit: the batch's number, the exit, the logits, and when they may
            be read.
        failed: On rank 0, told of a batch that will not arrive.
    """

    arrived: Callable[[int, int, Tree, Ready], None]
    failed: Callable[[int, BaseException], None]

    def __init__(self, node: Node) -> None:
        self._node = node
        self.stopped = threading.Event()
        self._every = self._alone = False
        self._first: int | None = None
        self._pauses: tuple[int, ...] = ()
        self._parked: dict[int, tuple[Tree, Ready]] = {}
        self._mode = ExitStack()

    def receive(self, message: Message, tree: Tree, ready: Ready) -> None:
        """Has a leg made that came from another rank."""
        facts = message.facts
        leg = Leg(facts["way"], facts["trip"], facts["depth"], facts["whole"], tree, ready, self, facts["onward"])
        self._node.inbox.push(leg)

    def begin(self, facts: Mapping[str, Any], stage: Stage) -> None:
        """Switches the layers on the way to evaluation.

        Args:
            facts: ``depth``, how far batches climb; ``every``, whether every exit is taken; ``pauses``, the exits where
                batches wait for a choice; ``first``, the number of the first batch; ``alone``, whether that is the only
                one, and needs no number in messages.
            stage: This rank's.
        """
        self._every, self._pauses = facts["every"], tuple(facts["pauses"])
        self._first, self._alone = facts["first"], facts["alone"]
        self._mode.enter_context(in_mode(modules_below([stage], facts["depth"]), False))

    def end(self) -> None:
        """Gives the layers their modes back, and lets go of what waits."""
        self._first = None
        self._parked.clear()
        self._mode.close()

    def make(self, leg: Leg, stage: Stage) -> None:
        """Makes a leg; what goes wrong is told to whoever predicts, and the pipeline lives on."""
        if self._first is None or leg.trip < self._first:
            return  # of a batch that has failed on another way, and was given up
        try:
            device = stage.device
            with device.active(), torch.no_grad(), stage.autocast():
                if leg.way == "down":
                    self._descend(leg, stage, brought(stage, leg.tree, leg.ready, leg.does), turns_at=None)
                else:
                    self._climb(leg, stage)
        except Exception as error:
            if self.stopped.is_set() or self._node.progress.stopped:
                raise
            self._failed(leg.trip, error)

    def _climb(self, leg: Leg, stage: Stage) -> None:
        numbers = [index for index, _ in stage.layers]
        if leg.way != "up" and leg.depth - 1 not in numbers:  # it turned on a later stage
            self._up(leg)
            return
        if leg.way == "forget":
            self._parked.pop(leg.trip, None)
            return
        if leg.way == "choice":
            tree, ready = self._parked.pop(leg.trip)
            if leg.tree is not None:
                rows = stage.device.receive(leg.tree, leg.ready)
                tree = select((stage.device.receive(tree, ready), rows))
            below, depth = leg.depth, leg.onward
        else:
            tree, below, depth = brought(stage, leg.tree, leg.ready, leg.does), numbers[0], leg.depth
        turns = [end for end in range(below + 1, depth + 1) if end == depth or self._every]
        for turn in turns:
            steps: list[Step] = [(UP, *one) for one in stage.layers if below <= one[0] < turn]
            if steps:
                tree = self._walk(stage, steps, tree, leg)
            below = turn
            if turn - 1 > numbers[-1]:
                break
            if turn in self._pauses:
                self._parked[leg.trip] = tree, stage.device.mark_ready(tree)
            self._descend(replace(leg, depth=turn), stage, tree, turns_at=turn)
        if depth - 1 > numbers[-1]:
            tree = stage.thin(tree)
            going = replace(leg, way="up", depth=depth, tree=tree, ready=stage.device.mark_ready(tree))
            self._up(going)

    def _descend(self, leg: Leg, stage: Stage, tree: Tree, turns_at: int | None) -> None:
        layers = [one for one in stage.layers if turns_at is None or one[0] < turns_at]
        steps: list[Step] = [] if turns_at is None else [(TURN, *layers[-1])]
        steps += [(DOWN, *one) for one in reversed(layers)]
        tree = self._walk(stage, steps, tree, leg)
        ready = stage.device.mark_ready(tree)
        if stage.number == 0:
            self.arrived(leg.trip, leg.depth, tree, ready)
        else:
            self._node.backbox.push(replace(leg, way="down", tree=tree, ready=ready))

    def _failed(self, trip: int, error: Exception) -> None:
        if self._node.rank == 0:
            self.failed(trip, error)
        else:
            self._node.reply("leg failed", {"trip": trip, "error": told(error)})

    def _walk(self, stage: Stage, steps: list[Step], tree: Tree, leg: Leg) -> Tree:
        batch = None if self._alone else leg.trip - (self._first or 0)
        return walk(stage, steps, tree, whole=leg.whole, batch=batch, abandoned=self.stopped)

    def _up(self, leg: Leg) -> None:
        assert self._node.outbox is not None  # the model has so many layers
        self._node.outbox.push(leg)
