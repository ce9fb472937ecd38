"""Pipelined backpropagation as rank 0 has it in hands: a layer and a pipeline like any other."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree
from pipeal.engine import Pipeline
from pipeal.engine.distributed.requests import spans_in, times_in
from pipeal.engine.trace import Span, StageTimes
from pipeal.methods.bp import BP
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import follow_weights
from pipeal.run.backprop_ranks import Leader


class BPOverRanks(BP):
    """A network in BP form as rank 0 has it in its pipeline, while a :class:`Leader` trains it on all ranks.

    Args:
        leader: Has the network.
    """

    draws_from_default = False

    def __init__(self, leader: Leader) -> None:
        LocalLayer.__init__(self)  # with the optimizer that is there, and what it has learnt
        self.model, self.cri, self.opt = leader.layer.model, leader.layer.cri, leader.layer.opt
        self._places = ()
        self._leader: Any = leader
        self._lr_scale = 1.0

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Forward and backward on all ranks."""
        self.keep(self._leader.learn(x, y))
        return x, y

    def backward(self) -> None:
        """Was done, micro-batch by micro-batch."""
        self._taken_graph()

    def scale_lr(self, factor: float) -> None:
        """See :meth:`LocalLayer.scale_lr`."""
        self._lr_scale = factor
        super().scale_lr(factor)

    def update(self) -> None:
        """On all ranks."""
        self._leader.update_all(self._lr_scale)

    def scale_losses(self, wanted: bool = True) -> None:
        """Losses of this are not scaled.

        Raises:
            ConfigError: They are to be.
        """
        if wanted:
            raise ConfigError("precision is fp16, whose scaled losses no stages of backpropagation share; use 'bf16'")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the whole network, as all ranks have learnt it."""
        if self._leader.is_open:
            self._leader.collect()
        return super().state_dict(*args, **kwargs)

    def _climb(self, x: Tree) -> Tree:
        return self._leader.infer(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BPOverRanks:
        """Other ranks' blocks stay on the CPU: they are for what is collected."""
        for block in self._leader.blocks[0]:
            self.row()[block]._apply(fn, recurse)
        follow_weights(self.optimizers())
        return self


class PipelinedBackprop(Pipeline):
    """Rank 0's pipeline; it ends the others' work with its own.

    Args:
        leader: Has the network.
        settings: As for :class:`pipeal.Pipeline`.
    """

    def __init__(self, leader: Leader, **settings: Any) -> None:
        self._leader = leader
        self._spans: list[Span] = []
        super().__init__([BPOverRanks(leader)], [str(leader.device.device)], **settings)
        self.sizes = [len(blocks) for blocks in leader.blocks]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As :meth:`pipeal.Pipeline.__exit__`."""
        try:
            super().__exit__(kind, error, trace)
            if error is None:
                self._leader.close()
        finally:
            if self._leader.is_open:
                self._leader.abort()
            self.left_behind |= self._leader.is_open

    @property
    def device_names(self) -> list[str]:
        """See :attr:`pipeal.Pipeline.device_names`."""
        return [
            f"{seat.device} of rank {rank}" if rank else seat.device for rank, seat in enumerate(self._leader.seats)
        ]

    def spans(self) -> list[Span]:
        """Those of micro-batches, numbered through all batches, as of the last report."""
        return sorted(self._spans, key=lambda span: span.begin)

    def _restart_clocks(self) -> None:
        super()._restart_clocks()
        self._leader.begin()

    def _collect(self) -> tuple[dict[int, Tensor], list[StageTimes], list[int], list[int]]:
        losses, _, splits, overflows = super()._collect()
        reports = self._leader.reports()
        self._spans = [span for rank, facts in enumerate(reports) for span in spans_in(facts, rank)]
        return losses, [times_in(facts) for facts in reports], splits, overflows
