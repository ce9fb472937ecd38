"""Text models whose layers compute a batch in groups of similar length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from pipeal.core.errors import ConfigError
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer
from pipeal.data import Grouped
from pipeal.methods.al import AL, BP, ALPackage


def group_layers(
    package: ALPackage, thresholds: Sequence[int], layers: Sequence[int] | None = None, *, pad_index: int = 0
) -> ALPackage:
    """Puts a :class:`pipeal.data.Grouped` around the forward blocks of a package that :func:`build_text` made.

    Answers stay those of the ungrouped package, up to rounding; dropout draws other masks.

    Args:
        package: Of any form; in the BP form, its blocks are the layers. It is altered.
        thresholds: The longest samples of all groups but the last, rising.
        layers: Which, counted from 1, the embedding being the first; None for all above it.
        pad_index: The token that pads.

    Returns:
        The package.

    Raises:
        ConfigError: Thresholds that do not rise, or a layer that there is not.
    """
    _require_there(layers, sum(1 for layer in package for _ in _places(layer)))  # before anything is altered
    for _ in group_each(package, thresholds, layers, pad_index=pad_index):
        pass
    return package


def group_each(
    package: Iterable[TrainableLayer],
    thresholds: Sequence[int],
    layers: Sequence[int] | None = None,
    *,
    pad_index: int = 0,
) -> Iterator[TrainableLayer]:
    """The same for layers as they are made; the arguments are those of :func:`group_layers`.

    Raises:
        ConfigError: As there; of a layer that there is not, after the last.
    """
    number = 0
    for layer in package:
        for holder, name in _places(layer):
            number += 1
            if number > 1 if layers is None else number in layers:
                pads = pad_index if number == 1 else None
                setattr(holder, name, Grouped(getattr(holder, name), thresholds, pad_index=pads))
        yield layer
    _require_there(layers, number)


def _places(layer: TrainableLayer) -> list[tuple[nn.Module, str]]:
    """The modules and the attribute names that hold a layer's block, or in the BP form its blocks."""
    if isinstance(layer, AL):
        return [(layer.enc, "f")]
    if isinstance(layer, BP):
        *blocks, _ = layer.model.named_children()  # the last is the head
        return [(layer.model, name) for name, _ in blocks]
    return [(module_of(layer), "f")]


def _require_there(layers: Sequence[int] | None, count: int) -> None:
    for number in sorted(set(layers or ())):
        if not 1 <= number <= count:
            raise ConfigError(f"no layer {number} to group; wanted layers from 1 to {count}")
