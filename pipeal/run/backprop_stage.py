"""One stage of pipelined backpropagation: a rank's blocks of a network under PyTorch's own schedules.

::

    micro-batches     all of one shape, as PyTorch's stages want them: what is missing is filled up with copies
    between stages    one row of numbers each way; where blocks hand on features and a mask, of both
    loss              on the last stage; of each micro-batch a share of the mean over all samples but copies

Shapes are found by a climb: a micro-batch goes through all stages without gradients before the first of its kind is
trained on, so that PyTorch's stages are told them and need not ask each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeal.core.draws import may_draw
from pipeal.core.modules import in_mode
from pipeal.core.options import Precision
from pipeal.core.rng import keyed
from pipeal.core.tree import Shapes, Tree, tensors
from pipeal.core.tree_codec import Form, put_together, taken_apart
from pipeal.engine.devices import Device
from pipeal.engine.runner.parts import cut
from pipeal.engine.runner.precision import autocast
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock
from pipeal.run.micro_batches import Shape

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""PyTorch's, by the names of :data:`pipeal.core.names.BACKPROP_SCHEDULES`."""

SHAPES = 24
"""So many shapes of micro-batches keep the buffers that PyTorch's stages receive them in; of more the latest ones."""


@dataclass(frozen=True)
class Crossing:
    """What one micro-batch is between two stages: a row of numbers, since PyTorch sends what is contiguous.

    Attributes:
        form: Of the tree.
        shapes: Of its tensors.
        orders: Of their dimensions in memory, the one of the largest steps first.
        dtypes: Of their numbers.
    """

    form: Form
    shapes: Sequence[torch.Size]
    orders: Sequence[list[int]]
    dtypes: Sequence[torch.dtype]

    @classmethod
    def of(cls, tree: Tree) -> Crossing:
        """That of a tree."""
        form, found = taken_apart(tree)
        orders = [sorted(range(one.dim()), key=lambda axis, one=one: -one.stride(axis)) for one in found]  # type: ignore[misc]
        return cls(form, [one.shape for one in found], orders, [one.dtype for one in found])

    def example(self) -> Tensor:
        """What :meth:`pack` gives, on the meta device."""
        count = sum(shape.numel() for shape in self.shapes)
        return torch.empty(count, dtype=self._dtype, device="meta", requires_grad=True)

    def pack(self, tree: Tree) -> Tensor:
        """A tree as a row; a single tensor is not copied."""
        found = zip(tensors(tree), self.orders, strict=True)
        rows = [one.permute(order).reshape(-1).to(self._dtype) for one, order in found]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def unpack(self, row: Tensor) -> Tree:
        """The tree that was packed."""
        rows = row.split([shape.numel() for shape in self.shapes])
        found = []
        for part, shape, order, dtype in zip(rows, self.shapes, self.orders, self.dtypes, strict=True):
            back = sorted(range(len(order)), key=order.__getitem__)
            found.append(part.view([shape[axis] for axis in order]).permute(back).to(dtype))
        return put_together(self.form, found)

    @property
    def _dtype(self) -> torch.dtype:
        """Holds all of them: masks are exact in any type, whole numbers in float32 up to 2^24."""
        floats = [dtype for dtype in self.dtypes if dtype.is_floating_point]
        if not floats or any(not dtype.is_floating_point and dtype is not torch.bool for dtype in self.dtypes):
            floats.append(torch.float32)
        return reduce(torch.promote_types, floats)


@dataclass(frozen=True)
class Work:
    """A batch to learn from.

    Attributes:
        shape: Of its micro-batches.
        counts: Of the samples of each that count; copies fill it up.
        sequence: The number of the batch in the pipeline's life.
        key: Of what forwards draw.
        x: What the first stage takes, micro-batch by micro-batch; nothing on the others.
        y: The targets of all samples that count, on the last stage; nothing on the others.
    """

    shape: Shape
    counts: Sequence[int]
    sequence: int
    key: int
    x: Sequence[Tree] = ()
    y: Tree = None


