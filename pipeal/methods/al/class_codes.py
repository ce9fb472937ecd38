"""Label sides that work once for each class of a classification, and not once for each sample.

::

    y (B,) ──► g(every class) (C, K) ──► y, codes (C, K) ──► g(codes) (C, K') ──► …     later layers, too, have C rows
                  └─► h ─► logits (C, C), of which each sample takes the row of its class, for the loss

A label side that draws nothing gives all samples of a class the same code, so that with 4 classes 4 rows say all that
512 do. Losses take each class as often as there are samples of it: they, and the gradients, are those of the samples
one by one, up to rounding. Weights, their names and inferences are the same.

What it saves grows with the width of the codes and with the samples of each class; of a ResNet's step,
``scripts/bench/ladder.py --model resnet`` measures it (``labels by class``). From device to device go the codes
of all classes, once for a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.rng import may_draw
from pipeal.core.tree import describe, shapes_of
from pipeal.methods.al.layers import AE, AL, ENC, LabelAE
from pipeal.methods.dropout import Dropout

Coded: TypeAlias = tuple[Tensor, Tensor]
"""``(B,)`` class numbers, and ``(B, C, K)`` codes of all classes, the same for each sample and in one memory: the
tensors of a packet have an entry for each sample."""


class EachClass(LabelAE):
    """The label side of a first layer; the arguments are those of :class:`pipeal.LabelAE`."""

    draws_from_default = False

    def forward(self, y: Tensor) -> tuple[Tensor, Coded]:  # type: ignore[override]
        """``y`` is ``(B,)`` class numbers.

        Raises:
            DataError: ``y`` is of another shape or type.
        """
        if y.dim() != 1 or y.is_floating_point():
            raise DataError(f"targets are {describe(shapes_of(y))}; expected (B,) class numbers, as whole numbers")
        y = y.long()
        like = next(self.parameters())
        codes = self.g(torch.eye(self.classes, dtype=like.dtype, device=like.device))
        return self.cri(F.embedding(y, self.h(codes)), y), (y, _for_each(codes, y))


class EachCode(AE):
    """The label side of a later layer; the arguments are those of :class:`pipeal.AE`."""

    draws_from_default = False

    def forward(self, coded: Coded) -> tuple[Tensor, Coded]:
        """To the autoencoder loss, and the same classes with this layer's codes."""
        y, before = coded
        codes = self.g(before[0])
        return self.cri(F.embedding(y, self.h(codes)), F.embedding(y, before[0])), (y, _for_each(codes, y))


class OfClass(nn.Module):
    """An associated loss, of each sample against the code of its class.

    Args:
        cri: ``(answers, codes) -> scalar``.
    """

    draws_from_default = False

    def __init__(self, cri: nn.Module) -> None:
        super().__init__()
        self.cri = cri

    def forward(self, answer: Tensor, coded: Coded) -> Tensor:
        """``answer`` is ``(B, K)``.

        Raises:
            DataError: The bridge does not answer as the codes are.
        """
        y, codes = coded
        wanted = F.embedding(y, codes[0])
        if answer.shape != wanted.shape:
            raise DataError(
                f"b gives {describe(shapes_of(answer))} and the codes are {describe(shapes_of(wanted))}; expected "
                "equal shapes: a bridge as wide as the code"
            )
        return self.cri(answer, wanted)


def encode_each_class(layers: Iterable[nn.Module]) -> None:
    """Has the label sides of a classifier's AL layers work once for each class.

    Args:
        layers: All of them, in order, with the weights and optimizers that they have.

    Raises:
        ConfigError: A side is of a class of its own, or a sample's code depends on more than its class.
    """
    found = list(layers)
    for number, layer in enumerate(found):
        kinds = (LabelAE if number == 0 else AE, ENC)
        if not isinstance(layer, AL) or (type(layer.ae), type(layer.enc)) != kinds:
            raise ConfigError(
                f"layer {number} is no AL of {kinds[0].__name__} and {kinds[1].__name__}, whose label side can work "
                "once for each class"
            )
        sides = layer.blocks()
        if any(_draws(sides[side]) or _sees_others(sides[side]) for side in "gh"):
            raise ConfigError(
                f"the label side of layer {number} draws numbers or looks at other samples, so that a code is not its "
                "class's alone; let it work for each sample"
            )
    for layer in found:
        assert isinstance(layer, AL)
        enc, side = layer.enc, layer.ae
        assert isinstance(enc, ENC)
        if isinstance(side, LabelAE):
            layer.ae = EachClass(side.g, side.h, side.classes, side.cri)
        elif isinstance(side, AE):
            layer.ae = EachCode(side.g, side.h, side.cri)
        enc.cri = OfClass(enc.cri)


def _for_each(codes: Tensor, y: Tensor) -> Tensor:
    return codes.expand(len(y), *codes.shape)


def _draws(module: nn.Module) -> bool:
    """Also under the engine's keys, of which :func:`~pipeal.core.rng.may_draw` does not ask."""
    return may_draw(module) or any(isinstance(part, Dropout) and part.p > 0 for part in module.modules())


def _sees_others(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules())
