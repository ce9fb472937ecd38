"""Label sides, an encoder side and losses per place: of a text, whose label is the character that comes next, or a tag;
of an image, whose pixels each have a class.

What travels beside the features are the labels and one code for *every* class: the label sides work once per class
instead of once per place, and an associated loss can ask which of all codes was meant, instead of how near the bridge
came to one::

    y (B, T) ──► g1 ──► y, codes (V, K) ──► g2 ──► y, codes (V, K) ──► …        detached between layers
                 └► h1       │               └► h2      │
    x (B, T) ──► f1 ──► b1 ──┴─► cross entropy          │                       b's answer times each code
                 └──────────────────────► f2 ──► b2 ────┴─► cross entropy

``h`` is the transpose of ``g``, so that ``h1(h2(b2(x)))``, the way of an inference, gives just the logits that the
second layer was trained on: the answer times a code is the answer taken back through ``g``, times what the code came
from.

Places may lie in one dimension or several: ``(B, T)`` stands for ``(B, H, W)``, too. Answers have their codes last,
``(B, T, K)``; only the first ``h`` puts the classes where the network has them (``class_dim``).

Labels below zero are left out, and those of padding: those places have none. No class here draws random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.al.folding import LinearMap, Map
from pipeal.methods.al.layers import AE, ENC
from pipeal.methods.layer import read_by

UNLABELLED = -1
"""The label of a place that has none, as any below zero says."""

Labels: TypeAlias = tuple[Tensor, Tensor]
"""Labels ``(B, T)``, and the codes of all classes, ``(B, V, K)``."""

CodeStart: TypeAlias = Literal["drawn", "apart", "one-hot"]
"""How the codes of classes begin; see :class:`ClassCodes`."""

_ONE_HOT_LENGTH = 128.0
"""The logits of a code differ by as much, and e^-128 is 0 in float32: their autoencoder loss is 0, and its gradient."""

_CODE_OVER_CLASSES = 4
_CODE_OVER_WIDTH = 4
_WIDE_CODE = 512
"""What many classes, such as the characters of Chinese, have at most, or four times the width: the weights between two
layers' codes grow with the square."""


def code_width(classes: int, width: int = 0) -> int:
    """How wide the codes of so many classes are, unless it is chosen; ``width`` is that of the features.

    In codes narrower than the classes are many, not everything can be said of a place; in training they cost nothing
    at any place, however wide (:class:`WhichCode`).

    >>> code_width(65), code_width(5000)
    (260, 512)
    """
    return min(_CODE_OVER_CLASSES * classes, max(_WIDE_CODE, _CODE_OVER_WIDTH * width))


def code_length(code: int, start: CodeStart) -> float:
    """How long codes ``code`` wide begin, by which an answer times a code is divided.

    >>> code_length(256, "drawn"), code_length(65, "one-hot")
    (16.0, 128.0)
    """
    return _ONE_HOT_LENGTH if start == "one-hot" else code**0.5


