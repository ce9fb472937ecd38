"""The loop over epochs: what it counts, and when."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from pipeal import BP, ALPackage, Pipeline
from pipeal.data import BatchLoader, Corpus, FixedBatchSampler, Vocab
from pipeal.errors import DataError, Interrupted
from pipeal.train.evaluation import accuracy
from pipeal.train.position import Part, Position
from pipeal.train.recorders import EpochRow
from pipeal.train.trainer import Course, Scores, fit


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
    assert 0 < totals.padding_share < 1
    assert 0 < totals.busy_share[0] <= 1


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

    class Keeper:
        def after_batch(self, pipe: Pipeline, position: Position) -> bool:
            assert not pipe.gathers
            kept.append(position.batches)
            return False

        def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
            pipe.fence().wait(120)

        def after_epoch(self, pipe: Pipeline, position: Position) -> None:
            pass

    monkeypatch.setattr(Pipeline, "submit", watched)
    with Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe:
        course, keeper = Course(epochs=2, accumulate=2), Keeper()
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), course, Silent(), position, keeper))  # type: ignore[arg-type]
    assert seen == updating
    assert {2, 3, 5, 6} <= set(kept)  # the keeper comes by after every update


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
    """A keeper that ends the training after its first batch."""

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        return True

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        raise Interrupted(f"interrupted after {position.where}, and saved", 143)


def test_a_training_that_is_ended_while_a_batch_is_left_out_says_that() -> None:
    """Symptom: "epoch 1 has no batches", and nothing was saved."""
    position = Position()
    position.totals.left_out = {(1, 0)}
    keeper: Any = AskedToEnd()
    with (
        Pipeline(ALPackage([BP(Bag())]), ["cpu"], "sequential", threads=1) as pipe,
        pytest.raises(Interrupted, match="after batch 1 of epoch 1, and saved"),
    ):
        list(fit(pipe, loader(), lambda pipe: Scores(0.5, 0.5), Course(epochs=1), Silent(), position, keeper))


def test_accuracy_counts_every_sample_once() -> None:
    model = Bag()
    with torch.no_grad():  # says 1 where there is a "b", else 0
        model.table.weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 5.0]]))
    package = ALPackage([BP(model)])
    found = accuracy(Pipeline(package, ["cpu"], "sequential"), loader())
    assert found in (1.0, 0.0) or 0 < found < 1
    words = loader().corpus
    x, y = words.batch(range(len(words)))
    assert found == (package.infer(x).argmax(-1) == y).float().mean().item()
