"""Law: a line leaves what one process leaves, to the last bit, whichever of its stages die, wherever and how often."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from left_behind import same

from pipeal.core.errors import DataError, PeerLostError
from pipeal.core.modules import module_of
from pipeal.line.items import Item
from pipeal.line.neighbours import Neighbours
from pipeal.line.parting import Partings
from pipeal.line.stage_run import StageRun
from pipeal.line.status import read_status
from pipeal.line.worker import StageWorker
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from tests.cli.test_text import varied
from tests.integration.test_resume import assert_same
from tests.line.lines import Counted, Killed, built_in_turn, learned_twice, new_line, run_alone, run_line, stopped
from tests.line.links import LONG_S, until

pytestmark = [pytest.mark.usefixtures("cheap_runs", "one_thread", "built_in_turn")]

__all__ = ["built_in_turn"]

TEXT = (
    "model.embedding_dim=12", "model.n_heads=2", "model.x_hid=8", "model.y_hid=8", "data.batching.budget_tokens=256",
    "train.train_accuracy_samples=50", "train.precision=fp32", "train.epochs=2", "engine.threads=1",
    "data.held_out=0.1",
)  # fmt: skip
IMAGES = (
    "model.width=0.0625", "model.x_hid=16", "model.y_hid=8", "data.size=16", "data.batch_size=256", "train.epochs=2",
    "train.train_accuracy_samples=50", "train.precision=fp32", "engine.threads=1",
)  # fmt: skip


def text_line(tmp_path: Path, model: str, stages: int, *settings: str, **fields: object) -> Path:
    """A line that trains on 200 small texts."""
    data = f"data.root={varied(tmp_path / 'data')}"
    return new_line(tmp_path, "agnews", model, stages, *TEXT, data, *settings, **fields)


def quick(*methods: object) -> list[object]:
    """The first in every ``make test``, the others in ``make test-all``."""
    return [methods[0], *(pytest.param(one, marks=pytest.mark.slow) for one in methods[1:])]


@pytest.mark.parametrize("method", quick("al", "greedy", "scpl", "deinforeg", "predsim"))
@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_a_line_of_text(model: str, method: str, tmp_path: Path) -> None:
    stages = 3 if model == "transformer" else 2
    line = text_line(tmp_path, model, stages, f"train.mode={method}")
    run_line(line)
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["al", "predsim"])
def test_a_line_of_images_with_batch_norm(method: str, tmp_path: Path) -> None:
    line = new_line(tmp_path, "toyimages", "resnet", 4, *IMAGES, f"train.mode={method}")
    run_line(line)
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.data
def test_a_line_of_characters_measured_by_its_loss(real_data: Path, tmp_path: Path) -> None:
    line = new_line(
        tmp_path, "shakespeare", "charlm", 3, f"data.root={real_data}", "data.steps=25", "data.estimate_batches=4",
        "data.batch_size=4", "model.width=32", "train.epochs=2", "engine.threads=1", "train.precision=fp32",
        preset="cpu",
    )  # fmt: skip
    counted = Counted({0: [40], 1: [20, 60], 2: [50]})
    run_line(line, counted)
    assert len(counted.died) == 4
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


@pytest.mark.parametrize("seed", quick(*range(6)))
def test_a_line_whose_stages_die_anywhere(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six deaths at random places, some of two neighbours at once; and how little may wait is random, too."""
    draw = random.Random(seed)
    model, stages = draw.choice((("transformer", 4), ("transformer", 2), ("lstm", 3)))
    every_s, retain_mib = draw.choice((0.02, 0.2, 5.0)), draw.choice((0.002, 0.05, 64.0))
    accumulate, precision = draw.choice((1, 1, 3)), draw.choice(("fp32", "bf16"))
    line = text_line(
        tmp_path, model, stages, f"train.accumulate={accumulate}", f"train.precision={precision}",
        snapshot_s=every_s, retain_mib=retain_mib,
    )  # fmt: skip
    deaths: dict[int, list[int]] = {stage: [] for stage in range(stages)}
    for _ in range(6):
        deaths[draw.randrange(stages)].append(draw.randrange(1, 80))
    counted, learnt = Counted(deaths, together=0.3), learned_twice(monkeypatch)
    run_line(line, counted)
    monkeypatch.undo()
    assert counted.died
    never = {str(stage) for stage in range(stages)} - {str(stage) for stage, _ in counted.died}
    assert all(count == 1 for (name, _), count in learnt.items() if name in never), "no other stage does it again"
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def at_first(stage: int, place: str) -> Callable[[int, str], None]:
    """Kills a stage once, when it first comes to a place."""
    left = [place]

    def reached(number: int, where: str) -> None:
        if number == stage and where in left:
            left.remove(where)
            raise Killed(where)

    return reached


