"""The engine's options are checked when they are made, whoever makes them, and know what excludes what."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from pipeal import BP, ConfigError, PipealError, Pipeline, PlacementError
from pipeal.core.options import DEFAULTS, EngineOptions, with_keywords


def layer() -> BP:
    return BP(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"on_non_finite": "skp"}, ConfigError, "unknown on_non_finite 'skp'; did you mean 'skip'?"),
        ({"on_oom": "halve"}, ConfigError, "unknown on_oom 'halve'"),
        ({"matmul": "low"}, ConfigError, "unknown matmul 'low'"),
        ({"packet": "int4"}, ConfigError, "unknown packet 'int4'; did you mean 'int8'?"),
        ({"precision": "fp8"}, ConfigError, "unknown precision 'fp8'"),
        ({"compile": "all"}, ConfigError, "unknown compile 'all'"),
        ({"queue_depth": 0}, PlacementError, "queue_depth is 0; expected at least 1 packet"),
        ({"threads": 0}, ConfigError, "threads is 0; expected a whole number from 1 to 1024, or None"),
        ({"threads": 10**6}, ConfigError, "threads is 1000000; expected a whole number from 1 to 1024"),
        ({"threads": 1.5}, ConfigError, "threads is 1.5; expected a whole number"),
        ({"threads": True}, ConfigError, "threads is True; expected a whole number"),
        ({"queue_depth": 1.5}, PlacementError, "queue_depth is 1.5; expected at least 1 packet"),
        ({"queue_depth": "2"}, PlacementError, "queue_depth is '2'; expected at least 1 packet"),
        ({"queue_depth": float("nan")}, PlacementError, "queue_depth is nan; expected at least 1 packet"),
        ({"stall_timeout_s": float("nan")}, ConfigError, "stall_timeout_s is nan; expected seconds, above 0"),
        ({"stall_timeout_s": None}, ConfigError, "stall_timeout_s is None; expected seconds"),
        ({"stall_timeout_s": "3"}, ConfigError, "stall_timeout_s is '3'; expected seconds"),
        ({"stall_timeout_s": 0}, ConfigError, "stall_timeout_s is 0; expected seconds, above 0"),
    ],
)
def test_a_wrong_option_is_refused_alike_as_an_option_and_as_a_keyword(
    wrong: dict[str, Any], kind: type[PipealError], said: str
) -> None:
    messages = []
    for make in (lambda: EngineOptions(**wrong), lambda: Pipeline([layer()], "cpu", **wrong)):
        with pytest.raises(kind) as caught:
            make()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(said)


@pytest.mark.parametrize("number", [1.5, -1, "0", True])
def test_the_number_of_a_batch_is_whole(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"first_batch is .*; expected a whole number, at least 0"):
        Pipeline([layer()], "cpu", first_batch=number)
    with pytest.raises(ValueError, match=r"cannot skip .* batches; expected a whole number, at least 0"):
        Pipeline([layer()], "cpu").skip(number)


def test_an_unknown_keyword_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(TypeError, match="unknown keyword 'precison'; did you mean 'precision'"):
        Pipeline([layer()], "cpu", precison="bf16")


def test_a_keyword_goes_before_the_options_and_these_stay_as_they_were() -> None:
    options = EngineOptions(queue_depth=5, threads=2)
    pipe = Pipeline([layer()], "cpu", options=options, threads=1)
    assert (pipe.options.queue_depth, pipe.options.threads, pipe.threads) == (5, 1, 1)
    assert options.threads == 2
    assert with_keywords(None, {}) == DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [{"on_non_finite": "skip"}, {"on_oom": "split"}])
def test_replicas_that_learn_together_exclude_what_one_cannot_decide_for_all(wrong: dict[str, Any]) -> None:
    options = EngineOptions(**wrong)
    options.check_layout(replicas=1)
    with pytest.raises(ConfigError, match="is not possible with 2 replicas"):
        options.check_layout(replicas=2)


def test_a_layer_on_several_devices_excludes_compilation() -> None:
    EngineOptions().check_layout(row=True)
    with pytest.raises(ConfigError, match="use 'none', or one device"):
        EngineOptions(compile="static").check_layout(row=True)