class BackpropStage(nn.Module):
    """A rank's blocks, as a module that PyTorch's schedules call: tensors in, one tensor out.

    Args:
        blocks: They, in order, on ``device``.
        first: The number of the first one in the network.
        criterion: The loss; None but on the last stage.
        place: The number of the stage, and how many there are.
        schedule: One of :data:`SCHEDULES`.
        micro_batches: Of a batch.
        device: This rank's.
        group: The process group of all stages, in order.
        precision: Of forwards.
        clock: Times the actions.

    Attributes:
        action: What it was last at, for messages.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first: int,
        criterion: nn.Module | None,
        place: tuple[int, int],
        schedule: str,
        micro_batches: int,
        device: Device,
        group: Any,
        precision: Precision,
        clock: StageClock,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.criterion = criterion
        self.micro_batches = micro_batches
        self._number, self._count = place
        self._schedule, self._group = SCHEDULES[schedule], group
        self._device, self._precision, self._clock = device, precision, clock
        self._first, self._draws = first, [may_draw(block) for block in self.blocks]
        self._made: dict[Shape, tuple[Any, Crossing, Crossing]] = {}
        self._work: Work | None = None
        self._losses: list[Tensor] = []
        self._begun = 0
        self.action = Action.FORWARD

    @property
    def is_last(self) -> bool:
        """Whether it has the loss."""
        return self._number == self._count - 1

    def climb(self, x: Tree, shape: Shape | None = None) -> Tree:
        """Takes what the stage before gave through the blocks, in evaluation mode, without gradients.

        Args:
            x: On the device.
            shape: That of a batch to come with micro-batches like this one; None for none.
        """
        self.action = Action.FORWARD
        with in_mode([self.blocks], False), torch.no_grad():
            out = self._through(x)
        if shape is not None:
            takes, gives = Crossing.of(x), Crossing.of(out)
            self._made[shape] = self._made_for(takes, gives), takes, gives
            if len(self._made) > SHAPES:
                del self._made[next(iter(self._made))]
        return out

    def knows(self, shape: Shape) -> bool:
        """Whether a micro-batch of that shape has climbed, and its buffers are still there; the same on all stages."""
        return shape in self._made

    def takes(self, shape: Shape) -> Shapes:
        """What a micro-batch of a shape that has climbed is as it comes in here."""
        _, takes, _ = self._made[shape]
        return list(zip(takes.shapes, takes.dtypes, strict=True))

    def learn(self, work: Work) -> Tensor | None:
        """Forward and backward of a batch whose shape has climbed; gradients add up to that of the mean loss.

        Returns:
            On the last stage the loss, ``()``, float32; None on the others.

        Raises:
            Exception: What a block or the loss raised.
        """
        made = self._made[work.shape] = self._made.pop(work.shape)  # the latest
        schedule, takes, _ = made
        self.action = Action.FORWARD
        # A row of each, which PyTorch takes apart again.
        rows = [torch.stack([takes.pack(one) for one in work.x])] if work.x else []
        self._work, self._losses, self._begun = work, [], 0
        target = {"target": torch.zeros(self.micro_batches, device=self._device.device)} if self.is_last else {}
        try:
            # As the engine does: what a backward computes again finds this thread's settings.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                schedule.step(*rows, **target)
            return torch.stack(self._losses).sum() if self.is_last else None
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # PyTorch wraps it into one that lists all arguments
        finally:
            self._work = None

    def forward(self, given: Tensor) -> Tensor:
        """Goes forward with the next micro-batch of the batch at hand."""
        work = self._work
        assert work is not None
        (_, takes, gives), number = self._made[work.shape], self._begun
        self._begun += 1
        x = takes.unpack(given.reshape(-1))
        out = self._through(x, (work.key, number))
        if self.criterion is None:
            return gives.pack(out)
        with keyed(work.key, number, -1, whole_default=True), autocast(self._device, self._precision):
            loss = self._share(self.criterion, out, work, number)
        self._losses.append(loss.detach().float())
        return torch.stack([loss.float()])  # no view: PyTorch 2.6 detaches in place what it merges

    @contextmanager
    def timed(self, action: Action, batch: int) -> Iterator[None]:
        """Counts an action on a micro-batch, or an update after the last one, by its number through all batches."""
        self.action = action
        begin = self._device.stamp()
        yield
        self._clock.add(self._number, action, batch, batch, begin)

    def _timed(self, action: Action, micro_batch: int) -> AbstractContextManager[None]:
        assert self._work is not None
        return self.timed(action, self._work.sequence * self.micro_batches + micro_batch)

    def _share(self, criterion: nn.Module, out: Tree, work: Work, number: int) -> Tensor:
        """What a micro-batch adds to the mean loss of its batch."""
        begin, count = sum(work.counts[:number]), work.counts[number]
        if not count:  # filled up altogether
            return sum((one.float().sum() for one in tensors(out)), torch.zeros((), device=self._device.device)) * 0.0
        loss: Tensor = criterion(cut(out, range(count)), cut(work.y, range(begin, begin + count)))
        return loss * (count / sum(work.counts))

    def _through(self, x: Tree, key: tuple[int, ...] | None = None) -> Tree:
        """Through the blocks; what each draws follows from the key and its number, wherever the network is cut."""
        for place, block in enumerate(self.blocks):
            draws = nullcontext() if key is None else keyed(*key, self._first + place, whole_default=self._draws[place])
            with draws, autocast(self._device, self._precision):
                x = block(x)
        return x

    def _made_for(self, takes: Crossing, gives: Crossing) -> Any:
        # The first stage's rows come in one tensor, and have no gradient; of the last one comes a loss.
        given = takes.example() if self._number else takes.example().detach()[None]
        output = torch.empty(1, device="meta", requires_grad=True) if self.is_last else gives.example()
        stage = _Timed(
            self._timed,
            *(self, self._number, self._count, self._device.device),
            input_args=(given,),
            output_args=(output,),
            group=self._group,
        )
        # Losses are shares of a mean already. An older PyTorch, which does not ask, adds gradients up.
        adds_up: dict[str, Any] = (
            {"scale_grads": False} if "scale_grads" in inspect.signature(self._schedule).parameters else {}
        )
        return self._schedule(stage, self.micro_batches, loss_fn=lambda loss, _: loss.sum(), **adds_up)


class _Timed(PipelineStage):
    """A stage of PyTorch's whose work on each micro-batch is timed, without its waits for others."""

    def __init__(
        self, timed: Callable[[Action, int], AbstractContextManager[None]], *args: Any, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._in_time = timed

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with self._in_time(Action.FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with self._in_time(Action.BACKWARD, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **more)
