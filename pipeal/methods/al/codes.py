"""Label sides by task: how a target becomes a code, layer by layer, and comes back.

Those of the character language model are in :mod:`pipeal.models.nextchar`.

Two styles. ``inverse``, the default, starts ``g`` and ``h`` as near inverses of each other: a first ``g`` that spreads
the targets over the whole range of tanh, later ones that are orthogonal, each ``h`` the scaled transpose, and biases
of zero. ``published`` is the published code: linear maps with PyTorch's own initialisation and a sigmoid after each,
trained by mean squared error.

Why not the published one: its first codes of two out of 200 classes differ by a hundredth or so (a sigmoid near its
middle, of weights as small as one over the root of 200), and each further layer brings them closer together. So
the bridges have nothing to tell apart until the autoencoders have learnt to, and mean squared error against one-hot
targets of many classes hardly teaches them: answering zero everywhere is nearly as good. Near inverses tell the classes
apart from the first step, on the way up and on the way down; cross entropy pulls as hard for 200 classes as for 2.

No class here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.core.errors import DataError, check_counts, check_named
from pipeal.core.modules import device_of, dtype_of
from pipeal.core.tree import describe, shapes_of
from pipeal.methods.al.layers import AE, LabelAE
from pipeal.methods.layer import read_by

Task: TypeAlias = Literal["classification", "multilabel", "regression"]
LabelStyle: TypeAlias = Literal["inverse", "published"]

CODE_ACTIVATIONS: Mapping[LabelStyle, type[nn.Module]] = {"inverse": nn.Tanh, "published": nn.Sigmoid}
"""The last activation of a code's block, and so of the bridges that predict it."""

TASKS = ("classification", "multilabel", "regression")
LABEL_STYLES = tuple(CODE_ACTIVATIONS)

_FIRST_LOGIT = 8
"""The first layer's ``h`` starts by giving about 0.6 times this to the right class, and about 0 to the others."""

_REGRESSION_SPREAD = 0.5
"""The spread, before tanh, of the code of standardised numbers: small enough to tell two deviations from three."""


def target_side(task: Task, outputs: int, code: int, *, style: LabelStyle = "inverse") -> AE:
    """The label side of a first layer.

    ==============  ===========================================  ======================  =======================
    task            target                                       ``h`` gives             autoencoder loss
    ==============  ===========================================  ======================  =======================
    classification  ``(B,)`` class numbers, or                   logits                  cross entropy
                    ``(B, outputs)`` probabilities
    multilabel      ``(B, outputs)`` of 0 and 1                  logits                  binary cross entropy
    regression      ``(B, outputs)``, or ``(B,)`` for one        the numbers             mean squared error
    ==============  ===========================================  ======================  =======================

    Codes lie within (-1, 1), whatever the task, because the bridges that predict them end in tanh. So the numbers of a
    regression should be standardised (a mean of about 0, a spread of about 1); codes of numbers far beyond that can
    hardly be told apart.

    Args:
        task: See above.
        outputs: How many classes, labels or numbers there are.
        code: The width of the code.
        style: ``inverse`` or ``published``. The published one trains by mean squared error whatever the task, and its
            sigmoids answer between 0 and 1: regression targets have to lie there.

    Raises:
        ConfigError: The task or style is unknown, or a size is below 1.
    """
    check_named("task", task, TASKS)
    if task == "classification":
        return class_side(outputs, code, style=style)
    check_named("style of label sides", style, LABEL_STYLES)
    check_counts(outputs=outputs, code=code)
    if style == "published":
        return TargetAE(*_published(outputs, code), outputs)
    if task == "multilabel":
        return LabelsSide(*_inverse(outputs, code), outputs, nn.BCEWithLogitsLoss())
    return NumbersSide(*_inverse(outputs, code), outputs, nn.MSELoss())


def class_side(classes: int, code: int, *, style: LabelStyle = "inverse") -> LabelAE:
    """The label side of a first layer for classification: a code per class, and logits back.

    Args:
        classes: How many classes there are.
        code: The width of the code.
        style: ``inverse`` or ``published``; the latter answers with ``classes`` numbers between 0 and 1, of which the
            greatest is meant, as a logit is.

    Raises:
        ConfigError: The style is unknown, or a size is below 1.
    """
    check_named("style of label sides", style, LABEL_STYLES)
    check_counts(classes=classes, code=code)
    if style == "published":
        return LabelAE(*_published(classes, code), classes, OneHotError())
    return ClassSide(*_inverse(classes, code), classes)


def recode_side(code_in: int, code_out: int, *, style: LabelStyle = "inverse") -> AE:
    """The label side of a later layer: the code of the layer before to one of its own, and back.

    Under PyTorch's own initialisation each ``g`` brings the codes of two classes closer to each other, by a factor of
    about 1.7, and the decoders need some hundred steps before the way down says anything; until then the encoder
    sides chase moving targets that hardly differ. An orthogonal ``g`` with the gain of tanh, and its transpose as
    ``h``, keep the distances and decode from the first step: the LSTM on 16,568 texts of AG News stood at 0.86 test
    accuracy after two epochs, and at 0.53 without (where a label side five times as fast was already a help).

    Args:
        code_in: The width of the code that the layer before hands on.
        code_out: The width of the layer's own.
        style: ``inverse`` or ``published``.

    Raises:
        ConfigError: The style is unknown, or a size is below 1.
    """
    check_named("style of label sides", style, LABEL_STYLES)
    check_counts(code_in=code_in, code_out=code_out)
    if style == "published":
        return AE(*_published(code_in, code_out))
    return RecodeSide(*_inverse(code_in, code_out))


