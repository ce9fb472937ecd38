"""Stages of equal cost for a model that is nowhere whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC
from pipeal.core.options import EngineOptions
from pipeal.engine.schedule import Action
from pipeal.planning import planner
from pipeal.planning.planner import TRIAL_BATCHES, balance_one_by_one

WIDTHS = [6, 5, 4, 3, 2]


def layers(alive: list[int]) -> Iterator[AL]:
    """Each takes what the one before gives; notes how many of them there are when the next is made."""
    made: list[weakref.ref[AL]] = []
    for width, out in zip(WIDTHS, [*WIDTHS[1:], 2], strict=True):
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        f, g = nn.Linear(width, out), nn.Linear(width, out)
        layer = AL(ENC(f, nn.Linear(out, out)), AE(g, nn.Linear(out, width)), 0.01)
        made.append(weakref.ref(layer))
        yield layer
        del layer, f, g


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, WIDTHS[0]), torch.randn(4, WIDTHS[0])) for _ in range(TRIAL_BATCHES)]


def test_layers_are_measured_one_at_a_time_each_on_what_the_one_before_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []
    costs = iter([5.0, 1.0, 1.0, 1.0, 1.0])
    measure = planner.layer_costs

    def measured(*given: Any, **more: Any) -> list[dict[Action, float]]:
        measure(*given, **more)  # raises where shapes do not fit
        return [{Action.FORWARD: next(costs)}]

    monkeypatch.setattr(planner, "layer_costs", measured)
    assert balance_one_by_one(layers(alive), 5, batches(), 2, EngineOptions(threads=1, offload="disk")) == [1, 4]
    assert max(alive) <= 1


def test_where_memory_does_not_suffice_they_are_divided_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> Sequence[Any]:
        raise MemoryError

    monkeypatch.setattr(planner, "layer_costs", too_large)
    assert balance_one_by_one(layers([]), 5, batches(), 2) == [2, 3]


def test_time_that_is_over_leaves_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are measured all the same: sizes of stages need each."""
    given: list[int] = []

    def measured(_: Any, found: Sequence[Any], *__: Any, goes_on: Callable[[], bool], **___: Any) -> list[Any]:
        given.append(len(found))
        assert not goes_on()
        return [{Action.FORWARD: 1.0}]

    monkeypatch.setattr(planner, "layer_costs", measured)
    monkeypatch.setattr(planner, "TimeLimit", lambda: type("Over", (), {"bound_s": 1.0, "spent_s": 2.0})())
    assert balance_one_by_one(layers([]), 5, batches(), 2) == [2, 3]
    assert given == [TRIAL_BATCHES, 3, 3, 3, 3]
