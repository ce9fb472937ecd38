"""The loss of an answer by the task, for methods without label sides; targets may be what label sides take.

No class here draws random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.methods.al.codes import number_targets
from pipeal.methods.al.layers import class_targets
from pipeal.methods.al.place_codes import TokenCrossEntropy, without

_NO_LABEL = -(2**62)
"""No label is this: PyTorch passes over what is."""


class ClassLoss(nn.Module):
    """Cross entropy of one class for each input.

    Args:
        classes: How many there are.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, answer: Tensor, y: Tensor) -> Tensor:
        """``answer`` is ``(B, classes)`` logits; ``y`` ``(B,)`` class numbers or ``(B, classes)`` probabilities.

        Raises:
            DataError: ``y`` is of another shape or type.
        """
        y = class_targets(y, self.classes)
        # An input has a class: -100, which PyTorch passes over, is as wrong as any other number below 0.
        return F.cross_entropy(answer, y.to(answer.dtype) if y.is_floating_point() else y, ignore_index=_NO_LABEL)


class NumbersLoss(nn.Module):
    """A loss of numbers for each input: of several labels at once, or of a regression.

    Args:
        outputs: How many there are.
        cri: ``(answer, target) -> scalar``, of two ``(B, outputs)``.
    """

    def __init__(self, outputs: int, cri: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        self.cri = cri

    def forward(self, answer: Tensor, y: Tensor) -> Tensor:
        """Both ``(B, outputs)``, or ``(B,)`` if there is one output; whole numbers are taken as floats.

        Raises:
            DataError: ``y`` is of another shape.
        """
        return self.cri(answer.reshape(-1, self.outputs), number_targets(y, self.outputs).to(answer.dtype))


class PlaceLoss(nn.Module):
    """The mean cross entropy over the labelled places; zero where there are none.

    Args:
        class_dim: The dimension of the answer that is the classes'.
        ignore_index: A label of places that have none, beside all below zero.
    """

    def __init__(self, class_dim: int, ignore_index: int) -> None:
        super().__init__()
        self.cri = TokenCrossEntropy()
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def forward(self, answer: Tensor, y: Tensor) -> Tensor:
        """Logits such as ``(B, T, classes)`` or ``(B, classes, H, W)``, and ``(B, T)`` or ``(B, H, W)`` classes.

        Raises:
            DataError: There is not one label for each place.
        """
        return self.cri(torch.movedim(answer, self.class_dim, -1), without(y, self.ignore_index))
