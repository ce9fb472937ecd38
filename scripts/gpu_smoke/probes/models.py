"""What probes train: models and batches of ``scripts/bench/gpu.py``, of published size on a GPU, else of toy size."""

from __future__ import annotations

from typing import Any

from gpu import SIZES, batches, build
from torch import Tensor

from gpu_smoke.place import Place
from pipeal import ALPackage, Pipeline

STAGES = 4
NOTHING_SEEN = "PyTorch's profiler saw no kernel here"


def package(place: Place, model: str, form: str = "al") -> ALPackage:
    """``transformer`` or ``resnet``."""
    return build(model, form, SIZES["toy" if place.stand_in else "published"])


def data(place: Place, model: str, count: int = 8, size: str = "published") -> list[tuple[Tensor, Tensor]]:
    """Random batches, in pinned memory where there is a GPU."""
    return batches(model, SIZES["toy" if place.stand_in else size], count)


def pipeline(place: Place, layers: Any, stages: int = STAGES, schedule: str = "pipelined", **options: Any) -> Pipeline:
    """All stages on the one device, in bf16 on a GPU."""
    precision = "fp32" if place.stand_in else "bf16"
    return Pipeline(layers, [place.device] * stages, schedule, **{"precision": precision, **options})
