"""Epochs of several forms in turns: the order, what each sees of the process, and how all end."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch

from pipeal.run.forms import in_turns


class Told:
    """Trainings of so many epochs that note what they do."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def training(self, name: str, epochs: int, begun: int = 0) -> Generator[int, None, str]:
        try:
            yield begun
            for epoch in range(begun + 1, epochs + 1):
                self.order.append(f"{name}{epoch}")
                yield epoch
        except GeneratorExit:
            self.order.append(f"{name} closed")
            raise
        return name


def test_another_form_begins_each_epoch() -> None:
    told = Told()
    assert in_turns([told.training("a", 4), told.training("b", 4)]) == ["a", "b"]
    assert told.order == ["a1", "b1", "b2", "a2", "a3", "b3", "b4", "a4"]


def test_of_three_each_begins_as_often_as_the_others() -> None:
    told = Told()
    in_turns([told.training(name, 6) for name in "abc"])
    rounds = [told.order[place : place + 3] for place in range(0, 18, 3)]
    assert [one[0][0] for one in rounds] == ["a", "b", "c"] * 2
    assert all(sorted(name[0] for name in one) == ["a", "b", "c"] for one in rounds)


def test_a_run_that_was_ended_in_the_middle_keeps_the_order() -> None:
    """What was behind comes first, then it goes on as if nothing had been."""
    whole = Told()
    in_turns([whole.training("a", 4), whole.training("b", 4)])
    for behind in range(len(whole.order)):
        done = {name: sum(one[0] == name for one in whole.order[:behind]) for name in "ab"}
        told = Told()
        assert in_turns([told.training(name, 4, done[name]) for name in "ab"]) == ["a", "b"]
        assert told.order == whole.order[behind:]


def test_each_has_the_threads_of_the_caller_to_itself() -> None:
    """A pipeline of one stage sets them when it is opened: the other's would round by them."""
    before = torch.get_num_threads()
    seen: list[tuple[str, int]] = []

    def training(name: str, own: int) -> Generator[int, None, None]:
        yield 0
        torch.set_num_threads(own)
        for epoch in (1, 2, 3):
            seen.append((name, torch.get_num_threads()))
            yield epoch
        seen.append((name, torch.get_num_threads()))

    in_turns([training("a", 3), training("b", 2)])
    assert set(seen) == {("a", 3), ("b", 2)}
    assert torch.get_num_threads() == before


def test_where_one_fails_the_others_are_closed() -> None:
    told = Told()

    def failing() -> Generator[int, None, str]:
        yield 0
        raise ValueError("the disk is gone")

    with pytest.raises(ValueError, match="the disk is gone"):
        in_turns([told.training("a", 2), failing()])
    assert told.order == ["a1", "a closed"]


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_a_second_signal_reaches_all(signal: type[BaseException]) -> None:
    """It gives up what is still to be written, in the forms that are not at work, too."""
    heard: list[type[BaseException]] = []

    def waiting() -> Iterator[int]:
        try:
            yield from range(3)
        except BaseException as error:
            heard.append(type(error))
            raise

    def ended() -> Iterator[int]:
        yield 0
        raise signal

    with pytest.raises(signal):
        in_turns([waiting(), ended()])  # type: ignore[list-item]
    assert heard == [signal]
