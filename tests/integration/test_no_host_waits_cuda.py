"""The host never waits for a GPU between two batches: PyTorch's own check, on every shipped model.

The mode is the process's: it holds in the workers as in the caller. It sees operators and copies that wait, and waits
for a stream; not those for an event, which the engine has where it keeps the host near the device, and under ``skip``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeal import Pipeline, Window
from pipeal.training.learning_rate import Course, epoch_scale

from .blind import MODELS, Batches, batches, build

pytestmark = pytest.mark.cuda

COUNT = 40
"""Forwards of a stage: more than have their losses looked at together."""

WARM_UP = epoch_scale(Course(1, "cosine", "batch", 0.1, warmup=3), epoch=0, batches=COUNT, first_batch=0)
EVERY_MODEL = pytest.mark.parametrize(("name", "form"), MODELS)


@contextmanager
def refusing_waits() -> Iterator[None]:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def data(name: str, where: str) -> Batches:
    """As loaders hand it on: in plain or pinned memory, or made on the GPU."""
    found = (batches(name) * COUNT)[:COUNT]
    if where == "pinned":
        return [(x.pin_memory(), y.pin_memory()) for x, y in found]
    return [(x.to(where), y.to(where)) for x, y in found]


def train(name: str, form: str, devices: list[str], schedule: str, where: str, **options: Any) -> list[Tensor]:
    """The losses of the first batches, in which optimizers make their states and kernels are chosen, then no waits."""
    package = build(name, form)
    if name in ("vgg", "resnet"):
        package.to(memory_format=torch.channels_last)
    ready = data(name, where)
    with Pipeline(package, devices, schedule, trace=Window(0, 4), **options) as pipe:
        losses = pipe.run(ready[:6], WARM_UP).losses
        with refusing_waits():
            for x, y in ready[6:]:
                pipe.submit(x, y, WARM_UP(pipe.next_batch))
            pipe._open().drain()  # a report does wait: it reads the losses
        report = pipe.drain()
    assert report.batches == COUNT - 6
    assert all(rows.isfinite().all() for rows in report.losses)
    return losses


def stages(form: str, schedule: str) -> list[str]:
    return ["cuda:0"] * (1 if schedule == "sequential" or form == "bp" else 4)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(("schedule", "where"), [("sequential", "cuda:0"), ("pipelined", "pinned"), ("al-fm", "cpu")])
@EVERY_MODEL
def test_training_never_waits(name: str, form: str, schedule: str, where: str, policy: str) -> None:
    train(name, form, stages(form, schedule), schedule, where, on_non_finite=policy)


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_compiled_training_never_waits(name: str) -> None:
    """The first batches have every shape: after them, nothing is compiled, and stages work side by side."""
    train(name, "al", ["cuda:0"] * 4, "pipelined", "pinned", compile="static")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@EVERY_MODEL
def test_where_batches_come_from_does_not_matter(name: str, form: str, precision: str) -> None:
    """Close, not equal: some kernels of attention and pooling add up in racing order."""
    wanted, *found = (
        train(name, form, stages(form, "pipelined"), "pipelined", where, precision=precision)
        for where in ("cuda:0", "pinned", "cpu")
    )
    for losses in found:
        torch.testing.assert_close(losses, wanted, rtol=2e-2, atol=1e-3)


@EVERY_MODEL
def test_predictions_never_wait(name: str, form: str) -> None:
    package = build(name, form)
    inputs = [x for x, _ in data(name, "pinned")]
    pipe = Pipeline(package, ["cuda:0"] * len(package))
    wanted = [logits.cpu() for logits in pipe.predict_each(inputs)]
    with refusing_waits():
        found = list(pipe.predict_each(inputs))
        exits = list(pipe.predict_exits(inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
    assert len(exits) == COUNT


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@EVERY_MODEL
def test_packets_between_two_gpus_make_nobody_wait(name: str, form: str, policy: str) -> None:
    """A copy is for the GPUs to wait for. A model of one layer gets its batches from the other GPU."""
    devices = [f"cuda:{number % 2}" for number in range(len(stages(form, "pipelined")))]
    found = train(name, form, devices, "pipelined", "cuda:1", on_non_finite=policy)
    wanted = train(name, form, ["cuda:0"], "sequential", "cuda:0", on_non_finite=policy)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
