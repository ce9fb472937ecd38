"""Offloading over ranks: the bits of one process without it, and on each rank nothing but its own layers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal import AL, ALPackage, DataError
from pipeal.engine.distributed import executor
from pipeal.engine.distributed.pipeline import DistributedPipeline, _Line, serve
from pipeal.engine.distributed.replicas import Alike
from pipeal.engine.distributed.world import World
from pipeal.engine.state import mapped_file
from pipeal.engine.state.stateful import release, stateful

from ..cases import Outcome, reference
from ..test_offload import batches, layer
from .lines import on_each, thread_ranks
from .ranks import each
from .test_exactness import RICH, run
from .test_replicas import DRAWS, shares, state, train


@pytest.fixture
def all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are moved, too."""
    monkeypatch.setattr(mapped_file, "_SMALL", 1)


@pytest.mark.usefixtures("all_of_it")
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
@pytest.mark.parametrize("sizes", [[1, 3], [2, 1, 1]], ids=str)
def test_offloaded_layers_of_ranks_learn_the_same(schedule: str, sizes: list[int], tmp_path: Path) -> None:
    """Their states come to rank 0 by the wire, through files at both ends."""
    with thread_ranks(len(sizes)) as worlds:
        found = run(worlds, RICH, schedule, sizes, offload="disk", offload_folder=tmp_path)
    assert found.differences(reference(RICH)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("all_of_it")
@pytest.mark.parametrize(("size", "sizes"), [(2, [3]), (4, [2, 1])])
def test_offloaded_replicas_learn_the_same(size: int, sizes: list[int], tmp_path: Path) -> None:
    """A layer's average is waited for before its update, and its gradients go with it."""
    found = []
    for options in ({"within_stage": "stage"}, {"offload": "disk", "offload_folder": tmp_path}):
        with thread_ranks(size, replicas=2) as worlds:
            packages = [DRAWS.build() for _ in worlds]
            (report,) = train(
                worlds, packages, shares(DRAWS, 3), sizes=sizes, updates=lambda batch: batch in (1, 3), **options
            )
            found.append(state(worlds, packages, 1).tensors | {"losses": torch.stack(report.losses)})
    assert Outcome(found[1]).differences(Outcome(found[0])) == []


def test_no_gradient_of_a_layer_outlives_its_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas, gradients of all layers of a stage lived until the last layer's backward."""
    under_way: list[int] = []
    finish = Alike.finish

    def counted(self: Alike, index: int) -> list[torch.Tensor] | None:
        with_gradients = [one for one in packages[self.replica] if any(p.grad is not None for p in one.parameters())]
        under_way.append(len(self._under_way) + len(with_gradients))
        return finish(self, index)

    monkeypatch.setattr(Alike, "finish", counted)
    packages = [ALPackage([layer(number) for number in range(3)]) for _ in range(2)]
    with thread_ranks(2, replicas=2) as worlds:
        train(worlds, packages, [batches(2), batches(2)], offload="disk", offload_folder=tmp_path)
    assert under_way == [1] * (2 * 3 * 2)


@pytest.mark.parametrize("offloads", [False, True], ids=["in memory", "offloaded"])
def test_of_an_iterator_each_rank_keeps_its_own_layers_alone(offloads: bool, tmp_path: Path) -> None:
    """When a layer is made, all before it that are another rank's have been let go of."""
    options: dict[str, Any] = {"offload": "disk", "offload_folder": tmp_path} if offloads else {}
    whole = ALPackage([layer(number) for number in range(4)])
    for x, y in batches():
        whole(x, y)
        whole.backward()
        whole.update()
    lock, held = threading.Lock(), dict[int, list[list[int]]]()

    def work(world: World) -> Any:
        made: list[AL] = []

        def one_by_one() -> Iterator[AL]:
            for number in range(4):
                held.setdefault(world.rank, []).append([n for n, one in enumerate(made) if not is_away(one)])
                with lock:
                    made.append(layer(number))
                yield made[-1]

        settings: dict[str, Any] = {"sizes": [1, 3], "threads": 1, **options}
        if world.rank:
            serve(one_by_one(), world, **settings)
        else:
            with DistributedPipeline(one_by_one(), world, **settings) as pipe:
                pipe.run(batches())
                found = pipe.snapshot().wait(60)
            for number, one in enumerate(whole):
                assert all(map(torch.equal, found[number].state["module"].values(), one.state_dict().values()))
        return [is_away(one) for one in made]

    with thread_ranks(2) as worlds:
        assert on_each(worlds, work) == [[False, True, True, True], [True, False, False, False]]
    assert held == {0: [[], [0], [0], [0]], 1: [[], [], [1], [1, 2]]}


def is_away(one: AL) -> bool:
    """Whether a layer holds nothing, neither itself nor by its optimizers."""
    tensors = [*one.parameters(), *one.buffers()]
    for optimizer in stateful(one)[0].values():
        tensors += [tensor for group in optimizer.param_groups for tensor in group["params"]]
        tensors += [value for kept in optimizer.state.values() for value in kept.values()]
    assert len({tensor.is_meta for tensor in tensors}) == 1
    return tensors[0].is_meta


def test_a_layer_that_is_let_go_of_leaves_nothing_with_its_optimizers() -> None:
    """Symptom: on every rank all layers of the model stayed in memory: the layers went to the meta device, but their
    optimizers still had the weights."""
    one = layer()
    for x, y in batches(1):
        one(x, y)
        one.backward()
        one.update()
    assert not is_away(one)
    release(one)
    assert is_away(one)


def test_a_disk_that_is_full_on_one_rank_ends_all_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full_there(*where: int) -> None:
        if full.is_set() and threading.current_thread().name.endswith("-1"):  # the worker of stage 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*where)

    monkeypatch.setattr(os, "posix_fallocate", full_there)
    packages, full = [ALPackage([layer(number) for number in range(2)]) for _ in range(2)], threading.Event()

    def work(world: World) -> None:
        settings: dict[str, Any] = {"threads": 1, "offload": "disk", "offload_folder": tmp_path}
        if world.rank:
            serve(packages[1], world, **settings)
            return
        with DistributedPipeline(packages[0], world, **settings) as pipe:
            full.set()
            pipe.run(batches())

    with thread_ranks(2) as worlds:
        for error in each(worlds, work):
            assert isinstance(error, DataError)
            assert "No space left on device" in str(error)
            assert "name another folder by offload_folder" in str(error)


def test_states_that_come_by_the_wire_are_put_into_files_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its layers rank 0 would hold the whole model in memory at every checkpoint."""
    put: list[int] = []
    away = executor.away

    def seen(state: Any, folder: Any) -> Any:
        put.append(len(state["module"]))
        return away(state, folder)

    monkeypatch.setattr(executor, "away", seen)
    packages = [ALPackage([layer(number) for number in range(3)]) for _ in range(2)]
    states: dict[int, Any] = {}

    def work(world: World) -> None:
        settings: dict[str, Any] = {"threads": 1, "sizes": [1, 2], "offload": "disk", "offload_folder": tmp_path}
        if world.rank:
            serve(packages[1], world, **settings)
            return
        with DistributedPipeline(packages[0], world, **settings) as pipe:
            pipe.run(batches(1))
            states.update(pipe.snapshot().wait(60))

    with thread_ranks(2) as worlds:
        on_each(worlds, work)
    assert put == [len(packages[1][0].state_dict())] * 2
    for number in (1, 2):
        found = states[number].state["module"]
        assert all(map(torch.equal, found.values(), packages[1][number].state_dict().values()))


def test_only_the_layers_of_this_rank_have_files(tmp_path: Path) -> None:
    def work(world: World) -> list[list[int]]:
        line = _Line(iter([layer(number) for number in range(3)]), world, sizes=[1, 2], offload="disk",
                     offload_folder=tmp_path)  # fmt: skip
        return [list(stage.offloaded._files) if stage.offloaded else [] for stage in line.stages]

    with thread_ranks(2) as worlds:
        assert on_each(worlds, work) == [[[0], []], [[], [1, 2]]]


def test_what_does_not_go_with_it_is_told_on_every_rank(tmp_path: Path) -> None:
    def work(world: World) -> None:
        _Line([layer(0), layer(1)], world, schedule="al-fm", offload="disk", offload_folder=tmp_path)

    with thread_ranks(2) as worlds:
        for error in each(worlds, work):
            assert "needs layers that end one before the next" in str(error)
