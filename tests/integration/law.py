"""Law 1, as the tests of all models ask it: what a training leaves behind, to the last bit."""

from __future__ import annotations

import pytest
from torch import Tensor

from pipeal import ALPackage, Pipeline
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.engine.runner.precision import _cpu_has_fp16
from pipeal.training.learning_rate import Course, epoch_scale

NEEDS_FP16 = pytest.mark.skipif(not _cpu_has_fp16(), reason="this CPU has no arithmetic in fp16")
STAGES = pytest.mark.parametrize("stages", [(1, 3), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
"""Numbers of stages: two of them are tried in every ``make test``, the others in ``make test-all``."""

Batches = list[tuple[Tensor, Tensor]]


def left_behind(
    package: ALPackage, data: Batches, schedule: str, stages: int, depth: int = 2, precision: str = "fp32"
) -> list[Tensor]:
    """Weights, buffers, optimizer states, losses and all predictions, after a warm-up and a falling learning rate."""
    course = Course(1, "cosine", "batch", 0.1, warmup=2)
    scale = epoch_scale(course, epoch=0, batches=len(data), first_batch=0)
    with Pipeline(
        package,
        ["cpu"] * stages,
        schedule,
        queue_depth=depth,
        seed=3,
        threads=1,
        precision=precision,  # type: ignore[arg-type]
    ) as pipe:
        report = pipe.run(data, lr_scale=scale)
        with intra_op_threads(2):  # the caller's own number changes nothing
            inputs = [x for x, _ in data]
            predicted = [pipe.predict(x) for x in inputs]
            predicted += pipe.predict_each(inputs)
            predicted += [logits for exits in pipe.predict_exits(inputs) for logits in exits]
    left = [*package.state_dict().values(), *report.losses, *predicted]
    for layer in package:
        for optimizer in (layer.enc_opt, layer.ae_opt) if hasattr(layer, "enc_opt") else (layer.opt,):
            left += [value for state in optimizer.state.values() for value in state.values()]
    return left
