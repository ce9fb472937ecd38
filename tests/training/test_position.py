"""Where a training stands, as JSON and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch

from pipeal.core.errors import DataError
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageTimes
from pipeal.training.position import Part, Position, Totals, joined, numbered
from pipeal.training.row import EpochRow


def position() -> Position:
    times = StageTimes(dict.fromkeys(Action, 0.1), {"input": 0.3})
    row = EpochRow(2, 1, 0.1 + 0.2, 0.9, 3.3, 3.3, 7.0, 0.0, losses=((0.1, 1e-17), (0.3,)))
    return Position(
        turn=2,
        epoch=1,
        batches=7,
        trained_s=3.3,
        part=Part(1.5, 3, 12, 40, 50, Counter({(4, 10): 2, (4, 9): 1})),
        rows=[row],
        totals=Totals(
            3.3,
            4,
            16,
            60,
            70,
            Counter({(4, 10): 4}),
            non_finite=2,
            splits=1,
            overflows={1: 3, 2: 0},
            stages=[times],
            stage_s=3.1,
            left_out={(2, 9), (1, 3)},
        ),
    )


def test_a_position_comes_back_from_json_as_it_was() -> None:
    before = position()
    after = Position.of(json.loads(json.dumps(before.state())), [])
    assert after == before
    assert after.step == 7
    assert isinstance(after.rows[0].losses[0], tuple)


def test_a_new_turn_begins_at_its_first_batch() -> None:
    """Symptom: after a turn that was ended early it passed over as many batches as that one had been behind."""
    after = position()
    after.losses = {0: torch.zeros(3, 2)}
    after.next_turn()
    assert (after.turn, after.epoch, after.batches, after.trained_s) == (3, 0, 0, 0.0)
    assert (after.part, after.losses) == (Part(), {})
    assert after.step == position().totals.batches


def test_what_a_resumed_training_counts_goes_on() -> None:
    after = Position.of(position().state(), [])
    after.part.add(Part(0.5, 1, 4, 9, 9, Counter({(4, 9): 1})))
    assert after.part == Part(2.0, 4, 16, 49, 59, Counter({(4, 10): 2, (4, 9): 2}))


def test_kernel_busy_goes_on_over_a_checkpoint_and_is_unknown_where_it_was() -> None:
    class Report:
        seconds = 2.0
        stages = [StageTimes(dict.fromkeys(Action, 0.2), {"input": 0.0}, 0.5)] * 1

    totals = position().totals
    totals.stages = []
    totals.watched(Report())  # type: ignore[arg-type]
    found = position()
    found.totals = totals
    totals = Position.of(found.state(), []).totals
    totals.watched(Report())  # type: ignore[arg-type]
    assert totals.kernel_share == [0.25]
    totals.stages[0] = StageTimes(totals.stages[0].busy, totals.stages[0].waiting)  # of a version that did not know it
    totals.watched(Report())  # type: ignore[arg-type]
    assert totals.kernel_share == [None]


def test_the_times_of_other_stages_than_before_begin_anew() -> None:
    class Report:
        seconds = 2.0
        stages = [StageTimes(dict.fromkeys(Action, 0.2), {"input": 0.0})] * 2

    totals = position().totals
    totals.watched(Report())  # type: ignore[arg-type]
    assert totals.busy_share == [pytest.approx(0.3)] * 2
    totals.watched(Report())  # type: ignore[arg-type]
    assert totals.busy_share == [pytest.approx(0.3)] * 2
    assert totals.stage_s == 4.0


def test_losses_of_two_parts_are_those_of_the_whole() -> None:
    one, other, late = torch.rand(3, 2), torch.rand(5, 2), torch.rand(1, 1)
    found = joined({1: one}, {0: late, 1: other})  # layer 0 has reported since the checkpoint alone
    assert list(found) == [0, 1]
    assert torch.equal(found[0], late)
    assert torch.equal(found[1], torch.cat([one, other]))
    assert joined({}, {}) == {}


def test_another_number_of_losses_since_the_checkpoint_is_one_line() -> None:
    """It ended in a traceback at the end of the epoch."""
    told = r"^layer 2 reports 1 losses, and 2 up to the checkpoint amid this epoch; [^\n]*$"
    with pytest.raises(DataError, match=told):
        joined({2: torch.zeros(3, 2)}, {2: torch.zeros(3, 1)})


FORGED: dict[str, Any] = {
    "turn": [0, -1, 1.0, "2", None, True, 2**60, 3],  # there are no rows of turn 3
    "epoch": [-1, 2, 10**30, "1"],
    "batches": [-1, 8, 2, None],
    "trained_s": [-1.0, math.nan, math.inf, "long", []],
    "part": [None, 3, {"batches": -1}, {"shapes": 7}, {"shapes": [[1, 2]]}, {"shapes": [[1, 2, 9]]},
             {"shapes": {"a": 1}}],
    "rows": [None, [1], [{}], {}, [{"turn": 2}]],
    "totals": [{"stages": [{}]}, {"stages": [{"busy": {"F": 1}, "waiting": {}}]}, {"non_finite": -3}, {"left_out": [3]},
               {"batches": 2**80}, {"stages": [{"busy": {"X": 1}, "waiting": {}}]}, {"left_out": [[0, 1]]}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FORGED.items() for value in values])
def test_a_forged_position_is_one_line(name: str, value: Any) -> None:
    """It ended in a traceback, in the middle of the run."""
    state = json.loads(json.dumps(position().state()))
    forged = {**state[name], **value} if isinstance(state[name], dict) and isinstance(value, dict) else value
    with pytest.raises(ValueError, match=r"^\w[^\n]*$"):
        Position.of({**state, name: forged}, [])


@pytest.mark.parametrize(
    "losses",
    [
        *(None, 3, [1.0], [torch.zeros(3)], [torch.zeros(9, 2)], {"a": 1}, {"a": torch.zeros(2, 2)}),
        [torch.zeros(2, 2), torch.zeros(4, 1)],
    ],
)
def test_forged_losses_are_one_line(losses: Any) -> None:
    """Those that did not fit the layers ended in a traceback at the end of the epoch."""
    with pytest.raises(ValueError, match=r"^losses[^\n]*$"):
        Position.of(position().state(), losses)


def test_losses_of_the_epoch_under_way_are_taken() -> None:
    losses = {0: torch.zeros(2, 2), 3: torch.zeros(1, 1)}  # that layer has reported on one of the two batches
    assert Position.of(position().state(), numbered(losses)).losses == losses
    assert Position.of(position().state(), [losses[0]]).losses == {0: losses[0]}  # as older checkpoints have them


def test_a_position_of_before_batches_were_left_out_is_taken() -> None:
    state = position().state()
    del state["totals"]["left_out"], state["totals"]["blamed"], state["totals"]["overflows"]
    assert Position.of(state, []).totals.left_out == set()


def test_where_it_stands_is_told_in_words() -> None:
    """A run that had all of its two epochs behind it went on "after batch 0 of epoch 3"."""
    assert Position().where == "batch 0 of epoch 1"
    assert Position(epoch=1, part=Part(batches=8)).where == "batch 8 of epoch 2"
    assert Position(epoch=2).where == "epoch 2"
