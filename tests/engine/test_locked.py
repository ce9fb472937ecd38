"""Locked memory of the host: of exactly the size asked for, unlocked before it goes; and the lanes that use it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeal import PlacementError
from pipeal.engine.devices.cuda import CudaLane
from pipeal.engine.devices.locked import locked_memory

from .paper import World

CPU = torch.device("cpu")


class Runtime:
    """That of CUDA, which locks nothing."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}
        self.was_mapped: list[bool] = []

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        assert flags == 1
        if not self.status:
            self.locked[place] = size
        return self.status

    def cudaHostUnregister(self, place: int) -> int:
        self.was_mapped.append(f"{place:x}-" in Path("/proc/self/maps").read_text(encoding="ascii"))
        del self.locked[place]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


def runtime(patch: pytest.MonkeyPatch, status: int = 0) -> Runtime:
    made = Runtime(status)
    patch.setattr(torch.cuda, "cudart", lambda: made)
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return made


def test_it_is_locked_as_long_as_a_tensor_over_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    known = runtime(monkeypatch)
    size = 5 * 2**20 + 12
    flat = locked_memory(size, CPU)
    assert (flat.shape, flat.dtype, known.locked) == ((size,), torch.uint8, {flat.data_ptr(): size})
    part = torch.empty(0).set_(flat.untyped_storage()[512:1024], 0, (128,), (1,)).fill_(3.0)
    del flat
    assert len(known.locked) == 1
    assert part.sum() == 384
    del part
    assert known.locked == {}
    assert known.was_mapped == [True]


def test_a_process_that_was_forked_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = runtime(monkeypatch)
    flat = locked_memory(4096, CPU)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        del flat
    assert len(known.locked) == 1


@pytest.mark.parametrize("size", [2**20, 2**62])
def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    known = runtime(monkeypatch, status=2)
    with pytest.raises(PlacementError, match=r"offload='host': .* more of page-locked memory .* were refused \(.*\);"):
        locked_memory(size, CPU)
    assert known.was_mapped == []


def test_a_lane_copies_on_its_own_stream_and_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(1), []
    world.install(monkeypatch)
    lane, other = CudaLane(torch.device("cuda", 0)), world.stream_on("cuda:0")

    class Into:
        def copy_(self, source: Any, *, non_blocking: bool) -> None:
            seen.append((world.stream_on("cuda:0"), source, non_blocking))
            world.stream_on("cuda:0").tick()

    before = other.record_event()
    lane.wait_for(before)
    lane.copy(Into(), "source")  # type: ignore[arg-type]
    assert seen == [(lane._stream, "source", True)]
    assert lane._stream.clock[other.number] == before.clock[other.number]
    mark = lane.mark()
    assert mark.clock[lane._stream.number] > 1  # type: ignore[union-attr]
    assert world.host[lane._stream.number] == 0
    lane.synchronize()
    assert world.host[lane._stream.number] > 1
