"""What methods share whose losses compare the samples of a batch with each other: groups, directions, similarity.

::

    vectors (B, D),    labels (B,)      one group: each sample is compared with every other of the batch
    vectors (B, T, D), labels (B, T)    a group per text: its places are compared with each other, not with other texts'

All places of a batch against all would take ``(B T)²`` numbers; within texts it takes ``B T²``, as attention does. A
label below zero is none: such a place is in no pair.

**Such a loss is no mean over the samples of a batch.** Where a batch is learnt from in parts (``on_oom="split"``), and
where replicas share it, samples are compared within their part alone: fewer pairs, so another loss and another update
than those of the whole batch. Only what is compared within single texts stays the same, as long as all have as many
labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.tree import describe, shapes_of
from pipeal.methods.network import Network, Part
from pipeal.methods.pooling import CellMeans

_LEAST_LENGTH = 1e-8
"""A shorter vector has no direction. The authors add as much to a length, which leaves a gradient of 1e8."""


def require_classes(network: Network, label: str) -> None:
    """Refuses a task by whose targets samples cannot be told apart.

    Raises:
        ConfigError: They are numbers, or several classes; the method is called ``label``.
    """
    if not network.has_classes:
        raise ConfigError(
            f"{label} compares samples by their classes, but a target of this task is no single class; train it by "
            "another method, such as dgl"
        )


def to_vectors(network: Network, part: Part, cells: int | None) -> tuple[list[nn.Module], int]:
    """New modules from features to what a projector reads, ``(B, D)`` or one per place, and ``D``.

    Args:
        network: It says how texts become vectors.
        part: Of which features.
        cells: The most that a side of an image is divided into, whose means are read; None for every pixel.
    """
    if not network.is_image(part.seen):
        pool, width = network.pool(part.features)
        return [pool], width
    channels, *sides = part.seen.shape[1:]
    rows, columns = sides if cells is None else (min(side, cells) for side in sides)
    means = [] if cells is None else [CellMeans(rows, columns)]
    return [*part.picks, *means, nn.Flatten()], channels * rows * columns


def in_groups(vectors: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``(B, D)`` or ``(B, …, D)`` and their labels to ``(G, N, D)`` float32 and ``(G, N)``.

    Raises:
        DataError: There is not one class for each vector.
    """
    if y.is_floating_point() or y.shape != vectors.shape[:-1]:
        raise DataError(
            f"targets are {describe(shapes_of(y))}; expected {tuple(vectors.shape[:-1])} class numbers, as whole "
            "numbers, by which samples are compared"
        )
    if vectors.dim() == 2:
        vectors, y = vectors.unsqueeze(0), y.unsqueeze(0)
    return vectors.flatten(1, -2).float(), y.flatten(1)


def directions(x: Tensor) -> Tensor:
    """Each vector at length 1; zero, with no gradient, where it has no length: ``(…, D)`` to the same."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(_LEAST_LENGTH) * (length > _LEAST_LENGTH)


def similarity_error(vectors: Tensor, y: Tensor, classes: int) -> Tensor:
    """How far the similarities of vectors are from those of their labels' one-hot codes: the mean of the squares over
    all pairs, each sample with itself included, as in the code of Nøkland and Eidnes (2019).

    The similarity of two vectors is the cosine after the mean over its own entries is taken off each: of two one-hot
    codes, 1 if they are of one class, else ``-1 / (classes - 1)``.

    Args:
        vectors: ``(G, N, D)`` float32.
        y: ``(G, N)``.
        classes: How many there are.

    Returns:
        A scalar; zero where nothing is labelled.
    """
    centred = directions(vectors - vectors.mean(-1, keepdim=True))
    wanted = torch.where(y.unsqueeze(2) == y.unsqueeze(1), 1.0, -1.0 / max(classes - 1, 1))
    labelled = y.ge(0)
    pairs = labelled.unsqueeze(2) & labelled.unsqueeze(1)
    errors = (centred @ centred.transpose(1, 2) - wanted).square() * pairs
    return errors.sum() / pairs.sum().clamp_min(1)
