"""Where configuration becomes objects: what every experiment, on whatever data, gives to a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pipeal.config import LrConfig, RunConfig
from pipeal.config.schema import USUAL_RATE
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.data import WHOLE, EpochBatches, Share
from pipeal.engine import Pipeline
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.methods.al import ALPackage, LearningRates
from pipeal.run.stopping import StopRequest
from pipeal.training.evaluation import Criterion

T = TypeVar("T")

SPLIT_SEED = 0
"""Of what divides a data set: runs of different seeds are trained and tested on the same samples."""


class Models(Protocol):
    """Makes the models of a run, also where its data was not read."""

    def package(self, mode: str, seed: int) -> ALPackage:
        """A new model; ``mode`` is the name of a method. The same on every rank, but for vectors that were read."""
        ...

    def under(self, config: RunConfig) -> Models:
        """The same with another configuration, of the same data; see :mod:`pipeal.run.grid` for what may differ.

        Raises:
            ConfigError: It does not fit what was read.
        """
        ...


class Experiment(Models, Protocol):
    """What a run needs, whatever kind of data it is: models and batches made anew for each turn."""

    @property
    def config(self) -> RunConfig:
        """What was asked for, with every name in its canonical spelling."""
        ...

    @property
    def facts(self) -> dict[str, int | float | str]:
        """What the data turned out to be, for the summary."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """``(N,)`` of the training samples; None where they have no length."""
        ...

    @property
    def criterion(self) -> Criterion | None:
        """The loss that epochs are measured by; None where the accuracy tells good ones from bad."""
        ...

    @property
    def blueprint(self) -> dict[str, Any]:
        """What must be known of the data to make the models, as JSON: for ranks that do not read it."""
        ...

    def under(self, config: RunConfig) -> Experiment:
        """The same data, trained on otherwise; see :meth:`Models.under`."""
        ...

    def train_batches(self, seed: int, share: Share = WHOLE) -> EpochBatches:
        """Batches to train on, or one replica's share of each."""
        ...

    def save(self, folder: Path) -> None:
        """Leaves in the run's folder what a trained model needs to read its input."""
        ...

    def train_evaluation(self) -> EpochBatches:
        """Training samples to take the accuracy on."""
        ...

    def held_out(self) -> EpochBatches | None:
        """Samples like those trained on, but not trained on, to choose by; None where the configuration keeps none."""
        ...

    def test_evaluation(self) -> EpochBatches:
        """Test samples to take the accuracy on."""
        ...

    def afterword(self, pipe: Pipeline, stop: StopRequest) -> Sequence[str]:
        """What else there is to show of a trained model, in lines.

        Raises:
            Leave: The run is to end meanwhile.
        """
        ...


def from_seed(make: Callable[[T, str], ALPackage]) -> Callable[[T, str, int], ALPackage]:
    """Gives what makes a model a seed, from which alone its first weights follow: see :meth:`Models.package`.

    With another number of threads, those of the process, an orthogonal matrix is rounded otherwise.
    """

    @wraps(make)
    def package(self: T, mode: str, seed: int) -> ALPackage:
        with intra_op_threads(1):
            torch.manual_seed(seed)
            return make(self, mode)

    return package


def data_root(config: RunConfig) -> Path:
    """The folder that holds the data sets."""
    return Path("data" if config.data.root is None else config.data.root)


def kept_in(config: RunConfig) -> Path | Literal[True]:
    """The folder that the user named for caches, or True for the one of the user's account."""
    return True if config.data.cache_dir is None else Path(config.data.cache_dir)


def rates(lr: LrConfig, mode: str) -> LearningRates:
    """One learning rate for each side of layers that have a label side; one for all of others."""
    base = USUAL_RATE if lr.base is None else lr.base  # of a model alone, of whose run nothing is known
    return {"enc": base, "ae": base if lr.ae is None else lr.ae} if METHODS[mode].has_labels else base


def hold_out(samples: int, share: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The samples to train on and those held out, each in rising order; the same for every seed of a run.

    Raises:
        ConfigError: Either would be empty, though something is to be held out.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(samples)
    count = round(samples * share)
    if share and not 0 < count < samples:
        raise ConfigError(f"data.held_out: {share:g} of {samples} samples is {count}; expected some, but not all")
    return np.sort(order[count:]), np.sort(order[:count])


def evaluated_part(samples: int, wanted: int | None) -> npt.NDArray[np.int64] | None:
    """The training samples that the training accuracy is taken on, a fixed random part; None for all."""
    if wanted is None or wanted >= samples:
        return None
    return np.sort(np.random.default_rng(SPLIT_SEED).choice(samples, wanted, replace=False))
