"""Predictions of a distributed pipeline, as rank 0 sees them: batches go up the line, and answers come down."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from typing import Any

from torch import Tensor

from pipeal.core.options import EngineOptions
from pipeal.core.tree import Tree
from pipeal.engine.devices import Ready, ready_now, take_over
from pipeal.engine.distributed.executor import DistributedExecutor
from pipeal.engine.distributed.inference import Leg
from pipeal.engine.execution.channel import Stopped
from pipeal.engine.execution.worker import TICK_S
from pipeal.engine.inference.exit_policy import EarlyExits, decide
from pipeal.engine.inference.predictor import Predictor
from pipeal.engine.inference.trips import Arrived, Journey
from pipeal.engine.stage import Stage


class RemotePredictor(Predictor):
    """As :class:`pipeal.engine.inference.predictor.Predictor`, over processes. The ranks' workers do the work.

    Args:
        stages: The stages, of which the first is here.
        options: As many batches per stage as packets in a queue may be under way.
        serial: Whether one batch is under way at a time.
        executor: Gives the executor; raises where the pipeline is not open.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        options: EngineOptions,
        *,
        serial: bool,
        executor: Callable[[], DistributedExecutor],
    ) -> None:
        super().__init__(stages, options, serial=serial, rest=lambda: executor().drain())
        self._executor = executor
        self._numbers = count()

    def one(self, x: Tree, exit_at: int | None) -> Tensor:
        """The logits of one batch."""
        with self.turn:
            (found,) = self._travel([x], Journey(self._depth(exit_at)), alone=True)
        assert isinstance(found, Tensor)
        return found

    def _travel(self, batches: Iterable[Tree], journey: Journey, *, alone: bool = False) -> Generator[Any, None, None]:
        with self.turn:
            self.refuse_while_under_way()
            self._rest()
            self._under_way = True
        executor = self._executor()
        try:
            way = self._begin(journey.depth)
            first = next(self._numbers)
            trips = Trips(executor, self.stages[0], journey, first)
            pauses = [] if journey.policy is None else journey.policy.tried[:-1]
            facts = {"depth": journey.depth, "every": journey.every, "pauses": pauses, "first": first, "alone": alone}
            executor.order("predict", facts, heads=False)
            try:
                most = 1 if self.serial else self.options.queue_depth * len(way)
                for arrived in trips.drive(batches, self._numbers, most):
                    yield take_over(*arrived)
            finally:
                if not executor.node.progress.stopped:
                    trips.settle()
                    executor.order("end", heads=False)
                    executor.drain()  # the layers here are in the caller's hands again, in the mode they had
        finally:
            self._under_way = False


class Trips:
    """The batches under way.

    Args:
        executor: Rank 0's.
        stage: The first one.
        journey: Where all go.
        first: The number of the first.
    """

    def __init__(self, executor: DistributedExecutor, stage: Stage, journey: Journey, first: int) -> None:
        self._executor = executor
        self._stage = stage
        self._journey = journey
        self._next = first
        self._sent: dict[int, Future[Arrived]] = {}  # by number, in order
        self._exits: dict[int, dict[int, Tensor]] = {}
        self._answers: dict[int, tuple[Tree, bool]] = {}
        self._guide = executor.node.requests.guide
        self._guide.arrived, self._guide.failed = self._arrive, self._end

    def drive(self, batches: Iterable[Tree], numbers: Iterable[int], most: int) -> Generator[Arrived, None, None]:
        """Sends batches on their way, ``most`` at a time, and yields what comes of them, in order.

        Raises:
            Exception: What went wrong with the batch that is due, or with the pipeline.
        """
        following = iter(numbers)
        for x in batches:
            self._send(x)
            self._next = next(following)
            while len(self._sent) >= most or (self._sent and next(iter(self._sent.values())).done()):
                yield self._result()
        while self._sent:
            yield self._result()

    def settle(self) -> None:
        """Waits until nothing is under way."""
        for due in self._sent.values():
            self._executor.wait(partial(self._is_there, due))
        self._sent.clear()

    def _send(self, x: Tree) -> None:
        depth = self._journey.depth if self._journey.policy is None else self._journey.policy.tried[0]
        leg = Leg("up", self._next, depth, True, x, ready_now(x), self._guide)  # raises on what is no packet
        self._sent[self._next] = Future()  # before its answer can come
        self._executor.push(leg)

    def _result(self) -> Arrived:
        trip, due = next(iter(self._sent.items()))
        self._executor.wait(partial(self._is_there, due))
        del self._sent[trip]
        return due.result()

    def _is_there(self, due: Future[Arrived]) -> bool:
        there = bool(wait([due], TICK_S).done)
        if not there and self._executor.node.progress.stopped:
            raise Stopped
        return there

    def _end(self, trip: int, found: Arrived | BaseException) -> None:
        """On the worker's thread, or that which hears of failures on other ranks."""
        due = self._sent.get(trip)
        if due is not None:  # one that failed may have been given up
            with suppress(InvalidStateError):  # the first word counts
                if isinstance(found, BaseException):
                    due.set_exception(found)
                else:
                    due.set_result(found)
        self._exits.pop(trip, None)
        self._answers.pop(trip, None)

    def _arrive(self, trip: int, depth: int, logits: Tree, ready: Ready) -> None:
        """On the worker's thread, with the device active."""
        if self._journey.every:
            exits = self._exits.setdefault(trip, {})
            exits[depth] = logits
            if len(exits) == self._journey.depth:
                # Made one after the other on one stage: the last mark is good for all.
                self._end(trip, ([exits[number] for number in sorted(exits)], ready))
        elif self._journey.policy is None:
            self._end(trip, (logits, ready))
        else:
            self._decide(trip, depth, logits)

    def _decide(self, trip: int, depth: int, logits: Tree) -> None:
        """Who is sure enough leaves; the others are chosen to climb on."""
        policy, last = self._journey.policy, self._journey.depth
        assert policy is not None
        answers, whole = self._answers.get(trip, (None, True))
        threshold = policy.thresholds[depth - 1] if depth < last else -inf
        answers, staying = decide(depth, threshold, policy.temperatures[depth - 1], (logits, answers))
        mark = self._stage.device.mark_ready
        if len(staying):
            all_stay = len(staying) == len(logits)
            whole = whole and all_stay
            self._answers[trip] = answers, whole
            onward = policy.tried[policy.tried.index(depth) + 1]
            rows = None if all_stay else staying
            self._executor.push(Leg("choice", trip, depth, whole, rows, mark(rows), self._guide, onward))
        else:
            if depth < last:
                self._executor.push(Leg("forget", trip, depth, whole, None, None, self._guide))
            self._end(trip, (EarlyExits(*answers[:2]), mark(answers)))
