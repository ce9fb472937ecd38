"""Sources that are read again."""

from __future__ import annotations

import pytest

from pipeal.core.errors import DataError
from pipeal.data.batching.reread import place_of, read_from, reader_at
from pipeal.data.iterators import NativeCheckpointableIterator


@pytest.mark.parametrize("source", [range(5), dict.fromkeys(range(5)), NativeCheckpointableIterator(range(5))])
def test_read_on_from_every_place(source):
    for start in range(6):
        reader = reader_at(source, None)
        assert [next(reader) for _ in range(start)] == list(range(start))
        place = place_of(reader, start)
        assert list(reader) == list(range(start, 5))
        assert list(reader_at(source, place)) == list(range(start, 5))


def test_a_plain_iterator_is_read_on_from_where_it_stands():
    numbers = iter(range(5))
    next(numbers)
    assert reader_at(numbers, None) is numbers


@pytest.mark.parametrize("source", [range(5), dict.fromkeys(range(5))])
def test_a_source_that_became_shorter_is_no_source_that_has_ended(source):
    # What lay before the place was passed over, however little that was, and the rest of nothing is nothing.
    with pytest.raises(DataError, match="ends before item 6"):
        next(read_from(source, 6))
