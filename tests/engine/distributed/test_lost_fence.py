"""A snapshot that will not come back because a rank is lost: whoever waits for it is told."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE
from pipeal.core.errors import PeerLostError
from pipeal.engine.distributed.follower import Server
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.engine.state.snapshot import LayerState, Snapshot

from .lines import thread_ranks
from .ranks import each


class Stuck(nn.Linear):
    gate = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.gate.wait(120)
        return super().forward(x)


def package_with(*blocks: nn.Module) -> ALPackage:
    torch.manual_seed(0)
    sides = [LabelAE(nn.Linear(3, 4), nn.Linear(4, 3), classes=3), AE(nn.Linear(4, 4), nn.Linear(4, 4))]
    return ALPackage([AL(ENC(f, nn.Linear(5, 4)), side, lr=1e-2) for f, side in zip(blocks, sides, strict=True)])


def test_who_waits_for_a_fence_of_a_lost_rank_is_told_at_once() -> None:
    """Symptom: rank 0 looked at what was learnt before an evaluation, and waited for minutes behind a cable that was
    cut."""
    Stuck.gate.clear()

    def work(world: World) -> None:
        package = package_with(nn.Linear(5, 5), Stuck(5, 5))
        if world.rank:
            serve(package, world)
            return
        with DistributedPipeline(package, world) as pipe:
            pipe.submit(torch.randn(4, 5), torch.arange(4) % 3)
            snapshot = pipe.snapshot()
            threading.Timer(0.3, worlds[1].fail, [ValueError("no more")]).start()
            begin = monotonic()
            with pytest.raises(PeerLostError, match="no more"):
                snapshot.wait(120)
            assert monotonic() - begin < 60
            Stuck.gate.set()
            raise PeerLostError("seen")

    with thread_ranks(2) as worlds:
        first, _ = each(worlds, work)
        assert isinstance(first, PeerLostError), first


def test_a_state_that_is_kept_only_after_the_last_message_leaves_no_thread_behind() -> None:
    """Symptom: it was sent to a rank that received no more; the thread waited for ever for it to be taken."""
    keeping, gone = threading.Event(), threading.Event()
    say_farewell = Server._say_farewell

    def say_it(server: Server) -> None:
        say_farewell(server)
        gone.set()

    def keep(snapshot: Snapshot, states: Mapping[int, LayerState]) -> Mapping[str, Any]:
        keeping.set()
        assert gone.wait(120)
        return {"layers": sorted(states)}

    def work(world: World) -> None:
        package = package_with(nn.Linear(5, 5), nn.Linear(5, 5))
        if world.rank:
            serve(package, world, on_snapshot=keep)
            return
        with DistributedPipeline(package, world) as pipe:
            pipe.submit(torch.randn(4, 5), torch.arange(4) % 3)
            pipe.snapshot()
            assert keeping.wait(120)
            raise ValueError("no more")

    with patch.object(Server, "_say_farewell", say_it), thread_ranks(2) as worlds:
        first, second = each(worlds, work)
    assert isinstance(first, ValueError), first
    assert "no more" in str(second)
