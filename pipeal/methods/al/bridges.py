"""Bridges: from what a layer's ``f`` gives, of whatever shape, to the shape of its label code.

::

    image     (B, C, H, W)            ──► average over at most 4 x 4 cells ──► flat ──┐
    sequence  (B, T, D), mask (B, T)  ──► mean over the words ────────────────────────┤──► linear maps ──► code
    vector    (B, D)                  ────────────────────────────────────────────────┤
    anything  ──► the user's pool ────────────────────────────────────────────────────┘

None of these classes draws random numbers; a user's own pool is judged by itself (:func:`pipeal.core.draws.may_draw`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from pipeal.core.errors import ConfigError, check_counts, check_named, first_line
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.al.codes import CODE_ACTIVATIONS, LabelStyle
from pipeal.methods.al.place_codes import padding_of
from pipeal.methods.cutting.answers import what_is
from pipeal.methods.cutting.probe import probing
from pipeal.methods.lookahead import Ahead
from pipeal.methods.network import Part
from pipeal.methods.norm import normed_maps
from pipeal.methods.pooling import CellMeans, MaskedMean

BridgeStyle: TypeAlias = Literal["pooled", "flat"]
Pool: TypeAlias = Callable[[Any], Tensor]
"""From what ``f`` gives to ``(B, D)``: a function or a module."""

BridgeKind: TypeAlias = Literal["pooled", "flat", "lookahead", "mlp"]
"""A style of bridges; or ``pooled`` ones that in all parts but the last go through more: through fresh copies of blocks
still to come, or through three linear maps with batch norm."""

BRIDGE_STYLES = ("pooled", "flat")
BRIDGE_KINDS = (*BRIDGE_STYLES, "lookahead", "mlp")

_CELLS = 4
"""The most that a side of an image is divided into, so that a pooled bridge does not grow with the image."""


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

    >>> import torch
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
    check_named("style of bridges", style, BRIDGE_STYLES)
    check_counts(code=code, hidden=hidden)
    before, width = vectors_from(output, style, pool)
    activation = nn.ReLU if style == "pooled" else nn.Sigmoid
    inner = [] if hidden is None else [nn.Linear(width, hidden), activation()]
    return nn.Sequential(*before, *inner, nn.Linear(hidden or width, code), CODE_ACTIVATIONS[labels]())


def bridge_of(
    part: Part,
    ahead: Ahead,
    code: int,
    *,
    style: BridgeKind,
    hidden: int | None = None,
    labels: LabelStyle = "inverse",
) -> nn.Module:
    """A bridge for a part of a network. Through copies of blocks above it, or through further maps, a part is asked for
    features that these can answer from; else for some whose means one linear map can answer from.

    The last part has nothing to come, and its bridge no copies or further maps. The whole way of an answer takes that
    bridge alone, so that these serve training, and exits, but no inference at the top.

    Args:
        part: Of which it reads the features.
        ahead: How far it looks.
        code: As for :func:`bridge_for`.
        style: As there, ``lookahead``, or ``mlp``.
        hidden: As there; of ``mlp``, which needs one, the width of the further maps.
        labels: As there.

    Raises:
        ConfigError: As there, or as :meth:`pipeal.methods.lookahead.Ahead.of`.
    """
    if style == "mlp" and part.ahead:
        before, width = hidden_maps(part.features, hidden)
        return nn.Sequential(*before, nn.Linear(width, code), CODE_ACTIVATIONS[labels]())
    if style != "lookahead":
        kind: BridgeStyle = "pooled" if style == "mlp" else style
        return bridge_for(part.features, code, style=kind, hidden=hidden, labels=labels)
    copies, features = ahead.of(part)
    with part.alike():
        bridge = bridge_for(features, code, hidden=hidden, labels=labels)
    return nn.Sequential(*copies, bridge) if copies else bridge


def hidden_maps(features: Tree, width: int | None) -> tuple[list[nn.Module], int]:
    """What a bridge of the kind ``mlp`` has before its last map, from features to ``(B, width)``, and that width: a
    projector, as of VICReg (Bardes, Ponce and LeCun, 2021).

    Raises:
        ConfigError: There is no width.
    """
    if width is None:
        raise ConfigError("bridges are mlp, and hidden is None; expected the width of their maps")
    before, given = vectors_from(features, "pooled", None)
    return [*before, *normed_maps(given, width)], width


def vectors_from(output: Tree, style: BridgeStyle, pool: Pool | None) -> tuple[list[nn.Module], int]:
    """What takes an output to ``(B, D)``, and ``D``; the arguments, and what is raised, as of :func:`bridge_for`."""
    if pool is not None:
        module = as_module(pool)
        return [module], tried("pool", module, output).shape[1]
    features = output if padding_of(output) is None else output[0]
    if isinstance(features, Tensor) and features.is_floating_point():
        if features.dim() == 4:
            channels, height, width = features.shape[1:]
            if style == "flat":
                return [nn.Flatten()], channels * height * width
            rows, columns = min(height, _CELLS), min(width, _CELLS)
            return [CellMeans(rows, columns), nn.Flatten()], channels * rows * columns
        if features.dim() == 3:
            return [MaskedMean()], features.shape[-1]
        if features.dim() == 2:
            return [], features.shape[-1]
    raise ConfigError(
        f"no bridge for an output of {describe(shapes_of(output))}: expected floats (B, C, H, W), (B, T, D), (B, D), "
        "or (B, T, D) with a mask (B, T); pass pool=…, a function from this output to (B, D)"
    )


class Pooling(nn.Module):
    """A user's function in the place of a module.

    Args:
        pool: From what ``f`` gives to ``(B, D)``.
    """

    draws_from_default = True  # it may, for all that is known; so the engine keys whatever it draws

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tree) -> Tensor:
        """Calls the function."""
        return self.pool(x)


def as_module(pool: Pool) -> nn.Module:
    """A pool as a part of a bridge."""
    return pool if isinstance(pool, nn.Module) else Pooling(pool)


def tried(what: str, block: nn.Module, x: Tree, wanted: Sequence[int] | None = None, *, dims: int | None = 2) -> Tensor:
    """What a block of the user's, or a bridge, gives for ``x``: floats, of the shape wanted, or of so many dimensions.

    Raises:
        ConfigError: It gives something else, or raises; the message calls it ``what``.
    """
    given = describe(shapes_of(x))
    try:
        with probing(block):
            out = block(x)
    except Exception as error:  # whatever a user's block raises
        raise ConfigError(f"{what}, given {given}, raises {first_line(error)}") from error
    dims = dims if wanted is None else len(wanted)
    fits = isinstance(out, Tensor) and out.is_floating_point() and dims in (None, out.dim())
    if not fits or (wanted is not None and tuple(out.shape) != tuple(wanted)):
        shape = f"floats {tuple(wanted)}" if wanted is not None else "floats (B, D)" if dims else "floats"
        raise ConfigError(f"{what}, given {given}, gives {what_is(out)}; expected {shape}")
    return out
