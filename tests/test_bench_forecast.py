"""What the forecasts are held against: the published scaling, and how much of it is left over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.planning.pure.layer_cost import LayerCost
from tests.benches import Benches


def test_the_published_scaling_has_a_closed_form(bench: Benches) -> None:
    """Of K stages of equal layers al-fm waits for the last one's backward, K + 2 for 3 K; pipelined for nothing."""
    published = bench["forecast"].PUBLISHED
    rows = bench["forecast"].scaling(batches=1000)
    assert [(row.model, row.gpus, row.published) for row in rows] == [
        (model, gpus, speedup) for model, found in published.items() for gpus, speedup in found.items()
    ]
    for row in rows:
        one = published[row.model][1]
        assert row.al_fm == pytest.approx(one * 3 * row.gpus / (row.gpus + 2))
        assert row.pipelined == pytest.approx(one * row.gpus, rel=0.01)


@given(gpus=st.integers(2, 6), serial=st.floats(0, 1))
def test_what_is_left_over_is_the_serial_share_that_was_put_in(bench: Benches, gpus: int, serial: float) -> None:
    """Amdahl: a share of the work at the speed of one GPU, the rest at that of the forecast."""
    one, ideal = bench["forecast"].PUBLISHED["n layers"][1], 3 * gpus / (gpus + 2)
    published = one / (serial + (1 - serial) / ideal)
    row = bench["forecast"].Scaling("n layers", gpus, published, one * ideal, one * gpus)
    assert row.serial_share == pytest.approx(serial, abs=1e-9)


def test_nothing_is_left_over_of_one_gpu_or_of_more_than_was_forecast(bench: Benches) -> None:
    scaling = bench["forecast"].Scaling
    assert scaling("n layers", 1, 1.16, 1.16, 1.16).serial_share == 0
    assert scaling("n layers", 4, 3.0, 2.3, 4.6).serial_share == 0


def test_runs_are_predicted_on_the_stages_that_they_have(bench: Benches) -> None:
    costs = [LayerCost(1.0, 2.0)] * 4
    predict = bench["held"].predict
    assert predict(costs, (3, 1), None, 1000) == pytest.approx(9, rel=0.01)
    assert predict(costs, (2, 2), None, 1000) == pytest.approx(6, rel=0.01)
    assert predict(costs, (2, 2), {2: 1.5}, 1000) == pytest.approx(9, rel=0.01)
    assert bench["placement"]._sums(costs, (3, 1)) == [9, 3]


def test_an_error_is_that_of_the_medians(bench: Benches) -> None:
    row = {"model": "resnet", "executor": "threads", "stages": 2, "sizes": [3, 1], "crowding": [{"2": 1.5}] * 3}
    held = bench["held"].read_held({**row, "predicted_ms": [90.0, 110.0, 99.0], "measured_ms": [100.0, 100.0, 90.0]})
    assert (held.sizes, held.crowding[0]) == ((3, 1), {2: 1.5})
    assert held.errors == pytest.approx([-0.1, 0.1, 0.1])
    assert held.error == pytest.approx(-0.01)
