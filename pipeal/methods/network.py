"""A network as every method takes it: blocks in order, each with what its features are like, and the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Part:
    """A block of a network, or several that are to be one layer.

    Attributes:
        f: From what the part before gives to features.
        width: Of the vectors that ``pool`` gives.
        pool: From features to vectors that a linear map can answer from: ``(B, width)``, or one per place.
        sides: Makes the encoder side, around ``f``, and the label side of a method that has label sides.
    """

    f: nn.Module
    width: int
    pool: nn.Module
    sides: Callable[[], tuple[nn.Module, nn.Module]]


@dataclass(frozen=True)
class Network:
    """What a model gives to a method. Nothing is made, and no weight drawn, before a method asks for it.

    Attributes:
        parts: Makes the parts, in order; those to come may be drawn after what a method makes of the ones before.
        whole: Makes the network from end to end, with a head that gives answers.
        outputs: The width of an answer: classes, or characters.
        criterion: Makes the loss of an answer: ``(answer, y) -> scalar``.
    """

    parts: Callable[[], Iterable[Part]]
    whole: Callable[[], nn.Module]
    outputs: int
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
