"""The styles in which a character model's label sides and encoder sides are built.

``codes``, the default, is :mod:`pipeal.methods.al.place_codes`: an associated loss asks which of the codes of all
characters was meant. ``one-hot`` begins with one-hot codes, which all layers hand on: a bridge's answer is then a
network's logits, and layers with one start (:mod:`pipeal.methods.lookahead`) learn what backpropagation would have them
learn, bit for bit. ``published`` is a code for each place, sigmoids, squared errors. There the way down does not
give what a layer was trained on: the mean of two codes need not decode to the mean of what they say. Nor are its
answers logits: they lie between 0 and 1, which with 65 characters keeps their cross entropy above 3.2 nats, however
right they are.

Labels below zero are left out: those places have none. No class here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.methods.al import AE, ENC
from pipeal.methods.al.place_codes import ClassCodes, CodeStart, Labels, OnwardCodes, WhichCode

CodeStyle: TypeAlias = Literal["codes", "one-hot", "published"]
CODE_STYLES = ("codes", "one-hot", "published")


class CodeError(nn.Module):
    """The associated loss of the style ``published``: the mean squared error over the labelled places."""

    def forward(self, answer: Tensor, labels: Labels) -> Tensor:
        """``(B, T, K)`` of a bridge."""
        y, codes = labels
        return _squared_error(answer, codes, y)


class PublishedCodes(AE):
    """The published label side, at every place by itself: a sigmoid code, and a sigmoid on the way back.

    Args:
        wide: How many characters there are; or, ``onward``, the width of the codes that come.
        code: The width of its own.
        onward: Whether it is of a later layer.
    """

    def __init__(self, wide: int, code: int, *, onward: bool) -> None:
        g, h = (InFloat32(nn.Linear(*ends), nn.Sigmoid()) for ends in ((wide, code), (code, wide)))
        super().__init__(g, h)
        self.wide = wide
        self.onward = onward

    def forward(self, labels: Tensor | Labels) -> tuple[Tensor, Labels]:
        """``(B, T)`` labels, of a later layer with their codes, to the autoencoder loss, and them with codes."""
        if isinstance(labels, Tensor):
            y, before = labels, F.one_hot(labels.clamp(min=0).long(), self.wide).to(torch.get_default_dtype())
        else:
            y, before = labels
        codes = self.g(before)
        return _squared_error(self.h(codes), before, y), (y, codes)


class InFloat32(nn.Sequential):
    """Modules in a row that compute in float32 under autocast, too.

    Sigmoid codes lie near 0.5, where bfloat16 has steps of 0.002 and 0.004, and the later the layer, the nearer to each
    other: those of 65 characters in a new fourth layer spread by 0.00005, and in bfloat16 by 0.00017, mostly rounding.
    (What is learnt hardly depends on it: the published form came to the same 3.866 in 2,000 steps.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` in any type of floating point."""
        with torch.autocast(x.device.type, enabled=False):
            answer: Tensor = super().forward(_no_half(x))
            return answer


def label_side(style: CodeStyle, characters: int, code: int, *, onward: bool, same: bool = False) -> AE:
    """The label side of a layer, ``onward`` of one that is not the first; all codes are ``code`` wide. Where all layers
    are to begin with the ``same`` codes, an onward one begins by handing them on: ``one-hot`` ones always do, and
    ``published`` ones cannot.

    Raises:
        ConfigError: One-hot codes are not as wide as there are characters.
    """
    if style == "published":
        return PublishedCodes(code if onward else characters, code, onward=onward)
    start = _start(style)
    return OnwardCodes(code, code, start=start, same=same) if onward else ClassCodes(characters, code, start=start)


def encoder_side(style: CodeStyle, f: nn.Module, bridge: Iterable[nn.Module], answer: nn.Linear) -> ENC:
    """The encoder side of a layer, which goes with a style's label sides; see
    :class:`pipeal.methods.al.place_codes.WhichCode`."""
    if style == "published":
        return ENC(f, nn.Sequential(*bridge, answer, InFloat32(nn.Sigmoid())), CodeError())
    return WhichCode(f, nn.Sequential(*bridge, answer), start=_start(style))


def _start(style: CodeStyle) -> CodeStart:
    return "one-hot" if style == "one-hot" else "drawn"


def _squared_error(answer: Tensor, wanted: Tensor, y: Tensor) -> Tensor:
    labelled = y.ge(0)
    # Codes hardly differ, so that half precision would not tell them apart.
    error = (_no_half(answer) - _no_half(wanted)).square().mean(-1) * labelled
    return error.sum() / labelled.sum().clamp(min=1)


def _no_half(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
