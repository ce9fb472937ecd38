"""Law 3 across processes: what fails anywhere is raised on rank 0 as its own type, all others stop, nothing hangs."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage
from pipeal.core.errors import Interrupted
from pipeal.engine.distributed import executor, follower
from pipeal.engine.distributed import heartbeat as heartbeat
from pipeal.engine.distributed.follower import Server
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.rank import Node
from pipeal.engine.distributed.watchdog import Watch
from pipeal.engine.distributed.world import World

from ..conftest import STOP_S
from ..test_failures import PickyError
from ..traps import Gate, Trap, nothing, quick, throw
from .lines import on_each, thread_ranks
from .processes import run, started

SOON_S = 60.0
Part = Callable[[World], Any]


def told_by(work: Callable[[], Any]) -> dict[str, Any]:
    """What is raised, in words, and how long that took."""
    begin = time.monotonic()
    try:
        work()
    except BaseException as error:  # noqa: BLE001  looked at by the test
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "notes": "\n".join(getattr(error, "__notes__", [])),
            "code": getattr(error, "code", None),
            "seconds": time.monotonic() - begin,
        }
    return {"kind": None, "seconds": time.monotonic() - begin}


def virtual(
    world: World, layers: list[nn.Module], schedule: str = "pipelined", *, last: Sequence[Any] = (), **settings: Any
) -> dict[str, Any]:
    """Virtual batches through layers of which one is a trap, and a ``last`` one or two of a replica's own feed."""
    chosen: dict[str, Any] = {"threads": 1, "stall_timeout_s": 120.0, "first_batch": 100} | settings

    def feed(epoch: int, first: int) -> Iterator[Any]:
        yield from [*nothing(3), *last]

    def work() -> None:
        if world.rank:
            serve(layers, world, "cpu", schedule, feed=feed, **chosen)
            return
        with DistributedPipeline(layers, world, "cpu", schedule, **chosen) as pipe:
            if world.mesh.replicas > 1:
                pipe.begin_feed(0)
            pipe.run(nothing(6))

    return told_by(work)


def traps(world: World) -> list[dict[str, Any]]:
    """One pipeline after the other fails, each in another way and place; the world lives on."""
    executor.STOP_S = follower.STOP_S = STOP_S
    found = []
    for schedule, action, stage in (
        ("pipelined", "F", 0),
        ("pipelined", "B", 1),
        ("al-fm", "U", 2),
        ("sequential", "F", 2),
        ("backward-overlap", "B", 0),
    ):
        layers = quick(3)
        layers[stage] = Trap(action, 2, throw(ValueError("the trap")))
        found.append(virtual(world, layers, schedule))
    for error in (PickyError(7, hint="look here"), SystemExit(4), KeyError("gone")):
        found.append(virtual(world, [*quick(2), Trap("B", 1, throw(error))]))
    still = [*quick(2), Trap("F", 1, Gate().stand_still_here)]
    require_progress = Watch.require_progress

    def require_it(watch: Watch, since: float) -> None:
        """Only when rank 0 has heard where the last one stands: a busy machine may be late with that."""
        if any(beat["does"].startswith("F1@s2") for beat in watch._beats.values()):
            require_progress(watch, since)

    Watch.require_progress = require_it  # type: ignore[method-assign]
    executor.STOP_S = follower.STOP_S = 2.0  # it will not come back
    found.append(virtual(world, still, stall_timeout_s=2.0, dump_folder=f"dump-{world.rank}"))
    Watch.require_progress = require_progress  # type: ignore[method-assign]
    executor.STOP_S = follower.STOP_S = STOP_S
    found.append(virtual(world, [*quick(2), Unhappy()]))

    def interrupted() -> None:
        chosen = {"threads": 1, "stall_timeout_s": 120.0}
        if world.rank:
            serve(quick(3), world, **chosen)
            return
        with DistributedPipeline(quick(3), world, **chosen) as pipe:
            pipe.submit(None, None)
            raise Interrupted("interrupted after batch 1, and saved", 143)

    found.append(told_by(interrupted))
    found.append(told_by(lambda: not_finite(world)))
    found.append(virtual(world, quick(3)))
    return found


