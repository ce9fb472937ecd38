"""One layer of Associated Learning: an encoder side, a label side, two local losses, two optimizers.

::

        x ──► f ──► x'  (detached, to the next layer)
                └─► b ──┐ associated loss
        y ──► g ──► y'  (detached, to the next layer, and the target of b)
                └─► h ──┐ autoencoder loss, against y

Training needs nothing from outside the layer, so layers can learn at the same time, on different batches.
After Kao and Chen, "Associated Learning: Decomposing End-to-end Backpropagation based on Auto-encoders and
Target Propagation" (Neural Computation 33, 2021), and Wu et al., "Associated Learning" (ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError, LayerError, name_of
from pipeal.core.modules import dtype_of
from pipeal.core.tree import Tree, describe, detach, shapes_of
from pipeal.methods.layer import LocalLayer, read_by
from pipeal.methods.network import Network
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, open_optimizer

SIDES = ("enc", "ae")


class ENC(nn.Module):
    """The encoder side: forward block ``f`` and bridge ``b``.

    Args:
        f: ``x -> x'``, a block of the original network. It may take and return any nesting of tensors.
        b: ``x' -> code``, to the shape of the label code.
        cri: The associated loss, ``(b(f(x)), code) -> scalar``; mean squared error if None.
    """

    def __init__(self, f: nn.Module, b: nn.Module, cri: nn.Module | None = None) -> None:
        super().__init__()
        _require_callable(self, f=f, b=b, cri=cri)
        self.f = f
        self.b = b
        self.cri = nn.MSELoss() if cri is None else cri

    def forward(self, x: Tree, code: Tree) -> tuple[Tensor, Tree]:
        """Returns the associated loss and ``f(x)``. ``code`` is ``g(y)``, detached. Made to be overridden.

        Raises:
            DataError: The mean squared error of codes of different shapes is wanted.
            LayerError: ``b`` wrote into what ``f`` gives.
        """
        out = self.f(x)
        predicted = read_by(self.b, out)
        # PyTorch would broadcast one to the other: one target to eight inputs.
        if type(self.cri) is nn.MSELoss and predicted.shape != code.shape:
            raise DataError(
                f"b gives {describe(shapes_of(predicted))} and g gives {describe(shapes_of(code))}; expected equal "
                "shapes: a target per input, and a bridge as wide as the code"
            )
        return self.cri(predicted, code), out


class AE(nn.Module):
    """The label side, an autoencoder: ``g`` encodes the target, ``h`` decodes it.

    Args:
        g: ``y -> code``.
        h: ``code -> y``.
        cri: The autoencoder loss, ``(h(g(y)), y) -> scalar``; mean squared error if None.
    """

    def __init__(self, g: nn.Module, h: nn.Module, cri: nn.Module | None = None) -> None:
        super().__init__()
        _require_callable(self, g=g, h=h, cri=cri)
        self.g = g
        self.h = h
        self.cri = nn.MSELoss() if cri is None else cri

    def forward(self, y: Tree) -> tuple[Tensor, Tree]:
        """Returns the autoencoder loss and the code ``g(y)``. Made to be overridden.

        Raises:
            DataError: ``y`` is whole numbers, and ``g`` begins with a linear layer.
            LayerError: ``h`` wrote into what ``g`` gives.
        """
        if isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex()) and _begins_linear(self.g):
            raise DataError(
                f"targets are {describe(shapes_of(y))}, whole numbers, and g begins with a linear layer, which takes "
                "floats; use LabelAE(g, h, classes) where they are class numbers, else y.float()"
            )
        code = self.g(y)
        return self.cri(read_by(self.h, code, "h", "g"), y), code


class LabelAE(AE):
    """The label side of a first layer for classification: targets are class numbers, ``h`` gives logits.

    Args:
        g: ``(B, classes) -> (B, code)``.
        h: ``(B, code) -> (B, classes)``.
        classes: The number of classes.
        cri: ``(logits, y) -> scalar``; cross entropy if None.
    """

    def __init__(self, g: nn.Module, h: nn.Module, classes: int, cri: nn.Module | None = None) -> None:
        super().__init__(g, h, nn.CrossEntropyLoss() if cri is None else cri)
        self.classes = classes

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``y`` is ``(B,)`` class numbers, or ``(B, classes)`` one-hot or class probabilities, as floats.

        Raises:
            DataError: ``y`` is of another shape or type.
            LayerError: ``h`` wrote into what ``g`` gives.
        """
        y = class_targets(y, self.classes)
        soft = y if y.is_floating_point() else nn.functional.one_hot(y, self.classes)
        soft = soft.to(dtype_of(self))
        code = self.g(soft)
        return self.cri(read_by(self.h, code, "h", "g"), y), code


