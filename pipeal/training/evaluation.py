"""How good a model is on batches that it does not learn from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeal.core.errors import DataError, LayerError
from pipeal.core.samples import pair_of
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.engine import Pipeline

Criterion: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets to a loss."""


def accuracy(pipe: Pipeline, batches: Iterable[Any], exit_at: int | None = None) -> float:
    """The share of samples whose most likely class is the right one; not a number where :func:`right` is not.

    Args:
        pipe: The pipeline; it is drained first.
        batches: What to predict, as :meth:`pipeal.Pipeline.run` takes it, with class numbers as targets.
        exit_at: The exit to take; None for the full path.

    Raises:
        DataError: Targets are no class numbers, one for each answer.
    """
    return share_right([right(*answer) for answer in _answers(pipe, batches, exit_at)])


def accuracy_and_loss(
    pipe: Pipeline, batches: Iterable[Any], criterion: Criterion, exit_at: int | None = None
) -> tuple[float, float]:
    """The share of answers that are right, and the loss; not a number where there are none.

    Both are means over the batches, of which each counts alike, however many answers it has.

    Args:
        pipe: The pipeline; it is drained first.
        batches: What to predict, as :meth:`pipeal.Pipeline.run` takes it, with class numbers as targets.
        criterion: The loss of a batch, from its logits and its targets.
        exit_at: The exit to take; None for the full path.

    Raises:
        DataError: Targets are no class numbers, one for each answer.
    """
    return mean_of([right_and_loss(*answer, criterion) for answer in _answers(pipe, batches, exit_at)])


def right(logits: Tensor, wanted: Tensor) -> Tensor:
    """1 where the most likely class of each sample, or place of a text, is the right one, else 0; of logits that are
    not finite, as of a model that has diverged, not a number, as their loss is (some may be masked)."""
    check_class_numbers(logits, wanted)
    best = logits.max(-1)
    return torch.where(best.values.isfinite(), best.indices == wanted, math.nan)


def check_class_numbers(logits: Tensor, wanted: Tensor) -> None:
    """Refuses targets that cannot be told right from wrong, such as class probabilities, or several classes a sample.

    Raises:
        DataError: They are no whole numbers, or not one for each answer, ``(…, classes)``.
    """
    if wanted.shape != logits.shape[:-1] or wanted.is_floating_point() or wanted.is_complex():
        raise DataError(
            f"found targets {describe(shapes_of(wanted))} for answers {describe(shapes_of(logits))}; expected class "
            f"numbers, whole numbers of shape {tuple(logits.shape[:-1])}: of other targets no answer is right or wrong"
        )


def share_right(found: Sequence[Tensor]) -> float:
    """The share of samples that are right, of what :func:`right` gave batch by batch; 0 where there are none."""
    return float(torch.cat([*found]).double().mean()) if found else 0.0


def right_and_loss(logits: Tensor, wanted: Tensor, criterion: Criterion) -> Tensor:
    """``(2,)`` float64: the share of a batch's answers that are right, and its loss."""
    return torch.stack((right(logits, wanted).double().mean(), criterion(logits, wanted).double()))


def mean_of(found: Sequence[Tensor]) -> tuple[float, float]:
    """The means over what :func:`right_and_loss` gave batch by batch; the loss is not a number where there are none."""
    share, loss = torch.stack([*found]).mean(0).tolist() if found else (0.0, math.nan)
    return share, loss


def _answers(pipe: Pipeline, batches: Iterable[Any], exit_at: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields logits and targets, on the device of the logits.

    Raises:
        LayerError: An answer is no tensor.
    """
    targets: deque[Tensor] = deque()
    for logits in pipe.predict_each(inputs_of(batches, targets), exit_at):
        if not isinstance(logits, Tensor):
            raise LayerError(
                f"the answer of the model is of the class {type(logits).__name__}; expected a tensor of logits: "
                "what makes it of features belongs into the last layer's blocks(), under TURN"
            )
        yield logits, targets.popleft().to(logits.device, non_blocking=True)


def inputs_of(batches: Iterable[Any], targets: MutableSequence[Tensor]) -> Iterator[Tree]:
    """Yields the inputs of batches, and adds their targets to ``targets`` as they pass by."""
    for batch in batches:
        x, y = pair_of(batch)
        targets.append(y)
        yield x