class Unhappy(Trap):
    """Fails in a way that only a note tells."""

    def __init__(self) -> None:
        super().__init__("U", 0, throw(RuntimeError()))


def not_finite(world: World) -> None:
    torch.manual_seed(0)
    layers = [AL(ENC(nn.Linear(3, 3), nn.Linear(3, 3)), AE(nn.Identity(), nn.Identity())) for _ in range(3)]
    with torch.no_grad():
        layers[2].enc.f.weight.fill_(float("nan"))
    package = ALPackage(layers)
    if world.rank:
        serve(package, world, threads=1)
        return
    with DistributedPipeline(package, world, threads=1) as pipe:
        pipe.run([(torch.randn(2, 3), torch.randn(2, 3))] * 3)


@pytest.mark.slow
def test_what_fails_anywhere_reaches_rank_0_as_its_own_type_and_stops_all(tmp_path: Path) -> None:
    ranks = run(traps, 3, tmp_path)
    words = {"F": "forward", "B": "backward", "U": "update"}
    for place, (action, stage) in enumerate((("F", 0), ("B", 1), ("U", 2), ("F", 2), ("B", 0))):
        for rank in range(3):
            told = ranks[rank][place]
            assert (told["kind"], told["text"]) == ("ValueError", "the trap"), (place, rank)
            note = (
                f"in the {words[action]} of stage {stage}, layer {stage} (Trap), batch 102, device cpu; input no tensor"
            )
            assert note in told["notes"]
    first = ranks[0]
    assert (first[5]["kind"], first[5]["text"]) == ("RuntimeError", "PickyError: code 7: look here")
    assert "in spring" in first[5]["notes"]  # the stack, as it was there
    assert re.search(r"on rank 2 \(stage 2\) on \S+:\nTraceback", first[5]["notes"])
    assert (first[6]["kind"], first[6]["code"]) == ("SystemExit", 4)
    assert (first[7]["kind"], first[7]["text"]) == ("KeyError", "'gone'")
    assert first[8]["kind"] == "StallError"
    assert re.match(r"stage 2 stands still: F1@s2 for .* s on cpu of rank 2 \(stage 2\) on ", first[8]["text"])
    assert "the stacks of all threads are in dump-0/stall-" in first[8]["text"]
    (dump,) = (tmp_path / "dump-2").iterdir()  # each rank leaves its own
    assert "stand_still_here" in dump.read_text()
    assert (first[9]["kind"], first[9]["text"]) == ("RuntimeError", "")
    assert [(told[10]["kind"], told[10]["code"]) for told in ranks] == [("Interrupted", 143)] * 3
    assert first[11]["kind"] == "NonFiniteError"
    assert first[11]["text"].startswith("layer 2 has a loss that is not finite on batch 0")
    for told in ranks:
        assert told[12]["kind"] is None  # the next pipeline is none the worse
        assert all(one["seconds"] < SOON_S for one in told)


def test_a_pipeline_that_cannot_end_is_told_to_all_ranks() -> None:
    """Symptom: rank 0 raised that gradients had been gathered for an update that never came; all others ended in
    order, with exit code 0, as if all had been learnt."""

    def work(world: World) -> dict[str, Any]:
        def on_rank() -> None:
            if world.rank:
                serve(quick(3), world, threads=1)
                return
            with DistributedPipeline(quick(3), world, threads=1) as pipe:
                pipe.submit(None, None, updates=False)

        return told_by(on_rank)

    with thread_ranks(3) as worlds:
        for told in on_each(worlds, work):
            assert told["kind"] == "ScheduleError"
            assert told["text"].startswith("the pipeline cannot end between two batches of one update")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_failure_that_rank_0_may_get_over_is_not_raised_elsewhere(stage: int) -> None:
    """Symptom: a setting of --tune that diverged was told by rank 0, which went on; the others ended with it."""

    def work(world: World) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
        failures: list[Exception] = []

        def on_rank(layers: list[nn.Module]) -> None:
            if world.rank:
                serve(layers, world, threads=1, on_failure=failures.append)
                return
            with DistributedPipeline(layers, world, threads=1) as pipe:
                pipe.run(nothing(3))

        trapped = quick(2)
        trapped[stage] = Trap("F", 1, throw(ValueError("the trap")))
        failed, next_one = told_by(lambda: on_rank(trapped)), told_by(lambda: on_rank(quick(2)))
        return failed, [str(failure) for failure in failures], next_one

    with thread_ranks(2) as worlds:
        first, second = on_each(worlds, work)
    assert (first[0]["kind"], first[1], first[2]["kind"]) == ("ValueError", [], None)
    assert (second[0]["kind"], second[1], second[2]["kind"]) == (None, ["the trap"], None)


