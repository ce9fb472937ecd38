"""The methods that layers can be trained by: what must be known of each without its code, and without PyTorch.

A method is one line of :data:`METHODS` and the module or package ``pipeal.methods.<name>``, whose ``make_layers`` makes
layers of a network; see :func:`pipeal.methods.make_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeal.core.errors import ConfigError, name_of, unknown_name

Maker: TypeAlias = Callable[..., Iterable[Any]]
"""What makes the layers of a method, ``make_layers(network, lr, optimizer, **options)``."""

COMPARE = "compare"
"""The mode that trains several methods side by side."""


@dataclass(frozen=True)
class Loss:
    """One of the losses of a layer.

    Attributes:
        name: What charts call it.
        ending: Of its columns in ``epochs.csv``, where that is not the name without the word "loss".
    """

    name: str
    ending: str = ""

    @property
    def tag(self) -> str:
        """The name as one word; in TensorBoard its curves end with it."""
        return self.name.removesuffix(" loss").replace(" ", "_")

    @property
    def column(self) -> str:
        """What its columns in ``epochs.csv`` end with."""
        return self.ending or self.tag


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: As ``--method`` takes it; also that of its module, with ``_`` for ``-``, and of its folder in a
            comparison.
        label: What tables and pictures call it.
        title: What a model in this form is called, in a sentence.
        losses: Those of each layer, in the order in which it gives them.
        has_labels: Whether layers have a label side, with a learning rate and sizes of its own.
        has_exits: Whether every layer gives an answer, so that samples may leave early.
        is_whole: Whether the network is one layer, which no other stage can overlap; its blocks may lie on several
            devices.
        compares_samples: Whether a loss compares the samples of a batch with each other, so that it is no mean over
            them: of a batch in parts it is another one.
    """

    name: str
    label: str
    title: str
    losses: tuple[Loss, ...]
    has_labels: bool = False
    has_exits: bool = True
    is_whole: bool = False
    compares_samples: bool = False

    @property
    def module(self) -> str:
        """Of :mod:`pipeal.methods`, where its layers are made; also the section of its options."""
        return self.name.replace("-", "_")

    @property
    def loss_titles(self) -> tuple[str, ...]:
        """Of charts, one for each of :attr:`losses`."""
        return tuple(f"{one.name}, end to end" if self.is_whole else f"{one.name} by layer" for one in self.losses)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            "al",
            "AL",
            "AL form (local losses)",
            (Loss("associated loss", "enc"), Loss("autoencoder loss", "ae")),
            has_labels=True,
        ),
        Method("bp", "BP", "BP form (backpropagation)", (Loss("loss"),), has_exits=False, is_whole=True),
        Method("greedy", "Greedy", "greedy form (a classifier per layer)", (Loss("cross entropy"),)),
        Method("dgl", "DGL", "DGL form (a deeper classifier per layer)", (Loss("cross entropy"),)),
        Method("auglocal", "AugLocal", "AugLocal form (copies of blocks to come per layer)", (Loss("cross entropy"),)),
        Method(
            "infopro",
            "InfoPro",
            "InfoPro form (a classifier and a decoder per layer)",
            (Loss("cross entropy"), Loss("reconstruction loss")),
        ),
        Method(
            "predsim",
            "PredSim",
            "PredSim form (similarity)",
            (Loss("cross entropy"), Loss("similarity loss")),
            compares_samples=True,
        ),
        Method(
            "scpl",
            "SCPL",
            "SCPL form (contrastive losses)",
            (Loss("cross entropy"), Loss("contrastive loss")),
            compares_samples=True,
        ),
        Method(
            "deinforeg",
            "DeInfoReg",
            "DeInfoReg form (variance, invariance, covariance)",
            (Loss("cross entropy"), Loss("variance loss"), Loss("invariance loss"), Loss("covariance loss")),
            compares_samples=True,
        ),
    )
}
"""By name; the first is what is trained unless another one is asked for."""

DEFAULT, BASELINE = METHODS["al"], METHODS["bp"]
"""What pipeal is about, and what it is held against."""

COMPARED = (DEFAULT.name, BASELINE.name)
"""What a comparison trains unless it is told."""

MODES = (*METHODS, COMPARE)
"""What ``--method``, or ``--mode``, takes."""


def method_of(given: str | Maker) -> Method:
    """What is known of a method: of one that is a function, which is not listed here, its name alone.

    Raises:
        ConfigError: There is none of this name, or it is no function.
    """
    if isinstance(given, str):
        if given not in METHODS:
            raise ConfigError(unknown_name("method", given, METHODS))
        return METHODS[given]
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"method is {name_of(given)}; expected a name, such as 'greedy', or a function make_layers(network, lr, "
            "optimizer), which yields a layer for each of network.parts()"
        )
    name = getattr(given, "__name__", type(given).__name__)
    return Method(name, name, f"{name} form", ())


def with_all(names: tuple[str, ...]) -> str:
    """Names in a row, for a sentence.

    >>> with_all(("al", "bp", "compare"))
    'al, bp or compare'
    """
    return f"{', '.join(names[:-1])} or {names[-1]}"