class TargetAE(AE):
    """The label side of a first layer for targets that are numbers: several labels at once, or a regression.

    Args:
        g: ``(B, outputs) -> (B, code)``.
        h: ``(B, code) -> (B, outputs)``.
        outputs: How many numbers a target has.
        cri: ``(h(g(y)), y) -> scalar``; mean squared error if None.
    """

    def __init__(self, g: nn.Module, h: nn.Module, outputs: int, cri: nn.Module | None = None) -> None:
        super().__init__(g, h, cri)
        self.outputs = outputs

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``y`` is ``(B, outputs)``, or ``(B,)`` if there is one; whole numbers are taken as floats.

        Raises:
            DataError: ``y`` is of another shape.
            LayerError: ``h`` wrote into what ``g`` gives.
        """
        target = number_targets(y, self.outputs).to(dtype_of(self))
        code = self.g(target)
        return self.cri(read_by(self.h, code, "h", "g"), target), code


def number_targets(y: Tensor, outputs: int) -> Tensor:
    """``(B, outputs)`` numbers, or ``(B,)`` where there is one output, as ``(B, outputs)``.

    Raises:
        DataError: ``y`` is of another shape.
    """
    if y.shape[1:] != (outputs,) and not (outputs == 1 and y.dim() == 1):
        raise DataError(
            f"targets are {describe(shapes_of(y))}; expected (B, {outputs})"
            f"{' or (B,)' if outputs == 1 else ''}: {outputs} per input"
        )
    # Without the reshape a (B,) target would broadcast against (B, 1) answers into a (B, B) loss.
    return y.reshape(-1, outputs)


class NearInverse(AE):
    """A label side of the style ``inverse``, which starts with ``h`` near the inverse of ``g``.

    Args:
        g: A linear map and tanh.
        h: A linear map back.
        more: What the class beside this one takes.
    """

    bias_back = 0.0
    """What the biases of ``h`` start as."""

    def __init__(self, g: nn.Module, h: nn.Module, *more: Any) -> None:
        super().__init__(g, h, *more)
        self._built: Any = (g, h)  # hidden in a tuple, as they may be replaced by a user's own
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts both maps; a block of a user's in the place of one is left alone."""
        (encode, *_), decode = self._built
        weight, back = self.start(torch.empty(encode.weight.shape, device=device_of(self)))
        if self.g is self._built[0]:
            encode.weight.copy_(weight)
            encode.bias.zero_()
        if self.h is self._built[1]:
            decode.weight.copy_(back)
            decode.bias.fill_(self.bias_back)

    def start(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of ``g``, in the tensor given, and of ``h``: codes of one-hot targets that use the whole range of
        tanh, and decode from the start."""
        weight.normal_()
        return weight, weight.t() * (_FIRST_LOGIT / len(weight))


class ClassSide(NearInverse, LabelAE):
    """Of classes."""


class LabelsSide(NearInverse, TargetAE):
    """Of several labels at once."""

    bias_back = -0.3 * _FIRST_LOGIT
    """Half of what a label that is there starts with: those that are not start as far below zero."""


class NumbersSide(NearInverse, TargetAE):
    """Of standardised numbers."""

    def start(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes whose inverse decodes them."""
        weight.normal_(std=_REGRESSION_SPREAD / weight.shape[1] ** 0.5)
        return weight, torch.linalg.pinv(weight)


class RecodeSide(NearInverse):
    """Of the codes of the layer before."""

    def start(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as far from each other as those."""
        nn.init.orthogonal_(weight)
        return weight * nn.init.calculate_gain("tanh"), weight.t()


class OneHotError(nn.Module):
    """Mean squared error against one-hot targets, which are given as class numbers or as they are."""

    def forward(self, answer: Tensor, y: Tensor) -> Tensor:
        """``answer`` is ``(B, classes)``; ``y`` is ``(B,)`` class numbers or ``(B, classes)``."""
        soft = y if y.is_floating_point() else nn.functional.one_hot(y.long(), answer.shape[-1])
        return nn.functional.mse_loss(answer, soft.to(answer.dtype))


def _inverse(wide: int, code: int) -> tuple[nn.Module, nn.Module]:
    encode, decode = nn.Linear(wide, code), nn.Linear(code, wide)
    return nn.Sequential(encode, nn.Tanh()), decode


def _published(wide: int, code: int) -> tuple[nn.Module, nn.Module]:
    encode, decode = nn.Linear(wide, code), nn.Linear(code, wide)
    return nn.Sequential(encode, nn.Sigmoid()), nn.Sequential(decode, nn.Sigmoid())
