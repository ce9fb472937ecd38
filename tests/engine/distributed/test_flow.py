"""What flows between ranks is bounded as in one process, in order, and whatever its shape."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from bench.virtual import VirtualLayer
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.tree import Tree
from pipeal.engine.distributed import channel as wire
from pipeal.engine.distributed import nccl_transfer as module
from pipeal.engine.distributed.channel import Wire
from pipeal.engine.distributed.nccl_transfer import GpuCarrier
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World

from ..traps import Gate, Trap
from .lines import on_each, thread_ranks


class Counting(VirtualLayer):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.forwards = 0

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        self.forwards += 1
        return x, y


@pytest.mark.parametrize(("queue_depth", "forwards"), [(1, 4), (2, 4), (3, 5)])
def test_a_slow_stage_holds_the_earlier_ones_back(queue_depth: int, forwards: int) -> None:
    """One packet in the slow stage's hands, as many on the way as the queue is deep (two at least), one in the hands of
    the stage before."""
    gate, first, batches = Gate(), Counting(), [(torch.ones(2, 2), torch.ones(2))] * 12

    def watch() -> None:
        assert gate.reached.wait(120)
        until = time.monotonic() + 120
        while first.forwards < forwards and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # would it take more?
        seen.append(first.forwards)
        gate.open()

    seen: list[int] = []
    watcher = threading.Thread(target=watch)
    settings: dict[str, Any] = {"threads": 1, "queue_depth": queue_depth, "stall_timeout_s": 60.0}

    def work(world: World) -> None:
        if world.rank:
            return serve([Counting(), Trap("F", 0, gate.stand_still_here)], world, **settings)
        with DistributedPipeline([first, Counting()], world, **settings) as pipe:
            pipe.run(batches)
        return None

    with thread_ranks(2) as worlds:
        watcher.start()
        on_each(worlds, work)
        watcher.join()
    assert seen == [forwards]
    assert first.forwards == 12


class Recording(VirtualLayer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.got: list[tuple[Tree, Tree]] = []

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        self.got.append((x, y))
        return x, y


def test_packets_of_every_shape_arrive_unchanged_and_in_order() -> None:
    batches: list[tuple[Any, Any]] = [
        (torch.randn(3, 5).T, torch.arange(5)),
        ((torch.randn(2, 4), {"mask": torch.ones(2, dtype=torch.bool)}, [3, "three", None]), None),
        (None, None),
        (torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.rand(2, 7, dtype=torch.float64)),
        (torch.tensor(3), torch.zeros(0, 4)),
        (torch.randn(400, 700), [torch.ones(1, dtype=torch.int8)] * 40),
    ]
    last = Recording()

    def work(world: World) -> None:
        if world.rank:
            return serve([Counting(), Counting(), last], world, threads=1)
        with DistributedPipeline([Counting() for _ in range(3)], world, threads=1) as pipe:
            pipe.run(batches * 3)
        return None

    with thread_ranks(3) as worlds:
        # Rank 1's model has the recording layer as well, but not in its stage.
        on_each(worlds, work)
    assert len(last.got) == 3 * len(batches)
    for (x, y), (wanted_x, wanted_y) in zip(last.got, batches * 3, strict=True):
        assert same(x, wanted_x)
        assert same(y, wanted_y)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other) and (one.stride() == other.stride() or not len(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Operation:
    """One of gloo, whose sends do not know when they have ended, as one of NCCL, which do: the question waits."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = False

    def is_completed(self) -> bool:
        self._work.wait()
        self._ended = True
        return True

    def wait(self) -> None:
        assert self._ended  # else a stream would wait for another rank


