"""In fp16, the layers of a rank scale their losses from when it begins to serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.engine.runner import precision as settings

from .lines import on_each, thread_ranks


def package() -> ALPackage:
    torch.manual_seed(0)
    return ALPackage(
        [AL(ENC(nn.Linear(5, 5), nn.Linear(5, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1e-2) for _ in range(2)]
    )


def test_the_layers_of_every_rank_update_with_factors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_cpu_has_fp16", lambda: True)
    packages = [package(), package()]
    x, y = torch.linspace(-1, 1, 15).view(3, 5), torch.linspace(0, 1, 12).view(3, 4)

    def work(world: World) -> None:
        options: dict[str, Any] = {"threads": 1, "precision": "fp16", "stall_timeout_s": 30.0}
        if world.rank:
            serve(packages[1], world, **options)
            return
        with DistributedPipeline(packages[0], world, **options) as pipe:
            assert pipe.run([(x, y)] * 2).overflows == [0, 0]

    with thread_ranks(2) as worlds:
        on_each(worlds, work)
    for layer in (packages[0][0], packages[1][1]):
        assert isinstance(layer, AL)
        assert layer.scaler is not None
        assert layer.scaler.good == 2
