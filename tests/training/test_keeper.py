"""What a checkpoint in the middle of an epoch knows of it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.engine.runner.split import SplitWarning
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter, Outcome
from pipeal.training.position import Part, Position
from pipeal.training.row import EpochRow
from tests.engine.test_out_of_memory import data, model


@pytest.mark.filterwarnings("ignore", category=SplitWarning)
def test_batches_learnt_from_in_parts_before_a_kill_are_counted_after_it(tmp_path: Path, silent: None) -> None:
    """Only the report at an epoch's end told them, and a run that was taken up forgot those before the checkpoint."""
    batches = data(6, 4, 6, 6, 4)
    position: Any = Position(part=Part(0.5, 3, 16, 0, 0))
    with CheckpointStore(tmp_path) as store, CheckpointWriter(store) as writer:
        saves = CheckpointPolicy(writer, 3, lambda: None, {})
        with Pipeline(model(5, "B"), threads=1, on_oom="split") as pipe:
            pipe.run(batches[:1])
            position.totals.splits = 1
            for x, y in batches[1:4]:
                pipe.submit(x, y)
            position.batches = 3
            assert saves.after_batch(pipe, position) is False
            assert writer.flush(120)
            resumed = ResumedTraining.of(store.newest(pytest.fail))  # type: ignore[arg-type]
            assert resumed.position.totals.splits == 3
            assert sum(pipe.run(batches[4:]).splits) == 2
            position.totals.splits = 3
            saves._save(pipe, position)
            assert writer.flush(120)
        assert ResumedTraining.of(store.newest(pytest.fail)).position.totals.splits == 3  # type: ignore[arg-type]


def test_losses_before_a_checkpoint_and_up_to_it_are_kept(tmp_path: Path, silent: None) -> None:
    """Bit for bit, and in a file of their own: the layers' files are of the layers alone."""
    batches = data(4, 2, 4)
    position = Position(part=Part(0.5, 1, 4, 0, 0), batches=1)
    with CheckpointStore(tmp_path) as store, CheckpointWriter(store) as writer:
        saves = CheckpointPolicy(writer, None, lambda: None, {})
        with Pipeline(model(5, "B"), threads=1) as pipe:
            position.losses = dict(enumerate(pipe.run(batches[:1]).losses))
            for x, y in batches[1:]:
                pipe.submit(x, y)
            position.part.batches = position.batches = 3
            saves._save(pipe, position)
            wanted = [torch.cat(pair) for pair in zip(position.losses.values(), pipe.drain().losses, strict=True)]
        assert writer.flush(120)
    saved = store.newest(pytest.fail)
    assert saved is not None
    assert set(saved.layers()[0]) == {"module", "versions", "gradients", "optimizers", "others"}
    found = [*ResumedTraining.of(saved).position.losses.values()]
    assert [losses.dtype for losses in found] == [torch.float32] * len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Shy(nn.Linear):
    """Its state cannot be had while it is shy, as when memory is short for a copy."""

    shy = False

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if self.shy:
            raise RuntimeError("can't allocate memory")
        return super().state_dict(*args, **options)


def test_a_look_that_fails_ends_no_training(tmp_path: Path, said: list[str]) -> None:
    """Symptom: it ended by the look before an evaluation, though a checkpoint that cannot be taken is only told."""
    layer = Shy(4, 4)
    model = ALPackage([AL(ENC(layer, nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))])
    position: Any = Position(part=Part(0.5, 1, 2, 0, 0), rows=[], batches=1)
    with (
        CheckpointStore(tmp_path) as store,
        CheckpointWriter(store) as writer,
        Pipeline(model, threads=1) as pipe,
    ):
        saves = CheckpointPolicy(writer, None, lambda: None, {}, look_until=9)
        pipe.submit(torch.ones(2, 4), torch.ones(2, 4))
        layer.shy = True
        assert saves.after_batch(pipe, position) is False
        saves.before_evaluation(pipe, position)
        assert said == [
            "the states of step 1 could not be looked at: RuntimeError: can't allocate memory; the training goes on"
        ]
        saves._save(pipe, position)
        assert writer.flush(120)
        assert writer.failures == 1
        layer.shy = False
        saves.before_evaluation(pipe, position)
        saves._save(pipe, position)
        assert writer.flush(120)
        assert store.newest(pytest.fail) is not None


def test_a_look_at_a_pipeline_that_ends_raises_why(tmp_path: Path, silent: None) -> None:
    """The training would learn it with its next batch; but it may be the last."""
    model = ALPackage([AL(ENC(nn.Linear(4, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)))])
    with CheckpointStore(tmp_path) as store, CheckpointWriter(store) as writer:
        saves = CheckpointPolicy(writer, None, lambda: None, {})
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Pipeline(model, threads=1) as pipe:  # noqa: PT012
            pipe.submit(torch.ones(2, 5), torch.ones(2, 4))
            saves.before_evaluation(pipe, Position())


@pytest.mark.parametrize(
    ("begun", "wanted"), [(0, [8, 18, 24]), (7, [8, 18, 24]), (8, [18, 24]), (14, [18, 24]), (18, [24])]
)
def test_it_saves_at_the_first_update_after_so_many_batches_and_once(
    monkeypatch: pytest.MonkeyPatch, begun: int, wanted: list[int]
) -> None:
    """Where several batches make an update, it saved again at the next, and whenever an epoch ended with fewer."""
    saved = list[int]()
    saves = CheckpointPolicy(None, 8, lambda: None, {}, begun=begun)  # type: ignore[arg-type]
    monkeypatch.setattr(saves, "_save", lambda _, position: saved.append(position.batches))
    for batches in (4, 8, 10, 14, 18, 20, 24):  # updates of four, in epochs of ten
        if batches > begun:
            saves.after_batch(None, Position(batches=batches))  # type: ignore[arg-type]
    assert saved == wanted


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((0.5, 0.7, 0.6, 0.7, 0.8), [True, True, False, False, True]),  # of equals, the first
        ((0.9, 0.1), [True, False]),
        ((math.nan, 0.1), [False, True]),
    ],
)
def test_the_checkpoint_of_the_best_epoch_so_far_is_marked(scores: tuple[float, ...], best: list[bool]) -> None:
    """Also where it is that of an earlier turn; and one within an epoch never is."""
    marked: list[bool] = []
    writer: Any = SimpleNamespace(submit=lambda job: marked.append(job.best) or Outcome(done=True))
    pipe: Any = SimpleNamespace(snapshot=lambda: None)
    saves, position = CheckpointPolicy(writer, 1, lambda: None, {}), Position()
    accuracies = [one.name for one in fields(EpochRow) if one.name.endswith("_acc")]
    first = EpochRow(1, 1, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    for epoch, score in enumerate(scores, 1):
        if epoch == 3:
            position.turn, position.epoch = 2, 0
        position.batches, position.part = position.batches + 1, Part(batches=1)
        saves.after_batch(pipe, position)
        assert marked.pop() is False
        position.epoch, position.part = position.epoch + 1, Part()
        row = replace(first, turn=position.turn, epoch=position.epoch, **dict.fromkeys(accuracies, score))
        position.rows.append(row)
        saves.after_epoch(pipe, position)
    assert marked == best
