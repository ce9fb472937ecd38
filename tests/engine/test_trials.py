"""Which of some candidates is taken, and what it costs to find out: by a clock that is only counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeal.planning.pure.trials import CLOSE, LOOK_AFTER, MOST, MOST_S, SHARE, More, TimeLimit, Trials


class Machine:
    """Takes so many seconds per batch for each candidate, round by round, and sets the clock by them."""

    def __init__(self, seconds: dict[str, Sequence[float]], warming: float = 1.0) -> None:
        self.now = 0.0
        self.warming = warming
        self.seconds = seconds
        self.timed: list[tuple[str, int]] = []

    def clock(self) -> float:
        return self.now

    def measure(self, name: str, more: More) -> float:
        rounds = self.seconds[name]
        each = rounds[min(len([one for one, _ in self.timed if one == name]), len(rounds) - 1)]
        self.now += self.warming * each
        if not more(self.warming * each, warm=False):
            self.timed.append((name, 0))
            return self.warming * each
        self.now += each * LOOK_AFTER
        count = more(each)
        self.now += each * count
        self.timed.append((name, LOOK_AFTER + count))
        return each


def tried(seconds: dict[str, Sequence[float]], run_batches: int | None = None) -> tuple[str, Machine]:
    machine = Machine(seconds)
    trials = Trials(machine.measure, TimeLimit(run_batches, clock=machine.clock))
    trials.run(iter(seconds), len(seconds))
    trials.repeat()
    return trials.best.candidate, machine


def test_the_fastest_is_taken_and_what_is_hopeless_is_dropped() -> None:
    best, machine = tried({"slow": [0.03], "fast": [0.01], "hopeless": [0.02], "middling": [0.015]})
    assert best == "fast"
    assert machine.timed == [("slow", MOST), ("fast", MOST), ("hopeless", LOOK_AFTER), ("middling", MOST)]


def test_what_does_not_even_warm_up_in_time_is_dropped_at_once() -> None:
    """Two threads took 17 s for a batch on a busy machine, one 0.3 s: they were timed on three."""
    best, machine = tried({"one thread": [0.3], "two": [17.0], "three": [0.5]})
    assert best == "one thread"
    assert [name for name, batches in machine.timed if not batches] == ["two"]
    assert machine.now < 17 + MOST_S


def test_a_close_result_is_timed_again_before_it_is_believed() -> None:
    """One lucky round decided: a layout that was 1 % faster once was taken for all of a run."""
    assert CLOSE > 0.0105 / 0.01
    best, machine = tried({"steady": [0.0105, 0.0095], "lucky": [0.01, 0.012], "far": [0.013]})
    assert best == "steady"
    assert [name for name, _ in machine.timed] == ["steady", "lucky", "far", "steady", "lucky"]


def test_of_close_ones_that_were_timed_twice_the_fastest_is_taken() -> None:
    assert tried({"plain": [0.0105], "complex": [0.01]})[0] == "complex"


def test_without_time_to_repeat_the_first_of_the_close_ones_is_taken() -> None:
    best, machine = tried({"plain": [5.2], "complex": [5.0]})
    assert best == "plain"
    assert machine.timed == [("plain", LOOK_AFTER), ("complex", LOOK_AFTER)]


def test_two_are_tried_whatever_it_takes_and_no_third() -> None:
    best, machine = tried({"first": [30.0], "second": [20.0], "third": [1.0]})
    assert best == "second"
    assert machine.timed == [("first", LOOK_AFTER), ("second", LOOK_AFTER)]


@pytest.mark.parametrize("each", [0.001, 0.1, 0.7, 2.0])
def test_the_bound_holds_but_for_a_last_round(each: float) -> None:
    names = {str(number): [each * (1 + number / 5)] for number in range(12)}
    _, machine = tried(names)
    assert machine.now <= max(MOST_S, 2 * LOOK_AFTER * 1.2 * each) + LOOK_AFTER * 4 * each


def test_none_is_begun_that_cannot_be_ended_in_time() -> None:
    """A third was begun in the last second of twenty, and took fourteen more."""
    _, machine = tried({"first": [3.1], "second": [2.5], "third": [2.5]})
    assert [name for name, _ in machine.timed] == ["first", "second"]
    assert MOST_S - 3 * 2.5 < machine.now <= MOST_S, "there was some time left"


def test_a_short_run_is_not_kept_waiting() -> None:
    """Twelve batches of each layout were trained on before a run of fifty."""
    _, machine = tried({str(number): [1.0] for number in range(6)}, run_batches=50)
    assert SHARE * 50 * 1.0 < 2 * LOOK_AFTER
    assert machine.timed == [("0", LOOK_AFTER), ("1", LOOK_AFTER)]


def test_the_bound_is_that_of_the_fastest() -> None:
    limit = TimeLimit(100, clock=lambda: 0.0)
    assert limit.bound_s == MOST_S
    for each, bound in ((1.0, 5.0), (0.5, 2.5), (2.0, 2.5)):
        limit.learn(each)
        assert limit.bound_s == bound


def test_what_fails_is_left_out_or_raised() -> None:
    machine = Machine({"good": [0.01], "better": [0.005]})

    def measure(name: str, more: More) -> float:
        if name == "bad":
            raise MemoryError(name)
        return machine.measure(name, more)

    trials = Trials(measure, TimeLimit(clock=machine.clock), left_out=lambda name, _: name == "bad")
    trials.run(["bad", "good", "better"], 3)
    assert [times.candidate for times in trials.times] == ["good", "better"]
    with pytest.raises(MemoryError):
        Trials(measure, TimeLimit(clock=machine.clock)).run(["bad"], 1)
