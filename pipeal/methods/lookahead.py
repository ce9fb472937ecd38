"""Looking ahead: a chain of fresh copies of blocks still to come, for the heads of parts below them.

::

    the network      part │ u1  u2 │ u3  u4 │ u5  u6 │             six units still to come, in three parts
    depth=None        └─►   u1'      u3'      u5'    ──► head     the first of each part
    depth=4           └─►       u2'  u3'      u5' u6' ──► head    four, evenly spaced, the last one always

A copy has weights of its own and reads what the copy before gives. Fresh copies train beside the part and leave with
it: the network's own blocks never see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pipeal.core.errors import ConfigError, check_counts
from pipeal.core.tree import Tree, shapes_of
from pipeal.methods.network import Part, Unit


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a part looks ahead.

    Attributes:
        depth: How many copies at most; None for one of the first block of every part still to come.
        width: Of the copies, as a multiple of the network's own.
        shared: Whether neighbouring copies of blocks that are alike, as those of a text model are, have the same
            weights: one block, gone through several times.

    Raises:
        ConfigError: A size is out of range.
    """

    depth: int | None = None
    width: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        check_counts(depth=self.depth)
        if not self.width > 0:
            raise ConfigError(f"width is {self.width}; expected a multiple of the network's own, above 0")

    def of(self, part: Part) -> tuple[list[nn.Module], Tree]:
        """The copies that a part looks ahead with; as :func:`look_ahead`."""
        return look_ahead(part.ahead, part.features, depth=self.depth, width=self.width, shared=self.shared)


class Repeated(nn.Module):
    """A block whose output is fed to it again.

    Args:
        block: From features to features of the same shape.
        times: How often it is gone through.
    """

    def __init__(self, block: nn.Module, times: int) -> None:
        super().__init__()
        self.block = block
        self.times = times

    def forward(self, x: Tree) -> Tree:
        """The features after the last time."""
        for _ in range(self.times):
            x = self.block(x)
        return x


def look_ahead(
    ahead: Sequence[Sequence[Unit]], features: Tree, *, depth: int | None, width: float, shared: bool = False
) -> tuple[list[nn.Module], Tree]:
    """Fresh copies of units still to come, each reading what the one before gives.

    Args:
        ahead: The units of each part still to come.
        features: What the first copy reads, of one sample, on the meta device.
        depth: How many copies at most, as :func:`sampled` chooses them; None for one of the first unit of every part.
        width: Of the copies, as a multiple of their units'.
        shared: As :class:`Ahead` says.

    Returns:
        The copies, in order, and what the last one gives, of one sample, on the meta device: ``features`` themselves
        where nothing is to come.

    Raises:
        ConfigError: ``depth`` is below 1, ``width`` is not above 0, or a unit cannot be copied.
    """
    check_counts(depth=depth)
    if not width > 0:
        raise ConfigError(f"width is {width}; expected a multiple of the network's own, above 0")
    units = [unit for part in ahead for unit in part]
    chosen = [part[0] for part in ahead] if depth is None else [units[place] for place in sampled(len(units), depth)]
    copies: list[nn.Module] = []
    before, same = None, False
    for unit in chosen:
        if unit.fresh is None:
            raise ConfigError("a block still to come reads the network's input, so that no copy of it reads features")
        # Alike: made by the same function. That of the last one may read something narrower than it gives.
        if shared and unit.fresh == before and same:
            last = copies.pop()
            copies.append(Repeated(last.block, last.times + 1) if isinstance(last, Repeated) else Repeated(last, 2))
            continue
        copy, given = unit.fresh(features, width)
        before, same, features = unit.fresh, shapes_of(given) == shapes_of(features), given
        copies.append(copy)
    return copies, features


def sampled(count: int, depth: int) -> list[int]:
    """Which of so many units still to come are copied: ``depth`` of them, evenly spaced, the last one always.

    After Ma et al. (ICLR 2024), whose code takes the units ``round(l + (count / depth) i)`` after unit ``l``, for ``i``
    from 1 to ``depth``. Halves are rounded up here, for whatever ``l``: their ``round`` goes to the even number, which
    lies above or below by where the part stands.

    >>> sampled(6, 4), sampled(5, 2), sampled(2, 3)
    ([1, 2, 4, 5], [2, 4], [0, 1])
    """
    if depth >= count:
        return list(range(count))
    return [(2 * count * step + depth) // (2 * depth) - 1 for step in range(1, depth + 1)]
