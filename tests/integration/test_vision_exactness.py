"""Law 1 for the vision models: batch norm, a smaller last batch, both memory layouts, every schedule and placement."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from pipeal.engine import SCHEDULES
from pipeal.models import VISION_MODELS, VisionDims, build_vision
from tests.integration.law import NEEDS_FP16, STAGES, Batches, left_behind

DIMS = VisionDims(size=16, hidden=10, code=8, width=0.05)
EVERY_MODEL = pytest.mark.parametrize("model", VISION_MODELS)


def batches(layout: torch.memory_format) -> Batches:
    random = torch.Generator().manual_seed(1)

    def batch(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, 16, 16, generator=random).contiguous(memory_format=layout)
        return images, torch.randint(5, (count,), generator=random)

    return [*(batch(6) for _ in range(4)), batch(3)]


def trained(
    model: str, mode: str, schedule: str, stages: int, precision: str = "fp32", layout: str = "channels_last"
) -> list[Tensor]:
    torch.manual_seed(0)
    package = build_vision(model, mode, classes=5, dims=DIMS, lr=1e-2)  # type: ignore[arg-type]
    memory_format = getattr(torch, layout)
    return left_behind(
        package.to(memory_format=memory_format), batches(memory_format), schedule, stages, precision=precision
    )


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param("fp32", "contiguous_format", marks=pytest.mark.slow),
        ("fp32", "channels_last"),
        pytest.param("bf16", "channels_last", marks=pytest.mark.slow),
        pytest.param("fp16", "channels_last", marks=[NEEDS_FP16, pytest.mark.slow]),
    ],
)
@STAGES
@EVERY_MODEL
def test_every_schedule_leaves_what_sequential_leaves(
    model: str, stages: tuple[int, ...], precision: str, layout: str
) -> None:
    expected = trained(model, "al", "sequential", 1, precision, layout)
    assert all(tensor.isfinite().all() for tensor in expected)
    for schedule, count in product(SCHEDULES, stages):
        found = trained(model, "al", schedule, count, precision, layout)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (schedule, count)


@EVERY_MODEL
def test_backpropagation_runs_in_the_same_engine(model: str) -> None:
    expected = trained(model, "bp", "sequential", 1)
    assert all(map(torch.equal, trained(model, "bp", "pipelined", 1), expected))
