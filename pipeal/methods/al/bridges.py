"""Bridges: from what a layer's ``f`` gives, of whatever shape, to the shape of its label code.

::

    image     (B, C, H, W)            ──► average over at most 4 x 4 cells ──► flat ──┐
    sequence  (B, T, D), mask (B, T)  ──► mean over the words ────────────────────────┤──► linear maps ──► code
    vector    (B, D)                  ────────────────────────────────────────────────┤
    anything  ──► the user's pool ────────────────────────────────────────────────────┘

All classes here set ``draws_from_default = False``: none draws (see :func:`pipeal.core.rng.may_draw`). A user's own
pool is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, first_line, unknown_name
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.al.codes import CODE_ACTIVATIONS, LabelStyle
from pipeal.methods.cutting.calling import what_is
from pipeal.methods.cutting.probe import probing

BridgeStyle: TypeAlias = Literal["pooled", "flat"]
Pool: TypeAlias = Callable[[Any], Tensor]
"""From what ``f`` gives to ``(B, D)``: a function or a module."""

Activation: TypeAlias = Callable[[], nn.Module]
"""Makes an activation."""

BRIDGE_STYLES = ("pooled", "flat")


def bridge_for(
    output: Tree,
    code: int,
    *,
    hidden: int | None = None,
    style: BridgeStyle = "pooled",
    labels: LabelStyle = "inverse",
    pool: Pool | None = None,
) -> nn.Module:
    """A bridge for what a layer's ``f`` gives.

    >>> bridge = bridge_for(torch.zeros(2, 64, 8, 8), code=16)
    >>> bridge(torch.zeros(5, 64, 8, 8)).shape
    torch.Size([5, 16])

    Args:
        output: What ``f`` gives for some batch: ``(B, C, H, W)``, ``(B, T, D)``, a tuple of such a sequence and its
            ``(B, T)`` mask, or ``(B, D)``; anything if there is a ``pool``.
        code: The width of the label code.
        hidden: The width of a hidden layer before the code; None for no such layer.
        style: ``pooled``: means over space, and ReLU after the hidden layer. ``flat``: the published bridge, which
            keeps every place of an image, and a sigmoid after the hidden layer.
        labels: How the label sides are built, which decides the range of codes (:data:`CODE_ACTIVATIONS`).
        pool: From ``output`` to ``(B, D)``.

    Raises:
        ConfigError: The style is unknown, or a size is below 1; ``output`` is of no such shape and there is no
            ``pool``; or ``pool`` gives no ``(B, D)``.
    """
    if style not in BRIDGE_STYLES:
        raise ConfigError(unknown_name("style of bridges", style, BRIDGE_STYLES))
    for name, size in (("code", code), ("hidden", hidden)):
        if size is not None and size < 1:
            raise ConfigError(f"{name} is {size}; expected a whole number, at least 1")
    inner = nn.ReLU if style == "pooled" else nn.Sigmoid
    ending = CODE_ACTIVATIONS[labels]
    vectors = partial(VectorBridge, code=code, hidden=hidden, activation=inner, ending=ending)
    if pool is not None:
        return vectors(_width_of(pool, output), pool=pool)
    if isinstance(output, Tensor) and output.is_floating_point():
        if output.dim() == 4:
            image_bridge = ImageBridge if style == "pooled" else FlatBridge
            channels, height, width = output.shape[1:]
            return image_bridge(channels, height, width, code, hidden, ending=ending)
        if output.dim() == 3:
            return vectors(output.shape[-1], pool=MaskedMean())
        if output.dim() == 2:
            return vectors(output.shape[-1])
    elif _is_masked_sequence(output):
        return vectors(output[0].shape[-1], pool=MaskedMean())
    raise ConfigError(
        f"no bridge for an output of {describe(shapes_of(output))}: expected floats (B, C, H, W), (B, T, D), (B, D), "
        "or (B, T, D) with a mask (B, T); pass pool=…, a function from this output to (B, D)"
    )


class ImageBridge(nn.Sequential):
    """Images to codes: averages over a few cells, so that its size does not grow with the image.

    Args:
        channels: ``C`` of ``(B, C, H, W)``.
        height: ``H``; an image of another size is averaged over the same number of cells.
        width: ``W``.
        code: The width of the code.
        hidden: The width of a hidden layer; None for none.
        cells: How many cells a side is divided into, at most.
        ending: Makes the activation of the codes.
    """

    draws_from_default = False

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        code: int,
        hidden: int | None = None,
        *,
        cells: int = 4,
        ending: Activation = nn.Tanh,
    ) -> None:
        rows, columns = min(height, cells), min(width, cells)
        flat = channels * rows * columns
        super().__init__(CellMeans(rows, columns), nn.Flatten(), *_to_code(flat, hidden, code, nn.ReLU, ending))


class CellMeans(nn.Module):
    """Averages over the cells of an image: ``(B, C, H, W)`` to ``(B, C, rows, columns)``.

    As ``nn.AdaptiveAvgPool2d``. In training, where all cells are of one size, as they mostly are, ``avg_pool2d`` takes
    its place: that one's backward is compiled into the kernels around it and stays in their layout, and
    ``torch.use_deterministic_algorithms`` lets it pass on a GPU. Answers keep the operator that no size decides on, so
    that they can be exported for images of any size.

    Args:
        rows: Cells of a column.
        columns: Cells of a row.
    """

    draws_from_default = False

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        """An image smaller than the cells lends its places to several of them."""
        height, width = x.shape[-2:]
        if not self.training or height % self.rows or width % self.columns:
            return F.adaptive_avg_pool2d(x, (self.rows, self.columns))
        return F.avg_pool2d(x, (height // self.rows, width // self.columns))

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.rows}, {self.columns}"


class VectorBridge(nn.Sequential):
    """Vectors to codes, after a pool where the layer gives something else.

    Args:
        width: ``D`` of ``(B, D)``.
        code: The width of the code.
        hidden: The width of a hidden layer; None for none.
        pool: What gives those vectors; None if the layer does.
        activation: Makes the hidden layer's activation.
        ending: Makes the activation of the codes.
    """

    draws_from_default = False

    def __init__(
        self,
        width: int,
        code: int,
        hidden: int | None = None,
        *,
        pool: Pool | None = None,
        activation: Activation = nn.ReLU,
        ending: Activation = nn.Tanh,
    ) -> None:
        before = [] if pool is None else [pool if isinstance(pool, nn.Module) else Pooling(pool)]
        super().__init__(*before, *_to_code(width, hidden, code, activation, ending))


class FlatBridge(VectorBridge):
    """The published bridge of images: every place of every channel, and a sigmoid after the hidden layer.

    Args:
        channels: ``C`` of ``(B, C, H, W)``.
        height: ``H``; it is fixed.
        width: ``W``; it is fixed.
        code: The width of the code.
        hidden: The width of the hidden layer; None for none.
        ending: Makes the activation of the codes.
    """

    draws_from_default = False

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        code: int,
        hidden: int | None = None,
        *,
        ending: Activation = nn.Sigmoid,
    ) -> None:
        flat = channels * height * width
        super().__init__(flat, code, hidden, pool=nn.Flatten(), activation=nn.Sigmoid, ending=ending)


class MaskedMean(nn.Module):
    """The mean over the words of a text: ``(B, T, D)`` with a ``(B, T)`` mask, or without one, to ``(B, D)``."""

    draws_from_default = False

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Sums as a product with the mask: one pass over the features, in one fused operator."""
        if isinstance(x, Tensor):
            return x.mean(1)
        features, mask = x
        # A row without any word has the mean zero, not 0/0.
        weights = mask.to(features.dtype) / mask.sum(1, keepdim=True).clamp(min=1).to(features.dtype)
        return torch.bmm(weights.unsqueeze(1), features).squeeze(1)


