"""What a layer must be able to do to be trained, and what it may do besides.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from pipeal.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeal.core.tree import Tree


Path: TypeAlias = Literal["f", "b", "h"]
"""A part of the way of an answer through a layer, by the letter of the AL block: ``f1 … fk, bk, hk … h1``."""

UP: Path = "f"
"""Up to the next layer: the forward block."""
TURN: Path = "b"
"""At the exit, from features to an answer: the bridge, or a classifier; nothing, if the features are the answer."""
DOWN: Path = "h"
"""Down again: the label decoder; nothing, for methods without a label side."""

WAY: tuple[Path, ...] = (UP, TURN, DOWN)
"""All parts of the way of an answer, in their order."""

Function = TypeVar("Function", bound=Callable[..., Any])


def check_path(path: str) -> None:
    """Refuses what is no part of the way.

    Raises:
        ConfigError: It is none.
    """
    if path not in WAY:
        raise ConfigError(f"unknown inference path {path!r}; expected 'f', 'b' or 'h'")


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
        """Passes ``x`` through one block: on the way :data:`UP`, at the :data:`TURN`, or on the way :data:`DOWN`."""
        ...


def through_blocks(inference: Function) -> Function:
    """Marks an inference that does nothing but call, of ``blocks()``, the one of that letter, or nothing without one.

    A subclass with an inference of its own is not marked by it.
    """
    inference.through_blocks = True  # type: ignore[attr-defined]
    return inference


@runtime_checkable
class KnowsInput(Protocol):
    """A model that knows what the inputs of batches are, such as a network that was converted."""

    def require_input(self, x: Tree) -> None:
        """Raises where an input is something else."""


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
