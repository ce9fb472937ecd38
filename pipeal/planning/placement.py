"""A placement: which layers go where, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where layers go, and what a trial of it took.

    Attributes:
        devices: One device per stage.
        sizes: The number of layers of each stage.
        threads: Intra-op threads of each CPU worker.
        seconds_per_batch: Measured; None where nothing else was possible.
        stage_s: What the layers of each stage took per batch, alone on its device; None where that was not measured.
    """

    devices: list[str]
    sizes: list[int]
    threads: int
    seconds_per_batch: float | None = None
    stage_s: tuple[float, ...] | None = None

    def __str__(self) -> str:
        stages = " | ".join(
            f"{device}: {size} layer{'s' if size > 1 else ''}"
            for device, size in zip(self.devices, self.sizes, strict=True)
        )
        return f"{stages} ({self.threads} thread{'s' if self.threads > 1 else ''} each)"
