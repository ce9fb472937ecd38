"""What the layers of all methods share: how losses that stay in a layer become gradients, and these an update.

::

    forward (of each method)       backward             update
    x, y ──► losses ── keep() ──► (scaled in fp16) ──► optimizers(), gradients cleared
        └──► what the next layer gets, detached
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, LayerError, PlacementError, ScheduleError, listed
from pipeal.core.materialize import Origin, is_on_meta
from pipeal.core.modules import device_of
from pipeal.core.protocols import DOWN, TURN, UP, Path, check_path, through_blocks
from pipeal.core.tree import Tree, detach_alone, versions
from pipeal.methods.fused import step_and_clear
from pipeal.methods.optimizers import follow_weights, scale_rates
from pipeal.methods.scaling import LossScaler

T = TypeVar("T")


class LocalLayer(nn.Module, ABC):
    """A layer that trains itself; a method adds its ``forward``, its ``blocks()``, and its optimizer as ``opt``.

    The forward takes ``x`` and ``y``, gives its losses to :meth:`keep`, and returns what the next layer gets, detached.

    Attributes:
        opt: The optimizer; a layer with several overrides :meth:`optimizers`.
        draws_from_default: Of a class, whether its forward may draw from PyTorch's default generators, as ``F.dropout``
            does; the engine then keys what it draws, at some microseconds per operator. True unless it says False.
        scaler: What scales the losses, in fp16; None otherwise.
        most_losses: How many its method has names for; None where it is of none.
        origin: Where what is on the meta device gets its numbers from, beside ``reset_parameters``; None for nothing.
    """

    opt: torch.optim.Optimizer
    draws_from_default: bool

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A method's layer may draw by any operator unless it says otherwise itself: it is not trusted as the other
        classes of this package are (:func:`pipeal.core.draws.may_draw`), since anyone's method has its file here."""
        super().__init_subclass__(**keywords)
        if "draws_from_default" not in vars(cls):
            cls.draws_from_default = True

    def __init__(self) -> None:
        super().__init__()
        self.scaler: LossScaler | None = None
        self.origin: Origin | None = None
        self.most_losses: int | None = None
        self._graph: tuple[Tensor, ...] | None = None
        self._losses: tuple[Tensor, ...] | None = None

    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those of the layer; together they have all its parameters.

        Raises:
            LayerError: There is no ``opt``.
        """
        if "opt" not in vars(self):
            raise LayerError(
                f"a layer, {type(self).__name__}, has no optimizer; set self.opt = open_optimizer(optimizer, self, lr) "
                "at the end of its __init__"
            )
        return (self.opt,)

    @abstractmethod
    def blocks(self) -> dict[str, nn.Module]:
        """The modules that the layer is made of, by their letters; an inference passes through ``f``, ``b`` and ``h``,
        and where there is none of them, has nothing to do."""

    def keep(self, *losses: Tensor, weights: Sequence[float] | None = None) -> None:
        """Keeps the losses of a forward for :meth:`backward` and :meth:`loss`.

        Args:
            losses: In the order of the method's names.
            weights: What each counts for in the gradients; it is reported as it is. None for 1 each.

        Raises:
            LayerError: One is no tensor of one number; there are more than the method has names for, or not as many as
                weights; or, the first time, with gradients, a parameter of the layer is in no optimizer.
        """
        self._check(losses, weights)
        if self._losses is None and torch.is_grad_enabled():
            self._check_optimizer()
        weighted = losses if weights is None else tuple(w * loss for w, loss in zip(weights, losses, strict=True))
        self._graph = weighted if torch.is_grad_enabled() else None
        self._losses = tuple(map(detach_alone, losses))

    def loss(self) -> tuple[Tensor, ...] | None:
        """The losses of the last forward, detached; None before the first."""
        return self._losses

    def backward(self) -> None:
        """Computes the gradients of the losses; they stay inside this layer.

        Raises:
            ScheduleError: There is no forward to go back through.
            LayerError: There are several losses, and no parameter that any depends on, though not all are frozen.
            RuntimeError: There is one loss, and no parameter that it depends on.
        """
        losses = [*self._taken_graph()]
        if len(losses) > 1:  # a side may be frozen; where there is one loss, PyTorch says that nothing learns from it
            losses = [loss for loss in losses if loss.requires_grad]
            if not losses:
                self._require_frozen()
        # One call for all: their graphs share little, and it spares crossings into C++.
        torch.autograd.backward(losses if self.scaler is None else self.scaler.scaled(losses))

    def update(self) -> None:
        """Steps the optimizers and clears their gradients."""
        optimizers = self.optimizers()
        if self.scaler is None:
            step_and_clear(optimizers)
            return
        self.scaler.step(optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()

    def backward_and_update(self) -> None:
        """:meth:`backward`, then :meth:`update`: what the published code gives to a thread."""
        self.backward()
        self.update()

    def scale_losses(self, wanted: bool = True) -> None:
        """Has the losses scaled from now on, as fp16 needs (:class:`pipeal.methods.scaling.LossScaler`), or no longer.

        Idempotent. A pipeline asks, as its precision wants it.

        Raises:
            ConfigError: An optimizer, or a method of a subclass, does not go with it.
        """
        if not wanted:
            self.scaler = None
        elif self.scaler is None:
            for name in ("backward", "update", "backward_and_update"):
                if getattr(type(self), name) is not getattr(LocalLayer, name):
                    raise ConfigError(
                        f"{type(self).__name__} has a {name}() of its own, which does not scale its losses as fp16 "
                        "needs; give it a scale_losses() of its own as well, or use precision='bf16'"
                    )
            self.scaler = LossScaler(self.optimizers()).to(self._home())

    def scale_lr(self, factor: float) -> None:
        """Sets every learning rate to ``factor`` times its base value."""
        scale_rates(self.optimizers(), factor)

    @through_blocks
    def inference(self, x: Tree, path: Path) -> Tree:
        """Passes ``x`` through one block.

        Args:
            x: What that block takes.
            path: ``"f"``, ``"b"`` or ``"h"``.

        Raises:
            ConfigError: Another path.
        """
        check_path(path)
        block = self.blocks().get(path)
        return x if block is None else block(x)

    def block_parameters(self) -> dict[str, int]:
        """The number of parameters of each block, by its letter."""
        return {letter: sum(p.numel() for p in block.parameters()) for letter, block in self.blocks().items()}

    def effective_parameters(self, *, last: bool = False) -> int:
        """How many parameters a full inference uses: the turn's are those of the ``last`` layer alone."""
        count = self.block_parameters()
        return count.get(UP, 0) + count.get(DOWN, 0) + (count.get(TURN, 0) if last else 0)

    def affiliated_parameters(self, *, last: bool = False) -> int:
        """How many parameters serve training alone: all others."""
        return sum(self.block_parameters().values()) - self.effective_parameters(last=last)

    def _check(self, losses: Sequence[Tensor], weights: Sequence[float] | None) -> None:
        if not losses:
            raise LayerError("keep() got no loss, by which the layer would learn; expected at least one")
        for number, loss in enumerate(losses, start=1):
            if not isinstance(loss, Tensor):
                raise LayerError(
                    f"loss {number} that keep() got is of the class {type(loss).__name__}, which has no gradient; "
                    "expected a tensor of one number: leave .item(), float() and the like away"
                )
            if loss.numel() != 1:
                raise LayerError(
                    f"loss {number} that keep() got has the shape {tuple(loss.shape)}; expected one number: "
                    "take its mean()"
                )
        if weights is not None and len(weights) != len(losses):
            raise LayerError(f"keep() got {len(losses)} losses, and weights for {len(weights)}; expected one for each")
        if self.most_losses is not None and len(losses) > self.most_losses:
            raise LayerError(
                f"keep() got {len(losses)} losses, but the method's line of pipeal.core.methods.METHODS has names for "
                f"{self.most_losses}; name each loss there, or add up those that are one"
            )

    def _check_optimizer(self) -> None:
        """Refuses to leave a parameter as it is without a word."""
        updated = {id(p) for opt in self.optimizers() for group in opt.param_groups for p in group["params"]}
        own = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        left = [name for name, p in own if id(p) not in updated and not p.is_meta]  # which .to("meta") has replaced
        if left:
            raise LayerError(
                f"no optimizer of the layer, {type(self).__name__}, has its parameters {listed(left, 4)}, which would "
                "never learn: its factory left them out, they came after it, or optimizers() does not give it (by "
                "default self.opt alone); open it once all modules are there, have optimizers() give it, or freeze "
                "them (requires_grad_(False))"
            )

    def _require_frozen(self) -> None:
        """Refuses losses that are all without a gradient, unless the whole layer is frozen."""
        learning = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        if learning:
            raise LayerError(
                f"no loss of the layer, {type(self).__name__}, has a gradient, so that its parameters "
                f"{listed(learning, 4)} would never learn: compute the losses from them, without detach() and outside "
                "of torch.no_grad() and inference_mode(), or freeze them (requires_grad_(False))"
            )

    def _taken_graph(self) -> tuple[Tensor, ...]:
        """The losses to go back from, which are let go: with them goes the graph."""
        if self._graph is None:
            raise ScheduleError(
                "backward() without a forward() that kept losses: call layer(x, y) first, with gradients enabled; the "
                "forward of a layer of your own gives them to keep(), and no other open pipeline trains the same layer"
            )
        graph, self._graph = self._graph, None
        return graph

    def _home(self) -> torch.device:
        """Where its losses are."""
        return device_of(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LocalLayer:
        """Moves the optimizers' states along with the weights.

        Raises:
            PlacementError: There are no numbers to move.
        """
        if is_on_meta(self) and not _stays_there(fn):
            raise PlacementError(
                f"a layer, {type(self).__name__}, is on the meta device, where it has no numbers to move; call "
                "materialize(seed) of its package, or give that to a Pipeline, which makes its layers real one by one"
            )
        super()._apply(fn, recurse)
        follow_weights(self.optimizers())
        return self


def read_by(block: Callable[[Any], T], out: Tree, reader: str = "b", giver: str = "f") -> T:
    """What a block makes of what the next layer is given, too.

    An inference that goes on to later layers has no such block between.

    Args:
        block: A bridge, a head or a decoder.
        out: What it reads.
        reader: Its name, for messages.
        giver: That of the block that gives ``out``.

    Raises:
        LayerError: It wrote into that. A compiler, which follows the layer, is not asked.
    """
    if torch.compiler.is_compiling():
        return block(out)
    before = versions(out)
    made = block(out)
    if versions(out) != before:
        raise LayerError(
            f"{reader} changed what {giver} gives in place, which the next layer is given, too; use operators that do "
            f"not (such as inplace=False) at the beginning of {reader}"
        )
    return made


def _stays_there(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function leaves what is on the meta device there, as a change of its type does."""
    try:
        return fn(torch.empty(0, device="meta")).is_meta
    except NotImplementedError:
        return False