def test_a_failure_that_rank_0_does_not_know_of_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Server._leave_in_order

    def leave_badly(server: Server) -> None:
        leave(server)
        raise OSError("the end")

    monkeypatch.setattr(Server, "_leave_in_order", leave_badly)

    def work(world: World) -> dict[str, Any]:
        def on_rank() -> None:
            if world.rank:
                serve(quick(2), world, threads=1, on_failure=lambda _: None)
                return
            with DistributedPipeline(quick(2), world, threads=1) as pipe:
                pipe.run(nothing(1))

        return told_by(on_rank)

    with thread_ranks(2) as worlds:
        assert [told["kind"] for told in on_each(worlds, work)] == [None, "OSError"]


def short_feed(world: World) -> list[dict[str, Any]]:
    return [virtual(world, quick(1)), virtual(world, quick(1), last=[(torch.zeros(0, 3), None)])]


@pytest.mark.slow
def test_a_replica_without_a_batch_or_samples_is_told_of_it(tmp_path: Path) -> None:
    for no_batch, no_samples in run(short_feed, 2, tmp_path, replicas=2):
        assert no_batch["kind"] == no_samples["kind"] == "DataError"
        assert re.match(r"the feed of rank 1 .* has no batch 103, but rank 0 has one", no_batch["text"])
        assert no_samples["text"] == "batch 103 has no samples ((0, 3) float32); expected one at least"


def apart() -> None:
    """As on another machine: nobody can look at the number of a process."""
    heartbeat.is_gone = lambda _: False  # type: ignore[assignment]


def lost_when_told_to_end(world: World) -> dict[str, Any]:
    """All is learnt; then a process dies that the others are about to let go."""
    apart()
    if world.rank == 2:
        Node.close = lambda _: os._exit(9)  # type: ignore[method-assign,assignment]
    return virtual(world, quick(3))


def lost_when_it_has_closed(world: World) -> dict[str, Any]:
    """Its neighbour has had its last word, and nobody but rank 0 waits for it."""
    apart()
    if world.rank == 2:

        def leave(server: Server) -> None:
            while server.node.join(0.1) != ["pipeal-commands"]:
                pass
            os._exit(9)

        Server._say_farewell = leave  # type: ignore[method-assign]
        Server._finish_fences = lambda server: (server._snapshots.put(None), server.node.close())  # type: ignore[method-assign,assignment,func-returns-value]
    return virtual(world, quick(3))


@pytest.mark.parametrize("job", [lost_when_told_to_end, lost_when_it_has_closed])
@pytest.mark.slow
def test_a_process_that_dies_while_all_others_end_is_named(job: Any, tmp_path: Path) -> None:
    """Symptom: rank 0 said after half a minute that threads of its own did not end, and nothing of the machine that was
    gone; what broke after the last batch was taken for the end."""
    with started(job, 3, tmp_path) as ranks:
        assert ranks.wait()[2] == 9
        for rank in range(2):
            said = ranks.said(rank)
            told = ranks.found(rank) if (tmp_path / f"{rank}.pt").exists() else {"kind": "PeerLostError", "text": said}
            assert told["kind"] == "PeerLostError", told
            assert "rank 2 (stage 2) on " in told["text"]


