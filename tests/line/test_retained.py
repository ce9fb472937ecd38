"""Items that wait for a snapshot of the next stage: their numbers, their bytes, and when they may go."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.line.items import BATCH, Item, Packed
from pipeal.line.retained import Retained


def item(number: int, elements: int = 1) -> Packed:
    facts = {"batch": number, "lr_scale": 1.0, "updates": True}
    return Packed.of(Item(BATCH, facts, (torch.full((elements,), number), None)))


OPERATIONS = st.lists(
    st.one_of(st.just(("add", 0)), st.tuples(st.just("cover"), st.integers(0, 40)), st.just(("restart", 0))),
    max_size=60,
)


@given(OPERATIONS)
def test_each_number_is_that_of_its_item_and_goes_just_when_it_is_covered(operations: list[tuple[str, int]]) -> None:
    """Held against a plain list of all items ever added; a restart is one from what a snapshot keeps."""
    found, added, covered = Retained(1e9), 0, 0
    for what, number in operations:
        if what == "add":
            found.add(item(added))
            added += 1
        elif what == "cover":
            found.cover(number)
            covered = max(covered, number)
        else:
            first, kept = found.all()
            found, covered = Retained(1e9, first, kept), first
        assert found.next == added
        assert found.first == min(max(covered, found.first), added)
        first, kept = found.all()
        assert [one.facts["batch"] for one in kept] == list(range(first, added))
        assert found.size == sum(one.size for one in kept)
        for asked in range(added + 2):
            one = found.get(asked)
            assert (one is not None) == (first <= asked < added)
            assert one is None or one.facts["batch"] == asked
        assert first >= min(covered, added)


def test_what_is_covered_never_comes_back_by_an_older_word() -> None:
    found = Retained(1e9)
    for number in range(5):
        found.add(item(number))
    found.cover(4)
    found.cover(2)
    assert (found.first, found.next) == (4, 5)


def test_items_that_a_snapshot_ahead_covers_pass_through_without_staying() -> None:
    """The next stage stands at 3; this one went back to its snapshot at 1 and does 1 and 2 again."""
    found = Retained(1e9, first=1)
    found.cover(3)
    for number in (1, 2, 3):
        found.add(item(number))
    assert [one.facts["batch"] for one in found.all()[1]] == [3]
    assert found.first == 3


def test_there_is_room_up_to_the_limit_and_for_one_item_of_any_size() -> None:
    size = item(0, 10).size
    found = Retained(2.5 * size)
    assert found.has_room(100 * size), "alone, an item may be larger than all that may wait"
    found.add(item(0, 10))
    assert found.has_room(size)
    found.add(item(1, 10))
    assert not found.has_room(size)
    assert found.has_room(size // 2)
    found.cover(1)
    assert found.has_room(size)
