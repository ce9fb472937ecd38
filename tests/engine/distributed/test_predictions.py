"""Predictions over ranks: every answer is what one process gives, whatever else is under way."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, ConfigError, Pipeline, PlacementError, ScheduleError
from pipeal.engine.distributed.pipeline import DistributedPipeline
from pipeal.engine.inference.exit_policy import EarlyExits, ExitPolicy

from ..cases import Case, Layer, predictions_by_hand
from .lines import thread_ranks, with_pipe

CASE = Case(
    (Layer("batch norm", "AL", 8, 5), Layer("nn.Dropout", "AL", 5, 4), Layer("attention"), Layer("linear", "AL", 7, 3)),
    rows=(7, 5, 6, 1, 7, 3, 4, 2),
    seed=3,
)
TUPLES = Case((Layer(), Layer("linear", "own ENC", 6, 2), Layer(), Layer()), rows=(4, 5, 6), pairs=True, seed=8)


def by_hand(case: Case) -> list[list[Tensor]]:
    """By batch and exit."""
    package = case.build()
    return [predictions_by_hand(package, x) for x, _ in case.batches()]


def until_sure(case: Case, policy: ExitPolicy) -> list[EarlyExits]:
    """What one process gives."""
    with Pipeline(case.build(), ["cpu"] * 2, threads=1) as pipe:
        return list(pipe.predict_each([x for x, _ in case.batches()], policy=policy))


@pytest.mark.parametrize("case", [CASE, TUPLES], ids=["dynamic", "tuples"])
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 1, 1]])
def test_every_way_to_predict_gives_what_one_process_gives(case: Case, sizes: list[int]) -> None:
    wanted, inputs = by_hand(case), [x for x, _ in case.batches()]
    policies = [ExitPolicy((0.42, 0.4, 2.0, 0.0), (1.0, 0.5, 1.0, 1.0)), ExitPolicy((0.0,) * 4, (1.0,) * 4),
                ExitPolicy((1.0, 1.0, 1.0, 1.0), (1.0,) * 4)]  # fmt: skip

    def work(pipe: DistributedPipeline) -> None:
        for exit_at in (None, 1, 3):
            found = list(pipe.predict_each(inputs, exit_at))
            assert len(found) == len(wanted)
            assert all(torch.equal(one, exits[(exit_at or 4) - 1]) for one, exits in zip(found, wanted, strict=True))
        for exits, found_exits in zip(wanted, pipe.predict_exits(iter(inputs)), strict=True):
            assert all(map(torch.equal, found_exits, exits))
        for policy in policies:
            for one, early in zip(until_sure(case, policy), pipe.predict_each(inputs, policy=policy), strict=True):
                assert torch.equal(early.exits, one.exits)
                assert torch.equal(early.logits, one.logits)
        assert all(torch.equal(pipe.predict(x), exits[-1]) for x, exits in zip(inputs, wanted, strict=True))

    with thread_ranks(len(sizes)) as worlds:
        packages = [case.build() for _ in worlds]
        for schedule in ("pipelined", "sequential"):
            with_pipe(worlds, packages, work, sizes=sizes, schedule=schedule)
            assert all(part.training for package in packages for part in package.modules())


class Picky(nn.Module):
    """Fails on batches of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("alone")
        return x


def test_a_batch_that_fails_is_told_and_the_pipeline_lives_on() -> None:
    def package() -> ALPackage:
        found = CASE.build()
        found[2].enc.b = nn.Sequential(Picky(), found[2].enc.b)
        return found

    inputs = [x for x, _ in CASE.batches()]

    def work(pipe: DistributedPipeline) -> list[Tensor]:
        for answers in (pipe.predict_each(inputs, 3), pipe.predict_exits(inputs)):
            assert len([next(answers) for _ in range(3)]) == 3
            with pytest.raises(ValueError, match="alone") as caught:
                next(answers)
            notes = "\n".join(caught.value.__notes__)
            assert "in the inference (b) of stage 1, layer 2 (AL), batch 3, device cpu; input (1, 4) float32" in notes
        with pytest.raises(ValueError, match="alone"):
            pipe.predict(inputs[3], 3)
        return list(pipe.predict_each(inputs))

    with thread_ranks(2) as worlds:
        found = with_pipe(worlds, [package() for _ in worlds], work)
    assert all(torch.equal(one, exits[-1]) for one, exits in zip(found, by_hand(CASE), strict=True))


def test_what_is_no_packet_is_refused_at_once() -> None:
    """Symptom: a stage that stood still was blamed after the limit for that, as the batch was waited for."""

    def work(pipe: DistributedPipeline) -> Tensor:
        with pytest.raises(TypeError, match="UserDict"):
            pipe.predict(UserDict(x=torch.ones(1)))
        return pipe.predict(CASE.batches()[0][0])

    with thread_ranks(2) as worlds:
        assert with_pipe(worlds, [CASE.build() for _ in worlds], work).shape == (7, 3)


def test_a_pipeline_that_fails_between_two_answers_says_what_failed() -> None:
    """Symptom: a signal of the threads among themselves came instead, to the caller."""

    def work(pipe: DistributedPipeline) -> None:
        answers = pipe.predict_each([x for x, _ in CASE.batches()])
        next(answers)
        pipe._line().node.progress.fail(RuntimeError("gone"))
        list(answers)

    with thread_ranks(2) as worlds, pytest.raises(RuntimeError, match="gone"):
        with_pipe(worlds, [CASE.build() for _ in worlds], work)


def test_an_iterator_that_outlives_its_pipeline_says_so() -> None:
    def work(pipe: DistributedPipeline) -> Iterator[Tensor]:
        answers = pipe.predict_each([x for x, _ in CASE.batches()])
        next(answers)
        return answers

    with thread_ranks(2) as worlds:
        answers = with_pipe(worlds, [CASE.build() for _ in worlds], work)
    with pytest.raises(ScheduleError, match="the pipeline has ended"):
        list(answers)


def test_an_iterator_may_be_left_early_and_only_one_is_open() -> None:
    inputs = [x for x, _ in CASE.batches()]

    def work(pipe: DistributedPipeline) -> list[Tensor]:
        for answer in pipe.predict_each(inputs):
            assert answer.shape == (7, 3)
            with pytest.raises(ScheduleError, match="the pipeline is predicting"):
                pipe.submit(*CASE.batches()[0])
            break
        with pytest.raises(PlacementError, match="exit 5 does not exist"):
            pipe.predict(inputs[0], 5)
        with pytest.raises(ConfigError, match="the policy is for a model of 2 exits"):
            pipe.predict_each(inputs, policy=ExitPolicy((0.5, 0.5), (1.0, 1.0)))
        pipe.run(CASE.batches()[:3])
        return list(pipe.predict_each(inputs))

    def endless() -> Iterator[Tensor]:
        while True:
            yield inputs[0]

    def leave(pipe: DistributedPipeline) -> None:
        answers = pipe.predict_each(endless())
        assert [len(next(answers)) for _ in range(20)] == [7] * 20
        answers.close()

    with thread_ranks(2) as worlds:
        assert len(with_pipe(worlds, [CASE.build() for _ in worlds], work)) == len(inputs)
        with_pipe(worlds, [CASE.build() for _ in worlds], leave)
