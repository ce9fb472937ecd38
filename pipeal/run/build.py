"""Where configuration becomes objects: what every kind of data gives to a run; one file beside this for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pipeal.config import LrConfig, RunConfig
from pipeal.config.schema import USUAL_RATE, ModelConfig
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.core.names import Names
from pipeal.core.protocols import TrainableLayer
from pipeal.core.rng import key_seed
from pipeal.data import WHOLE, EpochBatches, Share
from pipeal.engine import Pipeline
from pipeal.engine.devices.threads import intra_op_threads
from pipeal.methods.al import ALPackage, LearningRates
from pipeal.methods.lookahead import Ahead
from pipeal.run.stopping import StopRequest
from pipeal.training.evaluation import Criterion

Config = TypeVar("Config", bound=RunConfig)
M = TypeVar("M", bound="Models")
E = TypeVar("E", bound="Experiment")

SPLIT_SEED = 0
"""Of what divides a data set: runs of different seeds are trained and tested on the same samples."""


@dataclass(frozen=True)
class Models(ABC):
    """Makes the models of a run, also where its data was not read: all fields but the first say what it must be known.

    Attributes:
        config: Which, and how wide.
    """

    config: Any

    @classmethod
    def of(cls: type[M], config: RunConfig, blueprint: Mapping[str, Any]) -> M:
        """Those of an experiment whose data was read elsewhere; vectors that were read are left blank."""
        return cls(config, **blueprint)

    @property
    def blueprint(self) -> dict[str, Any]:
        """What must be known of the data to make the models, as JSON: for ranks that do not read it."""
        return {known.name: getattr(self, known.name) for known in fields(self) if known.name != "config"}

    @property
    def criterion(self) -> Criterion | None:
        """The loss that epochs are measured by; None where the accuracy tells good ones from bad."""
        return None

    def under(self: M, config: RunConfig) -> M:
        """The same with another configuration, of the same data; see :mod:`pipeal.run.grid` for what may differ.

        Raises:
            ConfigError: It does not fit what was read.
        """
        return replace(self, config=config)

    def how(self, mode: str) -> dict[str, Any]:
        """What the configuration says to a method: its learning rates, and what is for it alone."""
        section = getattr(self.config.methods, METHODS[mode].module, None)
        return {"lr": rates(self.config.train.lr, mode), "method_options": {} if section is None else asdict(section)}

    def package(self, mode: str, seed: int) -> ALPackage:
        """All of :meth:`layers`, with the same bits."""
        return ALPackage(self.layers(mode, seed))

    def layers(self, mode: str, seed: int, here: Container[int] | None = None) -> Iterator[TrainableLayer]:
        """The layers of a new model, one at a time: each is made when it is asked for.

        The first weights of each follow from the seed and its number alone; they are the same on every rank, but for
        read vectors. The caller's default generators are left as they are.

        Args:
            mode: The name of a method.
            seed: Of the first weights.
            here: The numbers of the layers that are wanted; all others are on the meta device, without a weight, and
                draw nothing. None for all.
        """
        made = self.build(mode)
        if here is not None:
            # The first optimizer imports PyTorch's compiler, and that of 2.6 looks at numbers, which the meta device
            # has not.
            torch.optim.SGD([torch.zeros(1)])
        for number in count():
            place = nullcontext() if here is None or number in here else torch.device("meta")
            # With another number of threads, an orthogonal matrix is rounded otherwise.
            with intra_op_threads(1), torch.random.fork_rng(devices=[]), place:
                torch.default_generator.manual_seed(key_seed(seed, number))
                layer = next(made, None)
            if layer is None:
                return
            yield layer

    @abstractmethod
    def build(self, mode: str) -> Iterator[TrainableLayer]:
        """The layers of a new model of the configured name and widths; ``mode`` is the name of a method.

        Nothing of a layer is made before it is asked for: it may be for another device, with another key.
        """


@dataclass(frozen=True)
class Experiment(ABC):
    """A data set and a model for it: models and batches are made again for each turn.

    Attributes:
        models: Makes the models.
        train: The samples to train on.
        held: Samples like those, but not trained on, to choose by; None where the configuration keeps none.
        test: The test samples.
        facts: What the data turned out to be, for the summary.
        shared: Under ``torchrun``, makes the training batches of rank 0, which the replicas share.
    """

    models: Models
    train: Any
    held: Any
    test: Any
    facts: dict[str, int | float | str]
    shared: Callable[[Experiment, int], EpochBatches] | None = field(default=None, kw_only=True)

    @property
    def config(self) -> Any:
        """What was asked for, with every name in its canonical spelling."""
        return self.models.config

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """``(N,)`` of the training samples; None where they have no length."""
        return None

    @property
    def criterion(self) -> Criterion | None:
        """See :attr:`Models.criterion`."""
        return self.models.criterion

    def package(self, mode: str, seed: int) -> ALPackage:
        """A new model; see :meth:`Models.package`."""
        return self.models.package(mode, seed)

    def layers(self, mode: str, seed: int, here: Container[int] | None = None) -> Iterator[TrainableLayer]:
        """A new model, layer by layer; see :meth:`Models.layers`."""
        return self.models.layers(mode, seed, here)

    def under(self: E, config: RunConfig) -> E:
        """The same data, trained on otherwise; see :meth:`Models.under`."""
        return replace(self, models=self.models.under(config))

    def train_batches(self, seed: int) -> EpochBatches:
        """Batches to train on, in this process."""
        return self.batches(seed) if self.shared is None else self.shared(self, seed)

    @abstractmethod
    def batches(self, seed: int, share: Share = WHOLE) -> EpochBatches:
        """Shuffled training batches as configured, or one replica's share of each."""

    @abstractmethod
    def in_order(self, part: Any) -> EpochBatches:
        """A part of the data, to be evaluated on: always the same batches."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Leaves in the run's folder what a trained model needs to read its input."""

    def train_evaluation(self) -> EpochBatches:
        """The training samples, or a fixed random part of the configured size, to take the accuracy on."""
        part = evaluated_part(len(self.train), self.config.train.train_accuracy_samples)
        return self.in_order(self.train if part is None else self.train.subset(part))

    def held_out(self) -> EpochBatches | None:
        """The samples to choose by; None where there are none."""
        return None if self.held is None else self.in_order(self.held)

    def test_evaluation(self) -> EpochBatches:
        """The test samples."""
        return self.in_order(self.test)

    def afterword(self, pipe: Pipeline, stop: StopRequest) -> Sequence[str]:  # noqa: ARG002
        """What else there is to show of a trained model, in lines.

        Raises:
            Leave: The run is to end meanwhile.
        """
        return ()


class Part(Protocol):
    """Classified samples."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Of all of them, in their order."""
        ...


def facts_of(classes: int, train: Part, held: Part | None, test: Part) -> dict[str, int | float | str]:
    """What summaries tell of classified samples, and by what a run that is taken up again knows its data."""
    facts: dict[str, int | float | str] = {
        "classes": classes,
        "train_samples": len(train),
        "held_out_samples": 0 if held is None else len(held),
        "test_samples": len(test),
        "fingerprint": train.fingerprint,
        "test_fingerprint": test.fingerprint,
    }
    if held is not None:
        facts["held_out_fingerprint"] = held.fingerprint
    return facts


def with_names(config: Config, names: Names) -> Config:
    """The configuration with its names in their canonical spelling.

    Raises:
        DataError: The data set is none of these.
        ConfigError: The model is none of these.
    """
    model, _ = names.model(config.model.name)
    return replace(config, dataset=names.dataset(config.dataset), model=replace(config.model, name=model))


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


def looks_ahead(model: ModelConfig) -> Ahead:
    """How far the bridges of AL look ahead, as the sizes of models have it."""
    return Ahead(**asdict(model.ahead))


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