@pytest.mark.parametrize(
    "death",
    quick(
        (1, "amid evaluate"), (0, "amid begin"), (1, "amid begin"), (1, "amid decoder"), (1, "amid ask"),
        (0, "amid ask"), (1, "amid layer"), (0, "amid end"), (1, "amid end"), (1, "before a snapshot"),
        (1, "after a snapshot"), (2, "after a snapshot"), (0, "after a snapshot"),
    ),
    ids=str,
)  # fmt: skip
def test_a_stage_that_dies_at_the_worst_places(death: tuple[int, str], tmp_path: Path) -> None:
    line = text_line(tmp_path, "transformer", 3, "train.epochs=1", snapshot_s=0.05)
    run_line(line, at_first(*death))
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_sizes_that_were_measured_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a first stage that died before its first snapshot measured the layers again, found other sizes, and the
    next stage, which had saved the first ones, left a layer out. Cause: nothing had kept what was chosen."""
    line = text_line(tmp_path, "transformer", 2)
    sizes = iter([[1, 3], [2, 2]])
    monkeypatch.setattr("pipeal.line.beginning.balance_one_by_one", lambda *_, **__: next(sizes))
    run_line(line, at_first(0, "amid begin"))
    assert next(sizes) == [2, 2]
    monkeypatch.undo()
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_more_batches_to_an_update_than_may_wait(tmp_path: Path) -> None:
    """Symptom: the line stood still for ever. Cause: the stage before waited for a snapshot before it sent another
    batch, and the next one for that batch, since it saves after an update alone."""
    line = text_line(tmp_path, "lstm", 2, "train.accumulate=4", "train.epochs=1", retain_mib=1e-6)
    run_line(line)
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_line_that_dies_amid_an_update(tmp_path: Path) -> None:
    """What was gathered for an update is kept nowhere: a stage saves when there is nothing of it."""
    line = text_line(tmp_path, "lstm", 2, "train.accumulate=3", snapshot_s=1e-6)
    counted = Counted({0: [20, 45], 1: [10, 12, 23, 30]})
    run_line(line, counted)
    assert len(counted.died) == 6
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_stage_that_dies_amid_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snapshot is of the time when the layers answer, and had been set to; few answers would not show it."""
    ask = StageWorker._ask

    def asked(worker: StageWorker, item: Item) -> None:
        assert not any(part.training for _, layer in worker._stage.layers for part in module_of(layer).modules())
        ask(worker, item)

    monkeypatch.setattr(StageWorker, "_ask", asked)
    line = text_line(tmp_path, "transformer", 2, "train.epochs=2", snapshot_s=1e-6)
    left = {0: 4, 1: 6}

    def reached(stage: int, where: str) -> None:
        left[stage] -= where == "between answers"
        if where == "between answers" and left[stage] > 0:
            sleep(0.3)  # in which the last snapshot is written
        if left[stage] == 0:
            left[stage] = -1
            raise Killed

    run_line(line, reached)
    assert max(left.values()) < 0
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def checkpoints(run: Path) -> list[Checkpoint]:
    """Those of a run, in order."""
    return [Checkpoint.open(path) for path in sorted((run / "checkpoints").glob("step-*"))]


