"""Which layers form which stage, decided from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipeal.core.errors import PlacementError, is_whole


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
    if not isinstance(sizes, Sequence) or not all(map(is_whole, sizes)):
        wanted = f"the number of layers of each of {stages} stages, whole numbers in a list, or None"
        raise PlacementError(f"sizes is {sizes!r}; expected {wanted}")
    if len(sizes) != stages:
        raise PlacementError(f"{len(sizes)} sizes {list(sizes)} for {stages} stages; pass one size per device")
    found = None
    if not sizes or min(sizes) < 1:
        found = "leave a stage without a layer; every stage needs at least one"
    elif sum(sizes) != layers:
        found = f"cover {sum(sizes)} layers, but the package has {layers}"
    if found is not None:
        raise PlacementError(f"sizes {list(sizes)} {found}; sizes=None balances automatically")
    return list(sizes)
