"""Law 1 across executors: processes leave what one process leaves, bit for bit."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal import ALPackage, Pipeline
from pipeal.engine import SCHEDULES, Snapshot, load_layer_state
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World

from ..cases import Case, Layer, Outcome, cases, cosine, cuts, outcome, reference
from ..test_exactness import RICH
from .lines import on_each, thread_ranks

PAIRS = Case(
    (Layer("linear", "AL", 7, 5), Layer("linear", "silent AL", 6, 4), Layer("linear", "AL", 3, 3), Layer("linear")),
    rows=(4, 6, 5, 2),
    pairs=True,
    seed=5,
)


_building = threading.Lock()  # of packages, from PyTorch's default generator


def rebuilt(case: Case, snapshot: Snapshot) -> ALPackage:
    """A new package with what a snapshot found."""
    package = case.build()
    for number, found in snapshot.wait(120).items():
        load_layer_state(package[number], found.state)
    return package


def trained(world: World, package: ALPackage, case: Case, schedule: str, **settings: Any) -> Outcome | None:
    """What a rank finds after training: rank 0 all that is left of the case, predictions along every exit included."""
    chosen: dict[str, Any] = {"seed": case.seed, "threads": 1, "stall_timeout_s": 60.0} | settings
    if world.rank:
        serve(package, world, "cpu", schedule, **chosen)
        return None
    batches = case.batches()
    with DistributedPipeline(package, world, "cpu", schedule, **chosen) as pipe:
        report = pipe.run(iter(batches), lr_scale=cosine)
        snapshot = pipe.snapshot()
        predictions = [pipe.predict(batches[0][0], depth + 1) for depth in range(len(package))]
    assert report.batches == len(batches)
    assert report.samples == sum(case.rows)
    with _building:
        return outcome(rebuilt(case, snapshot), report.losses, predictions)


def run(worlds: list[World], case: Case, schedule: str, sizes: list[int], **settings: Any) -> Outcome:
    """What training over ranks that are threads leaves of a case."""
    packages = [case.build() for _ in worlds]
    found = on_each(worlds, lambda world: trained(world, packages[world.rank], case, schedule, sizes=sizes, **settings))
    assert found[0] is not None
    return found[0]


@given(case=cases(), data=st.data())
@settings(max_examples=8)
def test_random_packages_on_random_ranks(case: Case, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, min(4, len(case.layers))), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    schedule = data.draw(st.sampled_from(list(SCHEDULES)), label="schedule")
    queue_depth = data.draw(st.integers(1, 4), label="queue depth")
    with thread_ranks(stages) as worlds:
        found = run(worlds, case, schedule, sizes, queue_depth=queue_depth)
    assert found.differences(reference(case)) == []


FEW = [(RICH, [1, 3]), (PAIRS, [1, 1, 1, 1])]
MORE = [(RICH, [1, 1, 1, 1]), (PAIRS, [1, 3]), *product((RICH, PAIRS), ([4], [2, 1, 1]))]


@pytest.mark.parametrize("placed", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_every_number_of_ranks(schedule: str, placed: list[tuple[Case, list[int]]]) -> None:
    for case, sizes in placed:
        with thread_ranks(len(sizes)) as worlds:
            for queue_depth in (1, 2):
                found = run(worlds, case, schedule, sizes, queue_depth=queue_depth)
                assert found.differences(reference(case)) == [], (sizes, queue_depth)


def test_numbers_of_numpy_are_what_they_are_in_one_process() -> None:
    """Symptom: JSON, in which a packet's numbers travel, took no ``np.bool_`` and no ``np.int64``, and the pipeline
    failed; a rate of ``np.float32`` was one in one process, and a plain number over several."""
    case = Case((Layer(), Layer("linear", "AL", 3)), rows=(4, 4, 3, 2))
    batches, chosen = case.batches(), {"first_batch": np.int64(1), "threads": 1}

    def learnt(pipe: Pipeline) -> Snapshot:
        report = pipe.run(
            batches[:2], lambda batch: np.float32(cosine(batch)), updates=lambda batch: np.bool_(batch % 2)
        )
        pipe.skip(np.int64(3))
        pipe.run(batches[2:], np.float32(0.3))
        assert report.batches == 2
        return pipe.snapshot()

    def work(world: World) -> tuple[Outcome, int] | None:
        if world.rank:
            serve(packages[1], world, **chosen)
            return None
        with DistributedPipeline(packages[0], world, **chosen) as pipe:
            snapshot, logits = learnt(pipe), pipe.predict(batches[0][0], np.int64(2))
        with _building:
            return outcome(rebuilt(case, snapshot), [], [logits]), pipe.next_batch

    with thread_ranks(2) as worlds:
        packages = [case.build() for _ in worlds]
        found = on_each(worlds, work)[0]
    with Pipeline(case.build(), "cpu", **chosen) as pipe:
        snapshot, logits = learnt(pipe), pipe.predict(batches[0][0], 2)
    assert found is not None
    assert found[1] == pipe.next_batch == 8
    assert found[0].differences(outcome(rebuilt(case, snapshot), [], [logits])) == []
