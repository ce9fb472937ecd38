"""A training that is asked to end saves first; a disk that hangs keeps it for some time, not for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.core.errors import Interrupted
from pipeal.engine.state.snapshot import Snapshot
from pipeal.training.checkpoint import policy as keeping
from pipeal.training.checkpoint.policy import CheckpointPolicy, is_best
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter, Job, Outcome
from pipeal.training.position import Part, Position
from pipeal.training.row import EpochRow


class Hanging:
    """A store that writes when it is allowed to."""

    folder = "nowhere"

    def __init__(self) -> None:
        self.go = threading.Event()

    def save(self, *_: Any) -> None:
        assert self.go.wait(120)


class Passed:
    """A snapshot that has passed a layer, and the pipeline that gives it."""

    batch = splits = 0
    ended = gathers = False
    losses = kept = None
    state = {"module": {"w": torch.zeros(1)}, "gradients": {}, "optimizers": {}}  # noqa: RUF012  not changed

    def snapshot(self) -> Passed:
        return self

    def wait(self) -> dict[int, Passed]:
        return {0: self}


@pytest.fixture
def store() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.go.set()


def leave(writer: CheckpointWriter) -> None:
    CheckpointPolicy(writer, None, lambda: 143, {}).leave(Passed(), Position())  # type: ignore[arg-type]


def test_it_says_that_it_is_saving_when_that_takes_its_time(
    store: Hanging, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(keeping, "QUIET_S", 0.1)

    class Answers(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            store.go.set()

    logger = logging.getLogger("pipeal")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, Answers()])
    with CheckpointWriter(store) as writer, pytest.raises(Interrupted, match="and saved"):  # type: ignore[arg-type]
        leave(writer)
    assert said == ["saving; another signal ends the run at once, without its last batches"]


def test_it_leaves_without_a_checkpoint_that_does_not_come(
    store: Hanging, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Symptom: it waited without end."""
    for name, seconds in (("policy.QUIET_S", 0.1), ("policy.PATIENCE_S", 0.3), ("writer.HURRY_S", 0.1)):
        monkeypatch.setattr(f"pipeal.training.checkpoint.{name}", seconds)
    with (
        pytest.raises(Interrupted, match=r"not saved within 0.3 s; .* from the checkpoint before it"),
        CheckpointWriter(store) as writer,  # type: ignore[arg-type]
    ):
        leave(writer)
    # That, and where to look: it was waited for as long as PATIENCE_S says, and at the end as long as HURRY_S does.
    saving, where = said
    assert saving.startswith("saving;")
    assert where.startswith("a checkpoint is still not written 0.1 s after the end of the training")
    store.go.set()
    for thread in threading.enumerate():
        if thread.name == "pipeal-writer":
            thread.join(120)


class Breaks(nn.Module):
    """On its third batch it raises, when it is allowed to."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.go, self.seen = [go], 0  # in a list: deepcopy of a module copies no lock

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        if self.training and self.seen == 3:
            assert self.go[0].wait(120)
            raise ValueError("the custom layer cannot bear it")
        found: Tensor = self.linear(x)
        return found


@pytest.mark.parametrize("ends_on_broken", [True, False])
def test_a_stage_that_fails_on_the_last_batches_is_told_and_nothing_is_called_saved(
    ends_on_broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: None
) -> None:
    """Symptom: "interrupted …, and saved" with nothing on the disk, and the error was never seen.

    The second stage was still at a batch before the snapshot when the signal came; that it failed there ended the
    writer's job, which counted as no failure.
    """
    monkeypatch.setattr(keeping, "QUIET_S", 120.0)
    go = threading.Event()
    model = ALPackage(
        [AL(ENC(f, nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4))) for f in (nn.Linear(4, 4), Breaks(go))]
    )
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        saves = CheckpointPolicy(writer, None, lambda: 143, {}, ends_on_broken=ends_on_broken)
        with pytest.raises(ValueError, match="cannot bear it"), Pipeline(model, threads=1) as pipe:  # noqa: PT012
            for _ in range(3):
                pipe.submit(torch.ones(2, 4), torch.ones(2, 4))
            snapshot = pipe.snapshot

            def then_fails() -> Snapshot:
                sent = snapshot()
                go.set()
                return sent

            pipe.snapshot = then_fails  # type: ignore[method-assign]
            saves.leave(pipe, Position(batches=3, part=Part(batches=3)))
    assert store.newest(pytest.fail) is None


def row(turn: int, epoch: int, held_acc: float) -> EpochRow:
    return EpochRow(turn, epoch, 0.5, 1 - held_acc, 1.0, 1.0, 1.0, 1.0, held_acc=held_acc)  # the test set disagrees


class Asked:
    """A writer that notes what it is asked for."""

    failing = False
    failures = 0
    last_failure = None

    def __init__(self) -> None:
        self.best: list[bool] = []

    def submit(self, job: Job) -> Outcome:
        self.best.append(job.best)
        return Outcome(done=True, written=True)

    def flush(self, _: float) -> bool:
        return True


@pytest.mark.parametrize(
    ("last", "batches", "best"), [(0.7, 0, True), (0.4, 0, False), (float("nan"), 0, False), (0.7, 2, False)]
)
def test_what_is_saved_again_at_the_end_of_the_best_epoch_is_still_the_best(
    last: float, batches: int, best: bool
) -> None:
    """Symptom: a signal after the last epoch, which was the best, took its mark away, and later its weights."""
    writer, position = Asked(), Position(epoch=2, batches=8 + batches, part=Part(batches=batches))
    position.rows = [row(1, 1, 0.5), row(1, 2, last)]
    saves = CheckpointPolicy(writer, None, lambda: 143, {})  # type: ignore[arg-type]
    if not batches:
        saves.after_epoch(Passed(), position)  # type: ignore[arg-type]
    with pytest.raises(Interrupted, match="and saved"):
        saves.leave(Passed(), position)  # type: ignore[arg-type]
    assert writer.best == ([best] if batches else [best, best])


@pytest.mark.parametrize(("failing", "said"), [(False, "interrupted before turn 2; the same"), (True, "and saved")])
def test_a_later_turn_that_has_not_begun_takes_nothing_away_from_the_one_before(failing: bool, said: str) -> None:
    """Its checkpoint has the step of that one's last, which may be kept as the best: if it is on the disk."""
    writer, position = Asked(), Position(turn=2, rows=[row(1, 1, 0.5)])
    writer.failing = failing
    with pytest.raises(Interrupted, match=said):
        CheckpointPolicy(writer, None, lambda: 143, {}).leave(Passed(), position)  # type: ignore[arg-type]
    assert writer.best == [False] * failing


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_an_epoch_whose_loss_is_no_number_is_never_the_best(loss: float) -> None:
    """Symptom: no later one was better than the first, which was kept for ever; then it was, as long as none was."""
    broken, fine = replace(row(1, 1, 0.5), held_loss=loss), replace(row(1, 2, 0.5), held_loss=9.0)
    assert not is_best(Position(epoch=1, batches=4, rows=[broken]))
    assert is_best(Position(epoch=2, batches=8, rows=[broken, fine]))
