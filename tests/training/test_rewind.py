"""What is done about a number that is not finite: which batch is left out, and when a training gives up."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.core.errors import Interrupted, NonFiniteError
from pipeal.training.checkpoint.policy import CheckpointPolicy
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.checkpoint.writer import CheckpointWriter
from pipeal.training.position import Part, Position
from pipeal.training.rewind import MOST_LEFT_OUT, Decision, Rewinds, go_back

WIDE = 4


def error(batch: int, losses: tuple[float, ...] = (nan,), *, is_to_blame: bool = True) -> NonFiniteError:
    return NonFiniteError("broken", 1, batch, losses, is_to_blame=is_to_blame)


def position(batches: int, epoch_begins: int = 0) -> Position:
    return Position(turn=2, batches=batches, part=Part(batches=batches - epoch_begins))


def test_a_batch_that_is_to_blame_is_left_out() -> None:
    where, rewinds = position(9), Rewinds()
    assert rewinds.plan(error(7), where) == Decision(
        True, "layer 1 has a loss that is not finite on batch 7 of turn 2, which is left out from now on"
    )
    assert where.totals.left_out == {(2, 7)}
    assert rewinds.look_until == 0


def test_where_it_is_not_known_which_it_is_looked_for_first() -> None:
    where, rewinds = position(9), Rewinds()
    assert rewinds.plan(error(7, (), is_to_blame=False), where).goes_back
    assert where.totals.left_out == set()
    assert rewinds.look_until == 8
    decision = rewinds.plan(error(5, (), is_to_blame=False), where)  # found on the way there
    assert where.totals.left_out == {(2, 5)}
    assert decision.goes_back
    assert "is not finite after batch 5" in decision.why


def test_a_batch_that_is_left_out_already_is_not_to_blame_again() -> None:
    where, rewinds = position(9), Rewinds()
    where.totals.left_out.add((2, 7))
    decision = rewinds.plan(error(7), where)
    assert not decision.goes_back
    assert "batch 7 was left out before" in decision.why


def test_of_an_update_of_several_batches_that_is_to_blame_all_are_left_out_and_count_once() -> None:
    """Its last batch alone was blamed: innocent ones were left out, and the training given up before the bad one."""
    where, rewinds = position(300, epoch_begins=10), Rewinds(accumulate=16, look_until=200)
    decision = rewinds.plan(error(25, ()), where)
    assert decision.why.endswith("which is left out from now on with the 15 others of its update")
    assert where.totals.left_out == {(2, batch) for batch in range(10, 26)}
    rewinds.plan(error(30), where)  # whose loss it was is known
    rewinds.plan(error(40, ()), where)  # of an update whose last batch was left out before, or with which an epoch ends
    assert where.totals.left_out == {(2, batch) for batch in (*range(10, 26), *range(26, 41))}
    assert where.totals.blamed == {(2, 25), (2, 30), (2, 40)}
    assert not rewinds.plan(error(25, ()), where).goes_back
    for update in range(MOST_LEFT_OUT - 3):
        assert rewinds.plan(error(57 + 16 * update, ()), where).goes_back
    decision = rewinds.plan(error(199, ()), where)
    assert not decision.goes_back
    assert decision.why.startswith("8 batches, or updates of several, of this epoch were left out before")


def test_a_model_that_diverges_ends_the_training() -> None:
    """It would otherwise go back for ever, or until no batch were left."""
    where, rewinds = position(500, epoch_begins=100), Rewinds()
    others = {(2, 99), (1, 120)}  # of another epoch, of another turn
    where.totals.left_out |= others
    where.totals.blamed |= others
    for batch in range(MOST_LEFT_OUT):
        assert rewinds.plan(error(120 + batch), where).goes_back
    decision = rewinds.plan(error(200), where)
    assert not decision.goes_back
    assert decision.why.startswith("8 batches of this epoch were left out before, the most there may be: the model ")
    assert len(where.totals.left_out) == MOST_LEFT_OUT + 2
    where.part.batches = 0  # the next epoch
    assert rewinds.plan(error(501), where).goes_back


class Sinister(nn.Module):
    """On one batch it makes a weight that no loss shows at once: a word's vector, where the word is rare."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))
        self.linear = nn.Linear(WIDE, WIDE)
        self.batch = batch

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if int(self.seen) == self.batch:
                with torch.no_grad():
                    self.table[2] = nan
            self.seen += 1
        return self.linear(x) + self.table[0]


def package(batch: int, kind: type[Sinister] = Sinister) -> ALPackage:
    torch.manual_seed(0)
    plain = AL(ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))
    return ALPackage(
        [plain, AL(ENC(kind(batch), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))]
    )


def train(saves: CheckpointPolicy, model: ALPackage, where: Position, until: int) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(3, WIDE, generator=draw), torch.randn(3, WIDE, generator=draw)) for _ in range(until)]
    with Pipeline(model, threads=1, first_batch=where.batches) as pipe:
        while where.batches < until:
            pipe.submit(*batches[where.batches])
            where.batches += 1
            where.part.batches += 1
            if saves.after_batch(pipe, where):
                saves.leave(pipe, where)
        saves.before_evaluation(pipe, where)


def running() -> None:
    return None


class Allergic(Sinister):
    """To one batch, whichever came before it."""

    def forward(self, x: Tensor) -> Tensor:
        self.batch = int(self.seen) if x.abs().max() > 5 else -1
        return super().forward(x)


