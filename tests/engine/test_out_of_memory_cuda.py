"""Memory of a GPU that really runs out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.core.errors import OutOfMemoryError
from pipeal.engine import SCHEDULES
from pipeal.engine.runner.split import SplitWarning

pytestmark = pytest.mark.cuda

WIDE, ROWS = 16, 16
COPIES = 2**18
"""Of each row: 32 MiB a row in float64, and as much for each activation of that size."""


class Wide(nn.Module):
    """A block with little to learn that takes much memory, in proportion to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        many = out[:, None, :].expand(-1, COPIES, -1) + 1
        return torch.tanh(many * many).mean(1) + out


def package() -> ALPackage:
    torch.manual_seed(0)
    return ALPackage(
        [
            AL(ENC(f, nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), 0.01)
            for f in (nn.Linear(WIDE, WIDE), Wide(), nn.Linear(WIDE, WIDE))
        ]
    ).double()


def data(batches: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, WIDE, generator=draw).double(), torch.randn(ROWS, WIDE, generator=draw).double())
        for _ in range(batches)
    ]


@contextmanager
def room_for(mebibytes: int) -> Iterator[None]:
    """Within it, PyTorch gets no more of the GPU than that beyond what is in use."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mebibytes * 2**20) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def trained(schedule: str, stages: int = 3, **options: Any) -> tuple[list[Tensor], Any]:
    model = package()
    with Pipeline(model, ["cuda:0"] * stages, schedule, threads=1, **options) as pipe:
        report = pipe.run(data(3))
    return [value.cpu() for value in model.state_dict().values()], report


def test_the_message_has_what_was_asked_for_and_what_was_free() -> None:
    with (
        room_for(600),
        pytest.raises(OutOfMemoryError, match=r"layer 1 \(AL\), batch 0, device cuda:0: .*iB were asked for") as caught,
    ):
        trained("pipelined")
    assert "were free" in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("mebibytes", [400, 700, 1200])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_parts_a_batch_teaches_what_it_does_whole(schedule: str, mebibytes: int, stages: int) -> None:
    wanted, whole = trained(schedule, stages)
    assert whole.splits == [0, 0, 0]
    with room_for(mebibytes), warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitWarning)
        found, report = trained(schedule, stages, on_oom="split")
    assert report.splits == [0, 3, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(report.losses, whole.losses, rtol=1e-6, atol=1e-6)