class TokenCrossEntropy(nn.Module):
    """The mean cross entropy in nats over the labelled places; zero where there are none."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """``(B, T, V)`` logits and ``(B, T)`` classes.

        Raises:
            DataError: There is not one label for each place.
        """
        return _cross_entropy(logits, y)


class WhichCode(ENC):
    """The encoder side of such label sides: cross entropy of the bridge's answer times the code of each class.

    Codes take no gradient here. So in training the bridge's last map is multiplied by them first, which takes ``V K D``
    operations once and ``V D`` at each place, and an answer, ``K`` wide, takes ``K (D + V)`` at each place: with 65
    classes, codes of 260 and features of 128, six times as many, from 52 places on more. A bridge that ends in
    anything but a linear map with a bias and maybe a :class:`Resample`, or has hooks on it or on that map, does answer
    at each place.

    Args:
        f: Classes, or features, to features ``(B, T, D)``, or anything that ``b`` takes.
        b: The bridge, from there to codes ``(B, T, K)``.
        mask_at: Which item of the tuple that ``f`` gives is a mask ``(B, T)``, false where there is no label; None
            where there is none.
        start: How codes begin; see :class:`ClassCodes`.
    """

    def __init__(self, f: nn.Module, b: nn.Module, mask_at: int | None = None, *, start: CodeStart = "drawn") -> None:
        super().__init__(f, b, TokenCrossEntropy())
        self.mask_at = mask_at
        self.start = start

    def forward(self, x: Tree, labels: Labels) -> tuple[Tensor, Tree]:
        """The associated loss and ``f(x)``; of features with a mask, padding has no label.

        Raises:
            DataError: There is not one label for each place.
            LayerError: ``b`` wrote into what ``f`` gives.
        """
        out = self.f(x)
        y, codes = labels
        if self.mask_at is not None and out[self.mask_at].shape == y.shape:
            y = _long(y).masked_fill(~out[self.mask_at].bool(), UNLABELLED)
        every = codes[0] / code_length(codes.shape[-1], self.start)
        return self.cri(read_by(partial(self._logits, every=every), out), y), out

    def _logits(self, features: Tree, every: Tensor) -> Tensor:
        parted = _parted(self.b)
        if parted is None:
            answer: Tensor = self.b(features)
            return answer @ every.t()
        before, last, after = parted
        for module in before:
            features = module(features)
        logits = F.linear(features, every @ last.weight, every @ last.bias)
        for module in after:
            logits = module(logits)
        return logits


def padding_of(out: Tree) -> Tensor | None:
    """The mask ``(B, T)`` beside features ``(B, T, D)``, true on words; None where there is none."""
    if type(out) is not tuple or len(out) != 2 or not all(isinstance(part, Tensor) for part in out):
        return None
    features, mask = out
    return mask if features.dim() == 3 and mask.shape == features.shape[:2] else None


def _parted(bridge: nn.Module) -> tuple[list[nn.Module], nn.Linear, list[nn.Module]] | None:
    """A linear map at the end, what comes before it and what resamples after it; None if there is no such map, or
    something looks at its answer."""
    if type(bridge) is not nn.Sequential or not len(bridge):
        return None
    modules = list(bridge)
    end = len(modules) - 1 - isinstance(modules[-1], Resample)
    last, after = modules[end], modules[end + 1 :]
    if end < 0 or type(last) is not nn.Linear or last.bias is None or any(map(_has_hooks, (bridge, last, *after))):
        return None
    return modules[:end], last, after


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class Resample(nn.Module):
    """Answers at fewer places, or more, to one at each place of the labels: ``(B, t, K)`` to ``(B, T, K)``.

    Images bilinearly, as heads of segmentation do; sequences by repeating, so that no place is told what comes later.
    Each number of a code by itself, so that it makes no difference whether answers are resampled or their logits.

    Args:
        found: How many places features have, ``(t,)`` or ``(h, w)``, of some sample.
        wanted: How many labels there are of that sample. Of an input of another size there are as many in proportion.
    """

    def __init__(self, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        super().__init__()
        self.found, self.wanted = tuple(found), tuple(wanted)

    def forward(self, answer: Tensor) -> Tensor:
        """``(B, t, K)`` or ``(B, h, w, K)``, in any type of floating point."""
        places = answer.shape[1:-1]
        sizes = [(size * n + of // 2) // of for size, n, of in zip(places, self.wanted, self.found, strict=True)]
        first = answer.movedim(-1, 1)
        if len(sizes) == 1:
            return F.interpolate(first, sizes, mode="nearest").movedim(1, -1)
        mode = "bilinear" if len(sizes) == 2 else "trilinear"
        return F.interpolate(first, sizes, mode=mode, align_corners=False).movedim(1, -1)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.found} -> {self.wanted}"


class ClassCodes(AE):
    """The label side of a first layer: a code for each class, whose transpose tells them apart again.

    Args:
        classes: How many there are.
        code: The width of a code.
        class_dim: Where ``h`` puts the classes: last, or after the batch.
        ignore_index: A label of places that have none, beside all below zero.
        start: How codes begin: each ``drawn`` by itself; ``apart`` from each other, at right angles where they are as
            wide as there are classes; or ``one-hot``, so that an answer has a number for each class and learns as
            logits do, for which codes must be just as wide as that. The autoencoder tells one-hot codes apart from the
            start, as surely as float32 can say: it has nothing left to learn, and they stay (if weights do not decay).

    Raises:
        ConfigError: One-hot codes are not as wide as there are classes.
    """

    def __init__(
        self,
        classes: int,
        code: int,
        *,
        class_dim: int = -1,
        ignore_index: int = UNLABELLED,
        start: CodeStart = "drawn",
    ) -> None:
        if start == "one-hot" and code != classes:
            raise ConfigError(f"code is {code}, and one-hot; expected {classes}, as there are {classes} classes")
        h = _Readout(classes, code, class_dim, start)
        super().__init__(_Transposed(h), h, nn.CrossEntropyLoss())
        self.classes = classes
        self.ignore_index = ignore_index

    def forward(self, y: Tensor) -> tuple[Tensor, Labels]:
        """``(B, T)`` labels to the autoencoder loss, and them with the codes of all classes."""
        like = next(self.parameters())
        every = torch.eye(self.classes, dtype=like.dtype, device=like.device)
        codes = self.g(every)
        return self.cri(self.h(codes), every), (without(y, self.ignore_index), _per_sample(codes, y))


def without(y: Tensor, ignore_index: int) -> Tensor:
    """Labels, below zero where they were ``ignore_index``."""
    return y if ignore_index < 0 else _long(y).masked_fill(y == ignore_index, UNLABELLED)


def _long(y: Tensor) -> Tensor:
    """Labels of any whole type in one that has numbers below zero; others, which the loss refuses, as they are."""
    return y if y.is_floating_point() else y.long()


class OnwardCodes(AE):
    """The label side of a later layer: codes turned into others as far from each other, and back.

    Args:
        code_in: The width of the codes that come.
        code: The width of its own.
        start: How the first layer's codes begin; one-hot ones are handed on as they are.
        same: Whether it begins by handing on codes of any kind.

    Raises:
        ConfigError: Codes that are to be handed on are not as wide as its own.
    """

    def __init__(self, code_in: int, code: int, *, start: CodeStart = "drawn", same: bool = False) -> None:
        same = same or start == "one-hot"
        if same and code != code_in:
            raise ConfigError(f"code is {code}, and codes are handed on; expected {code_in}, as wide as they come")
        h = _Turn(code_in, code, same=same)
        super().__init__(_Transposed(h), h)

    def forward(self, labels: Labels) -> tuple[Tensor, Labels]:
        """To the autoencoder loss, and the same labels with this layer's codes."""
        y, before = labels
        codes = self.g(before[0])
        return self.cri(self.h(codes), before[0]), (y, _per_sample(codes, y))


