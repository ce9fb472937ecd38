"""What a run says and does around a way back to a checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pipeal.run.turns
from pipeal.core.errors import NonFiniteError
from pipeal.reporting.attempts import Attempts
from pipeal.run.turns import Turns
from pipeal.training.position import Position
from pipeal.training.rewind import Rewinds


class Folder:
    """A run's folder that remembers what it was told."""

    path = status_path = Path("runs/x")
    way_back = "the same command"

    def __init__(self) -> None:
        self.told: list[int | None] = []

    def tell(self, _: str, message: str = "", epoch: int | None = None) -> None:
        self.told.append(epoch)


def made(
    where: Position,
    folder: Folder | None = None,
    *,
    written: bool = True,
    policy: str = "stop-and-rewind",
    compile: str = "none",
    schedule: str = "pipelined",
) -> Turns:
    """The turns of a form, from a position on, whose checkpoints are written, or are not in time."""
    train = SimpleNamespace(on_non_finite=policy, accumulate=1)
    engine = SimpleNamespace(compile=compile, schedule=schedule)
    run: Any = SimpleNamespace(folder=folder or Folder(), attempts=Attempts())
    outcome: Any = SimpleNamespace(config=SimpleNamespace(train=train, engine=engine), position=where)
    store: Any = SimpleNamespace(folder="checkpoints", newest=lambda _: None)
    writer: Any = SimpleNamespace(flush=lambda _: written)
    fake: Any = None
    return Turns(run, outcome, store, writer, (), fake)


def broken() -> NonFiniteError:
    return NonFiniteError("layer 1 is broken", 1, 7, ())


def attempts(monkeypatch: pytest.MonkeyPatch, *found: tuple[NonFiniteError, str] | None) -> None:
    results = list(found)

    def attempt(*_: Any) -> Generator[None, None, tuple[NonFiniteError, str, list[Any]] | None]:
        yield from ()  # no epoch comes to its end
        result = results.pop(0)
        return None if result is None else (*result, [])

    monkeypatch.setattr(Turns, "_attempt", attempt)


def test_how_the_run_stands_is_told_again_after_going_back(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Symptom: status.json told an epoch that had been undone, until that was behind once more."""
    folder, where = Folder(), Position(epoch=3, batches=30)

    def back(_: Any, position: Position, *others: Any) -> bool:
        position.epoch, position.batches = 1, 10
        return True

    monkeypatch.setattr(pipeal.run.turns, "go_back", back)
    attempts(monkeypatch, (broken(), "batch 7 is left out"), None)
    list(made(where, folder).turn(None))  # type: ignore[arg-type]
    assert folder.told == [1]
    assert said == ["batch 7 is left out; going back to where it stood after epoch 1"]


def test_rows_of_epochs_that_are_to_come_again_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[str]] = []
    recorder: Any = SimpleNamespace(path=Path("epochs.csv"), rewrite=lambda rows: kept.append(list(rows)))
    where: Any = Position(epoch=3, batches=30)
    where.rows[:] = ["row 1", "row 2", "row 3"]

    def back(_: Any, position: Any, *others: Any) -> bool:
        position.rows[:] = position.rows[:1]
        position.epoch, position.batches = 1, 10
        return True

    monkeypatch.setattr(pipeal.run.turns, "go_back", back)
    attempts(monkeypatch, (broken(), "batch 27 is left out"), None)
    turns = made(where)
    turns.recorders = (recorder,)
    list(turns.turn(None))  # type: ignore[arg-type]
    assert kept == [["row 1"]]


@pytest.mark.parametrize(
    ("written", "note"),
    [
        (False, "the checkpoint to go back to was not written within 300 s"),
        (True, "there is no good checkpoint in checkpoints to go back to"),
    ],
)
def test_why_nothing_goes_back_is_told(
    written: bool, note: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Symptom: a disk that hangs was told as one that holds no good checkpoint."""
    attempts(monkeypatch, (broken(), "batch 7 is left out"))
    turns = made(Position(batches=30), written=written)
    with pytest.raises(NonFiniteError) as caught:
        list(turns.turn(None))  # type: ignore[arg-type]
    assert caught.value.__notes__ == [note]
    assert said == []


@pytest.mark.parametrize(("compile", "may"), [("dynamic", True), ("static", False), ("none", False)])
def test_that_graphs_for_all_sizes_may_round_otherwise_after_it_is_said(
    compile: str, may: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(pipeal.run.turns, "go_back", lambda *_: True)
    monkeypatch.setattr(Turns, "tell", lambda *_: None)
    attempts(monkeypatch, (broken(), "batch 7 is left out"), None)
    list(made(Position(batches=30), compile=compile).turn(None))  # type: ignore[arg-type]
    assert [text for text in said if text.startswith("graphs for all sizes")] == said[1:]
    assert len(said) == 1 + may


def test_nothing_goes_back_under_a_stage_that_may_still_learn() -> None:
    """Symptom: the thread that was left behind updated layers that had just been put back."""
    where = Position(batches=30)
    turns = made(where)
    for left_behind in (True, False):
        pipe: Any = SimpleNamespace(left_behind=left_behind)
        decision = turns._decide(broken(), Rewinds(), pipe)
        assert decision.goes_back is not left_behind
        assert ("a stage stands still" in decision.why) is left_behind
        assert bool(where.totals.left_out) is not left_behind


@pytest.mark.parametrize(
    ("policy", "schedule", "why"),
    [
        ("raise", "pipelined", "or leave such batches out: --resume runs/x"),
        ("raise", "gpipe", "or leave such batches out, in one process: --resume runs/x"),
        ("skip", "pipelined", ""),
    ],
)
def test_what_else_there_is_to_do_depends_on_what_was_asked_for(policy: str, schedule: str, why: str) -> None:
    turns = made(Position(batches=30), policy=policy, schedule=schedule)
    pipe: Any = SimpleNamespace(left_behind=False)
    decision = turns._decide(broken(), Rewinds(), pipe)
    assert not decision.goes_back
    assert decision.why.startswith(why)
    assert bool(decision.why) is bool(why)
