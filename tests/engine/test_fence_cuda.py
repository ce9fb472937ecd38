"""Fences on a GPU: the copies are those of the moment, and the host waits for none of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AL, ENC, ALPackage, Pipeline
from pipeal.engine import SCHEDULES, Snapshot, load_layer_state

from .test_cuda import PLACEMENTS, batches, package, same
from .test_layer_state import pairs, written_and_read

pytestmark = pytest.mark.cuda

LIMIT_S = 60.0


def rate(batch: int) -> float:
    return 1 / (1 + batch)


def leaves(model: ALPackage) -> list[Tensor]:
    """Weights, buffers and optimizer states, on the CPU."""
    found = [value.cpu() for value in model.state_dict().values()]
    for layer in model:
        for optimizer in (layer.enc_opt, layer.ae_opt):
            found += [v.cpu() for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return found


@pytest.mark.parametrize("devices", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fence_finds_what_a_pipeline_that_ended_there_left(devices: list[str], schedule: str) -> None:
    """The batches after it are given to the GPU long before it has come to the copies."""
    data = batches(12)
    snapshots: list[Snapshot] = []
    with Pipeline(package(), devices, schedule, threads=1) as pipe:
        pipe.run(data, rate, lambda _: snapshots.append(pipe.snapshot()))
    for snapshot in snapshots[::3]:
        ended = package()
        with Pipeline(ended, devices, schedule, threads=1) as pipe:
            report = pipe.run(data[: snapshot.batch], rate)
        found = snapshot.wait(LIMIT_S)
        tensors = [v for state in found.values() for _, (v, _) in pairs(state.state, state.state).items()]
        assert all(not value.is_cuda for value in tensors if isinstance(value, Tensor))
        loaded = package()
        for layer, state in zip(loaded, found.values(), strict=True):
            load_layer_state(layer, written_and_read(state.state))
        assert same(leaves(loaded), leaves(ended))
        assert same([state.losses for state in found.values() if state.losses is not None], report.losses)


@pytest.mark.parametrize("placement", ["two stages on one GPU", "four stages on one GPU"])
def test_going_on_from_a_fence_in_another_schedule_is_never_having_stopped(placement: str) -> None:
    data, whole = batches(10), package()
    with Pipeline(whole, ["cuda:0"], "sequential") as pipe:
        losses = pipe.run(data, rate).losses
    with Pipeline(package(), PLACEMENTS[placement]) as pipe:
        for batch in data[:6]:
            pipe.submit(*batch, rate(pipe.next_batch))
        snapshot = pipe.snapshot()
    second = package(0.3)
    for layer, state in zip(second, snapshot.wait(LIMIT_S).values(), strict=True):
        load_layer_state(layer, state.state)
    with Pipeline(second, ["cuda:0"] * 3, "al-fm", first_batch=snapshot.batch) as pipe:
        report = pipe.run(data[6:], rate)
    assert same(leaves(second), leaves(whole))
    assert same(report.losses, [rows[6:] for rows in losses])


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_the_host_does_not_wait(schedule: str) -> None:
    """PyTorch itself raises when an operation makes the host wait for the GPU; the mode is the process's."""
    data = batches(6, "cuda:0")
    with Pipeline(package(), ["cuda:0"] * 2, schedule) as pipe:
        pipe.run(data, rate)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            snapshots = []
            for batch in data:
                pipe.submit(*batch, rate(pipe.next_batch))
                snapshots.append(pipe.snapshot())
            found = [snapshot.wait(LIMIT_S) for snapshot in snapshots]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [list(states) for states in found] == [[0, 1, 2, 3]] * 6
    assert all(value.is_pinned() for value in found[0][0].state["module"].values())


class Slow(AL):
    """An update after which the GPU is busy for a while, so that copies are far behind the host."""

    def update(self) -> None:
        torch.cuda._sleep(50_000_000)
        super().update()


def test_a_fence_is_done_only_when_its_copies_are() -> None:
    model = package()
    slow = ALPackage([Slow(layer.enc, layer.ae) for layer in model])
    with Pipeline(slow, ["cuda:0"]) as pipe:
        pipe.submit(*batches(1)[0])
        snapshot = pipe.snapshot()
        seen: list[Any] = []
        writer = threading.Thread(target=lambda: seen.append(snapshot.wait(LIMIT_S)))
        writer.start()
        pipe.submit(*batches(1)[0])
        writer.join(LIMIT_S)
        assert not snapshot.is_open
    assert list(seen[0]) == [0, 1, 2, 3]


def test_tensors_with_gaps_and_of_any_layout_are_copied_as_they_are() -> None:
    """A copy of a tensor with gaps to memory of the same strides would go over memory that is not pinned."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gaps", torch.arange(24.0).reshape(4, 6)[:, ::2])
            self.register_buffer("turned", torch.arange(24.0).reshape(4, 6).t())
            self.register_buffer("last", torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
            self.register_buffer("one", torch.arange(3.0).expand(5, 3))
            self.register_buffer("empty", torch.zeros(0, 3))
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    first, *others = package()
    model = ALPackage([AL(ENC(Odd(), first.enc.b), first.ae), *others])
    wanted = {name: value.clone() for name, value in model[0].enc.f.named_buffers()}
    with Pipeline(model, ["cuda:0"]) as pipe:
        for name in ("gaps", "one"):  # ``module.to`` closes gaps
            moved = wanted[name].cuda()
            odd = torch.empty(*moved.shape[:-1], 2 * moved.shape[-1], device="cuda")[..., ::2]
            setattr(model[0].enc.f, name, odd.copy_(moved))
        found = pipe.snapshot().wait(LIMIT_S)[0].state["module"]
    assert all(torch.equal(found[f"enc.f.{name}"], value) for name, value in wanted.items())
