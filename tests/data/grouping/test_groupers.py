from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.batching.bounds import find_thresholds
from pipeal.data.grouping import LengthThresholdGrouper, PredefinedConsecutiveGrouper, PredefinedGrouper, UniGrouper
from pipeal.data.grouping.groupers import Partition, checked

some_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=30)


def grouped(lengths: list[int], thresholds: list[int], **options: Any) -> Partition:
    return LengthThresholdGrouper("t", thresholds, **options).partition({"t": np.array(lengths)}, len(lengths))


@given(lengths=some_lengths, thresholds=st.sets(st.integers(1, 30), min_size=1, max_size=6).map(sorted))
def test_no_threshold_lies_inside_a_group_and_none_is_empty(lengths: list[int], thresholds: list[int]) -> None:
    parts = grouped(lengths, thresholds)
    assert checked(parts, len(lengths)) == parts
    assert all(parts)
    # Which thresholds are below a length says which group it belongs to.
    below = [{sum(limit < lengths[index] for limit in thresholds) for index in part} for part in parts]
    assert all(len(found) == 1 for found in below)
    assert [min(found) for found in below] == sorted({min(found) for found in below})


def test_a_length_equal_to_a_threshold_belongs_to_it() -> None:
    """As ``find_thresholds`` counts; asym puts it above, so its demo's 16 is padded to 64."""
    assert grouped([16, 64, 1, 4], [1, 4, 16]) == [[2], [3], [0], [1]]


@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=20), data=st.data())
def test_found_thresholds_split_into_so_many_groups(lengths: list[int], data: st.DataObject) -> None:
    distinct = len(set(lengths))
    k = data.draw(st.integers(1, distinct))
    thresholds = find_thresholds(lengths, lambda length: length, k)
    assert len(grouped(lengths, thresholds)) == min(k + 1, distinct)


def test_what_is_given_is_taken() -> None:
    assert UniGrouper().partition({}, 3) == [[0, 1, 2]]
    assert PredefinedGrouper([[2, 0], [], [1]]).partition({}, 3) == [[2, 0], [], [1]]
    assert checked([[2, 0], [], [1]], 3) == [[2, 0], [1]]
    assert PredefinedConsecutiveGrouper([1, 0, 2]).partition({}, 3) == [[0], [], [1, 2]]


def test_numbers_may_come_in_any_list() -> None:
    for numbers in ((1, 4), np.array([1, 4]), torch.tensor([1, 4]), (n for n in (1, 4))):
        assert LengthThresholdGrouper("t", numbers).thresholds == [1, 4]  # type: ignore[arg-type]
    for parts in (np.array([[1], [0]]), torch.tensor([[1], [0]]), [torch.tensor([1]), torch.tensor([0])]):
        assert PredefinedGrouper(parts).partition({}, 2) == [[1], [0]]  # type: ignore[arg-type]
        assert checked(parts, 2) == [[1], [0]]  # type: ignore[arg-type]


MISTAKES = {
    "no thresholds": (lambda: LengthThresholdGrouper("t", []), ConfigError, "no thresholds"),
    "not sorted": (lambda: LengthThresholdGrouper("t", [4, 1]), ConfigError, "4 before 1"),
    "repeated": (lambda: LengthThresholdGrouper("t", [1, 4, 4]), ConfigError, "4 before 4"),
    "fraction": (lambda: LengthThresholdGrouper("t", [1, 2.5]), ConfigError, "2.5"),  # type: ignore[list-item]
    "below 1": (lambda: LengthThresholdGrouper("t", [0, 2]), ConfigError, "at least 1"),
    "tensor": (lambda: LengthThresholdGrouper("t", torch.tensor([1.5])), ConfigError, "1.5"),  # type: ignore[arg-type]
    "a number": (lambda: LengthThresholdGrouper("t", 4), ConfigError, "a list"),  # type: ignore[arg-type]
    "bool": (lambda: LengthThresholdGrouper("t", [True]), ConfigError, "whole"),
    "no such length": (
        lambda: grouped([1], [1]) and LengthThresholdGrouper("u", [1]).partition({"t": np.ones(1, int)}, 1),
        DataError,
        "'u'",
    ),
    "sizes": (lambda: PredefinedConsecutiveGrouper([1.0]), ConfigError, "whole"),  # type: ignore[list-item]
    "negative": (lambda: PredefinedGrouper([[-1]]), ConfigError, "at least 0"),
    "too few": (
        lambda: PredefinedConsecutiveGrouper([2]).partition({}, 3),
        DataError,
        "hold 2 samples, the batch has 3",
    ),
    "twice": (lambda: checked([[0, 0]], 2), DataError, "sample 0 is in 2 groups"),
    "missing": (lambda: checked([[0]], 2), DataError, "sample 1 is in 0 groups"),
    "no groups": (lambda: checked([], 2), DataError, "sample 0 is in 0 groups"),
    "half": (lambda: checked([[0.5]], 1), ConfigError, "0.5"),  # type: ignore[list-item]
    "stranger": (lambda: checked([[0, 2]], 2), DataError, r"sample 2; the batch has 0..1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    make, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        make()
