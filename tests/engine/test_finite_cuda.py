"""Losses on a GPU that are not finite; one GPU is enough, several stages may share it."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Dropout, Pipeline
from pipeal.core.errors import NonFiniteError
from pipeal.engine import SCHEDULES

pytestmark = pytest.mark.cuda

WIDE = 32
PLACEMENTS = {
    "one stage": ["cuda:0"],
    "three stages on one GPU": ["cuda:0"] * 3,
    "cpu, cuda, cpu": ["cpu", "cuda:0", "cpu"],
    "cuda, cpu, cuda": ["cuda:0", "cpu", "cuda:0"],
}


def package() -> ALPackage:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.GELU(), Dropout(0.2))

    return ALPackage(
        [AL(ENC(block(), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))) for _ in range(3)]
    )


def data(batches: int, poisoned: dict[int, float]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    found = [(torch.randn(8, WIDE, generator=draw), torch.randn(8, WIDE, generator=draw)) for _ in range(batches)]
    for batch, value in poisoned.items():
        found[batch][0][3, 2] = value
    return found


@pytest.mark.parametrize("batches", [6, 200])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_ends_the_run_at_the_drain_at_the_latest(placement: str, schedule: str, batches: int) -> None:
    """Whichever layer looks first: losses of a later one may arrive between two looks of an earlier one."""
    with (
        pytest.raises(NonFiniteError, match=r"has a loss that is not finite on batch 5: nan"),
        Pipeline(package(), PLACEMENTS[placement], schedule, threads=1) as pipe,
    ):
        pipe.run(data(batches, {5: nan}))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_fence_keeps_weights_that_learnt_from_it(placement: str) -> None:
    with pytest.raises(NonFiniteError), Pipeline(package(), PLACEMENTS[placement], threads=1) as pipe:  # noqa: PT012
        for x, y in data(7, {5: inf}):
            pipe.submit(x, y)
        pipe.snapshot().wait(20)


def test_nobody_waits_for_the_losses() -> None:
    """PyTorch says where an operator waits for the device; forty forwards have their losses looked at once."""
    with Pipeline(package(), ["cuda:0"], "sequential") as pipe:
        batches = [(x.cuda(), y.cuda()) for x, y in data(20, {})]
        pipe.run(batches)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x, y in batches:
                pipe.submit(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pipe.drain().non_finite == [0, 0, 0]


def trained(devices: list[str], schedule: str, batches: list[Any], **options: Any) -> tuple[list[Tensor], Any]:
    model = package()
    with Pipeline(model, devices, schedule, threads=1, **options) as pipe:
        report = pipe.run(batches, lambda batch: 1 / (1 + batch))
    state = [value.cpu() for value in model.state_dict().values()]
    for layer in model:
        for optimizer in (layer.enc_opt, layer.ae_opt):
            state += [v.cpu() for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return state, report


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_batch_that_is_left_out_leaves_nothing_behind(placement: str) -> None:
    """The last batches, so that the numbers of those before, and so what they draw and learn, are the same."""
    devices = PLACEMENTS[placement]
    wanted, _ = trained(devices, "sequential", data(10, {}))
    poisoned = [*data(10, {}), *data(2, {0: nan, 1: -inf})]
    for schedule in SCHEDULES:
        state, report = trained(devices, schedule, poisoned, on_non_finite="skip")
        assert report.non_finite == [2, 2, 2]
        assert all(map(torch.equal, state, wanted)), schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_follows_a_batch_that_is_left_out_is_learnt(schedule: str) -> None:
    poisoned = data(12, {0: nan, 4: inf})
    wanted, _ = trained(["cuda:0"], "sequential", poisoned, on_non_finite="skip")
    state, report = trained(["cuda:0"] * 3, schedule, poisoned, on_non_finite="skip")
    assert report.non_finite == [2, 2, 2]
    assert all(map(torch.equal, state, wanted))
    assert all(value.isfinite().all() for value in state)
