"""How good a model is on batches that it does not learn from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeal.core.samples import pair_of
from pipeal.core.tree import Tree
from pipeal.engine import Pipeline

Criterion: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets to a loss."""


def accuracy(pipe: Pipeline, batches: Iterable[Any], exit_at: int | None = None) -> float:
    """The share of samples whose most likely class is the right one.

    Args:
        pipe: The pipeline; it is drained first.
        batches: What to predict, as :meth:`pipeal.Pipeline.run` takes it, with class numbers as targets.
        exit_at: The exit to take; None for the full path.
    """
    right = [logits.argmax(-1) == wanted for logits, wanted in _answers(pipe, batches, exit_at)]
    return float(torch.cat(right).double().mean()) if right else 0.0


def accuracy_and_loss(
    pipe: Pipeline, batches: Iterable[Any], criterion: Criterion, exit_at: int | None = None
) -> tuple[float, float]:
    """The share of answers that are right, and the mean loss of the batches; not a number where there are none.

    Args:
        pipe: The pipeline; it is drained first.
        batches: What to predict, as :meth:`pipeal.Pipeline.run` takes it, with class numbers as targets.
        criterion: The loss of a batch, from its logits and its targets.
        exit_at: The exit to take; None for the full path.
    """
    found = [
        torch.stack((logits.argmax(-1).eq(wanted).double().mean(), criterion(logits, wanted).double()))
        for logits, wanted in _answers(pipe, batches, exit_at)
    ]
    right, loss = torch.stack(found).mean(0).tolist() if found else (0.0, math.nan)
    return right, loss


def _answers(pipe: Pipeline, batches: Iterable[Any], exit_at: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields logits and targets, on the device of the logits."""
    targets: deque[Tensor] = deque()
    for logits in pipe.predict_each(inputs_of(batches, targets), exit_at):
        yield logits, targets.popleft().to(logits.device, non_blocking=True)


def inputs_of(batches: Iterable[Any], targets: MutableSequence[Tensor]) -> Iterator[Tree]:
    """Yields the inputs of batches, and adds their targets to ``targets`` as they pass by."""
    for batch in batches:
        x, y = pair_of(batch)
        targets.append(y)
        yield x
