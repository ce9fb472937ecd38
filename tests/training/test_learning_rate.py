from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.config.schema import Decay, Per
from pipeal.training.learning_rate import Course, cosine, epoch_scale, usual_course


def scales(
    decay: Decay,
    per: Per,
    *,
    warmup: int = 0,
    end: float = 0.1,
    epochs: int = 2,
    batches: int = 4,
    begun: int = 0,
) -> list[float]:
    """Of every batch of a run; its first has the number ``begun``."""
    found = []
    for epoch in range(epochs):
        first = begun + batches * epoch
        scale = epoch_scale(Course(epochs, decay, per, end, warmup), epoch, batches, first)
        found += [scale(batch) for batch in range(first, first + batches)]
    return found


def test_without_a_decay_the_rate_stays() -> None:
    assert scales("none", "batch") == [1.0] * 8


def test_a_warm_up_rises_from_its_first_batch_on_which_learns_too() -> None:
    scale = epoch_scale(Course(epochs=1, warmup=4), epoch=0, batches=9, first_batch=0)
    assert [scale(batch) for batch in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_per_batch_it_falls_at_every_batch_and_ends_where_it_should() -> None:
    found = scales("cosine", "batch", begun=100)
    assert found[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(found))
    assert found[4] == pytest.approx(0.55)
    assert found[-1] > 0.1 == pytest.approx(cosine(1.0, 0.1, 1.0))


def test_per_epoch_it_is_the_published_course() -> None:
    assert scales("cosine", "epoch", begun=100) == pytest.approx([1.0] * 4 + [0.55] * 4)


run_lengths = {"epochs": st.integers(1, 6), "batches": st.integers(1, 80)}


@given(**run_lengths, warmup=st.integers(0, 60), per=st.sampled_from(["batch", "epoch"]), end=st.floats(0, 1))
def test_the_rate_rises_to_its_course_stays_on_it_and_never_exceeds_its_base(
    epochs: int, batches: int, warmup: int, per: Per, end: float
) -> None:
    run = {"epochs": epochs, "batches": batches}
    level, course = scales("none", per, warmup=warmup, **run), scales("cosine", per, end=end, **run)
    assert all(0 < scale <= 1 for scale in level)
    assert level[:warmup] == [(batch + 1) / warmup for batch in range(min(warmup, epochs * batches))]
    assert level[warmup:] == [1.0] * max(0, epochs * batches - warmup)
    both = scales("cosine", per, warmup=warmup, end=end, **run)
    assert both == [risen * scale for risen, scale in zip(level, course, strict=True)]
    assert all(end <= scale + 1e-9 for scale in course)


@given(**run_lengths)
def test_the_usual_warm_up_ends_early_in_every_run(epochs: int, batches: int) -> None:
    """Fifty batches of warm-up left a run of 54 updates at chance: it never learnt at its rate."""
    updates = epochs * batches
    level = scales("none", "batch", warmup=usual_course(updates).warmup, epochs=epochs, batches=batches)
    assert level.count(1.0) >= 0.8 * updates
    course = scales("cosine", "batch", end=0.0, warmup=usual_course(updates).warmup, epochs=epochs, batches=batches)
    assert max(course) > 0.9


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_the_shorter_a_run_the_higher_its_rate_but_it_learns_no_more_in_all(one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    short, long = usual_course(fewer), usual_course(more)
    assert 1e-3 <= long.rate <= short.rate <= 3e-3
    assert fewer * short.rate <= more * long.rate * 1.05  # it has two digits
    assert 0 <= short.warmup <= long.warmup <= 50


@pytest.mark.parametrize("updates", [250, 270, 324, 365, 100_000])
def test_a_run_of_the_shipped_length_has_the_course_that_it_always_had(updates: int) -> None:
    assert usual_course(updates) == (1e-3, 50)
