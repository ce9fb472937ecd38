"""Predictions of a pipeline: one at a time, or a stream of batches with the stages at work on several at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from pipeal.core.errors import ConfigError, PlacementError, ScheduleError, name_of
from pipeal.core.modules import in_mode, module_of
from pipeal.core.options import EngineOptions
from pipeal.core.tree import Tree
from pipeal.engine.devices import ready_now, take_over
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.engine.inference.drivers import Drivers
from pipeal.engine.inference.exit_policy import ExitPolicy
from pipeal.engine.inference.trips import Journey, Traveller, Trip, drive
from pipeal.engine.stage import Stage


class Predictor:
    """Lets batches travel through the stages of a pipeline; see :meth:`pipeal.Pipeline.predict_each`.

    Args:
        stages: The stages.
        options: With the intra-op threads of each stage's thread, or of the caller where it does the work. As many
            batches per stage as packets in a queue may be under way.
        serial: Whether the caller does all the work.
        rest: Called before a prediction begins; ends what the stages are at.

    Attributes:
        turn: Held by the thread that submits a batch or predicts one, or begins to predict several: the modes of the
            layers are those of either.
    """

    def __init__(
        self, stages: Sequence[Stage], options: EngineOptions, *, serial: bool, rest: Callable[[], None]
    ) -> None:
        self.stages = stages
        self.options = options
        self.serial = serial
        self._rest = rest
        self.turn = threading.RLock()
        self._under_way = False
        self._keeps = False
        self._idle: Drivers | None = None

    def open(self) -> None:
        """From now on the threads of one prediction stay for the next: kernels on GPUs have plans for each thread."""
        self._keeps = True

    def close(self) -> None:
        """Ends those threads; predictions from now on have their own.

        Raises:
            StallError: A thread did not come back.
        """
        self._keeps = False
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.stop()

    def one(self, x: Tree, exit_at: int | None) -> Tensor:
        """The logits of one batch, from the caller's own thread."""
        depth = self._depth(exit_at)
        with self.turn:
            self.refuse_while_under_way()
            self._rest()
            way = self._begin(depth)
            with in_mode(modules_below(way, depth), False), intra_op_threads(self.options.threads), _at_home_after(way):
                return take_over(*drive(Traveller(self.stages).trip(Journey(depth), x, ready_now(x))))

    def each(
        self, batches: Iterable[Tree], exit_at: int | None, policy: ExitPolicy | None
    ) -> Generator[Any, None, None]:
        """The logits of every batch, or with a policy :class:`~pipeal.engine.inference.exit_policy.EarlyExits`."""
        depth = self._depth(exit_at)
        if policy is None:
            return self._travel(batches, Journey(depth))
        if exit_at is not None:
            raise ConfigError(f"exit_at {exit_at} and a policy are given; the policy decides where samples leave")
        if len(policy.thresholds) != depth:
            raise ConfigError(
                f"the policy is for a model of {len(policy.thresholds)} exits, but this one has {depth}; "
                "calibrate it on this model"
            )
        return self._travel(batches, Journey(depth, policy=policy))

    def exits(self, batches: Iterable[Tree]) -> Generator[list[Tensor], None, None]:
        """The logits of every exit of every batch."""
        return self._travel(batches, Journey(self._depth(None), every=True))

    def refuse_while_under_way(self) -> None:
        """Raises a ScheduleError while an iterator of :meth:`each` or :meth:`exits` is neither exhausted nor closed."""
        if self._under_way:
            raise ScheduleError(
                "the pipeline is predicting; finish the iterator of predict_each or predict_exits, or close() it, first"
            )

    def _travel(self, batches: Iterable[Tree], journey: Journey) -> Generator[Any, None, None]:
        """Yields what the trips of all batches bring."""

        def trips(abandoned: threading.Event | None = None) -> Iterator[Trip]:
            for number, x in enumerate(batches):
                yield Traveller(self.stages, number, abandoned).trip(journey, x, ready_now(x))

        with self.turn:
            self.refuse_while_under_way()
            self._rest()
            self._under_way = True
        try:
            way = self._begin(journey.depth)
            with in_mode(modules_below(way, journey.depth), False), _at_home_after(way):
                if self.serial or len(way) == 1:
                    for trip in trips():
                        with intra_op_threads(self.options.threads):
                            arrived = drive(trip)
                        yield take_over(*arrived)
                else:
                    with self._driven(way) as drivers:
                        for arrived in drivers.drive(
                            trips(drivers.progress.ending), self.options.queue_depth * len(way)
                        ):
                            yield take_over(*arrived)
        finally:
            self._under_way = False

    @contextmanager
    def _driven(self, way: Sequence[Stage]) -> Iterator[Drivers]:
        """The threads for a prediction: those of the one before, if they were kept, or new ones."""
        drivers, self._idle = self._idle, None
        with ExitStack() as end:
            if drivers is None:
                drivers = end.enter_context(Drivers(self.stages if self._keeps else way, self.options))
            else:
                end.push(drivers)
            yield drivers
            # A prediction that does not come here has left things to do behind: its threads end.
            if self._keeps and len(drivers.threads) == len(self.stages):
                end.pop_all()
                self._idle = drivers

    def _begin(self, depth: int) -> list[Stage]:
        """The stages on the way to an exit, which from now on see what the caller has given to its own streams."""
        way = [stage for stage in self.stages if stage.layers[0][0] < depth]
        for stage in way:
            stage.device.follow_caller()
        return way

    def _depth(self, exit_at: int | None) -> int:
        layers = self.stages[-1].layers[-1][0] + 1
        depth = layers if exit_at is None else exit_at
        if not isinstance(depth, Integral):  # NumPy's, too
            raise ConfigError(
                f"exit_at is given as {name_of(depth)}; expected the number of an exit, from 1 to {layers} (several "
                "inputs are one argument, as in batches: predict((ids, mask)))"
            )
        if not 1 <= depth <= layers:
            raise PlacementError(f"exit {depth} does not exist; this model has exits 1 to {layers}")
        return int(depth)


@contextmanager
def _at_home_after(stages: Sequence[Stage]) -> Iterator[None]:
    """After it, a change of offloaded layers changes nothing of what was predicted."""
    try:
        yield
    finally:
        for stage in stages:
            if stage.offloaded is not None:
                stage.offloaded.settle()


def modules_below(stages: Sequence[Stage], depth: int) -> list[nn.Module]:
    """The layers of these stages on the way to an exit."""
    return [module_of(layer) for stage in stages for index, layer in stage.layers if index < depth]
