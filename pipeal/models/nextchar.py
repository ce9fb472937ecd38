"""Label sides, an encoder side and losses per place of a text, whose label is the character that comes next.

Two styles. Under ``codes``, the default, what travels beside the features are the labels and one code for *every*
character: the label sides work once per character instead of once per place, and an associated loss can ask which of
all codes was meant, instead of how near the bridge came to one::

    y (B, T) ──► g1 ──► y, codes (V, K) ──► g2 ──► y, codes (V, K) ──► …        detached between layers
                 └► h1       │               └► h2      │
    x (B, T) ──► f1 ──► b1 ──┴─► cross entropy          │                       b's answer times each code
                 └──────────────────────► f2 ──► b2 ────┴─► cross entropy

``h`` is the transpose of ``g``, so that ``h1(h2(b2(x)))``, the way of an inference, gives just the logits that the
second layer was trained on: the answer times a code is the answer taken back through ``g``, times what the code came
from. The regression of the ``published`` style (a code for each place, sigmoids, squared errors) has no such property:
the mean of two codes need not decode to the mean of what they say. Nor are its answers logits: they lie between 0 and
1, which with 65 characters keeps their cross entropy above 3.2 nats, however right they are.

Labels below zero are left out: those places have none. No class here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.al import AE, ENC
from pipeal.errors import DataError
from pipeal.packet import describe, shapes_of

UNLABELLED = -1
"""The label of a place that has none, as any below zero says."""

CodeStyle: TypeAlias = Literal["codes", "published"]
CODE_STYLES = ("codes", "published")

Labels: TypeAlias = tuple[Tensor, Tensor]
"""Labels ``(B, T)``, and codes: of all characters ``(B, V, K)``, of each place ``(B, T, K)`` if published."""


class TokenCrossEntropy(nn.Module):
    """The mean cross entropy in nats over the labelled places; zero where there are none."""

    draws_from_default = False

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """``(B, T, V)`` logits and ``(B, T)`` characters.

        Raises:
            DataError: There is not one label for each place.
        """
        return _cross_entropy(logits, y)


class WhichCode(ENC):
    """The encoder side of the style ``codes``: cross entropy of the bridge's answer times the code of each character.

    Codes take no gradient here. So in training the bridge's last map is multiplied by them first, which takes ``V K D``
    operations once and ``V D`` at each place, and an answer, ``K`` wide, takes ``K (D + V)`` at each place: with 65
    characters, codes of 260 and features of 128, six times as many, from 52 places on more. A bridge that ends in
    anything but a linear map with a bias, or has hooks on it or on that map, does answer at each place.

    Args:
        f: Characters, or features, to features ``(B, T, D)``.
        bridge: Features to what ``answer`` takes.
        answer: The last map, to codes ``(B, T, K)``.
    """

    draws_from_default = False

    def __init__(self, f: nn.Module, bridge: Iterable[nn.Module], answer: nn.Linear) -> None:
        super().__init__(f, nn.Sequential(*bridge, answer), TokenCrossEntropy())

    def forward(self, x: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        """The associated loss and ``f(x)``.

        Raises:
            DataError: There is not one label for each place.
        """
        out = self.f(x)
        y, codes = labels
        return self.cri(self._logits(out, codes[0] / codes.shape[-1] ** 0.5), y), out

    def _logits(self, features: Tensor, every: Tensor) -> Tensor:
        parted = _parted(self.b)
        if parted is None:
            answer: Tensor = self.b(features)
            return answer @ every.t()
        before, last = parted
        for module in before:
            features = module(features)
        return F.linear(features, every @ last.weight, every @ last.bias)


def _parted(bridge: nn.Module) -> tuple[list[nn.Module], nn.Linear] | None:
    """A linear map at the end and what comes before it; None if there is none, or something looks at its answer."""
    if type(bridge) is not nn.Sequential or not len(bridge):
        return None
    *before, last = bridge
    if type(last) is not nn.Linear or last.bias is None or _has_hooks(bridge) or _has_hooks(last):
        return None
    return before, last


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class CodeError(nn.Module):
    """The associated loss of the style ``published``: the mean squared error over the labelled places."""

    draws_from_default = False

    def forward(self, answer: Tensor, labels: Labels) -> Tensor:
        """``(B, T, K)`` of a bridge."""
        y, codes = labels
        return _squared_error(answer, codes, y)


class CharacterCodes(AE):
    """The label side of a first layer: a code for each character, whose transpose tells them apart again.

    Args:
        characters: How many there are.
        code: The width of a code.
    """

    draws_from_default = False

    def __init__(self, characters: int, code: int) -> None:
        h = _Readout(characters, code)
        super().__init__(_Transposed(h), h, nn.CrossEntropyLoss())
        self.characters = characters

    def forward(self, y: Tensor) -> tuple[Tensor, Labels]:
        """``(B, T)`` labels to the autoencoder loss, and them with the codes of all characters."""
        like = next(self.parameters())
        every = torch.eye(self.characters, dtype=like.dtype, device=like.device)
        codes = self.g(every)
        return self.cri(self.h(codes), every), (y, _per_sample(codes, y))


class OnwardCodes(AE):
    """The label side of a later layer: codes turned into others as far from each other, and back.

    Args:
        code_in: The width of the codes that come.
        code: The width of its own.
    """

    draws_from_default = False

    def __init__(self, code_in: int, code: int) -> None:
        h = _Turn(code_in, code)
        super().__init__(_Transposed(h), h)

    def forward(self, labels: Labels) -> tuple[Tensor, Labels]:
        """To the autoencoder loss, and the same labels with this layer's codes."""
        y, before = labels
        codes = self.g(before[0])
        return self.cri(self.h(codes), before[0]), (y, _per_sample(codes, y))


