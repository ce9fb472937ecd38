"""The host never waits for a device between two batches: every shipped model, on a device that nobody can read.

``test_no_host_waits_cuda.py`` asks PyTorch's own check on a GPU; this runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeal.core.rng
import pipeal.engine.pipeline
import pipeal.engine.runner.nonfinite
import pipeal.engine.stage
from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline
from pipeal.training.learning_rate import Course, epoch_scale

from .blind import CLASSES, MODELS, BlindDevice, batches, build, uploads_refused

WARM_UP = epoch_scale(Course(1, "cosine", "batch", 0.1, warmup=2), epoch=0, batches=3, first_batch=0)
EVERY_MODEL = pytest.mark.parametrize(("name", "form"), MODELS)


@pytest.fixture(autouse=True)
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pipelines work on ``meta``, which has no autocast and no generators of its own."""
    monkeypatch.setattr(pipeal.engine.devices.assignment, "parse_device", torch.device)
    monkeypatch.setattr(pipeal.engine.pipeline, "open_device", lambda _: BlindDevice())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(pipeal.core.rng, "generator", lambda _: None)
    monkeypatch.setattr(pipeal.engine.stage, "autocast", lambda *_: nullcontext())
    monkeypatch.setattr(pipeal.engine.runner.nonfinite, "LOOK_EVERY", 2)


def on_meta(make: Callable[[], ALPackage]) -> ALPackage:
    with torch.device("meta"):
        return make()


def train(package: ALPackage, data: list[Any], schedule: str, **options: Any) -> None:
    """Without what waits because it is asked to: reports and the leaving of the pipeline read values."""
    stages = 1 if schedule == "sequential" else len(package)
    watched = (
        uploads_refused() if schedule == "sequential" else nullcontext()
    )  # a mode is one thread's, and so is the caller
    with Pipeline(package, ["meta"] * stages, schedule, threads=1, **options) as pipe:
        with watched:
            for batch, (x, y) in enumerate(data):
                pipe.submit(x, y, WARM_UP(batch))
        pipe._open().drain()


@pytest.mark.parametrize(
    ("schedule", "policy"), [("pipelined", "skip"), pytest.param("sequential", "raise", marks=pytest.mark.slow)]
)
@EVERY_MODEL
def test_forward_backward_and_update_read_nothing(name: str, form: str, schedule: str, policy: str) -> None:
    # Adam in its fused form is for devices with kernels; what optimizers of PyTorch's do is its own affair.
    package = on_meta(lambda: build(name, form, optimizer=torch.optim.SGD))
    train(package, batches(name, 3), schedule, on_non_finite=policy)


@EVERY_MODEL
def test_predictions_read_nothing(name: str, form: str) -> None:
    package = on_meta(lambda: build(name, form))
    pipe = Pipeline(package, ["meta"] * len(package), threads=1)
    inputs = [x for x, _ in batches(name, 2)]
    found = [*pipe.predict_each(inputs), *(exits[-1] for exits in pipe.predict_exits(inputs))]
    assert [one.shape for one in found] == [(len(x), CLASSES) for x in inputs * 2]
    assert pipe.predict(inputs[0]).device.type == "meta"


class Reads(nn.Module):
    """A block of a user's own that makes the host wait."""

    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        self.how(x)
        return self.linear(x)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a choice by a mask": lambda x: x[x > 0],
    "tolist": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x + 1),
    "repeats": lambda x: torch.arange(len(x), device=x.device).repeat_interleave(x[:, 0].long()),
    "unique": lambda x: x.unique(),
}
UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a number": lambda x: torch.tensor(1.0, device=x.device),
    "to": lambda x: torch.ones(3).to(x.device),
    "copy_": lambda x: torch.empty(3, device=x.device).copy_(torch.ones(3)),
    "setitem": lambda x: (x * 1).__setitem__(slice(2), torch.ones(2, 8)),
}


def a_block_that(how: Callable[[Tensor], object]) -> ALPackage:
    side = LabelAE(nn.Linear(4, 8), nn.Linear(8, 4), 4)
    second = AE(nn.Linear(8, 8), nn.Linear(8, 8))
    blocks = [nn.Linear(8, 8), Reads(how)]
    pairs = zip(blocks, (side, second), strict=True)
    return ALPackage([AL(ENC(f, nn.Linear(8, 8)), ae, optimizer=torch.optim.SGD) for f, ae in pairs])


DATA = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))] * 2


@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
@pytest.mark.parametrize("how", WAITS)
def test_what_makes_the_host_wait_is_found(how: str, schedule: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        train(on_meta(lambda: a_block_that(WAITS[how])), DATA, schedule)


@pytest.mark.parametrize("how", UPLOADS)
def test_what_copies_from_pageable_memory_is_found(how: str) -> None:
    with pytest.raises(AssertionError, match="copies from pageable memory"):
        train(on_meta(lambda: a_block_that(UPLOADS[how])), DATA, "sequential")