def class_targets(y: Tensor, classes: int) -> Tensor:
    """``(B,)`` class numbers, of any whole type, as int64; ``(B, classes)`` probabilities as they are.

    Raises:
        DataError: ``y`` is of another shape or type.
    """
    if not isinstance(y, Tensor):
        raise DataError(f"targets are given as {name_of(y)}; expected a tensor: torch.as_tensor(y)")
    numbers = not y.is_floating_point()
    if y.shape[1:] != (() if numbers else (classes,)) or not y.dim():
        raise DataError(
            f"targets are {describe(shapes_of(y))}; expected (B,) class numbers, as whole numbers, or "
            f"(B, {classes}) class probabilities, as floats"
        )
    return y.long() if numbers else y


class AL(LocalLayer):
    """A layer that trains itself.

    Args:
        enc: The encoder side.
        ae: The label side.
        lr: One learning rate, or ``{"enc": …, "ae": …}``.
        optimizer: Called for each side as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.

    Attributes:
        enc: The encoder side.
        ae: The label side.
        enc_opt: The optimizer of the encoder side.
        ae_opt: The optimizer of the label side.
        scaler: What scales both losses, in fp16; None otherwise.

    Raises:
        LayerError: A side is none, such as a class or the other side.
        ConfigError: ``lr`` is a mapping that lacks a side or names another one, or no number of 0 or more; or the
            ``optimizer`` makes none that a layer can use.
    """

    draws_from_default = False

    def __init__(
        self,
        enc: nn.Module,
        ae: nn.Module,
        lr: LearningRates = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        for name, side, wanted, other in (("enc", enc, "ENC(f, b)", AE), ("ae", ae, "AE(g, h)", ENC)):
            if not isinstance(side, nn.Module) or isinstance(side, other) or _is_of_torch(side):
                raise LayerError(f"found {name_of(side)} for {name}; expected a side of the layer, such as {wanted}")
        self.enc = enc
        self.ae = ae
        rates = _by_side(lr)
        self.enc_opt = open_optimizer(optimizer, enc, rates["enc"])
        self.ae_opt = open_optimizer(optimizer, ae, rates["ae"])

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Encodes an input and its target, and keeps the two local losses for :meth:`backward`.

        Args:
            x: What ``f`` takes, batch first.
            y: What ``g`` takes, batch first.

        Returns:
            ``f(x)`` and ``g(y)``, both detached.
        """
        ae_loss, code = self.ae(y)
        code = detach(code)
        enc_loss, out = self.enc(x, code)
        self.keep(enc_loss, ae_loss)
        return detach(out), code

    def cut_parts(self) -> tuple[nn.Module, ...]:
        """Both sides, as forward goes back through their losses alone; none where its own or a hook may differ.

        It is asked for once, by a pipeline that compiles: register hooks on a side before you make one.
        """
        own = type(self).forward is AL.forward and "forward" not in vars(self)
        sides = (self.enc, self.ae)
        return sides if own and not any(side._forward_hooks for side in sides) else ()

    def set_lr(self, which: str | Iterable[str], lr: float) -> None:
        """Gives the sides named by ``which`` (``"enc"``, ``"ae"``, or several) a new base learning rate.

        Not while a pipeline is at work on the layer: drain it first, or let the change travel with the batches
        (``lr_scale`` of :meth:`pipeal.Pipeline.run`), which also takes the place of PyTorch's schedulers.
        """
        optimizers = {"enc": self.enc_opt, "ae": self.ae_opt}
        for side in [which] if isinstance(which, str) else which:
            if side not in optimizers:
                raise ConfigError(f"unknown side {side!r} of an AL layer; expected 'enc' or 'ae'")
            for group in optimizers[side].param_groups:
                group["lr"] = group["initial_lr"] = lr

    def blocks(self) -> dict[str, nn.Module]:
        """``f``, ``b``, ``g`` and ``h``, by their letters."""
        sides: Any = self  # a user's own ENC and AE are only known to have these attributes
        return {"f": sides.enc.f, "b": sides.enc.b, "g": sides.ae.g, "h": sides.ae.h}

    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """One per side."""
        return (self.ae_opt, self.enc_opt)


def make_layers(network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> Iterator[AL]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`."""
    for part in network.parts(same_start=network.same_start):
        yield AL(*network.sides(part), lr, optimizer)


def _require_callable(side: nn.Module, **parts: object) -> None:
    """Refuses a class in the place of an instance; None only for a loss."""
    for name, part in parts.items():
        if isinstance(part, type) or not (callable(part) or (part is None and name == "cri")):
            raise LayerError(f"found {name_of(part)} for {name} of {type(side).__name__}; expected a module")


def _begins_linear(block: nn.Module) -> bool:
    while isinstance(block, nn.Sequential) and len(block):
        block = block[0]
    return isinstance(block, nn.Linear)


def _is_of_torch(side: nn.Module) -> bool:
    """Such as a block in the place of a side: none of them takes and returns what a side does."""
    return type(side).__module__.startswith("torch.nn.modules.")


def _by_side(lr: LearningRates) -> Mapping[str, float]:
    rates = lr if isinstance(lr, Mapping) else dict.fromkeys(SIDES, lr)
    if set(rates) != set(SIDES):
        raise ConfigError(f"lr has the keys {sorted(rates)}; expected a number, or a mapping with 'enc' and 'ae'")
    return rates
