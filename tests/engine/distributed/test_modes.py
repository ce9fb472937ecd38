"""Layers are in the mode that the caller finds them in: what another thread still has to do must not show."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.training.exit_costs import exit_costs

from .lines import on_each, thread_ranks


def package() -> ALPackage:
    torch.manual_seed(0)
    first = LabelAE(nn.Linear(3, 4), nn.Linear(4, 3), classes=3)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2)]
    sides = [first, AE(nn.Linear(4, 4), nn.Linear(4, 4))]
    return ALPackage(
        [AL(ENC(block, nn.Linear(5, 4)), side, lr=1e-2) for block, side in zip(blocks, sides, strict=True)]
    )


@pytest.mark.parametrize("one", [False, True])
def test_after_predictions_the_layers_here_are_as_they_were_before(one: bool) -> None:
    """Symptom: exits that were calibrated on another model than the trained one, now and then.

    The layers on rank 0 went back to training when its worker came to it; by then the caller counted FLOPs with them,
    in what it took for evaluation, and batch norm learnt from that.
    """
    x = torch.randn(16, 5)

    def work(world: World) -> None:
        model = package()
        if world.rank:
            serve(model, world)
            return
        with DistributedPipeline(model, world) as pipe:
            layers = [layer for stage in pipe.stages for _, layer in stage.layers]
            before = [value.clone() for value in model.state_dict().values()]
            for _ in range(30):
                if one:
                    pipe.predict(x)
                else:
                    list(pipe.predict_exits([x]))
                assert model[0].training == model.training
                exit_costs(layers, x)
                assert all(map(torch.equal, before, model.state_dict().values()))

    with thread_ranks(2) as worlds:
        on_each(worlds, work)
