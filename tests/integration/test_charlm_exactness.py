"""Law 1 for the language model as it is shipped: dropout, a falling learning rate, every schedule and placement."""

from __future__ import annotations

import pytest
import torch

from pipeal import ALPackage, Pipeline
from pipeal.data import RandomBlocks
from pipeal.engine import SCHEDULES
from pipeal.models import CharDims, build_language, generate
from pipeal.run.build_language import adam
from tests.engine.distributed.lines import thread_ranks
from tests.engine.distributed.test_predictions import with_pipe
from tests.integration.law import NEEDS_FP16, STAGES, left_behind

DIMS = CharDims(block=6, width=12, heads=3, layers=4, dropout=0.3)


def trained(mode: str, labels: str, schedule: str, stages: int, depth: int, precision: str) -> list[torch.Tensor]:
    """Everything that training a new model leaves."""
    torch.manual_seed(0)
    dims = CharDims(**{name: getattr(DIMS, name) for name in DIMS.__slots__} | {"labels": labels})
    package = build_language("charlm", mode, characters=20, dims=dims, lr=1e-2, optimizer=adam)  # type: ignore[arg-type]
    text = torch.randint(20, (500,), generator=torch.Generator().manual_seed(1))
    batches = RandomBlocks(text, block=6, batch_size=5, batches=6, seed=0)
    return left_behind(package, [(batch.x, batch.y) for batch in batches], schedule, stages, depth, precision)


@pytest.mark.parametrize(
    ("labels", "precision"),
    [
        ("codes", "fp32"),
        pytest.param("codes", "bf16", marks=pytest.mark.slow),
        pytest.param("codes", "fp16", marks=[NEEDS_FP16, pytest.mark.slow]),
        pytest.param("one-hot", "fp32", marks=pytest.mark.slow),
        pytest.param("published", "fp32", marks=pytest.mark.slow),
    ],
)
@STAGES
def test_every_schedule_leaves_what_sequential_leaves(labels: str, precision: str, stages: tuple[int, ...]) -> None:
    expected = trained("al", labels, "sequential", 1, 1, precision)
    for schedule in SCHEDULES:
        for count in stages:
            found = trained("al", labels, schedule, count, 2, precision)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), (schedule, count)


def test_backpropagation_runs_in_the_same_engine() -> None:
    expected = trained("bp", "codes", "sequential", 1, 1, "fp32")
    assert all(map(torch.equal, trained("bp", "codes", "pipelined", 1, 2, "fp32"), expected))


def test_the_same_text_is_written_by_any_number_of_stages_and_ranks() -> None:
    """In one process it was written without the pipeline, and so in another precision than over several, which in turn
    met a new shape with each character, and compiled for it."""
    shapes: set[tuple[int, ...]] = set()

    def model() -> ALPackage:
        torch.manual_seed(0)
        return build_language("charlm", "al", characters=20, dims=DIMS)

    def write(pipe: Pipeline) -> list[int]:
        def look(x: torch.Tensor) -> torch.Tensor:
            shapes.add(tuple(x.shape))
            return pipe.predict(x)

        return generate(look, torch.tensor([3, 1]), length=20, block=6, seed=1).tolist()

    texts = []
    for stages in (1, 2, 4):
        with Pipeline(model(), ["cpu"] * stages, threads=1, precision="bf16") as pipe:
            texts.append(write(pipe))
    with thread_ranks(2) as worlds:
        texts.append(with_pipe(worlds, [model(), model()], write, precision="bf16"))
    assert all(text == texts[0] for text in texts)
    assert len({*texts[0]}) > 5
    assert shapes == {(1, 6)}
