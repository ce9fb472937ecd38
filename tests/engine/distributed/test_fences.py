"""Fences and reports over ranks: states between two batches, kept where the layers are or sent; one clock for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipeal import ALPackage, Pipeline, ScheduleError, StallError
from pipeal.engine import SCHEDULES, LayerState, Snapshot, Window, layer_state, violations
from pipeal.engine.distributed.follower import Server
from pipeal.engine.distributed.pipeline import DistributedPipeline
from pipeal.engine.distributed.world import World

from ..cases import cosine
from ..test_fence import RICH, by_hand, differences
from ..test_layer_state import rebuilt
from ..traps import Trap, quick, throw
from .lines import thread_ranks
from .lines import with_pipe as with_any_pipe

with_pipe = partial(with_any_pipe, seed=RICH.seed)


def built(worlds: list[World]) -> list[ALPackage]:
    return [RICH.build() for _ in worlds]


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_fences_between_all_batches_find_what_training_by_hand_leaves(schedule: str) -> None:
    wanted = by_hand(RICH, len(RICH.rows))

    def work(pipe: DistributedPipeline) -> list[Snapshot]:
        snapshots = [pipe.snapshot()]
        for x, y in RICH.batches():
            pipe.submit(x, y, cosine(pipe.next_batch))
            snapshots += [pipe.snapshot(), pipe.snapshot()]
        return snapshots

    for size in (1, 2, 4):
        with thread_ranks(size) as worlds:
            snapshots = with_pipe(worlds, built(worlds), work, schedule=schedule)
        for snapshot in snapshots:
            assert snapshot.wait(timeout_s=0)  # leaving the pipeline has waited for them
            assert differences(snapshot.wait(), wanted[snapshot.batch]) == []


def test_what_a_ranks_own_keeper_returns_comes_with_the_fence() -> None:
    """The rank that has the layer writes its file; only what it says of that travels, and the losses."""
    wanted = by_hand(RICH, 3)
    seen: dict[tuple[int, int], LayerState] = {}
    threads = set()

    def keep(snapshot: Snapshot, states: Mapping[int, LayerState]) -> Mapping[str, Any]:
        threads.add(threading.current_thread().name)
        time.sleep(0.05)  # a disk
        seen.update({(snapshot.batch, layer): state for layer, state in states.items()})
        return {"file": f"layers-{list(states)}-{snapshot.note['step']}", "bytes": 3}

    def work(pipe: DistributedPipeline) -> list[Snapshot]:
        snapshots = []
        for x, y in RICH.batches()[:3]:
            pipe.submit(x, y, cosine(pipe.next_batch))
            snapshots.append(pipe.snapshot(note={"step": pipe.next_batch}))
        return snapshots

    with thread_ranks(2) as worlds:
        snapshots = with_pipe(worlds, built(worlds), work, keep, sizes=[1, 3])
    assert threads == {"pipeal-snapshots"}
    for snapshot in snapshots:
        found = snapshot.wait(120)
        assert found[0].kept is None
        for layer in (1, 2, 3):
            assert found[layer].kept == {"file": f"layers-[1, 2, 3]-{snapshot.batch}", "bytes": 3}
            assert found[layer].state == {}
            losses = found[layer].losses
            assert losses is None or torch.equal(losses, wanted[snapshot.batch][layer].losses)  # type: ignore[arg-type]
        whole = {0: found[0]} | {layer: seen[snapshot.batch, layer] for layer in (1, 2, 3)}
        assert differences(whole, wanted[snapshot.batch]) == []


def test_a_keeper_that_fails_fails_its_fence_and_not_the_training() -> None:
    def keep(snapshot: Snapshot, states: Mapping[int, LayerState]) -> Mapping[str, Any]:
        if snapshot.batch == 1:
            raise OSError(28, "No space left on device")
        return {}

    def work(pipe: DistributedPipeline) -> None:
        pipe.submit(*RICH.batches()[0])
        snapshot = pipe.snapshot()
        with pytest.raises(OSError, match="No space left") as caught:
            snapshot.wait(120)
        assert caught.value.errno == 28
        assert not snapshot.ended
        pipe.submit(*RICH.batches()[1])
        assert pipe.snapshot().wait(120)[3].kept == {}
        assert pipe.drain().batches == 2

    with thread_ranks(2) as worlds:
        with_pipe(worlds, built(worlds), work, keep)


def test_a_slow_keeper_holds_the_line_up_and_not_the_memory() -> None:
    """At most two wait on a rank while one is kept; the fourth is not taken before."""
    going, taken = threading.Event(), []
    came = Server._snapshot_came

    def keep(snapshot: Snapshot, states: Mapping[int, LayerState]) -> Mapping[str, Any]:
        going.wait(120)
        return {}

    def snapshot_came(server: Server, snapshot: Snapshot) -> None:
        came(server, snapshot)
        taken.append(snapshot.number)

    def work(pipe: DistributedPipeline) -> None:
        snapshots = []
        for _ in range(4):
            pipe.submit(*RICH.batches()[0])
            snapshots.append(pipe.snapshot())
        until = time.monotonic() + 120
        while len(taken) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # would it take more?
        assert taken == [1, 2, 3]
        with pytest.raises(
            StallError, match=r"the states of layers \[2, 3\] before batch 1 were not there after 0.2 s"
        ):
            snapshots[0].wait(0.2)
        going.set()
        assert [list(snapshot.wait(120)) for snapshot in snapshots] == [[0, 1, 2, 3]] * 4

    with thread_ranks(2) as worlds, patch.object(Server, "_snapshot_came", snapshot_came):
        with_pipe(worlds, built(worlds), work, keep)
    assert taken == [1, 2, 3, 4]


def test_a_fence_ends_with_a_pipeline_that_fails() -> None:
    snapshots = []

    def work(pipe: DistributedPipeline) -> None:
        pipe.submit(None, None)
        pipe.submit(None, None)
        snapshots.append(pipe.snapshot())
        pipe.drain()

    with thread_ranks(2) as worlds:
        packages = [[*quick(1), Trap("B", 1, throw(ValueError("the trap")))] for _ in worlds]
        with pytest.raises(ValueError, match="the trap"):
            with_pipe(worlds, packages, work)
    with pytest.raises(ValueError, match="the trap"):
        snapshots[0].wait(120)
    assert snapshots[0].ended


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_recorded_keeps_the_schedule_and_reports_count_every_stage(schedule: str) -> None:
    def work(pipe: DistributedPipeline) -> None:
        for part in (RICH.batches(), RICH.batches()[:2]):
            report = pipe.run(part)
            assert len(report.stages) == 3
            assert all(stage.busy_s > 0 for stage in report.stages)
            assert sum(report.busy_share) > 0
            assert [len(rows) for rows in report.losses] == [len(part)] * 3  # one layer reports none
            assert report.splits == [0] * 4
        spans = pipe.spans()
        assert {(span.stage, span.layer) for span in spans} == {(0, 0), (1, 1), (2, 2), (2, 3)}
        assert len(spans) == 4 * 3 * 8
        assert violations(SCHEDULES[schedule], 3, spans) == []

    with thread_ranks(3) as worlds:
        with_pipe(worlds, built(worlds), work, schedule=schedule, sizes=[1, 1, 2], trace=Window(0, 8))


def test_what_ranks_have_learnt_is_saved_in_one_file_that_one_process_goes_on_from(tmp_path: Path) -> None:
    path, batches, wanted = tmp_path / "model.pipeal", RICH.batches(), by_hand(RICH, len(RICH.rows))
    pipes = []

    def work(pipe: DistributedPipeline) -> str:
        pipes.append(pipe)
        report = pipe.run(batches[:3], cosine)
        pipe.save(path)
        with pytest.raises(ScheduleError, match="what other processes' layers have learnt is not here"):
            pipe.load(path)
        return str(report)

    with thread_ranks(2) as worlds:
        printed = with_pipe(worlds, built(worlds), work)
    assert "cpu of rank 1" in printed
    with pytest.raises(ScheduleError, match="is not here; save within the `with`"):
        pipes[0].save(path)

    with Pipeline.load(path, rebuilt(RICH), ["cpu"] * 3, threads=1) as pipe:
        pipe.run(batches[3:], cosine)
    found = {number: LayerState(layer_state(layer), None) for number, layer in enumerate(pipe.model)}
    assert differences(found, [replace(state, losses=None) for state in wanted[-1]]) == []


def test_states_that_ranks_keep_themselves_are_not_saved(tmp_path: Path) -> None:
    def work(pipe: DistributedPipeline) -> None:
        with pytest.raises(ScheduleError, match="other ranks keep their layers' states themselves"):
            pipe.save(tmp_path / "m")

    with thread_ranks(2) as worlds:
        with_pipe(worlds, built(worlds), work, lambda snapshot, states: {"file": "here"})
    assert list(tmp_path.iterdir()) == []
