"""Text models whose layers compute a batch in groups of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from pipeal.core.errors import ConfigError
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
    places = list(_places(package))
    chosen = range(2, len(places) + 1) if layers is None else sorted(set(layers))
    for number in chosen:
        if not 1 <= number <= len(places):
            raise ConfigError(f"no layer {number} to group; wanted layers from 1 to {len(places)}")
    for number in chosen:
        holder, name = places[number - 1]
        setattr(holder, name, Grouped(getattr(holder, name), thresholds, pad_index=pad_index if number == 1 else None))
    return package


def _places(package: ALPackage) -> Iterator[tuple[nn.Module, str]]:
    """The module and the attribute name that hold each layer's block."""
    for layer in package:
        if isinstance(layer, AL):
            yield layer.enc, "f"
        elif isinstance(layer, BP):
            *blocks, _ = layer.model.named_children()  # the last is the head
            yield from ((layer.model, name) for name, _ in blocks)
        else:
            yield layer, "f"
