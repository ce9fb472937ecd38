"""What a run amounted to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipeal.engine.trace import StageTimes


@dataclass(frozen=True)
class RunReport:
    """What happened since the last report.

    Attributes:
        batches: The number of batches.
        samples: The number of samples in them.
        seconds: The time from the first submission to the end of the last update.
        losses: For each layer, ``(batches, losses)`` float32 on the CPU: for an AL layer the associated loss and
            the autoencoder loss. A layer that reports none has no row.
        stages: For each stage, how it spent the time.
    """

    batches: int
    samples: int
    seconds: float
    losses: list[Tensor]
    stages: list[StageTimes]

    @property
    def busy_share(self) -> list[float]:
        """For each stage, the share of the time in which it worked."""
        return [stage.busy_s / self.seconds if self.seconds else 0.0 for stage in self.stages]