def test_a_line_leaves_a_checkpoint_of_each_epoch(tmp_path: Path) -> None:
    """As one process does; a stage that dies meanwhile leaves none out and none half."""
    line = text_line(tmp_path, "transformer", 3, "train.checkpoint.keep=3", snapshot_s=0.05)
    run_line(line, at_first(1, "amid checkpoint"))
    alone = run_alone(line, tmp_path / "alone")
    found, wanted = checkpoints(tmp_path / "run"), checkpoints(alone)
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        assert (one.step, one.best) == (other.step, other.best)
        assert same(dict(one.layers()), dict(other.layers()))


def test_states_that_are_more_than_may_wait(tmp_path: Path) -> None:
    """A stage has to have all states of its layers before it can save, and the one before waited for a snapshot."""
    alone = run_alone(text_line(tmp_path / "0", "transformer", 2, "train.checkpoint.keep=9"), tmp_path / "alone")
    first, _ = sorted((alone / "checkpoints").glob("step-*"))
    run_line(new_line(tmp_path, None, None, 2, retain_mib=1e-6, resume=str(first)))
    assert_same(tmp_path / "run", alone)


def test_a_run_of_more_epochs_than_fit_beside_tensors(tmp_path: Path) -> None:
    """A row of each travels with the first item: in its head, 3,000 were refused."""
    alone = run_alone(text_line(tmp_path / "0", "lstm", 2, "train.epochs=1"), tmp_path / "alone")
    (one,) = checkpoints(alone)
    training, count = dict(one.state["training"]), 3000
    training |= {"epoch": count, "rows": [training["rows"][0] | {"epoch": 1 + number} for number in range(count)]}
    with CheckpointStore(alone / "checkpoints", keep=9) as store:
        store.save(one.step, dict(one.layers()), one.position, one.state | {"training": training}, True, one.epoch())
    run_line(new_line(tmp_path, None, None, 2, f"train.epochs={count + 1}", resume=str(one.path)))
    (found,) = checkpoints(tmp_path / "run")
    assert len(found.state["training"]["rows"]) == count + 1


def test_a_checkpoint_that_cannot_be_written_ends_nothing_but_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = text_line(tmp_path, "lstm", 2, "train.epochs=2")
    save, left = CheckpointStore.save, [tmp_path / "run" / "checkpoints"]

    def refused(store: CheckpointStore, *given: Any, **more: Any) -> Path:
        if store.folder in left:
            left.remove(store.folder)
            raise DataError("no space")
        return save(store, *given, **more)

    monkeypatch.setattr(CheckpointStore, "save", refused)
    run_line(line)
    assert not left
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_line_that_is_to_save_at_the_end_alone(tmp_path: Path) -> None:
    line = text_line(tmp_path, "lstm", 2, "train.epochs=3", "train.checkpoint.keep=9", checkpoint_epochs=None)
    run_line(line)
    assert len(checkpoints(tmp_path / "run")) == 1
    (tmp_path / "second").mkdir()
    line = text_line(tmp_path / "second", "lstm", 2, "train.epochs=3", "train.checkpoint.keep=9", checkpoint_epochs=2)
    run_line(line)
    assert [one.state["training"]["epoch"] for one in checkpoints(tmp_path / "second" / "run")] == [2, 3]


@pytest.mark.parametrize(
    "death", quick((1, "amid state"), (0, "amid state"), (0, "amid begin"), (1, "amid batch")), ids=str
)
def test_a_line_goes_on_with_a_run_on_other_stages(death: tuple[int, str], tmp_path: Path) -> None:
    """Of one process, then of a line of three stages, then of one of two: each leaves what one process leaves."""
    settings = ("train.epochs=3", "train.checkpoint.keep=9")
    alone = run_alone(text_line(tmp_path / "0", "transformer", 2, *settings), tmp_path / "alone")
    before = alone / "checkpoints"
    for stages in (3, 2):
        first, second, _ = sorted(before.glob("step-*"))
        home = tmp_path / str(stages)
        resume = str(first if stages == 3 else second)
        line = new_line(home, None, None, stages, snapshot_s=0.05, resume=resume)
        run_line(line, at_first(*death))
        assert_same(home / "run", alone)
        assert len(checkpoints(home / "run")) == 3 - (1 if stages == 3 else 2)