def train_in_groups(saves: CheckpointPolicy, model: ALPackage, where: Position, bad: int, *, size: int) -> None:
    """An epoch of 12 batches, of which so many make an update."""
    with Pipeline(model, threads=1, first_batch=where.batches) as pipe:
        while where.batches < 12:
            left_out = (1, where.batches) in where.totals.left_out
            updates = where.batches % size == size - 1
            x = torch.full((3, WIDE), 99.0 if where.batches == bad else where.batches / 12)
            pipe.skip() if left_out else pipe.submit(x, x, updates=updates)
            where.batches += 1
            where.part.batches += 1
            if updates:
                saves.after_batch(pipe, where)
        saves.before_evaluation(pipe, where)


@pytest.mark.parametrize(("bad", "wanted"), [(0, range(4)), (5, range(4, 8)), (11, range(8, 12))])
def test_the_update_that_learnt_from_a_bad_batch_is_left_out_whole(
    tmp_path: Path, bad: int, wanted: range, silent: None
) -> None:
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        model, where, rewinds = package(-1, Allergic), Position(), Rewinds(accumulate=4)
        for _ in range(2):
            saves = CheckpointPolicy(writer, None, running, {}, look_until=rewinds.look_until)
            with pytest.raises(NonFiniteError) as caught:
                train_in_groups(saves, model, where, bad, size=4)
            assert rewinds.plan(caught.value, where).goes_back
            assert go_back(model, where, None, Position(), lambda: package(-1, Allergic))
        assert where.totals.left_out == {(1, batch) for batch in wanted}
        train_in_groups(saves, model, where, bad, size=4)


def test_weights_that_no_loss_shows_are_no_checkpoint_and_the_batch_that_made_them_is_found(
    tmp_path: Path, said: list[str]
) -> None:
    """They were saved as good, and every later run went on from them."""
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        model, where = package(batch=7), Position()
        with pytest.raises(
            NonFiniteError, match=r"layer 1 is not finite after batch .* \(step \d+\).*: enc.f.table"
        ) as e:
            train(CheckpointPolicy(writer, 5, running, {}), model, where, 12)
        assert not e.value.is_to_blame
        assert writer.flush(20)
        saved = store.newest(pytest.fail)
        assert saved is not None
        assert saved.step == 5
        rewinds = Rewinds()
        assert rewinds.plan(e.value, where).goes_back
        assert go_back(model, where, saved, Position(), lambda: package(7))
        assert where.batches == 5
        with pytest.raises(NonFiniteError, match=r"after batch 7 .*, though it was before batch 7") as e:
            train(CheckpointPolicy(writer, 5, running, {}, look_until=rewinds.look_until), model, where, 12)
        assert (e.value.batch, e.value.is_to_blame) == (7, True)
        assert rewinds.plan(e.value, where).goes_back
        assert where.totals.left_out == {(1, 7)}
    assert said == []


def test_told_to_skip_the_training_goes_on_and_the_checkpoint_is_missing(tmp_path: Path, said: list[str]) -> None:
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        train(CheckpointPolicy(writer, 5, running, {}, ends_on_broken=False), package(batch=7), Position(), 12)
        assert writer.flush(20)
        assert [path.name for path in store.folder.glob("step-*")] == ["step-000000005"]
        assert writer.failures == 1
    assert len(said) == 1
    assert said[0].startswith(
        "layer 1 is not finite after batch 9 (step 10), though it was before batch 5: enc.f.table"
    )


def test_whoever_ends_a_training_whose_weights_are_broken_is_told_that_it_is_not_saved(
    tmp_path: Path, silent: None
) -> None:
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        saves = CheckpointPolicy(writer, None, lambda: 130 if where.batches == 9 else None, {})
        where = Position()
        with pytest.raises(
            Interrupted, match="which could not be saved: layer 1 is not finite after batch 8"
        ) as caught:
            train(saves, package(batch=7), where, 12)
        assert caught.value.code == 130
        assert store.newest(pytest.fail) is None


def test_going_back_takes_the_checkpoint_of_the_turn_or_its_beginning(tmp_path: Path, silent: None) -> None:
    with CheckpointStore(tmp_path / "checkpoints") as store, CheckpointWriter(store) as writer:
        model, where = package(batch=-1), Position()
        train(CheckpointPolicy(writer, 5, running, {}), model, where, 7)
        assert writer.flush(20)
        saved = store.newest(pytest.fail)
    begun, wanted = Position(turn=2), package(batch=-1)
    later = Position(turn=2, batches=4, part=Part(batches=4))
    later.totals.left_out.add((2, 3))
    later.totals.blamed.add((2, 3))
    rows, totals = later.rows, later.totals
    assert go_back(model, later, saved, begun, lambda: package(-1))  # the checkpoint is of turn 1
    assert (later.turn, later.batches, later.part.batches) == (2, 0, 0)
    assert later.totals.left_out == {(2, 3)}
    assert later.totals.blamed == {(2, 3)}, "else it would go back without end"
    assert later.rows is rows
    assert later.totals is totals
    assert same(model, wanted)
    assert not model[0].enc_opt.state
    midway = Position(turn=2, batches=4)
    assert not go_back(model, later, None, midway, lambda: package(-1))
    assert go_back(model, where, saved, Position(), lambda: package(-1))
    assert (where.turn, where.batches) == (1, 5)
    assert saved is not None
    ResumedTraining.of(saved).load_into(wanted)
    assert same(model, wanted)


def same(one: nn.Module, other: nn.Module) -> Any:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
