"""Law 1 for the text models as they are shipped: dropout, a falling learning rate, every schedule and placement."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pipeal import ALPackage
from pipeal.engine import SCHEDULES
from pipeal.methods.al import TouchedAdam, touch_rows
from pipeal.models import TextDims, build_text
from tests.integration.law import NEEDS_FP16, STAGES, left_behind

DIMS = TextDims(embedding=12, hidden=10, code=8, heads=2, dropout=0.3)
BATCHES = 6


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Lengths differ within and between batches, and the last batch is smaller."""
    random = torch.Generator().manual_seed(1)
    made = []
    for number in range(BATCHES):
        rows, longest = (5, 3) if number == BATCHES - 1 else (9, 4 + number)
        x = torch.randint(2, 50, (rows, longest), generator=random)
        lengths = torch.randint(1, longest + 1, (rows, 1), generator=random)
        x[torch.arange(longest) >= lengths] = 0
        made.append((x, torch.randint(4, (rows,), generator=random)))
    return made


def built(model: str, mode: str, updates: str = "dense") -> ALPackage:
    torch.manual_seed(0)
    optimizer = TouchedAdam if updates == "touched" else None
    package = build_text(model, mode, vocab_size=50, classes=4, dims=DIMS, lr=1e-2, optimizer=optimizer)  # type: ignore[arg-type]
    if updates == "touched":
        assert touch_rows(package) == 1
    return package


def trained(
    model: str, mode: str, schedule: str, stages: int, depth: int, precision: str, updates: str = "dense"
) -> list[torch.Tensor]:
    """Everything that training a new model leaves."""
    return left_behind(built(model, mode, updates), batches(), schedule, stages, depth, precision)


@STAGES
@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        pytest.param("bf16", marks=pytest.mark.slow),
        pytest.param("fp16", marks=[NEEDS_FP16, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_every_schedule_leaves_what_sequential_leaves(model: str, precision: str, stages: tuple[int, ...]) -> None:
    expected = trained(model, "al", "sequential", 1, 1, precision)
    for schedule, count, depth in product(SCHEDULES, stages, (1, 3)):
        found = trained(model, "al", schedule, count, depth, precision)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (schedule, count, depth)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=NEEDS_FP16)])
@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_backpropagation_runs_in_the_same_engine(model: str, precision: str) -> None:
    expected = trained(model, "bp", "sequential", 1, 1, precision)
    assert all(map(torch.equal, trained(model, "bp", "pipelined", 1, 2, precision), expected))


@pytest.mark.parametrize("model", ["lstm", "transformer"])
@pytest.mark.parametrize("mode", ["al", "bp"])
def test_rows_that_are_updated_where_they_were_touched_are_so_under_every_schedule(model: str, mode: str) -> None:
    expected = trained(model, mode, "sequential", 1, 1, "fp32", "touched")
    dense = trained(model, mode, "sequential", 1, 1, "fp32")
    assert not all(map(torch.equal, dense, expected))  # named another optimizer, and it is one
    for schedule in SCHEDULES:
        for stages in (1, 4) if mode == "al" else (1,):
            found = trained(model, mode, schedule, stages, 2, "fp32", "touched")
            assert all(map(torch.equal, found, expected)), (schedule, stages)


@pytest.mark.parametrize("updates", ["dense", "touched"])
@pytest.mark.parametrize("mode", ["al", "bp"])
def test_the_vector_of_the_padding_stays_zero(mode: str, updates: str) -> None:
    """The table of an embedding that gives sparse gradients does not know of the padding."""
    package = built("transformer", mode, updates)
    table = next(part for part in package.modules() if isinstance(part, torch.nn.Embedding))
    before = table.weight.detach().clone()
    left_behind(package, batches(), "sequential", 1)
    assert not table.weight[0].any()
    assert not torch.equal(table.weight, before)
