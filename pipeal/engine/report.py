"""What a run amounted to; ``print`` shows it as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.trace import StageTimes


@dataclass(frozen=True, repr=False)
class RunReport:
    """What happened since the last report; ``print(report)`` shows a short table.

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
        layers: For each row of ``losses``, the number of its layer.
        devices: For each stage, where it is.
        sizes: For each stage, how many layers it has; of one layer on several devices, how many blocks are on each.
    """

    batches: int
    samples: int
    seconds: float
    losses: list[Tensor]
    stages: list[StageTimes]
    splits: list[int]
    overflows: list[int]
    layers: list[int]
    devices: list[str]
    sizes: list[int]

    @property
    def non_finite(self) -> list[int]:
        """For each row of ``losses``, on how many batches one was not finite: with ``skip``, those left out."""
        return [int((~layer.isfinite()).any(dim=1).sum()) for layer in self.losses]

    @property
    def busy_share(self) -> list[float]:
        """For each stage, the share of the time in which it worked; on a GPU, in which its host had work open there."""
        return [stage.busy_s / self.seconds if self.seconds else 0.0 for stage in self.stages]

    @property
    def kernel_share(self) -> list[float | None]:
        """For each stage on a GPU, the share of the time in which it had kernels to run for certain, so at least."""
        return [
            None if stage.kernels_s is None else stage.kernels_s / self.seconds if self.seconds else 0.0
            for stage in self.stages
        ]

    def __repr__(self) -> str:
        return (
            f"RunReport(batches={self.batches}, samples={self.samples}, seconds={self.seconds:.6g}, "
            f"stages={len(self.stages)})"
        )

    def __str__(self) -> str:
        if not self.batches:
            return "no batches since the last report; an iterator gives its batches only once"
        rate = f" ({self.samples / self.seconds:,.0f} samples/s)" if self.samples and self.seconds else ""
        lines = [f"{self.batches:,} batches, {self.samples:,} samples in {self.seconds:.3g} s{rate}"]
        places = zip(
            self.devices, layers_of_stages(self.sizes), self.busy_share, self.kernel_share, self.stages, strict=True
        )
        on_gpus = any(share is not None for share in self.kernel_share)
        lines += _aligned(
            ("stage", "device", "layers", *(("host-open", "kernel-busy") if on_gpus else ("busy",)), "waiting for"),
            [
                (
                    *(str(number), device, _span(own), f"{busy:.0%}"),
                    *([] if not on_gpus else [""] if kernels is None else [f">= {kernels:.0%}"]),
                    self._waits(stage),
                )
                for number, (device, own, busy, kernels, stage) in enumerate(places)
            ],
        )
        rows = [
            (str(number), "  ".join(f"{loss:#8.4g}" for loss in losses[-1].tolist()))
            for number, losses in zip(self.layers, self.losses, strict=True)
        ]
        lines += _aligned(("layer", "losses of the last batch"), rows) if rows else []
        told = {"learnt from in parts": self.splits, "updates left out in fp16": self.overflows}
        lines += [f"{what}, by layer: {counts}" for what, counts in told.items() if any(counts)]
        return "\n".join(lines)

    def _waits(self, stage: StageTimes) -> str:
        """What the stage waited for, in shares of the time, longest first."""
        shares = {reason: seconds / self.seconds for reason, seconds in stage.waiting.items() if self.seconds}
        longest = sorted(shares, key=lambda reason: -shares[reason])
        return ", ".join(f"{reason} {shares[reason]:.0%}" for reason in longest if shares[reason] >= 0.005)


def _span(layers: range) -> str:
    """
    >>> _span(range(2, 5)), _span(range(5, 6))
    ('2-4', '5')
    """
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the last column stands to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in (heads, *rows)
    ]