class _Readout(LinearMap):
    """``h`` of the first layer: ``(…, K)`` answers to ``(…, V)`` logits."""

    def __init__(self, classes: int, code: int, class_dim: int, start: CodeStart) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, code))
        self.class_dim = class_dim
        self.start = start
        self.length = code_length(code, start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.start == "apart":
            nn.init.orthogonal_(self.weight, gain=max(self.weight.shape) ** 0.5)  # together as long as drawn ones
        elif self.start == "one-hot":
            nn.init.eye_(self.weight)
            with torch.no_grad():
                self.weight.mul_(self.length)
        else:
            nn.init.normal_(self.weight)

    def forward(self, answer: Tensor) -> Tensor:
        return (F.linear(answer, self.weight) / self.length).movedim(-1, self.class_dim)

    def as_linear(self) -> Map | None:
        return (self.weight / self.length, None) if self.class_dim == -1 else None


class _Turn(LinearMap):
    """``h`` of a later layer: ``(…, K)`` answers to those that the layer below would have given."""

    def __init__(self, code_in: int, code: int, *, same: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(code_in, code))
        self.same = same
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.same:
            nn.init.eye_(self.weight)
        else:
            nn.init.orthogonal_(self.weight)

    def forward(self, answer: Tensor) -> Tensor:
        return F.linear(answer, self.weight)

    def as_linear(self) -> Map:
        return self.weight, None


class _Transposed(nn.Module):
    """``g``: the transpose of ``h``, and no weights of its own."""

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
            f"targets are {describe(shapes_of(y))} and logits {describe(shapes_of(logits))}; expected a class, as "
            "a whole number, for each place"
        )
    # Not in half precision, in which two likely classes may get the same logit.
    rows, labels = logits.float().flatten(0, -2), y.flatten().long().clamp(min=UNLABELLED)
    try:
        total = F.cross_entropy(rows, labels, ignore_index=UNLABELLED, reduction="sum")
    except IndexError as error:  # of a CPU, as a GPU ends the process
        raise DataError(
            f"targets are classes up to {int(labels.max())}; expected 0 to {rows.shape[1] - 1}, and where a place has "
            "none, a number below 0 or the one that ignore_index names"
        ) from error
    return total / y.ge(0).sum().clamp(min=1)
