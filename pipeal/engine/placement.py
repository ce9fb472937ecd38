"""Which layers form which stage, decided from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

from pipeal.errors import PlacementError


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cuts a row of layers into contiguous stages so that the slowest stage is as fast as possible.

    An exact dynamic program in O(layers² × stages).

    Args:
        costs: The time of each layer per batch, in any unit.
        stages: How many stages, from 1 to the number of layers.

    Returns:
        The number of layers of each stage; none is empty.

    Raises:
        PlacementError: More stages than layers, or no stage.

    >>> balance([1, 3, 3, 3], stages=2)
    [2, 2]
    """
    if not 1 <= stages <= len(costs):
        _refuse(stages, len(costs))
    return balance_rows([costs] * stages)


def balance_rows(rows: Sequence[Sequence[float]]) -> list[int]:
    """As :func:`balance`, for stages that are not alike.

    Args:
        rows: For each stage, what each of all layers would take there.

    >>> balance_rows([[1, 1, 1, 1], [3, 3, 3, 3]])
    [3, 1]
    """
    stages, layers = len(rows), len(rows[0]) if rows else 0
    if not 1 <= stages <= layers:
        _refuse(stages, layers)
    # slowest[n]: the best that the first n layers can do in the stages laid so far; cut[k][n]: where it cuts.
    slowest = [0.0] + [float("inf")] * layers
    cuts: list[list[int]] = []
    for row in rows:
        total = [0.0, *accumulate(row)]
        best = [(float("inf"), 0)] * (layers + 1)
        for end in range(1, layers + 1):
            best[end] = min((max(slowest[start], total[end] - total[start]), start) for start in range(end))
        slowest = [cost for cost, _ in best]
        cuts.append([start for _, start in best])
    sizes: list[int] = []
    end = layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return sizes[::-1]


def _refuse(stages: int, layers: int) -> NoReturn:
    raise PlacementError(
        f"{stages} stages for {layers} layers; expected 1 to {layers} stages, each with at least one layer"
    )


def layers_of_stages(sizes: Sequence[int]) -> list[range]:
    """The numbers of the layers of each stage.

    >>> layers_of_stages([3, 1, 2])
    [range(0, 3), range(3, 4), range(4, 6)]
    """
    ends = list(accumulate(sizes))
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def check_sizes(sizes: Sequence[int], layers: int, stages: int) -> list[int]:
    """The number of layers of each stage, checked.

    Raises:
        PlacementError: They do not cover the layers, do not match the stages, or a stage is empty.
    """
    if len(sizes) != stages:
        raise PlacementError(f"{len(sizes)} sizes {list(sizes)} for {stages} stages; pass one size per device")
    if not sizes or min(sizes) < 1 or sum(sizes) != layers:
        raise PlacementError(
            f"sizes {list(sizes)} cover {sum(sizes)} layers, but the package has {layers}; every stage needs at "
            "least one, and sizes=None balances automatically"
        )
    return list(sizes)
