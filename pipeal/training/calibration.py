"""The cheapest early exit that keeps the accuracy of the full path, chosen on held-out samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor

from pipeal.core.by_size import BySize
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree
from pipeal.engine import Pipeline
from pipeal.engine.inference.exit_policy import ExitPolicy, confidence
from pipeal.training.evaluation import check_class_numbers, inputs_of, right
from pipeal.training.exit_costs import ExitCosts, mean_exit_costs

_ALL_SETS = 9
"""The most exits of which all sets, 2 to the power of one less, are tried."""


@dataclass(frozen=True)
class Calibration:
    """A policy, and what it was chosen by on the held-out samples.

    Attributes:
        policy: Where each sample leaves.
        costs: The costs it was chosen by.
        samples: How many samples were held out.
        tolerance: How much accuracy it might lose, as a share of the samples.
        margin: By how many standard errors that was made safer.
        accuracies: Held-out accuracy of each exit.
        accuracy: Held-out accuracy under the policy.
        cost: Mean FLOPs per held-out sample under the policy.
    """

    policy: ExitPolicy
    costs: ExitCosts
    samples: int
    tolerance: float
    margin: float
    accuracies: tuple[float, ...]
    accuracy: float
    cost: float

    def summary(self) -> dict[str, Any]:
        """Every figure, ready for ``write_json``; the threshold of an exit that is switched off is null."""
        last = len(self.costs)
        thresholds = [
            at if number in self.policy.tried else None for number, at in enumerate(self.policy.thresholds, 1)
        ]
        return {
            "thresholds": [*thresholds[:-1], None],
            "temperatures": list(self.policy.temperatures),
            "held_out_samples": self.samples,
            "tolerance": self.tolerance,
            "margin_standard_errors": self.margin,
            "held_out_accuracy_by_exit": list(self.accuracies),
            "held_out_accuracy": self.accuracy,
            "held_out_flops_per_sample": self.cost,
            "full_path_flops_per_sample": self.costs.alone(last),
        }


def calibrate(
    pipe: Pipeline,
    held_out: Iterable[Any],
    *,
    tolerance: float = 0.0,
    margin: float = 2.0,
    layers: Iterable[TrainableLayer] | None = None,
    inputs: BySize[Tree] | None = None,
) -> Calibration:
    """Finds the cheapest early exit that keeps the accuracy of the full path, but for ``tolerance``.

    Each exit gets a temperature that minimises its negative log-likelihood (Guo et al., "On Calibration of Modern
    Neural Networks", ICML 2017), so that confidences of different exits mean the same. All exits then share one
    threshold: the smallest from which on every larger one is safe enough as well, found by looking at every confidence
    that occurs. An exit whose trial costs more than it saves is switched off; where none saves anything, the policy
    is the full path.

    A threshold chosen on few samples looks safer there than it is. The accuracy lost is therefore taken as what was
    seen plus ``margin`` standard errors of it. They come from the samples on which the policy and the full path
    disagree, since both saw the same samples, and vanish where they never do. Among hundreds of thresholds some pass
    by luck: hence every larger one must. What comes of it is a bound in probability, not a promise: even for one
    threshold alone, more than the tolerance is lost in up to one case of six with a margin of 1, of forty with 2.

    Args:
        pipe: The trained pipeline.
        held_out: Batches, as :meth:`pipeal.Pipeline.run` takes them, with class numbers as targets, that were not
            trained on; test samples are for measuring.
        tolerance: The share of samples that may be lost: 0.005 is half a point.
        margin: How many standard errors of the difference in accuracy to stay away; 0 trusts what was seen.
        layers: Such as the pipeline's, to count the costs of exits on, where that has those of other processes on the
            meta device; an iterator may make one at a time. None for the pipeline's own.
        inputs: On which costs are counted; None for the held-out ones, as padded as they come.

    Raises:
        DataError: There is no held-out sample, or targets are no class numbers, one for each.
        ConfigError: ``tolerance`` is no number from 0 to 1, or ``margin`` none from 0.
    """
    if not 0 <= tolerance <= 1:
        raise ConfigError(f"tolerance is {tolerance}; expected a share of the samples, from 0 to 1")
    if not 0 <= margin < inf:
        raise ConfigError(f"margin is {margin}; expected a number of standard errors, at least 0")
    seen, logits, y = _collect(pipe, held_out)
    own = [layer for stage in pipe.stages for _, layer in stage.layers]
    costs = mean_exit_costs(layers or own, inputs or seen)
    temperatures = tuple(_temperature(one, y) for one in logits)
    sure = torch.stack([confidence(one, by) for one, by in zip(logits, temperatures, strict=True)], 1)
    shares = torch.stack([right(one, y) for one in logits], 1)
    policy = ExitPolicy(_thresholds(sure, shares, costs, tolerance, margin), temperatures)
    taken = _taken(sure, policy)
    by_exit = dict(zip(policy.tried, costs.on_the_way(policy.tried), strict=True))
    return Calibration(
        policy=policy,
        costs=costs,
        samples=len(y),
        tolerance=tolerance,
        margin=margin,
        accuracies=tuple(shares.double().mean(0).tolist()),
        accuracy=float(shares.gather(1, taken.unsqueeze(1) - 1).double().mean()),
        cost=sum(by_exit[depth] for depth in taken.tolist()) / len(y),
    )


def _collect(pipe: Pipeline, batches: Iterable[Any]) -> tuple[BySize[Tree], list[Tensor], Tensor]:
    """Batches of inputs, the logits ``(N, classes)`` of every exit, and the targets ``(N,)``; on the CPU."""
    seen = BySize[Tree]()
    y: list[Tensor] = []

    def inputs() -> Iterator[Tree]:
        for x in inputs_of(batches, y):
            seen.add(x, x)
            yield x

    found = [[one.cpu() for one in exits] for exits in pipe.predict_exits(inputs())]
    if not sum(map(len, y)):
        raise DataError("there are no held-out samples to calibrate exits on; pass some")
    logits, targets = [torch.cat(one) for one in zip(*found, strict=True)], torch.cat(y).cpu()
    for one in logits:
        check_class_numbers(one, targets)
    if targets.dim() != 1:
        raise DataError(f"found targets of shape {tuple(targets.shape)}; exits are for one answer per sample")
    targets, classes = targets.long(), logits[0].shape[-1]
    if not bool(((targets >= 0) & (targets < classes)).all()):
        low, high = int(targets.min()), int(targets.max())
        raise DataError(f"found class numbers from {low} to {high}; expected 0 to {classes - 1}, those of the exits")
    return seen, logits, targets


def _temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature of the least negative log-likelihood, within [0.05, 20].

    With ``s = 1 / temperature`` that is convex, and its slope the mean of ``softmax(s z) · z - z_y``: bisected.
    """
    z = logits.double()
    z = z[z.isfinite().all(-1)]
    wanted = z.gather(1, y[logits.isfinite().all(-1)].unsqueeze(1))
    low, high = log(1 / 20), log(20)
    for _ in range(40):
        scale = (low + high) / 2
        slope = float((((exp(scale) * z).softmax(-1) * z).sum(-1, keepdim=True) - wanted).sum())
        low, high = (low, scale) if slope > 0 else (scale, high)
    return exp(-(low + high) / 2)


@dataclass(frozen=True)
class _Choice:
    """The cheapest safe threshold for a set of exits, and its mean cost."""

    cost: float
    tried: tuple[int, ...]
    threshold: float


def _thresholds(sure: Tensor, right: Tensor, costs: ExitCosts, tolerance: float, margin: float) -> tuple[float, ...]:
    """The thresholds of the cheapest set of exits; one that is off has an infinite threshold.

    All sets are tried where they are few. Of many exits, one after the other is switched off, each time the one that
    is best left out, and the cheapest of these sets is taken.
    """
    last = len(costs)

    def choose(tried: tuple[int, ...]) -> _Choice:
        return _sweep(sure, right, tried, costs.on_the_way(tried), tolerance, margin)

    if last <= _ALL_SETS:
        earlier = range(1, last)
        sets = chain.from_iterable(combinations(earlier, size) for size in range(last))
        choices = [choose((*tried, last)) for tried in sets]
    else:
        choices = [choose(tuple(range(1, last + 1)))]
        while len(tried := choices[0].tried) > 1:
            fewer = [choose((*tried[:out], *tried[out + 1 :])) for out in range(len(tried) - 1)]
            choices.insert(0, min(fewer, key=lambda choice: choice.cost))
    best = min(choices, key=lambda choice: choice.cost)  # of equals the one with the fewest exits
    return tuple(best.threshold if depth in best.tried[:-1] else inf for depth in range(1, last + 1))


def _sweep(
    sure: Tensor, right: Tensor, tried: Sequence[int], costs: Sequence[float], tolerance: float, margin: float
) -> _Choice:
    """Lets a threshold rise over all confidences that occur, and takes the one after the last that is not safe.

    A sample leaves at the first of the exits ``tried`` where the greatest confidence so far reaches the threshold.
    As the threshold passes that, the sample goes on to the next exit: an event that changes three sums, of the
    accuracy, of the disagreement with the full path, and of the cost. Sorted and added up, the events give all
    thresholds at once.

    Args:
        sure: ``(N, exits)`` confidences.
        right: ``(N, exits)`` whether the answer is; an exit with one that is no number is not safe.
        tried: The exits, from 1, the last one included.
        costs: What leaving at each of them costs.
        tolerance: The accuracy that may be lost.
        margin: The standard errors to add to what is lost.
    """
    count = len(right)
    at = torch.tensor(tried) - 1
    answers = right[:, at]
    gained = answers.double() - right[:, -1:].double()
    differs = (answers != right[:, -1:]).double()
    spent = torch.tensor(costs, dtype=torch.float64).expand(count, -1)
    passed, order = sure[:, at[:-1]].cummax(1).values.flatten().sort()
    distinct = torch.cat([passed[1:] != passed[:-1], torch.ones(min(1, len(passed)), dtype=torch.bool)])

    def course(values: Tensor) -> Tensor:
        """The mean at a threshold of 0, and just above each distinct confidence."""
        steps = values.diff(dim=1).flatten()[order].cumsum(0)[distinct]
        return (values[:, 0].sum() + torch.cat([steps.new_zeros(1), steps])) / count

    gain, cost = course(gained), course(spent)
    error = ((course(differs) - gain.square()).clamp_min(0) / count).sqrt()
    # The full path itself, which is last, loses nothing; the sums may be off by their rounding.
    safe = gain - margin * error >= -tolerance - 1e-9
    safe[-1] = True
    # Not the first that is safe: below it, a noisy course dips by luck.
    unsafe = safe.logical_not().nonzero()
    first = int(unsafe[-1]) + 1 if len(unsafe) else 0
    return _Choice(float(cost[first]), tuple(tried), _between(passed[distinct], first))


def _between(levels: Tensor, number: int) -> float:
    """A threshold above the first ``number`` of the levels, and not above the next one."""
    if number == 0:
        return 0.0
    if number == len(levels):
        return inf
    below, above = levels[number - 1], levels[number]
    # Halfway: samples batched otherwise have confidences that differ in their last bits.
    middle = (below + above) / 2
    return float(middle if middle > below else above)


def _taken(sure: Tensor, policy: ExitPolicy) -> Tensor:
    """The exit of each sample, from 1."""
    leaves = sure >= torch.tensor(policy.thresholds, dtype=torch.float32)
    leaves[:, -1] = True
    return leaves.int().argmax(1) + 1
