"""The loop over epochs: what it counts, and when."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from pipeal import BP, ALPackage, Pipeline
from pipeal.core.errors import DataError, Interrupted
from pipeal.data import BatchLoader, Corpus, FixedBatchSampler, Vocab
from pipeal.engine import RunReport
from pipeal.training.evaluation import accuracy, accuracy_and_loss
from pipeal.training.learning_rate import Course
from pipeal.training.position import Part, Position
from pipeal.training.row import EpochRow
from pipeal.training.trainer import Scores, fit


class Silent:
    def __init__(self) -> None:
        self.samples = self.epochs = 0

    def begin_epoch(self, epoch: int, *, batches: int, turn: int) -> None:
        self.epochs += 1

    def advance(self, *, samples: int, tokens: int) -> None:
        self.samples += samples

    def end_epoch(self, row: EpochRow) -> None:
        assert row.epoch == self.epochs


def loader() -> BatchLoader:
    vocab = Vocab.build([["a", "b"]])
    corpus = Corpus.from_tokens([["a"], ["b", "a"]] * 10, [0, 1] * 10, vocab, max_len=None)
    return BatchLoader(corpus, FixedBatchSampler(corpus.lengths, 8))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def test_rows_hold_each_turns_own_seconds_and_totals_hold_all() -> None:
    position, watcher = Position(), Silent()
    for turn in (1, 2):
        watcher.epochs = 0
        with Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe:
            course = Course(epochs=2, decay="cosine")
            found = list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), course, watcher, position))
        assert found == position.rows[-2:]
        assert (position.turn, position.epoch, position.batches) == (turn, 2, 6)
        position.next_turn()
    rows, totals = position.rows, position.totals
    assert [(row.turn, row.epoch) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for first, second in (rows[:2], rows[2:]):
        assert first.train_time == first.epoch_time
        assert second.train_time == first.epoch_time + second.epoch_time
    assert totals.seconds == sum(row.epoch_time for row in rows)
    assert (totals.samples, watcher.samples, totals.batches) == (80, 80, 12)
    assert totals.tokens == 4 * 30
    assert totals.shapes == {(8, 2): 8, (4, 2): 4}  # samples, and what they are padded to
    assert 0 < totals.padding_share < 1
    assert 0 < totals.busy_share[0] <= 1


def test_what_reports_count_is_counted_once_over_epochs_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report tells the splits since the last one, but all overflows of a pipeline's life."""
    run, position, watcher = Pipeline.run, Position(), Silent()
    overflows = 0

    def counting(*args: Any, **options: Any) -> RunReport:
        nonlocal overflows
        overflows += 2
        return replace(run(*args, **options), splits=[1, 2], overflows=[overflows, 1])

    monkeypatch.setattr(Pipeline, "run", counting)
    for _ in range(2):
        watcher.epochs = overflows = 0
        with Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe:
            list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=3), watcher, position))
        position.next_turn()
    assert position.totals.splits == 6 * 3
    assert position.totals.overflows == {1: 7, 2: 7}


def test_a_batch_that_is_left_out_is_passed_over_and_keeps_its_number() -> None:
    position, watcher = Position(), Silent()
    position.totals.left_out = {(1, 4), (2, 1)}
    with Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe:
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=2), watcher, position))
        assert pipe.next_batch == position.batches == 6
    assert (watcher.samples, position.totals.samples, position.totals.batches) == (32, 32, 6)
    assert position.totals.shapes.total() == 5


@pytest.mark.parametrize(
    ("left_out", "updating"),
    [
        (set(), [1, 2, 4, 5]),  # an epoch of three batches ends with an update of one
        ({(1, 1), (2, 4)}, [0, 2, 4, 5]),  # where the last of two is left out, the first one updates
        ({(1, 0), (1, 2)}, [1, 4, 5]),
        ({(1, 0), (1, 1)}, [2, 4, 5]),
    ],
)
def test_every_update_has_its_batches_whichever_are_left_out(
    left_out: set[tuple[int, int]], updating: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    position, seen, kept = Position(), list[int](), list[int]()
    position.totals.left_out = left_out
    submit = Pipeline.submit

    def watched(pipe: Pipeline, x: Any, y: Any, scale: float, *, updates: bool) -> None:
        if updates:
            seen.append(pipe.next_batch)
        submit(pipe, x, y, scale, updates=updates)

    class Saves:
        def after_batch(self, pipe: Pipeline, position: Position) -> bool:
            assert not pipe.gathers
            kept.append(position.batches)
            return False

        def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
            pipe.snapshot().wait(120)

        def after_epoch(self, pipe: Pipeline, position: Position) -> None:
            pass

    monkeypatch.setattr(Pipeline, "submit", watched)
    with Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe:
        course, saves = Course(epochs=2, accumulate=2), Saves()
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), course, Silent(), position, saves))  # type: ignore[arg-type]
    assert seen == updating
    assert {2, 3, 5, 6} <= set(kept)  # the saves comes by after every update


def test_a_position_behind_the_end_of_its_epoch_is_refused() -> None:
    position = Position(batches=4, part=Part(batches=4))
    with (
        Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1, first_batch=4) as pipe,
        pytest.raises(DataError, match="behind batch 4 of epoch 1, which has 3"),
    ):
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=1), Silent(), position))


def test_an_epoch_of_which_every_batch_is_left_out_is_one_line() -> None:
    position = Position()
    position.totals.left_out = {(1, 0), (1, 1), (1, 2)}
    with (
        Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe,
        pytest.raises(DataError, match="epoch 1 has no batches"),
    ):
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=1), Silent(), position))


