"""Early exits measured: accuracy and cost of every exit, and of the calibrated policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.tree import Tree, batch_size, tensors
from pipeal.engine import Pipeline
from pipeal.training.calibration import Calibration, calibrate
from pipeal.training.evaluation import inputs_of, right
from pipeal.training.exit_costs import ExitCosts, exit_costs

__all__ = ["Calibration", "ExitCosts", "ExitRow", "ExitTable", "calibrate", "exit_costs", "exit_table"]


@dataclass(frozen=True)
class ExitRow:
    """One way to infer, measured on the test samples.

    Attributes:
        name: ``exit 1`` and so on, ``full path``, or ``early exit (calibrated)``.
        accuracy: The share of samples that it gets right.
        points: The difference to the full path in points of accuracy.
        mflops: Millions of FLOPs per sample.
        relative_cost: FLOPs over those of the full path; None where nothing was counted.
        ms: Milliseconds per sample at full speed, batched, on the pipeline's devices.
        share: The share of samples that leave here under the policy; None for the policy itself.
    """

    name: str
    accuracy: float
    points: float
    mflops: float
    relative_cost: float | None
    ms: float
    share: float | None


@dataclass(frozen=True)
class ExitTable:
    """Accuracy and cost of every exit.

    Attributes:
        exits: One row per exit; the last is the full path.
        early: The calibrated policy.
        calibration: How it was chosen.
        samples: How many test samples there were.
    """

    exits: tuple[ExitRow, ...]
    early: ExitRow
    calibration: Calibration
    samples: int

    @property
    def full(self) -> ExitRow:
        """The full path."""
        return self.exits[-1]

    @property
    def saving(self) -> float:
        """The share of the full path's FLOPs that the policy saves."""
        return 1 - self.early.relative_cost if self.early.relative_cost is not None else 0.0

    def summary(self) -> dict[str, Any]:
        """Every figure, ready for ``write_json``."""
        return {
            "samples": self.samples,
            "accuracy_difference_points": self.early.points,
            "saving": self.saving,
            "rows": [asdict(row) for row in (*self.exits, self.early)],
            "calibration": self.calibration.summary(),
        }


def exit_table(
    pipe: Pipeline, test: Iterable[Any], calibration: Calibration, *, timed_samples: int = 2048, rounds: int = 2
) -> ExitTable:
    """Measures every exit and the calibrated policy.

    Accuracy is of all test samples. Times are of the first batches, kept in memory so that reading them does not
    count: the median of several rounds in which all ways take their turns. Nothing needs to warm up: the accuracy
    has gone all their ways with the same batches.

    Args:
        pipe: The pipeline that was calibrated.
        test: Batches, as :meth:`pipeal.Pipeline.run` takes them, with class numbers as targets; iterated over twice.
        calibration: What :func:`calibrate` found.
        timed_samples: Batches are timed until they hold that many samples.
        rounds: How often.

    Raises:
        DataError: There is no test sample, or the batches can be iterated over only once.
    """
    policy, costs = calibration.policy, calibration.costs
    y: list[Tensor] = []
    found = [
        torch.stack([_is_right(one, y[number]) for one in exits], 1)
        for number, exits in enumerate(pipe.predict_exits(inputs_of(test, y)))
    ]
    if not sum(map(len, y)):
        raise DataError("there are no test samples to compare exits on; pass some")
    timed: list[Tree] = []
    y = []
    answers = pipe.predict_each(_kept(inputs_of(test, y), timed, timed_samples), policy=policy)
    early = [(_is_right(answer.logits, y[number]), answer.exits) for number, answer in enumerate(answers)]
    if len(early) != len(found):
        raise DataError(
            f"there were {len(found)} batches of test samples the first time and {len(early)} the second; pass a list, "
            "or what else can be iterated over twice"
        )
    accuracies = torch.cat(found).double().mean(0).tolist()
    left = torch.cat([exits for _, exits in early]).cpu()
    depths = range(1, len(costs) + 1)
    ways: list[dict[str, Any]] = [{"exit_at": depth} for depth in depths] + [{"policy": policy}]
    ms = _times_ms(pipe, timed, ways, rounds)
    full = costs.alone(len(costs))

    def row(name: str, accuracy: float, flops: float, ms: float, share: float | None) -> ExitRow:
        points = 100 * (accuracy - accuracies[-1])
        return ExitRow(name, accuracy, points, flops / 1e6, flops / full if full else None, ms, share)

    rows = [
        row(
            "full path" if depth == len(costs) else f"exit {depth}",
            accuracies[depth - 1],
            costs.alone(depth),
            ms[depth - 1],
            float((left == depth).double().mean()),
        )
        for depth in depths
    ]
    by_exit = torch.zeros(len(costs) + 1, dtype=torch.float64)
    by_exit[policy.tried] = torch.tensor(costs.on_the_way(policy.tried), dtype=torch.float64)
    accuracy = float(torch.cat([one for one, _ in early]).double().mean())
    last = row("early exit (calibrated)", accuracy, float(by_exit[left].mean()), ms[-1], None)
    return ExitTable(tuple(rows), last, calibration, len(left))


def _kept(inputs: Iterable[Tree], keep: list[Tree], samples: int) -> Iterator[Tree]:
    """Yields inputs as they are, and adds the first to ``keep`` until it holds that many samples."""
    held = 0
    for x in inputs:
        if held < samples:
            keep.append(x)
            held += batch_size(x)
        yield x


def _is_right(logits: Tensor, y: Tensor) -> Tensor:
    return right(logits, y.to(logits.device, non_blocking=True))


def _times_ms(pipe: Pipeline, timed: list[Tree], ways: list[dict[str, Any]], rounds: int) -> list[float]:
    """Milliseconds per sample of each way to infer, in turns, so that a machine that slows down slows all."""
    samples = sum(map(batch_size, timed))
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, taken in zip(ways, seconds, strict=True):
            begin = perf_counter()
            for answer in pipe.predict_each(timed, **way):
                last = answer
            tensors(last)[0].cpu()  # what was given to a device has come to its end
            taken.append(perf_counter() - begin)
    return [1e3 * median(taken) / samples for taken in seconds]