class Pair:
    """A group of gloo in the place of one of NCCL."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, rows: list[Tensor], to: int, tag: int) -> Operation:
        return Operation(self._group.send(rows, to, tag))

    def recv(self, rows: list[Tensor], source: int, tag: int) -> Operation:
        return Operation(self._group.recv(rows, source, tag))


def gpu_carrier(world: World) -> GpuCarrier:
    """Over gloo alone."""
    store = dist.PrefixStore("pair", world.store)
    group = dist.ProcessGroupGloo(store, world.rank, world.size, timedelta(seconds=60))
    device: Any = SimpleNamespace(device=torch.device("cpu"), lags=True)
    return GpuCarrier(Wire(world.endpoint, *world.wire_numbers(1)), Pair(group), 1 - world.rank, device)


@contextmanager
def stand_ins() -> Iterator[None]:
    """In the place of streams and events: everything has happened when it was asked for."""
    with ExitStack() as patched:
        for name in ("Stream", "Event", "device", "stream"):
            patched.enter_context(patch.object(torch.cuda, name, MagicMock()))
        yield


def test_what_goes_from_gpu_to_gpu_keeps_its_order_and_shape_over_two_ways() -> None:
    """The protocol of heads over one group and tensors over another, over gloo: NCCL needs two GPUs."""
    trees: list[Any] = [
        (torch.randn(3, 5).T, {"mask": torch.ones(2, dtype=torch.bool)}, [None, 3]),
        None,
        (torch.zeros(0, 4), torch.tensor(3), torch.randn(4, 6)[:, 1], torch.randn(4, 1).expand(4, 9)),
        # Types that NCCL does not know.
        [torch.arange(3, dtype=torch.int16), torch.randn(3, dtype=torch.complex64), torch.tensor([True, False])],
    ]

    def work(world: World) -> list[Any]:
        carrier = gpu_carrier(world)
        if world.rank == 0:
            for number, tree in enumerate(trees):
                carrier.send(1, "tree", {"number": number}, tree, None)
            return []
        found = []
        for number in range(len(trees)):
            message = carrier.wire.receive([0])
            assert (message.kind, message.facts["number"]) == ("tree", number)
            found.append(carrier.body(message)[0])
        return found

    with stand_ins(), thread_ranks(2) as worlds:
        arrived = on_each(worlds, work)[1]
    assert all(map(same, arrived, trees))


def test_what_a_rank_does_not_want_or_has_no_memory_for_is_never_put_on_the_way_between_gpus() -> None:
    """A send of NCCL that nobody receives holds up the GPU for ever."""

    def work(world: World) -> list[Any]:
        carrier = gpu_carrier(world)
        if world.rank == 0:
            for number in range(4):
                carrier.send(1, "tree", {}, torch.full((3,), number), None)
            return []
        carrier.drop(carrier.wire.receive([0]))  # the pipeline has ended
        message = carrier.wire.receive([0])
        with patch.object(module, "row_for", side_effect=torch.OutOfMemoryError), suppress(torch.OutOfMemoryError):
            carrier.body(message)
        assert not message.taken
        carrier.drop(message)
        return [carrier.body(carrier.wire.receive([0]))[0].tolist() for _ in range(2)]

    with stand_ins(), thread_ranks(2) as worlds:
        assert on_each(worlds, work)[1] == [[2, 2, 2], [3, 3, 3]]


def test_whoever_sends_to_a_gpu_whose_host_has_no_memory_either_is_answered() -> None:
    """Symptom: what was on the CPU was let go of by asking for the same memory once more. It was not received, no
    answer was sent, and the sender waited for ever."""

    def work(world: World) -> Any:
        carrier = gpu_carrier(world)
        if world.rank == 0:
            on_gpu = ["float32", [3], None, 3]
            carrier.wire.send(1, "tree", {"on gpu": [on_gpu, None]}, (torch.empty(0), torch.ones(5)))
            return carrier.wire.hear_answer(1)
        message = carrier.wire.receive([0])
        with patch.object(wire, "row_for", side_effect=MemoryError), suppress(MemoryError):
            carrier.body(message)
        assert not message.taken
        with patch.object(wire, "row_for", side_effect=MemoryError):
            carrier.drop(message)
        return message.taken

    with stand_ins(), thread_ranks(2) as worlds:
        assert on_each(worlds, work) == [False, True]


def test_whoever_sends_from_gpu_to_gpu_what_its_receiver_cannot_put_together_is_answered() -> None:
    """Symptom: of a container that the other rank did not know nothing was put on the way, and the sender waited for
    ever to hear so."""
    unknown = DataError("a container that this process does not know")

    def work(world: World) -> list[Any]:
        carrier = gpu_carrier(world)
        if world.rank == 0:
            for number in range(4):
                carrier.send(1, "tree", {}, torch.full((3,), number), None)
            return []
        with patch.object(wire, "put_together", side_effect=unknown):
            message = carrier.wire.receive([0])
            with pytest.raises(DataError):
                carrier.body(message)
            assert message.taken
            carrier.drop(carrier.wire.receive([0]))  # of what is not wanted no tree is made
        return [carrier.body(carrier.wire.receive([0]))[0].tolist() for _ in range(2)]

    with stand_ins(), thread_ranks(2) as worlds:
        assert on_each(worlds, work)[1] == [[2, 2, 2], [3, 3, 3]]


def test_a_rank_keeps_no_memory_for_layers_that_are_not_its_own() -> None:
    class Real(VirtualLayer):
        def __init__(self) -> None:
            super().__init__(0, 0)
            self.weight = torch.nn.Parameter(torch.ones(3))

    models = [[Real() for _ in range(3)] for _ in range(3)]

    def work(world: World) -> None:
        if world.rank:
            return serve(models[world.rank], world, threads=1)
        with DistributedPipeline(models[0], world, threads=1) as pipe:
            assert [str(stage.device) for stage in pipe.stages] == ["cpu", "cpu of rank 1", "cpu of rank 2"]
        return None

    with thread_ranks(3) as worlds:
        on_each(worlds, work)
    where = [[layer.weight.device.type for layer in model] for model in models]
    assert where == [["cpu"] * 3, ["meta", "cpu", "meta"], ["meta", "meta", "cpu"]]
