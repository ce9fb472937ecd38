"""The same as over threads, once with real processes and the groups of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World

from ..cases import Case, Layer, cosine, outcome, reference
from .processes import run
from .test_exactness import PAIRS, RICH, rebuilt, trained
from .test_replicas import shares

DRAWS = Case((Layer("batch norm", "AL", 7, 5), Layer("nn.Dropout", "own ENC", 6, 4, "sgd"), Layer(), Layer()),
             rows=(6, 8, 6, 5), seed=4)  # fmt: skip


def line(world: World) -> list[list[str]]:
    """One pipeline after the other; what differs from one process, on rank 0."""
    found = []
    for case, schedule in ((RICH, "pipelined"), (PAIRS, "pipelined"), (RICH, "al-fm")):
        left = trained(world, case.build(), case, schedule)
        found.append([] if left is None else left.differences(reference(case)))
    return found


@pytest.mark.slow
def test_four_processes_leave_what_one_leaves(tmp_path: Path) -> None:
    assert run(line, 4, tmp_path)[0] == [[], [], []]


def square(world: World) -> dict[str, torch.Tensor] | None:
    """Two stages in two replicas."""
    parts = shares(DRAWS, 3)
    package = DRAWS.build()

    def feed(epoch: int, first: int) -> Iterator[Any]:
        yield from parts[1][first:]

    if world.rank:
        return serve(package, world, threads=1, feed=feed, seed=4)
    with DistributedPipeline(package, world, threads=1, seed=4) as pipe:
        pipe.begin_feed(0)
        report = pipe.run(parts[0], cosine)
        snapshot = pipe.snapshot()
        prediction = pipe.predict(parts[0][0][0])
    assert report.samples == sum(DRAWS.rows)
    return outcome(rebuilt(DRAWS, snapshot), report.losses, [prediction]).tensors


@pytest.mark.slow
def test_two_stages_in_two_replicas_repeat_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        found.append(run(square, 4, tmp_path / turn, replicas=2)[0])
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