class Pooling(nn.Module):
    """A user's function in the place of a module.

    It declares nothing about random numbers, and holds a function: the engine keys whatever it may draw.

    Args:
        pool: From what ``f`` gives to ``(B, D)``.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tree) -> Tensor:
        """Calls the function."""
        return self.pool(x)


def _to_code(width: int, hidden: int | None, code: int, activation: Activation, ending: Activation) -> list[nn.Module]:
    """The end of every bridge: ``(B, width)`` to ``(B, code)``, by way of a hidden layer if there is one."""
    inner = [] if hidden is None else [nn.Linear(width, hidden), activation()]
    return [*inner, nn.Linear(hidden or width, code), ending()]


def _is_masked_sequence(output: Tree) -> bool:
    if not (isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output)):
        return False
    features, mask = output
    return features.dim() == 3 and features.is_floating_point() and mask.shape == features.shape[:2]


def _width_of(pool: Pool, output: Tree) -> int:
    given = describe(shapes_of(output))
    try:
        with probing(Pooling(pool)):
            pooled: Any = pool(output)
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(f"pool, given {given}, raises {first_line(error)}") from error
    if not (isinstance(pooled, Tensor) and pooled.dim() == 2 and pooled.is_floating_point()):
        raise ConfigError(f"pool, given {given}, gives {what_is(pooled)}; expected floats (B, D)")
    return pooled.shape[1]
