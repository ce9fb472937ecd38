"""Which layers form which stage: the best there is, and clear words where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal import PlacementError
from pipeal.engine import balance
from pipeal.engine.sizes import check_sizes

from .cases import cuts


@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_faster_slowest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def slowest(sizes: list[int]) -> int:
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        return max(sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True))

    found = balance(costs, stages)
    assert len(found) == stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert slowest(found) == min(slowest(sizes) for sizes in cuts(len(costs), stages))


@given(layers=st.integers(1, 40), data=st.data())
def test_equal_layers_are_shared_out_as_evenly_as_can_be(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    assert max(balance([1.0] * layers, stages)) == -(-layers // stages)


@pytest.mark.parametrize(("layers", "stages"), [(3, 0), (3, 4), (0, 0), (0, 1), (2, -1)])
def test_stages_that_cannot_be(layers: int, stages: int) -> None:
    with pytest.raises(PlacementError, match=f"^{stages} stages for {layers} layers; expected"):
        balance([1.0] * layers, stages)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2, 1], "3 sizes"),
        ([4], "1 sizes"),
        ([2, 3], "cover 5 layers, but the package has 4"),
        ([4, 0], "every stage needs at least one"),
        ([5, -1], "every stage needs at least one"),
    ],
)
def test_sizes_that_do_not_fit(sizes: list[int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_sizes(sizes, 4, 2)


def test_no_sizes_for_no_stages_is_a_placement_error_too() -> None:
    """It was ``min() arg is an empty sequence``."""
    with pytest.raises(PlacementError):
        check_sizes([], 4, 0)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_sizes_that_fit_are_kept(sizes: list[int]) -> None:
    assert check_sizes(tuple(sizes), sum(sizes), len(sizes)) == sizes
