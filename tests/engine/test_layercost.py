"""Costs are plain data: what is saved is what is loaded, and anything else is told in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal import DataError
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import Costs, LayerCost, load_costs, save_costs
from pipeal.planning.pure.layout import best_layout

seconds, sizes = st.floats(0, 1e3), st.integers(0, 2**50)
some_seconds = st.floats(1e-6, 1e3)
layers = st.builds(LayerCost, some_seconds, seconds, seconds, sizes, sizes, sizes, sizes, sizes)


@given(
    costs=st.builds(
        Costs,
        kind=st.text(),
        layers=st.lists(layers, min_size=1, max_size=3).map(tuple),
        backprop=st.lists(layers, max_size=3).map(lambda rows: {1: tuple(rows), 4: tuple(rows[::-1])} if rows else {}),
        crowding=st.dictionaries(st.integers(1, 8), some_seconds),
        samples=seconds,
        facts=st.dictionaries(st.text(), st.text()),
    )
)
def test_what_is_saved_is_what_is_loaded(costs: Costs, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    save_costs(costs, path)
    assert load_costs(path) == costs


def good() -> dict[str, object]:
    row = dict.fromkeys(LayerCost.__slots__, 1)
    return {
        "format": "pipeal-costs-3",
        "kind": "cpu",
        "layers": [row],
        "backprop": {"1": [row], "4": [row]},
        "crowding": {"2": 1.1},
        "samples": 3,
        "facts": {},
    }


def spoilt(**changes: object) -> str:
    return json.dumps({**good(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "expected the format"),
        ("{}", "expected the format"),
        (spoilt(format="other"), "expected the format"),
        (spoilt(format="pipeal-costs-2"), "expected the format 'pipeal-costs-3'.* measure again"),
        (spoilt(layers=[]), "holds no layer"),
        (spoilt(layers=3), "measure again"),
        (spoilt(layers=[{}]), r"layers.0.\w+ is missing; expected a file written by pipeal plan"),
        (spoilt(layers=[dict.fromkeys(LayerCost.__slots__, -1)]), "greater than or equal to 0"),
        (spoilt(layers=[dict.fromkeys(LayerCost.__slots__, "1")]), "input should be a valid number, found '1'"),
        (spoilt(crowding={"two": 1}), "measure again"),
        (spoilt(crowding={"0": 1}), "should be greater than 0"),
        (
            spoilt(crowding={"2": 0}),
            "input should be greater than 0, found 0",
        ),  # a ZeroDivisionError, once; and so below
        (spoilt(layers=[dict.fromkeys(LayerCost.__slots__, 0)]), "take no time"),
        (spoilt(backprop={"1": [dict.fromkeys(LayerCost.__slots__, 0)]}), "take no time"),
        (spoilt(backprop=[]), "measure again"),
        (spoilt(backprop={"1": []}), "holds no layer"),
        (spoilt(backprop={"4": [dict.fromkeys(LayerCost.__slots__, 1)]}), "no whole batch"),
        (spoilt(backprop={"9" * 5000: []}), "measure again"),
        (spoilt(crowding=[]), "measure again"),
        (spoilt(kind=None), "measure again"),
        (spoilt(samples=float("nan")), "should be a finite number"),
    ],
)
def test_what_is_no_file_of_costs_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(good()))
    load_costs(path)
    path.write_text(text)
    with pytest.raises(DataError, match=message) as told:
        load_costs(path)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_costs(tmp_path / "none.json")


def test_packets_of_which_only_the_largest_is_known_are_all_as_large() -> None:
    """A link carried them in no time: in the mean they were taken to have no bytes."""
    cost = LayerCost(1, 2, out_bytes=100)
    assert cost.mean_out_bytes == 100
    assert best_layout({"cpu": [cost] * 2}, Setup((PlannedDevice(),) * 2, Link(bytes_per_s=10))).sizes == [2]
    assert replace(cost, out_bytes=200).mean_out_bytes == 100
    assert LayerCost(1, 2, out_bytes=100, mean_out_bytes=0).mean_out_bytes == 0


def test_what_is_resident_counts_gradients() -> None:
    cost = LayerCost(1, 2, 3, parameter_bytes=10, optimizer_bytes=25)
    assert (cost.seconds, cost.resident_bytes) == (6, 45)
