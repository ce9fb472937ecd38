"""What a run amounted to."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        splits: For each layer of the model, how many batches did not fit into memory and were learnt from in parts.
        overflows: For each layer of the model, how many updates were left out because its gradients overflowed in
            fp16: all that its state counts, and so those before this report as well.
    """

    batches: int
    samples: int
    seconds: float
    losses: list[Tensor]
    stages: list[StageTimes]
    splits: list[int] = field(default_factory=list)
    overflows: list[int] = field(default_factory=list)

    @property
    def non_finite(self) -> list[int]:
        """For each row of ``losses``, on how many batches one was not finite: with ``skip``, those left out."""
        return [int((~layer.isfinite()).any(dim=1).sum()) for layer in self.losses]

    @property
    def busy_share(self) -> list[float]:
        """For each stage, the share of the time in which it worked."""
        return [stage.busy_s / self.seconds if self.seconds else 0.0 for stage in self.stages]
