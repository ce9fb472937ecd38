"""What reading PyTorch's source predicts of a first GPU, and the probe that looks whether it is so.

This file imports no torch: it is read where torch may be broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """A prediction.

    Attributes:
        number: Its number, which commits and notes call it by.
        text: What is predicted.
        probe: ``module:function``; it takes a :class:`~gpu_smoke.place.Place` and returns a :class:`Finding`.
        limit_s: How long the probe may take.
    """

    number: int
    text: str
    probe: str
    limit_s: float = 45.0


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        verdict: Whether the prediction is true of PyTorch and CUDA here; None where it could not be tested, or is of
            pipeal alone.
        figure: What was measured, in words.
        how: How, and from which size on the prediction counts as true.
        affected: Whether pipeal, as it stands in this tree, suffers from it; None where that was not seen.
        affected_figure: What was seen of pipeal, in words.
        not_tested: Why there is no verdict.
        figures: All that was measured, by name; the unit is in the name.
    """

    verdict: bool | None
    figure: str
    how: str
    affected: bool | None = None
    affected_figure: str = ""
    not_tested: str = ""
    figures: dict[str, float] = field(default_factory=dict)


OF_PIPEAL = "a property of pipeal: see whether that is affected"
"""Why a prediction has no verdict that no PyTorch and no CUDA makes true or false."""

_IN = "gpu_smoke.probes"

PREDICTIONS = (
    Prediction(1, "a second per new (B, T) and stage thread in text models (plans of cuDNN's attention)",
               f"{_IN}.plans:attention", 60),
    Prediction(2, "0.2 to 2 s in the first batch of every evaluation, trial and `with` (cuDNN's convolution plans)",
               f"{_IN}.plans:convolution", 60),
    Prediction(3, "four threads reach no more small operators per second than one", f"{_IN}.host:small_operators"),
    Prediction(4, "two optimizer steps and zero_grads per layer cost 90 µs of Python, one functional call 9",
               f"{_IN}.host:optimizer_calls"),
    Prediction(5, "six events and nine elapsed_time per layer and batch cost some 50 µs", f"{_IN}.host:events"),
    Prediction(6, "\"busy\" reads near 100 % on an idle GPU", f"{_IN}.host:busy_share"),
    Prediction(7, "cuBLAS takes 32 MiB per handle and stream, and the memory-growth test fails alone",
               f"{_IN}.memory:workspaces"),
    Prediction(8, "dropout is four kernels and a mask of the activation's type", f"{_IN}.kernels:dropout"),
    Prediction(9, "newer torch builds another NCCL backend; a receive cut off by an abort may look complete",
               f"{_IN}.ranks:nccl_backend", 60),
    Prediction(10, "streams beyond 8 connections wait for each other", f"{_IN}.kernels:connections", 60),
    Prediction(11, "\"duplicate GPU\" under MIG; exit 2 when each process sees one GPU",
               f"{_IN}.ranks:one_gpu_each", 75),
    Prediction(12, "half a gigabyte per rank on GPU 0", f"{_IN}.memory:first_gpu"),
    Prediction(13, "the heartbeat monitor of NCCL may end the process", f"{_IN}.ranks:monitor", 75),
    Prediction(14, "a host wait of 0.2 to 0.4 ms per layer and batch with replicas (counts go through gloo)",
               f"{_IN}.ranks:counts", 75),
    Prediction(15, "three batches ahead exceed 1,024 queued launches, and a blocked launch holds the context's lock",
               f"{_IN}.kernels:queued_launches"),
    Prediction(16, "the first snapshot takes 0.3 to 1 s (pinned memory asked for per tensor)",
               f"{_IN}.memory:snapshots", 60),
    Prediction(17, "GPU stages take all cores for intra-op threads", f"{_IN}.host:intra_op_threads"),
)  # fmt: skip

MEASUREMENTS = (
    Prediction(0, "host waits per batch", f"{_IN}.host:waits"),
    Prediction(0, "memory of training", f"{_IN}.memory:training"),
)
"""What is measured beside, and predicted nowhere."""
