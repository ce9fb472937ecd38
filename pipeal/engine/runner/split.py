"""Splits a batch on out-of-memory: the layer learns from it in parts.

A batch that does not fit is halved, and the halves again, down to one sample. Each part goes forward and backward by
itself, under a key of its own, so that one part's graph is alive at a time. Gradients and losses are weighted by the
parts' shares of the samples: for losses that are means over the samples the update is that of the whole batch, up to
rounding. It is another update where samples do not stand alone: batch norm sees each part's statistics, and dropout
draws other numbers. Batches of shapes that did not fit once are learnt from in parts from then on; where their forward
did fit, and only the backward did not, what is handed on stays that of the whole forward. So what comes out depends on
the batch and the memory, not on the batches before: a run that is taken up again goes on as it would have.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from pipeal.core.errors import OutOfMemoryError
from pipeal.core.options import Precision
from pipeal.core.packet import Packet
from pipeal.core.tree import Tree, shapes_of
from pipeal.engine.devices import Device
from pipeal.engine.runner.before import Before, cut_graphs
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.runner.parts import Gathered, UncuttableError, cut, halves, samples_in
from pipeal.engine.runner.precision import settings
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock

T = TypeVar("T")


class SplitWarning(UserWarning):
    """A batch did not fit into memory and was learnt from in parts."""


@dataclass(eq=False)
class Split(Runner):
    """Learns from a batch in parts where memory is short.

    The inputs are kept until the backward has ended, which graphs mostly do in any case.

    Attributes:
        part: Runs a part of a batch, untimed; ``inner`` runs a whole one.
        index: The layer's number.
        module: The layer.
        device: Its stage's device.
        precision: That of its forwards: a part goes forward within a backward as well.
        clock: Times the parts.
        before: The layer's gradients from before the batch, shared with what stands around.
        splits: Counts, by layer, the batches that were learnt from in parts.
    """

    part: Runner
    index: int
    module: nn.Module
    device: Device
    precision: Precision
    clock: StageClock
    before: Before
    splits: Counter[int]

    def __post_init__(self) -> None:
        # By the shapes that did not fit, the samples that did.
        self._most_forward: dict[Hashable, int] = {}
        self._most_backward: dict[Hashable, int] = {}
        self._said: tuple[Any, ...] = ()
        self._has_warned = False
        self._inputs: tuple[Tree, Tree] | None = None
        self._has_learnt = False

    def forget(self) -> None:
        """As :meth:`Runner.forget`; what did not fit is remembered."""
        self._inputs, self._has_learnt = None, False
        self.inner.forget()

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:  # noqa: ARG002
        """A forward; where it takes parts, their backwards as well.

        Raises:
            OutOfMemoryError: It does not fit, and cannot be cut, or one sample alone does not fit.
        """
        self._has_learnt = False
        if _shapes(x, y) not in self._most_forward:
            done = self._tried(partial(self.inner.forward, packet, x, y), (x, y))
            if done is not None:
                self._inputs = (x, y)
                return done[0]
            self.before.put_buffers_back()
        gathered = self._in_parts(Action.FORWARD, packet, x, y, self._most_forward)
        self._has_learnt = True
        try:
            return gathered.passed()
        except UncuttableError as why:
            raise self._hopeless(why) from None

    def backward(self, packet: Packet, rows: range | None = None) -> None:  # noqa: ARG002
        """A backward, unless it was part of the forward; raises as :meth:`forward`."""
        if self._has_learnt:
            return
        inputs, self._inputs = self._inputs, None
        assert inputs is not None  # those of the forward
        whole = partial(self.inner.backward, packet)
        if _shapes(*inputs) in self._most_backward or self._tried(whole, inputs) is None:
            # What was handed on is from the whole forward, and so shall the buffers be.
            after = Before(self.module)
            after.keep_buffers()
            self._in_parts(Action.BACKWARD, packet, *inputs, self._most_backward)
            after.put_buffers_back()

    def _learn(self, action: Action, packet: Packet, x: Tree, y: Tree, rows: range) -> Passed:
        """Goes, within an action, forward and backward with some samples of a batch."""
        begin = self.device.stamp()
        with settings(Action.FORWARD, self.device, self.precision):
            passed = self.part.forward(packet, x, y, rows)
        with settings(Action.BACKWARD, self.device, self.precision):
            self.part.backward(packet, rows)
        self.clock.add(self.index, action, packet.batch, packet.sequence, begin)
        return passed

    def _in_parts(self, action: Action, packet: Packet, x: Tree, y: Tree, known: dict[Hashable, int]) -> Gathered:
        """Learns from part after part, and leaves the gradients of the whole batch."""
        samples = samples_in((x, y))
        most = known.get(_shapes(x, y), (samples + 1) // 2)
        self.before.move_gradients_aside()
        self.before.drop_gradients()  # of an attempt that failed
        self._make_room()
        gathered, attempt = Gathered(self.module, samples), Before(self.module)
        left, largest = halves(range(samples), most), 0
        while left:
            rows = left.pop(0)
            cut_x, cut_y = cut((x, y), rows)
            attempt.keep_buffers()
            done = self._tried(partial(self._learn, action, packet, cut_x, cut_y, rows), (cut_x, cut_y))
            if done is None:
                attempt.put_buffers_back()
                self.before.drop_gradients()
                self._make_room()
                left[:0] = halves(rows, (len(rows) + 1) // 2)
            else:
                gathered.add(done[0], rows)
                largest = max(largest, len(rows))
        known[_shapes(x, y)] = largest
        gathered.put_gradients()
        self.splits[self.index] += 1
        if not self._has_warned:
            self._has_warned = True
            message, *_ = self._said
            warnings.warn(
                f"{message}; such batches are learnt from in parts of {largest} samples at most, which takes longer "
                "(said once for each layer, counted in the report)",
                SplitWarning,
                stacklevel=2,
            )
        return gathered

    def _make_room(self) -> None:
        """Lets go of what a failed attempt left: graphs, what only cycles hold, and what the allocator keeps."""
        cut_graphs(self.module)
        gc.collect(1)  # the cycles that hold it are young; to look through all of the process takes long
        self.device.give_memory_back()

    def _tried(self, attempt: Callable[[], T], packet: Tree) -> tuple[T] | None:
        """What the attempt gives; None where memory did not suffice and the packet can be cut.

        By the time it returns, the error is gone, and with its traceback everything that the attempt had made.
        """
        try:
            return (attempt(),)
        except OutOfMemoryError as error:
            self._said = error.args
            try:
                samples = samples_in(packet)
            except UncuttableError as why:
                raise self._hopeless(why) from error.__cause__
            if samples < 2:
                raise self._hopeless("even a single sample is too much") from error.__cause__
        return None

    def _hopeless(self, why: object) -> OutOfMemoryError:
        message, *where = self._said
        return OutOfMemoryError(f"{message}; it cannot be learnt from in parts, either: {why}", *where)


def _shapes(x: Tree, y: Tree) -> Hashable:
    return tuple(shapes_of((x, y)))
