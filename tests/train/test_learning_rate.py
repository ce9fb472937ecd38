from __future__ import annotations

from itertools import pairwise

import pytest

from pipeal.train.learning_rate import cosine, epoch_scale


def scales(decay: str, per: str, *, warmup: int = 0, end: float = 0.1) -> list[float]:
    """Two epochs of four batches, numbered from 100."""
    found = []
    for epoch in (0, 1):
        first = 100 + 4 * epoch
        scale = epoch_scale(
            decay,
            per,
            end_over_base=end,
            warmup=warmup,
            epoch=epoch,
            epochs=2,
            batches=4,
            first_batch=first,  # type: ignore[arg-type]
        )
        found += [scale(batch) for batch in range(first, first + 4)]
    return found


def test_without_a_decay_the_rate_stays() -> None:
    assert scales("none", "batch") == [1.0] * 8


def test_a_warm_up_rises_from_its_first_batch_on_which_learns_too() -> None:
    scale = epoch_scale("none", "batch", end_over_base=0.0, warmup=4, epoch=0, epochs=1, batches=9, first_batch=0)
    assert [scale(batch) for batch in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_per_batch_it_falls_at_every_batch_and_ends_where_it_should() -> None:
    found = scales("cosine", "batch")
    assert found[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(found))
    assert found[4] == pytest.approx(0.55)
    assert found[-1] > 0.1 == pytest.approx(cosine(1.0, 0.1, 1.0))


def test_per_epoch_it_is_the_published_course() -> None:
    assert scales("cosine", "epoch") == pytest.approx([1.0] * 4 + [0.55] * 4)