def test_a_stage_whose_folder_is_of_another_beginning_is_told(tmp_path: Path) -> None:
    """Symptom: the first stage began again, with another configuration, and the next one went on where it had stood:
    both ended with 0. Its folder had been left, and numbers of items are the same in every beginning."""
    line = text_line(tmp_path, "transformer", 2, snapshot_s=0.2)
    stopped(line)
    shutil.rmtree(tmp_path / "stage-0")
    with pytest.raises(
        DataError, match=r"stage 0 has begun the line again, .* remove this stage's folder as well, or put"
    ):
        run_line(line)
    shutil.rmtree(tmp_path / "stage-1")
    run_line(line)
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_line_whose_run_is_gone_says_so(tmp_path: Path) -> None:
    """Symptom: it went on, and left a run without its configuration and vocabulary, which nothing can read."""
    line = text_line(tmp_path, "transformer", 2, snapshot_s=0.2)
    stopped(line)
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.rename(moved)
    with pytest.raises(DataError, match="run does not hold the run of this line; put it back, or name it by --run"):
        run_line(line)
    assert not run.exists()
    moved.rename(run)
    run_line(line)
    assert_same(run, run_alone(line, tmp_path / "alone"))


def test_a_stage_that_is_done_waits_for_one_that_is_away_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the last stage left half a minute after the one before had lost power, which has to do the last items
    again, and waited for it without end."""
    monkeypatch.setattr("pipeal.line.parting._GRACE_S", 0.0)
    line = text_line(tmp_path, "transformer", 2, snapshot_s=0.2)
    died, read = threading.Event(), StageRun._read

    def reads(stage: StageRun) -> Any:
        if died.is_set():
            until(lambda: read_status(tmp_path / "stage-1")[-1].before.startswith("away"))
        return read(stage)

    monkeypatch.setattr(StageRun, "_read", reads)
    run_line(line, dying_at_the_end(tmp_path, died))
    assert died.is_set()
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


@pytest.mark.parametrize(
    ("stage", "word", "then"),
    [(1, "parted", "before"), (1, "parted", "after"), (0, "left", "before")],
)
def test_a_stage_that_dies_while_it_parts_leaves_none_waiting(
    stage: int, word: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one left before the other knew that it might, and that one waited without end."""
    line = text_line(tmp_path, "transformer", 2, "train.epochs=1")
    keep, died = Partings.keep, threading.Event()

    def keeps(one: Partings, neighbour: int, kept: str) -> None:
        dies = (neighbour, kept) == (1 - stage, word) and not died.is_set()
        if dies and then == "before":
            died.set()
            raise Killed(word)
        keep(one, neighbour, kept)
        if dies:
            died.set()
            raise Killed(word)

    monkeypatch.setattr(Partings, "keep", keeps)
    run_line(line)
    assert died.is_set()


def test_a_stage_that_is_done_waits_no_longer_than_wait_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: it ended with 0, and was not started again for the one before, which had to do its last items again."""
    line = text_line(tmp_path, "transformer", 2, snapshot_s=0.2, wait_s=1.0)
    died, lost = threading.Event(), threading.Event()

    def reads(stage: StageRun) -> Any:
        if died.is_set():
            assert lost.wait(LONG_S)
        return read(stage)

    def requires(neighbours: Neighbours) -> None:
        try:
            require(neighbours)
        except PeerLostError:
            lost.set()
            raise

    read, require = StageRun._read, Neighbours.require
    monkeypatch.setattr(StageRun, "_read", reads)
    monkeypatch.setattr(Neighbours, "require", requires)
    with pytest.raises(PeerLostError, match="stage 0 was away for 1 s"):
        run_line(line, dying_at_the_end(tmp_path, died))


def dying_at_the_end(folder: Path, died: threading.Event) -> Callable[[int, str], None]:
    """Kills stage 0 once, when stage 1 has done all, before it has saved that it has, too."""
    ended = threading.Event()

    def reached(stage: int, place: str) -> None:
        if stage == 0 and place == "amid end":
            ended.set()
        elif stage == 0 and place == "before a snapshot" and ended.is_set() and not died.is_set():
            until(lambda: read_status(folder / "stage-1")[-1].state == "finished")
            died.set()
            raise Killed(place)

    return reached