def test_a_feed_whose_next_batch_is_being_made_is_closed_when_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a failure elsewhere was told as "generator already executing"."""
    monkeypatch.setattr(follower, "STOP_S", 0.5)  # the batch is not there before rank 1 ends
    asked, going, closed = threading.Event(), threading.Event(), threading.Event()

    def feed(epoch: int, first: int) -> Iterator[Any]:
        try:
            yield from nothing(1)
            asked.set()
            going.wait(120)
            yield from nothing(1)
        finally:
            closed.set()

    def work(world: World) -> dict[str, Any]:
        def on_rank() -> None:
            if world.rank:
                serve(quick(1), world, threads=1, feed=feed)
                return
            with DistributedPipeline(quick(1), world, threads=1) as pipe:
                pipe.begin_feed(0)
                pipe.submit(None, None)
                pipe.submit(None, None)
                assert asked.wait(120)
                raise KeyError("elsewhere")

        return told_by(on_rank)

    with thread_ranks(2, replicas=2) as worlds:
        for told in on_each(worlds, work):
            assert (told["kind"], told["text"]) == ("KeyError", "'elsewhere'")
        assert not closed.is_set()
        going.set()
        assert closed.wait(120)


def test_the_callers_number_of_threads_comes_back() -> None:
    before, found = torch.get_num_threads(), []
    with thread_ranks(1) as worlds:  # of several in one process each would see what another has set
        on_each(worlds, lambda world: virtual(world, quick(1), threads=before + 1))
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before]


def long(world: World, schedule: str = "pipelined") -> None:
    """Trains until somebody dies."""
    layers = [*quick(2), Trap("F", 20, lambda: Path("under-way").touch(), (0.01, 0.01, 0.0))]
    if world.rank:
        serve(layers, world, "cpu", schedule, threads=1)
    else:
        with DistributedPipeline(layers, world, "cpu", schedule, threads=1) as pipe:
            pipe.run(nothing(100_000))


def long_joined(world: World) -> None:
    """The same, where stages also wait for others that are not their neighbours."""
    long(world, "al-fm")


def long_replicated(world: World) -> None:
    """Two replicas of a real layer, which average after every batch."""
    model = ALPackage([AL(ENC(nn.Linear(3, 3), nn.Linear(3, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))])
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)

    def batches(_: int = 0, __: int = 0) -> Iterator[Any]:
        for number in range(100_000):
            if number == 20:
                Path("under-way").touch()
            yield torch.ones(2, 3), torch.ones(2, 2)

    if world.rank:
        serve(model, world, threads=1, feed=batches)
    else:
        with DistributedPipeline(model, world, threads=1) as pipe:
            pipe.begin_feed(0)
            pipe.run(batches())


def long_replicated_apart(world: World) -> None:
    """Of several that hold the same layers it is known which one is gone."""
    apart()
    long_replicated(world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "victim", "size", "replicas"),
    [
        (long, 2, 3, 1),
        (long, 0, 3, 1),
        (long_joined, 1, 3, 1),
        (long_replicated, 1, 2, 2),
        (long_replicated_apart, 2, 3, 3),
    ],
)
def test_when_a_process_is_killed_all_others_end_and_name_it(
    job: Any, victim: int, size: int, replicas: int, tmp_path: Path
) -> None:
    with started(job, size, tmp_path, replicas, timeout_s=600) as ranks:  # it is seen at once, and not after that
        ranks.wait_for("under-way")
        ranks.processes[victim].kill()
        begin = time.monotonic()
        codes = ranks.wait()
        assert time.monotonic() - begin < 2 * SOON_S
        assert codes == [-9 if rank == victim else 1 for rank in range(size)]
        for rank in set(range(size)) - {victim}:
            last = ranks.said(rank).strip().splitlines()[-1]
            assert re.match(rf"pipeal\.core\.errors\.PeerLostError: .*rank {victim} ", last), ranks.said(rank)
