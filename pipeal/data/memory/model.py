"""How large a batch may be: a model of a step's peak memory, fitted to measured ones, and a search for the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.data.memory.peaks import PeakMeter, collect_peaks, device_memory, meter_for

__all__ = ["MemoryModel", "fit_memory_model", "max_batch_cost", "probe_memory"]

_Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a step on ``n`` samples padded to length ``L``: ``c0 + c1·n·L + c2·n·L²`` bytes.

    Weights and their like are in ``c0``, activations of linear layers in ``c1``, attention scores in ``c2``. As a cost
    of the samplers it makes batches that fit into memory whatever their shape::

        model = fit_memory_model(samples, lengths, peaks)
        SizeAwareBatchSampler(indices, lengths, max_total_size=0.9 * total, cost=model.bound)

    Attributes:
        c0: Bytes that every step needs.
        c1: Bytes per padded token.
        c2: Bytes per pair of tokens of a sample.
        rms_error: Root of the mean squared difference from the measured peaks, in bytes.
        worst_excess: The most bytes that a measured peak lay above the model, at least 0.
        points: How many peaks it was fitted to.
    """

    c0: float
    c1: float
    c2: float
    rms_error: float
    worst_excess: float
    points: int

    def predict(self, n: int, longest: float) -> float:
        """The expected peak in bytes."""
        return self.c0 + n * longest * (self.c1 + self.c2 * longest)

    def bound(self, n: int, longest: float) -> float:
        """A peak that no measured one exceeds: the expected one and the worst excess."""
        return self.predict(n, longest) + self.worst_excess

    def max_samples(self, longest: float, budget_bytes: float) -> int:
        """The most samples of a length whose :meth:`bound` is within a budget; 0 if not even one.

        Raises:
            ConfigError: Any number would do: the budget has no end, or the model says that samples of this length need
                no memory.
        """
        if not math.isfinite(budget_bytes):
            raise ConfigError(f"budget_bytes is {budget_bytes}; wanted a finite number")
        each = longest * (self.c1 + self.c2 * longest)
        if not each > 0:
            raise ConfigError(f"by this model samples of length {longest} need no memory; measure with longer ones")
        return max(0, int((budget_bytes - self.c0 - self.worst_excess) // each))


def fit_memory_model(samples: Sequence[int], lengths: Sequence[float], peaks: Sequence[float]) -> MemoryModel:
    """Fits the model by least squares among coefficients that are not negative: memory does not fall with size.

    With three coefficients the best solution is found by trying each choice of those that are above 0.

    Args:
        samples: ``(P,)``: the number of samples of each measured batch.
        lengths: ``(P,)``: what it was padded to.
        peaks: ``(P,)``: bytes.

    Raises:
        DataError: Lists of different lengths, numbers that are negative or not finite, or batches too alike to tell
            the three terms apart.

    >>> model = fit_memory_model([1, 2, 4, 4], [8, 8, 8, 16], [1080, 1160, 1320, 1640])
    >>> round(model.c0), round(model.c1), round(model.c2, 6), model.max_samples(16, 2001)
    (1000, 10, 0.0, 6)
    """
    n, length, peak = (np.asarray(list(part), dtype=np.float64) for part in (samples, lengths, peaks))
    if not n.shape == length.shape == peak.shape or n.ndim != 1:
        raise DataError(f"{len(n)} sample counts, {len(length)} lengths and {len(peak)} peaks; wanted one of each")
    for name, values in (("sample count", n), ("length", length), ("peak", peak)):
        wrong = ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(f"{name} {place} is {values[place]}; wanted a finite number of at least 0")
    terms = np.stack([np.ones_like(n), n * length, n * length**2], axis=1)
    # The columns differ by many powers of ten; as they are, the solver would take the small ones for noise.
    scale = np.linalg.norm(terms, axis=0)
    if not scale.all() or np.linalg.matrix_rank(terms / scale) < 3:
        raise DataError(
            f"{len(n)} batches do not tell c0, c1 and c2 apart; measure at least 3, of two numbers of samples and of "
            "two lengths"
        )
    fitted = _non_negative(terms / scale, peak) / scale
    excess = peak - terms @ fitted
    c0, c1, c2 = fitted.tolist()
    return MemoryModel(
        c0,
        c1,
        c2,
        rms_error=float(np.sqrt(np.mean(excess**2))),
        worst_excess=max(0.0, float(excess.max())),
        points=len(n),
    )


def probe_memory(
    step: Callable[[int, int], object],
    shapes: Iterable[tuple[int, int]],
    *,
    device: torch.device | str = "cpu",
    meter: PeakMeter | None = None,
    warm_up: int = 2,
    cleanup: Callable[[], None] | None = None,
) -> MemoryModel:
    """Measures a step on batches of several shapes and fits the model.

    Args:
        step: Called as ``step(n, length)``; does a whole training step on a batch of that shape. It trains: give it a
            copy of the model.
        shapes: ``(n, length)`` of each batch; a few of different ``n`` and ``length``. The smallest come first.
        device: What to measure.
        meter: Measures instead of the device's own.
        warm_up: Steps of the first shape that come before and do not count: optimizers make their buffers at first.
        cleanup: Called after each step; lets go of what it has left behind.

    Raises:
        DataError: Too few shapes, or too many of them ran out of memory.
    """
    todo = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    if not todo:
        raise DataError("no shapes to measure; wanted at least 3")
    for _ in range(warm_up):
        try:
            step(*todo[0])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise DataError(f"even the smallest of the shapes, {todo[0]}, runs out of memory") from error
        finally:
            if cleanup is not None:
                cleanup()

    def work(shape: tuple[int, int]) -> tuple[int, int]:
        step(*shape)
        return shape

    done, peaks = collect_peaks(todo, work, meter or meter_for(device), cleanup)
    return fit_memory_model([n for n, _ in done], [length for _, length in done], peaks)


def max_batch_cost(
    step: Callable[[int], object],
    *,
    share: float = 0.9,
    device: torch.device | str = "cpu",
    total_bytes: int | None = None,
    meter: PeakMeter | None = None,
    low: int = 1,
    high: int | None = None,
    tolerance: float = 0.02,
    warm_up: int = 2,
    cleanup: Callable[[], None] | None = None,
) -> int:
    """The largest cost of a batch whose step stays within a share of the memory: found by running it.

    The cost doubles until a step is too large (less than doubles where the last two peaks foretell the limit, since on
    the CPU the system may kill what asks for far too much); bisection does the rest. A step that runs out of memory is
    too large; one that ends is measured. After NeMo's OOMptimizer.

    Args:
        step: Called as ``step(cost)``; does a whole training step on a made-up batch of that cost, in the worst shape
            that may come. It trains, and may be broken off: give it a copy of the model.
        share: Of the memory, above 0 and at most 1.
        device: Whose memory.
        total_bytes: All memory; by default that of the device.
        meter: Measures instead of the device's own.
        low: A cost that fits.
        high: The largest cost of interest.
        tolerance: How far from the limit the result may lie, as a part of it; 0 for the exact one.
        warm_up: Steps of cost ``low`` that come before and do not count.
        cleanup: Called after each step, also after one that failed; lets go of what it has left behind.

    Returns:
        A cost that was run and stayed within the share; ``high`` if that did.

    Raises:
        ConfigError: Arguments out of range; ``low`` does not fit; no limit was found without ``high``; the peaks cannot
            be measured here.
    """
    if not 0 < share <= 1 or not 0 <= tolerance <= 1:
        raise ConfigError(f"share is {share} and tolerance {tolerance}; wanted 0 < share <= 1 and 0 <= tolerance <= 1")
    if low < 1 or (high is not None and high < low):
        raise ConfigError(f"low is {low} and high {high}; wanted 1 <= low <= high")
    measured = _Trials(step, meter or meter_for(device), cleanup)
    budget = share * (device_memory(device) if total_bytes is None else total_bytes)
    for _ in range(warm_up):
        measured.peak(low)
    good, peak = low, measured.peak(low)
    if peak is None or peak > budget:
        found = "runs out of memory" if peak is None else f"needs {peak} bytes"
        raise ConfigError(f"a batch of cost {low} {found}; the budget is {budget:.0f} bytes: lower low, or raise share")
    bad: int | None = None
    before: tuple[int, int] | None = None
    while bad is None or bad - good > max(1, tolerance * good):
        if bad is not None:
            trial = (good + bad) // 2
        elif good == high:
            return good
        elif good >= _ENDLESS:
            raise ConfigError(f"a batch of cost {good} still fits; does step heed the cost? Else pass high")
        else:
            trial = _next_cost((good, peak), before, budget, tolerance)
            trial = trial if high is None else min(trial, high)
        needed = measured.peak(trial)
        if needed is not None and needed <= budget:
            before, good, peak = (good, peak), trial, needed
        else:
            bad = trial
    return good


_ENDLESS = 2**48


def _next_cost(last: tuple[int, int], before: tuple[int, int] | None, budget: float, tolerance: float) -> int:
    """Twice the cost, or where a line through the last two peaks meets the budget if that comes earlier."""
    cost, peak = last
    trial: float = 2 * cost
    if before is not None and peak > before[1]:
        trial = min(trial, cost + (budget - peak) * (cost - before[0]) / (peak - before[1]))
    return max(int(trial), cost + max(1, int(tolerance * cost)))


class _Trials:
    """Runs steps one by one, each from the same start, and lives through those that run out of memory."""

    def __init__(self, step: Callable[[int], object], meter: PeakMeter, cleanup: Callable[[], None] | None) -> None:
        self._step, self._meter, self._cleanup = step, meter, cleanup

    def peak(self, cost: int) -> int | None:
        """The peak of a step; None if it ran out of memory."""
        self._meter.start()
        ended = self._ends(cost)
        if self._cleanup is not None:
            self._cleanup()
        if not ended:
            return None
        peak = self._meter.peak_bytes()
        if peak is None:
            raise ConfigError(
                "the peak of a step cannot be measured here, only that of the whole process; pass a meter"
            )
        return peak

    def _ends(self, cost: int) -> bool:
        # A function of its own: once it has returned, the error is gone, whose traceback holds the step's tensors.
        try:
            self._step(cost)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def _non_negative(terms: _Floats, wanted: _Floats) -> _Floats:
    """The ``x >= 0`` that makes ``|terms·x − wanted|`` least: the best of the solutions with any terms left out."""
    columns = range(terms.shape[1])
    best, least = np.zeros(terms.shape[1]), float(wanted @ wanted)
    for count in range(1, terms.shape[1] + 1):
        for chosen in combinations(columns, count):
            part = terms[:, chosen]
            solved = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(np.sum((part @ solved - wanted) ** 2))
            if (solved >= 0).all() and error < least:
                least = error
                best = np.zeros(terms.shape[1])
                best[list(chosen)] = solved
    return best