class PlaceCodes(AE):
    """The published label side, at every place by itself: a sigmoid code, and a sigmoid on the way back.

    Args:
        wide: How many characters there are; or, ``onward``, the width of the codes that come.
        code: The width of its own.
        onward: Whether it is of a later layer.
    """

    draws_from_default = False

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

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        """``x`` in any type of floating point."""
        with torch.autocast(x.device.type, enabled=False):
            answer: Tensor = super().forward(_no_half(x))
            return answer


def label_side(style: CodeStyle, characters: int, code: int, *, onward: bool) -> AE:
    """The label side of a layer, ``onward`` of one that is not the first; all codes are ``code`` wide."""
    if style == "published":
        return PlaceCodes(code if onward else characters, code, onward=onward)
    return OnwardCodes(code, code) if onward else CharacterCodes(characters, code)


def encoder_side(style: CodeStyle, f: nn.Module, bridge: Iterable[nn.Module], answer: nn.Linear) -> ENC:
    """The encoder side of a layer, which goes with a style's label sides; see :class:`WhichCode`."""
    if style == "published":
        return ENC(f, nn.Sequential(*bridge, answer, InFloat32(nn.Sigmoid())), CodeError())
    return WhichCode(f, bridge, answer)


class _Readout(nn.Module):
    """``h`` of the first layer: ``(…, K)`` answers to ``(…, V)`` logits."""

    draws_from_default = False

    def __init__(self, characters: int, code: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(characters, code))

    def forward(self, answer: Tensor) -> Tensor:
        return F.linear(answer, self.weight) / self.weight.shape[1] ** 0.5


class _Turn(nn.Module):
    """``h`` of a later layer: ``(…, K)`` answers to those that the layer below would have given."""

    draws_from_default = False

    def __init__(self, code_in: int, code: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(code_in, code)))

    def forward(self, answer: Tensor) -> Tensor:
        return F.linear(answer, self.weight)


class _Transposed(nn.Module):
    """``g``: the transpose of ``h``, and no weights of its own."""

    draws_from_default = False

    def __init__(self, h: _Readout | _Turn) -> None:
        super().__init__()
        self._h = (h,)  # in a tuple, so that its weights are counted, saved and learnt once

    def forward(self, codes: Tensor) -> Tensor:
        return F.linear(codes, self._h[0].weight.t())


def _per_sample(codes: Tensor, y: Tensor) -> Tensor:
    """``(V, K)`` as ``(B, V, K)``, without a copy: a packet's tensors have an entry for each sample."""
    return codes.expand(len(y), *codes.shape)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    if logits.shape[:-1] != y.shape or y.is_floating_point():
        raise DataError(
            f"targets are {describe(shapes_of(y))} and logits {describe(shapes_of(logits))}; expected a character, "
            "as a whole number, for each place"
        )
    # Not in half precision, in which two likely characters may get the same logit.
    rows, labels = logits.float().flatten(0, -2), y.flatten().long().clamp(min=UNLABELLED)
    total = F.cross_entropy(rows, labels, ignore_index=UNLABELLED, reduction="sum")
    return total / y.ge(0).sum().clamp(min=1)


def _squared_error(answer: Tensor, wanted: Tensor, y: Tensor) -> Tensor:
    labelled = y.ge(0)
    # Codes hardly differ, so that half precision would not tell them apart.
    error = (_no_half(answer) - _no_half(wanted)).square().mean(-1) * labelled
    return error.sum() / labelled.sum().clamp(min=1)


def _no_half(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x
