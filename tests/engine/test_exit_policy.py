"""How sure an answer is, and who leaves with it."""

from __future__ import annotations

from math import exp

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline
from pipeal.engine.inference.exit_policy import ExitPolicy, confidence, decide

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0, 20.0])
def test_a_confidence_is_the_greatest_probability_at_its_temperature(temperature: float) -> None:
    logits = torch.tensor([[2.0, 0.0], [-1.0, 3.0], [0.5, 0.5]])
    wanted = [1 / (1 + exp(-gap / temperature)) for gap in (2.0, 4.0, 0.0)]
    assert confidence(logits, temperature).tolist() == pytest.approx(wanted)


def test_who_is_sure_enough_leaves_and_the_threshold_itself_is_enough() -> None:
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    (answers, exits, rows), staying = decide(1, 0.5, 1.0, (logits, None))
    assert (exits.tolist(), rows.tolist(), staying.tolist()) == ([1, 1, 1], [], [])
    (answers, exits, rows), staying = decide(1, 0.6, 1.0, (logits, None))
    assert (rows.tolist(), staying.tolist()) == ([0], [0])
    (answers, exits, rows), staying = decide(2, -1.0, 1.0, (torch.tensor([[0.0, 5.0]]), (answers, exits, rows)))
    assert exits.tolist() == [2, 1, 1]
    assert answers.tolist() == [[0.0, 5.0], [9.0, 0.0], [0.0, 9.0]]


def test_each_exit_weighs_by_its_own_temperature() -> None:
    """Confidences of overconfident exits were taken as they were, and samples left too soon."""
    torch.manual_seed(0)
    first = AL(ENC(nn.Linear(3, 4), nn.Linear(4, 4)), LabelAE(nn.Linear(2, 4), nn.Linear(4, 2), 2))
    second = AL(ENC(nn.Linear(4, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))
    pipe, x = Pipeline(ALPackage([first, second]), threads=1), torch.randn(5, 3)
    (exits,) = pipe.predict_exits([x])
    middle = float(confidence(exits[0], 1.0).min())  # all are that sure at a temperature of 1, and none at 1000
    for temperatures, wanted in (((1.0, 1.0), 1), ((1000.0, 1.0), 2), ((1.0, 1000.0), 1)):
        policy = ExitPolicy((middle - 1e-6 if wanted == 1 else 0.51, 0.0), temperatures)
        (answer,) = pipe.predict_each([x], policy=policy)
        assert answer.exits.tolist() == [wanted] * 5


def test_an_exit_is_off_only_where_no_confidence_can_be_enough() -> None:
    assert ExitPolicy((1.0, 1.0 + 1e-6, 0.5, 2.0), (1.0,) * 4).tried == [1, 3, 4]
