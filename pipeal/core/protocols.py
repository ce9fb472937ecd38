"""What a layer must be able to do to be trained, and what it may do besides.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeal.core.tree import Tree


Path: TypeAlias = Literal["f", "b", "h"]
"""The way of an inference through a layer: forward block, bridge, or label decoder."""


@runtime_checkable
class TrainableLayer(Protocol):
    """What the engine trains. An ``nn.Module`` whose backward never leaves it; :class:`pipeal.AL` is one."""

    def __call__(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Forward: keeps the local losses, returns what the next layer gets, detached."""
        ...

    def backward(self) -> None:
        """Backward of the losses that the last forward kept."""
        ...

    def update(self) -> None:
        """Optimizer step, and the gradients cleared."""
        ...

    def loss(self) -> tuple[Tensor, ...] | None:
        """The local losses of the last forward, detached; None where a subclass keeps none."""
        ...

    def scale_lr(self, factor: float) -> None:
        """Sets every learning rate to ``factor`` times its base value."""
        ...

    def inference(self, x: Tree, path: Path) -> Tree:
        """Passes ``x`` through one block: ``f`` on the way up, ``b`` at the turn, ``h`` on the way down."""
        ...


@runtime_checkable
class CutsOutputs(Protocol):
    """A layer whose parts return ``(loss, output)``, of which it detaches the output.

    Compiled graphs of such parts may end there: no gradient comes back through the output."""

    def cut_parts(self) -> Collection[nn.Module]:
        """Those parts."""
        ...


@runtime_checkable
class ScalesUpdates(Protocol):
    """Scales a layer's losses in fp16 and skips updates whose gradients overflow; an ``nn.Module``.

    It has methods only: from Python 3.12 on, ``isinstance`` does not see a module's buffers.
    """

    def overflows(self) -> int:
        """How many updates it has skipped; waits for a GPU."""
        ...

    def at_first(self) -> Mapping[str, Tensor]:
        """Its ``state_dict()`` before the first update."""
        ...

    def gave_up(self) -> bool:
        """Whether gradients overflow however small the losses are made; waits for a GPU."""
        ...


@runtime_checkable
class ScalesLosses(Protocol):
    """A layer that can be trained in fp16.

    Its scaler, if it shows one, is its attribute ``scaler``, a :class:`ScalesUpdates`. States of the layer load with
    and without a scaler.
    """

    def scale_losses(self, wanted: bool = True) -> None:
        """Turns the scaling of losses, against gradients too small for fp16, on or off. Idempotent."""
        ...
