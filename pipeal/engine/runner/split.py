"""How a layer gets over a batch that it cannot learn from as it is: in parts where memory is short, or not at all.

A batch that does not fit is halved, and the halves again, down to one sample. Each part goes forward and backward by
itself, under a key of its own, so that one part's graph is alive at a time. Gradients and losses are weighted by the
parts' shares of the samples: for losses that are means over the samples the update is that of the whole batch, up to
rounding. It is another update where samples do not stand alone: batch norm sees each part's statistics, and dropout
draws anew. Batches of shapes that did not fit once are learnt from in parts from then on; where their forward did fit,
and only the backward did not, what is handed on stays that of the whole forward. So what comes out depends on the batch
and the memory, not on the batches before: a run that is taken up again goes on as it would have.

A batch whose loss is not finite is left out (:mod:`pipeal.engine.runner.nonfinite`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, TypeVar

from pipeal.core.errors import OutOfMemoryError
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, shapes_of
from pipeal.engine.devices import Device
from pipeal.engine.runner.before import Before, cut_graphs
from pipeal.engine.runner.forward import Passed
from pipeal.engine.runner.nonfinite import FiniteWatch, refuse_broken
from pipeal.engine.runner.parts import Gathered, UncuttableError, cut, halves, samples_in

T = TypeVar("T")

LearnPart: TypeAlias = Callable[[Tree, Tree, range], Passed]
"""Goes forward and backward with some samples of a batch, which the range numbers."""


class SplitWarning(UserWarning):
    """A batch did not fit into memory and was learnt from in parts."""


class BatchSplitter:
    """One layer's actions under the policies ``skip`` and ``split``. Under others a stage needs none.

    Args:
        index: The layer's number.
        layer: The layer.
        device: Its stage's device.
        watch: Knows which losses were not finite.
        splits: Whether batches may be learnt from in parts. The inputs are then kept until the backward has ended,
            which graphs mostly do in any case.

    Attributes:
        splits: How many batches were learnt from in parts since :meth:`take_splits`.
    """

    def __init__(self, index: int, layer: TrainableLayer, device: Device, watch: FiniteWatch, *, splits: bool) -> None:
        self._index = index
        self._module = module_of(layer)
        self._device = device
        self._watch = watch
        self._may_split = splits
        self._before = Before(self._module)
        # By the shapes that did not fit, the samples that did.
        self._most_forward: dict[Hashable, int] = {}
        self._most_backward: dict[Hashable, int] = {}
        self._said: tuple[Any, ...] = ()
        self._has_warned = False
        self.forget()

    def forget(self) -> None:
        """Drops what an earlier, perhaps failed, life of the pipeline left behind."""
        self.splits = 0
        self._inputs: tuple[Tree, Tree] | None = None
        self._has_learnt = False
        self._before.forget()

    def take_splits(self) -> int:
        """How many batches were learnt from in parts since the last call."""
        splits, self.splits = self.splits, 0
        return splits

    def forward(self, x: Tree, y: Tree, whole: Callable[[], Passed], part: LearnPart) -> Passed:
        """A forward; where it takes parts, their backwards as well.

        Args:
            x: The input.
            y: The target.
            whole: Goes forward with all of the batch.
            part: Learns from some of it.

        Raises:
            OutOfMemoryError: It does not fit, and cannot be cut, or one sample alone does not fit.
        """
        self._before.keep_buffers()
        self._has_learnt = False
        if not self._may_split:
            return whole()
        if _shapes(x, y) not in self._most_forward:
            done = self._tried(whole, (x, y))
            if done is not None:
                self._inputs = (x, y)
                return done[0]
            self._before.put_buffers_back()
        gathered = self._in_parts(x, y, part, self._most_forward)
        self._has_learnt = True
        try:
            return gathered.passed()
        except UncuttableError as why:
            raise self._hopeless(why) from None

    def backward(self, whole: Callable[[], None], part: LearnPart) -> None:
        """A backward, unless it was part of the forward. Arguments and errors as for :meth:`forward`."""
        if self._has_learnt:
            return
        self._before.move_gradients_aside()
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            whole()
        elif _shapes(*inputs) in self._most_backward or self._tried(whole, inputs) is None:
            # What was handed on is from the whole forward, and so shall the buffers be.
            after = Before(self._module)
            after.keep_buffers()
            self._in_parts(*inputs, part, self._most_backward)
            after.put_buffers_back()

    def counts(self) -> bool:
        """Before an update: whether the batch is learnt from. Else the layer is as it was before it.

        Raises:
            NonFiniteError: The loss and the weights are not finite.
        """
        found = self._watch.not_finite(self._index)
        if found is not None:
            refuse_broken(self._module, found)
        self._before.put_gradients_back(together=found is None)
        if found is not None:
            self._before.put_buffers_back()
        self._before.forget()
        return found is None

    def _in_parts(self, x: Tree, y: Tree, part: LearnPart, known: dict[Hashable, int]) -> Gathered:
        """Learns from part after part, and leaves the gradients of the whole batch."""
        samples = samples_in((x, y))
        most = known.get(_shapes(x, y), (samples + 1) // 2)
        self._before.move_gradients_aside()
        self._make_room()
        gathered, attempt = Gathered(self._module, samples), Before(self._module)
        left, largest = halves(range(samples), most), 0
        while left:
            rows = left.pop(0)
            cut_x, cut_y = cut((x, y), rows)
            attempt.keep_buffers()
            done = self._tried(lambda: part(cut_x, cut_y, rows), (cut_x, cut_y))  # noqa: B023  called at once
            if done is None:
                attempt.put_buffers_back()
                self._before.drop_gradients()
                self._make_room()
                left[:0] = halves(rows, (len(rows) + 1) // 2)
            else:
                gathered.add(done[0], rows)
                largest = max(largest, len(rows))
        known[_shapes(x, y)] = largest
        gathered.put_gradients()
        self.splits += 1
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
        cut_graphs(self._module)
        gc.collect(1)  # the cycles that hold it are young; to look through all of the process takes long
        self._device.give_memory_back()

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
