"""Batches that a thread makes ready: the same ones, and none of the thread's life left to chance."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pipeal.core.errors import ScheduleError
from pipeal.data import RandomBlocks, ReadAhead
from pipeal.data.iterators import reading_thread
from pipeal.data.loading.loader import Batch

TEXT = torch.arange(100, dtype=torch.uint8)


def blocks() -> RandomBlocks:
    return RandomBlocks(TEXT, block=8, batch_size=4, batches=6, seed=1)


class Watched:
    """Knows on which threads its batches were made, and fails at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.blocks = blocks()
        self.fails_at = fails_at
        self.made: list[str] = []
        self.changed = threading.Condition()
        self.closed = False

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.blocks):
            if number == self.fails_at:
                raise LookupError("no such batch")
            with self.changed:
                self.made.append(threading.current_thread().name)
                self.changed.notify_all()
            yield batch

    def __len__(self) -> int:
        return len(self.blocks)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        self.blocks.set_epoch(epoch, first)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_they_are_the_same_whoever_makes_them(ahead: int) -> None:
    loader = ReadAhead(blocks(), ahead)
    assert len(loader) == 6
    for epoch, first in ((0, 0), (1, 0), (1, 4), (2, 6)):
        plain = blocks()
        plain.set_epoch(epoch, first)
        loader.set_epoch(epoch, first)
        found, wanted = list(loader), list(plain)
        assert [batch.indices for batch in found] == [batch.indices for batch in wanted]
        assert all(torch.equal(one.x, other.x) for one, other in zip(found, wanted, strict=True))
    loader.close()


def test_so_many_are_ready_before_they_are_wanted_and_made_by_another_thread() -> None:
    source = Watched()
    loader = ReadAhead(source, 2)
    batches = iter(loader)
    next(batches)
    with source.changed:  # two wait, and a third has been made for which there is no room
        assert source.changed.wait_for(lambda: len(source.made) == 4, 120)
    assert set(source.made) == {"pipeal-prefetch"}
    assert len(list(batches)) == 5
    loader.close()
    assert source.closed


def test_none_are_made_ahead_on_a_cpu_where_nobody_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        made = Watched()
        assert len(list(ReadAhead(made, None))) == 6
        assert ("pipeal-prefetch" in made.made) == there
    source = Watched()
    assert len(list(ReadAhead(source, 0))) == 6
    assert set(source.made) == {threading.current_thread().name}


def test_a_failure_comes_in_its_turn_as_its_own_type() -> None:
    batches = iter(ReadAhead(Watched(fails_at=2), 4))
    assert [len(next(batches)) for _ in range(2)] == [4, 4]
    for _ in range(2):
        with pytest.raises(LookupError, match=r"^no such batch$") as caught:
            next(batches)
    assert not hasattr(caught.value, "__notes__"), "who reads ahead is nobody's concern"


def test_an_end_wakes_whoever_waits_on_another_thread_and_waits_for_no_slow_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: both stood still for ever."""
    monkeypatch.setattr(reading_thread, "PATIENCE_S", 0.1)
    gate, begun, seen = threading.Event(), threading.Event(), []

    class Slow(Watched):
        def __iter__(self) -> Iterator[Batch]:
            begun.set()
            gate.wait(120)
            yield from super().__iter__()

    loader = ReadAhead(Slow(), 1)

    def take() -> None:
        try:
            next(iter(loader))
        except ScheduleError as error:
            seen.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    assert begun.wait(120)
    (making,) = (thread for thread in threading.enumerate() if thread.name == "pipeal-prefetch")
    try:
        loader.close()
        taker.join(120)
        assert seen
        assert making.is_alive(), "nobody had to wait for its batch"
    finally:
        gate.set()
        making.join(120)


def test_a_loader_is_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another epoch waits for the batch that is being made, however long that takes."""
    monkeypatch.setattr(reading_thread, "PATIENCE_S", 0.01)
    inside: list[str] = []

    class Guarded(Watched):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                inside.append("in")
                time.sleep(0.1)
                assert inside.pop() == "in"
                yield batch

        def set_epoch(self, epoch: int, first: int = 0) -> None:
            assert not inside
            super().set_epoch(epoch, first)

    loader = ReadAhead(Guarded(), 2)
    for epoch in range(3):
        loader.set_epoch(epoch)
        next(iter(loader))
    loader.close()


def test_what_was_closed_before_its_first_batch_makes_none() -> None:
    source = Watched()
    loader = ReadAhead(source, 1)
    first = iter(loader)
    iter(loader)
    with pytest.raises(ScheduleError, match="take a new iterator"):
        next(first)
    loader.close()
    assert source.made == []


def test_an_iterator_is_closed_as_a_generator_is() -> None:
    """Symptom: a replica failed at the end of its training, when it dropped what it had not taken of its feed."""
    batches = iter(ReadAhead(Watched(), 1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    with pytest.raises(ScheduleError):
        next(batches)


def test_who_drops_an_iterator_ends_its_thread() -> None:
    batches = iter(ReadAhead(Watched(), 1))
    next(batches)
    del batches
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "pipeal-prefetch"]


def test_another_epoch_another_iterator_and_the_end_end_the_thread() -> None:
    loader = ReadAhead(Watched(), 1)
    for end in (lambda: loader.set_epoch(1), lambda: next(iter(loader)), loader.close):
        batches = iter(loader)
        next(batches)
        end()
        with pytest.raises(ScheduleError, match="closed"):
            list(batches)
    assert not [thread for thread in threading.enumerate() if thread.name == "pipeal-prefetch"]
