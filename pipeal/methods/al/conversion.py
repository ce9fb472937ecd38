"""What a conversion is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, TypeAlias

from torch import nn

from pipeal.core.errors import ConfigError, a_type, check_named, is_whole
from pipeal.core.methods import DEFAULT, Maker, Method, method_of
from pipeal.methods.al.bridges import BridgeStyle, Pool
from pipeal.methods.al.codes import TASKS, LabelStyle, Task
from pipeal.methods.optimizers import LearningRates, OptimizerFactory

OwnBlocks: TypeAlias = Mapping[int, Mapping[str, nn.Module]]
"""By the number of a layer, from 0, and the letter of a block: ``{2: {"b": my_bridge}}``."""
Pools: TypeAlias = Pool | Mapping[int, Pool]
"""For all layers, or by their number; each layer gets a copy of a module."""

PerPlace: TypeAlias = Literal["per-place"]

_LETTERS = ("f", "b", "g", "h")
_IGNORED = -100
"""The label of places that have none, as PyTorch and ``transformers`` have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How the blocks that a network lacks are built; the attributes are arguments of ``ALPackage.from_bp``.

    Raises:
        ConfigError: A size is no whole number above 0.
    """

    outputs: int
    task: Task | PerPlace = "classification"
    method: str | Maker = DEFAULT.name
    method_options: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None
    hidden: int | None = None
    labels: LabelStyle = "inverse"
    bridges: BridgeStyle = "pooled"
    class_dim: int | None = None
    ignore_index: int | None = None
    pool: Pools | None = None
    blocks: OwnBlocks | None = None
    lr: LearningRates = 1e-3
    optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("outputs", "code", "hidden"):
            size = getattr(self, name)
            if name != "outputs" and size is None:
                continue
            if not is_whole(size, 1):
                none = "" if name == "outputs" else ", or None"
                raise ConfigError(f"{name} is {size!r}; expected a whole number, at least 1{none}")
        check_named("task", self.task, (*TASKS, "per-place"))
        if self.task in ("classification", "per-place") and self.outputs == 1:
            raise ConfigError("outputs is 1; expected two classes or more (for one label, pass task='multilabel')")
        if self.class_dim not in (None, 1, -1):
            raise ConfigError(f"class_dim is {self.class_dim!r}; expected 1, -1, or None to find it")
        if not isinstance(self.ignore_index, Integral | None):
            raise ConfigError(f"ignore_index is {self.ignore_index!r}; expected a whole number")
        per_place = {"class_dim": None, "ignore_index": None}
        whole = {"labels": "inverse", "bridges": "pooled"}
        self._refuse(whole if self.task == "per-place" else per_place, f"task={self.task!r}")
        if not self.known.has_labels:
            self._refuse({"code": None, "hidden": None, **whole, "blocks": None}, f"method={self.known.name!r}")
            self._check_ignored()

    @property
    def known(self) -> Method:
        """What is known of the method."""
        return method_of(self.method)

    @property
    def ignored(self) -> int:
        """The label of places that have none."""
        return _IGNORED if self.ignore_index is None else self.ignore_index

    def own_blocks(self, layers: int) -> list[Mapping[str, nn.Module]]:
        """The user's blocks of each of so many layers, by their letters.

        Raises:
            ConfigError: They are of no such layer, or no blocks.
        """
        given = {} if self.blocks is None else self.blocks
        _check_numbers("blocks", given, layers)
        for number, own in given.items():
            if not isinstance(own, Mapping):
                raise ConfigError(f"blocks of layer {number} is {a_type(own)}; expected a mapping, {{'b': …}}")
            for letter, block in own.items():
                if letter not in _LETTERS or not isinstance(block, nn.Module):
                    raise ConfigError(
                        f"blocks of layer {number}: {letter!r} is {a_type(block)}; expected 'f', 'b', 'g' or "
                        "'h', each a torch.nn.Module"
                    )
        return [given.get(number, {}) for number in range(layers)]

    def pools(self, layers: int) -> Mapping[int, Pool]:
        """The user's pools, by the numbers of the layers that have one.

        Raises:
            ConfigError: They are of no such layer.
        """
        if self.pool is None:
            return {}
        given = self.pool if isinstance(self.pool, Mapping) else dict.fromkeys(range(layers), self.pool)
        _check_numbers("pool", given, layers)
        # A module in two bridges would be trained by two layers, in whatever order.
        return {number: deepcopy(one) if isinstance(one, nn.Module) else one for number, one in given.items()}

    def _refuse(self, defaults: Mapping[str, Any], because: str) -> None:
        for name, default in defaults.items():
            found = getattr(self, name)
            if found != default:
                shown = "given" if isinstance(found, Mapping) else f"{found!r}"  # modules take more than a line
                raise ConfigError(f"{name} is {shown}, which does nothing with {because}; leave it out")

    def _check_ignored(self) -> None:
        """A method may look at labels itself, where below zero is none; the one loss of a whole network does not."""
        if self.ignore_index is not None and self.ignore_index >= 0 and not self.known.is_whole:
            raise ConfigError(
                f"ignore_index is {self.ignore_index}; expected a number below 0 with method={self.known.name!r}, "
                f"whose layers take labels as they are: give y.masked_fill(y == {self.ignore_index}, {_IGNORED})"
            )


def _check_numbers(argument: str, given: Mapping[int, Any], layers: int) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{argument} is {a_type(given)}; expected a mapping by the number of a layer")
    for number in given:
        if number not in range(layers):
            raise ConfigError(f"{argument} names layer {number!r}; this model has layers 0 to {layers - 1}")
