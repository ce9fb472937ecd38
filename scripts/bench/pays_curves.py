"""Learning curves for pays.py: held-out accuracy over batches, of one process or of workers that average at times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from time import perf_counter
from typing import Any

import torch

from pipeal.config import RunConfig
from pipeal.core.modules import module_of
from pipeal.data import EpochBatches
from pipeal.engine import Pipeline
from pipeal.run.build import Experiment
from pipeal.run.duration import at_length
from pipeal.run.opening import as_it_runs, course_of, new_layers, open_pipeline
from pipeal.run.plan_costs import Wanted, experiment_of
from pipeal.training.evaluation import accuracy
from pipeal.training.learning_rate import epoch_scale

NETWORK = (
    *("model.embedding_dim=60", "model.x_hid=64", "model.y_hid=64", "data.max_len=48", "data.vocab_size=10000"),
    *("data.batching.budget_tokens=2048", "data.held_out=0.15", "train.precision=fp32"),
    *("engine.devices=[cpu]", "engine.schedule=sequential", "engine.threads=1"),
)
"""Beside the configuration of the transformer on AG News: of 4 layers, small enough for one core."""

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Of the averages of local SGD, as DiLoCo has it (Douillard et al., 2023)."""


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        method: A method's name.
        rate: The learning rate, before warm-up and decay.
        workers: More than one: local SGD.
        local_steps: Of each worker between two averages.
        batches: Of all workers together.
        measured: Batches of all workers together, and the held-out accuracy after them.
        seconds: Of training, in one process, whatever else the machine did.
    """

    method: str
    rate: float
    workers: int = 1
    local_steps: int = 0
    batches: int = 0
    measured: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, float, int, int]:
        """What tells it from all others."""
        return self.method, self.rate, self.workers, self.local_steps

    @property
    def best(self) -> float:
        """The best accuracy."""
        return max(found for _, found in self.measured)

    def until(self, target: float) -> float | None:
        """The batches until an accuracy, on straight lines between measurements; None where it is never reached.

        >>> curve = Curve("bp", 1e-3, measured=[(0, 0.25), (10, 0.75), (20, 0.5), (30, 1.0)])
        >>> curve.until(0.2), curve.until(0.5), curve.until(0.875), curve.until(1.01)
        (0.0, 5.0, 27.5, None)

        A worker of local SGD has the common model at the end of a round only:

        >>> replace(curve, workers=2, local_steps=4, batches=30).until(0.5)
        8.0
        """
        before, low = 0, 0.0
        for batches, found in self.measured:
            if found >= target:
                share = (target - low) / (found - low) if batches else 0.0
                reached = before + share * (batches - before)
                of_round = self.workers * self.local_steps
                return float(min(ceil(reached / of_round) * of_round, self.batches)) if of_round else reached
            before, low = batches, found
        return None


def opened(dataset: str, data_root: str, epochs: int, overrides: Sequence[str]) -> Experiment:
    """The data, and the small network for it."""
    chosen = (*NETWORK, f"train.epochs={epochs}", *overrides)
    return experiment_of(Wanted(dataset, "transformer", None, data_root, chosen))


def configured(experiment: Experiment, method: str, rate: float) -> RunConfig:
    """The configuration of a training, with every choice made."""
    config = experiment.config
    with closing(experiment.train_batches(config.train.seed)) as feed:
        lr = replace(config.train.lr, base=rate)
        engine, train = as_it_runs(config.engine, method), replace(config.train, mode=method, lr=lr)
        return at_length(replace(config, engine=engine, train=train), len(feed), quiet=True)


def passing(feed: EpochBatches, epochs: int) -> Iterator[Any]:
    """Yields the batches of all epochs."""
    for epoch in range(epochs):
        feed.set_epoch(epoch)
        yield from feed


def learnt(experiment: Experiment, wanted: Curve, per_epoch: int) -> Curve:
    """Trains: all samples of all epochs once, whichever worker has them.

    Args:
        experiment: With data and configuration.
        wanted: A curve without measurements.
        per_epoch: How often to measure in an epoch; local SGD no more often than it averages.
    """
    config = configured(experiment, wanted.method, wanted.rate)
    own, seed, workers = experiment.under(config), config.train.seed, wanted.workers
    measured: list[tuple[int, float]] = []
    with ExitStack() as open_now:
        feed = open_now.enter_context(closing(own.train_batches(seed)))
        of_epoch = len(feed)
        scale = epoch_scale(course_of(config), 0, of_epoch, 0)  # counts on through all epochs
        team = [list(new_layers(own, config, 1)) for _ in range(workers)]
        # Each worker drops out on its own.
        pipes = [open_now.enter_context(open_pipeline(team[n], config, seed + n)) for n in range(workers)]
        average = _Average(team) if workers > 1 else None
        at_once = workers * wanted.local_steps or ceil(of_epoch / per_epoch)
        batches, done, seconds = passing(feed, config.train.epochs), 0, 0.0
        measured.append((0, _held(own, pipes[0])))
        while taken := list(islice(batches, at_once)):
            begin = perf_counter()
            for n, pipe in enumerate(pipes[: len(taken)]):
                pipe.run(taken[n::workers], lambda step, n=n: scale(step * workers + n))  # type: ignore[misc]
            if average is not None:
                average.step()
            seconds += perf_counter() - begin
            done += len(taken)
            if done - measured[-1][0] >= of_epoch // per_epoch or done >= of_epoch * config.train.epochs:
                measured.append((done, _held(own, pipes[0])))
        if measured[-1][0] < done:
            measured.append((done, _held(own, pipes[0])))
    return replace(wanted, batches=done, measured=measured, seconds=seconds)


class _Average:
    """The outer step: all workers go on from where an optimizer takes the mean of their ways."""

    def __init__(self, team: list[list[Any]]) -> None:
        self._team = [[weight for layer in layers for weight in module_of(layer).parameters()] for layers in team]
        self._common = [weight.detach().clone() for weight in self._team[0]]
        self._optimizer = torch.optim.SGD(self._common, **OUTER)

    @torch.no_grad()
    def step(self) -> None:
        for common, *own in zip(self._common, *self._team, strict=True):
            common.grad = common - torch.stack(own).mean(0)
        self._optimizer.step()
        for common, *own in zip(self._common, *self._team, strict=True):
            for weight in own:
                weight.copy_(common)


def _held(experiment: Experiment, pipe: Pipeline) -> float:
    return accuracy(pipe, experiment.in_order(experiment.held))
