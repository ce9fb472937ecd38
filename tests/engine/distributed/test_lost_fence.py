"""A fence that will not come back because a rank is lost: whoever waits for it is told."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE
from pipeal.engine.distributed.front import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.errors import PeerLostError

from .lines import thread_ranks
from .ranks import each


class Stuck(nn.Linear):
    gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.gate.wait(30)
        return super().forward(x)


def test_who_waits_for_a_fence_of_a_lost_rank_is_told_at_once() -> None:
    """Symptom: rank 0 looked at what was learnt before an evaluation, and waited for minutes behind a cable that was
    cut."""
    Stuck.gate.clear()

    def work(world: World) -> None:
        torch.manual_seed(0)
        sides = [LabelAE(nn.Linear(3, 4), nn.Linear(4, 3), classes=3), AE(nn.Linear(4, 4), nn.Linear(4, 4))]
        blocks = [nn.Linear(5, 5), Stuck(5, 5)]
        package = ALPackage([AL(ENC(f, nn.Linear(5, 4)), side, lr=1e-2) for f, side in zip(blocks, sides, strict=True)])
        if world.rank:
            serve(package, world)
            return
        with DistributedPipeline(package, world) as pipe:
            pipe.submit(torch.randn(4, 5), torch.arange(4) % 3)
            fence = pipe.fence()
            threading.Timer(0.3, worlds[1].fail, [ValueError("no more")]).start()
            begin = monotonic()
            with pytest.raises(PeerLostError, match="no more"):
                fence.wait(30)
            assert monotonic() - begin < 10
            Stuck.gate.set()
            raise PeerLostError("seen")

    with thread_ranks(2) as worlds:
        first, _ = each(worlds, work)
        assert isinstance(first, PeerLostError), first
