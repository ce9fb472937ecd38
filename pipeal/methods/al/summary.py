"""A table of a package: shapes, parameters and devices, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pipeal.core.modules import device_of
from pipeal.core.protocols import TURN, UP
from pipeal.core.tree import Shapes, Tree, describe, move, shapes_of
from pipeal.methods.cutting.probe import probing
from pipeal.methods.layer import LocalLayer

HEADER = ("layer", "f gives", "code", "f", "b", "g", "h", "effective", "affiliated", "device")
_LEFT = {"f gives", "code", "device"}


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """The shapes of what one layer hands on: of ``f``'s output, and of its code."""

    out: Shapes
    code: Shapes


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One row.

    Attributes:
        number: The layer's number, from 0.
        shapes: What it hands on, with the batch size it was found with; None if that is not known yet.
        parameters: By the letter of the block; a layer that has no blocks counts under ``f``.
        effective: How many parameters a full inference uses.
        affiliated: How many serve training alone.
        device: Where it is.
    """

    number: int
    shapes: LayerShapes | None
    parameters: dict[str, int]
    effective: int
    affiliated: int
    device: str

    def cells(self) -> tuple[str, ...]:
        """As text."""
        out, code = ("?", "?") if self.shapes is None else map(_shape, (self.shapes.out, self.shapes.code))
        blocks = (f"{self.parameters[letter]:,}" if letter in self.parameters else "-" for letter in "fbgh")
        return (str(self.number), out, code, *blocks, *_shares(self.effective, self.affiliated), self.device)


@dataclass(frozen=True, slots=True)
class Summary:
    """A package's layers; ``print`` shows a table.

    Attributes:
        layers: A row each.
        notes: What a conversion has to say of them, a line each.
    """

    layers: tuple[LayerSummary, ...]
    notes: tuple[str, ...] = ()

    @property
    def effective(self) -> int:
        """How many parameters a full inference uses."""
        return sum(layer.effective for layer in self.layers)

    @property
    def affiliated(self) -> int:
        """How many parameters serve training alone."""
        return sum(layer.affiliated for layer in self.layers)

    def __str__(self) -> str:
        sums = (f"{sum(layer.parameters.get(letter, 0) for layer in self.layers):,}" for letter in "fbgh")
        total = ("total", "", "", *sums, *_shares(self.effective, self.affiliated), "")
        rows = [HEADER, *(layer.cells() for layer in self.layers), total]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if name in _LEFT else cell.rjust(width)
                for cell, width, name in zip(row, widths, HEADER, strict=True)
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *self.notes])


def summarize(layers: Sequence[Any], shapes: Sequence[LayerShapes | None], notes: Sequence[str] = ()) -> Summary:
    """The table of some layers, with the shapes that :func:`find_shapes` or a conversion found."""
    rows = []
    for number, (layer, found) in enumerate(zip(layers, shapes, strict=True)):
        last = number == len(layers) - 1
        effective, affiliated = layer.effective_parameters(last=last), layer.affiliated_parameters(last=last)
        parameters = layer.block_parameters() if isinstance(layer, LocalLayer) else {"f": effective}
        rows.append(LayerSummary(number, found, parameters, effective, affiliated, str(device_of(layer))))
    return Summary(tuple(rows), tuple(notes))


def find_shapes(layers: Sequence[nn.Module], sample: Tree) -> list[LayerShapes]:
    """Takes a batch of inputs up through ``f``; at each layer, its bridge gives the shape of a code."""
    found = []
    x = sample
    for layer in layers:
        inference: Any = layer
        with probing(layer):
            x = inference.inference(move(x, device_of(layer)), UP)
            found.append(LayerShapes(shapes_of(x), shapes_of(inference.inference(x, TURN))))
    return found


def _shape(shapes: Shapes) -> str:
    """With ``B`` for the batch; of floats, which are most, without the type."""
    batch = next((shape[0] for shape, _ in shapes if len(shape)), None)
    words = []
    for shape, dtype in shapes:
        word = describe([(shape, dtype)]).removesuffix(" float32")
        has_batch = len(shape) > 0 and shape[0] == batch
        words.append(f"(B{word.removeprefix(f'({batch}')}" if has_batch else word)
    return " + ".join(words)


def _shares(effective: int, affiliated: int) -> tuple[str, str]:
    whole = max(1, effective + affiliated)
    return f"{effective:,} ({effective / whole:.0%})", f"{affiliated:,} ({affiliated / whole:.0%})"