class AskedToEnd:
    """A saves that ends the training after its first batch."""

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        return True

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        raise Interrupted(f"interrupted after {position.where}, and saved", 143)


def test_a_training_that_is_ended_while_a_batch_is_left_out_says_that() -> None:
    """Symptom: "epoch 1 has no batches", and nothing was saved."""
    position = Position()
    position.totals.left_out = {(1, 0)}
    saves: Any = AskedToEnd()
    with (
        Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe,
        pytest.raises(Interrupted, match="after batch 1 of epoch 1, and saved"),
    ):
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=1), Silent(), position, saves))


class EndsAfter:
    """A saves that ends the training after so many batches of the turn."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        return position.batches == self.batches

    def before_evaluation(self, pipe: Pipeline, position: Position) -> None: ...

    def after_epoch(self, pipe: Pipeline, position: Position) -> None: ...

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        raise Interrupted(f"interrupted after {position.where}", 143)


@pytest.mark.parametrize("behind", [1, 2, 3, 4, 5])
def test_wherever_a_training_is_taken_up_it_is_fed_what_was_to_come(
    behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches with the same numbers and learning rates; and rows of whole epochs."""
    fed: list[tuple[int, list[list[int]], float]] = []
    submit = Pipeline.submit

    def watched(pipe: Pipeline, x: Any, y: Any, scale: float, *, updates: bool) -> None:
        fed.append((pipe.next_batch, x.tolist(), scale))
        submit(pipe, x, y, scale, updates=updates)

    def fed_in(position: Position, package: ALPackage, saves: Any = None) -> list[Any]:
        fed.clear()
        course = Course(epochs=2, decay="cosine", end_over_base=0.1, warmup=4)
        pipe = Pipeline(package, ["cpu"], "sequential", threads=1, first_batch=position.batches)
        with pipe, contextlib.suppress(Interrupted):
            list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), course, Ignorant(), position, saves))
        return list(fed)

    monkeypatch.setattr(Pipeline, "submit", watched)
    packages = []
    for _ in range(2):
        torch.manual_seed(0)
        packages.append(ALPackage([BP(Bag())]))
    untouched, ended = Position(), Position()
    wanted = fed_in(untouched, packages[0])
    assert [number for number, *_ in wanted] == list(range(6))
    assert [x for _, x, _ in wanted[:3]] != [x for _, x, _ in wanted[3:]], "each epoch has an order of its own"
    assert fed_in(ended, packages[1], EndsAfter(behind)) == wanted[:behind]
    assert ended.batches == behind
    hour_s, ended.part.seconds = 3600.0, 3600.0
    assert fed_in(ended, packages[1]) == wanted[behind:]
    assert [row.losses for row in ended.rows] == [row.losses for row in untouched.rows]
    under_way = ended.rows[(behind - 1) // 3]  # the end of an epoch is before its evaluation
    assert under_way.epoch_time >= hour_s
    assert under_way.samples_per_s * under_way.epoch_time == pytest.approx(20)


class Ignorant:
    """A watcher that nothing is asked of."""

    def begin_epoch(self, epoch: int, *, batches: int, turn: int) -> None: ...

    def advance(self, *, samples: int, tokens: int) -> None: ...

    def end_epoch(self, row: EpochRow) -> None: ...


@pytest.mark.parametrize("sizes", [(4, 4, 1), (1, 4, 4), (9,), (2, 7)])
def test_accuracy_counts_every_sample_once(sizes: tuple[int, ...]) -> None:
    """Whatever batches they come in. (The data of this test was all answered rightly, so that it could not fail.)"""
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1])
    answers = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 0])  # the first four are right
    x = nn.functional.one_hot(answers, 2).float()
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    with Pipeline(ALPackage([BP(nn.Identity())]), ["cpu"], "sequential", threads=1) as pipe:
        assert accuracy(pipe, batches) == 4 / 9
        assert accuracy(pipe, []) == 0.0


def test_answers_that_are_not_finite_are_not_those_of_the_first_class() -> None:
    """Symptom: a classifier whose answers were all NaN was as good as the first class is frequent."""
    y = torch.tensor([0, 0, 1])
    masked, broken = torch.tensor([[1.0, 0.0], [-math.inf, 0.0], [-math.inf, 0.0]]), torch.eye(2)[y]
    with Pipeline(ALPackage([BP(nn.Identity())]), ["cpu"], "sequential", threads=1) as pipe:
        assert accuracy(pipe, [(masked, y)]) == pytest.approx(2 / 3)
        for bad in (math.nan, math.inf):
            broken[0, 0] = bad
            assert math.isnan(accuracy(pipe, [(broken, y)]))
            assert math.isnan(accuracy_and_loss(pipe, [(broken, y)], nn.functional.cross_entropy)[0])


@pytest.mark.parametrize(
    "targets", [torch.eye(3), torch.zeros(3), torch.zeros(3, 1)], ids=["one-hot", "floats", "column"]
)
def test_an_accuracy_is_of_class_numbers_alone(targets: Tensor) -> None:
    """Symptom: 0.33, 1.0 and the like, where the shapes happened to go together."""
    with Pipeline(ALPackage([BP(nn.Identity())]), ["cpu"], "sequential", threads=1) as pipe:
        for found in (accuracy, partial(accuracy_and_loss, criterion=nn.functional.cross_entropy)):
            with pytest.raises(DataError, match=r"expected class numbers, whole numbers of shape \(3,\)"):
                found(pipe, [(torch.eye(3), targets)])
