"""A row cut into contiguous parts of equal cost: layers into stages, and the blocks of a network into layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

from pipeal.core.errors import PlacementError


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
