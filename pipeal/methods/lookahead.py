"""Looking ahead: a chain of fresh copies of blocks still to come, for the heads of parts below them.

::

    the network      part │ u1  u2 │ u3  u4 │ u5  u6 │             six units still to come, in three parts
    depth=None        └─►   u1'      u3'      u5'    ──► head     the first of each part
    depth=4           └─►       u2'  u3'      u5' u6' ──► head    four, evenly spaced, the last one always

A copy has weights of its own and reads what the copy before gives. Fresh copies train beside the part and leave with
it: the network's own blocks never see them.

**With one start**, a copy begins with the weights of the block that it stands for, and the heads of all parts alike.
Where a part looks ahead at *all* blocks, it and its copies are then the network from there on, and are given the same
samples. If they learn by the same loss, a block and its copies take the same steps, and every part learns what
backpropagation through the whole network would have it learn, though no gradient leaves a part. The loss is another
where parts have label codes that learn, as AL's do unless they are one-hot, and where dropout draws for each part. The
later blocks are computed again in each part below them: with four equal parts ``(4 + 3 + 2 + 1) / 4`` times the
operations. Fewer copies cost less, and are no longer the same.

A copy that reads features of another width than its block draws weights of its own, as does one that is made on the
meta device and becomes real later.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipeal.core.errors import ConfigError, check_counts, check_width
from pipeal.core.tree import Tree, shapes_of
from pipeal.methods.network import Part


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a part looks ahead.

    Attributes:
        depth: How many copies at most, as :func:`sampled` chooses them; None for one of the first block of every part
            still to come.
        width: Of the copies, as a multiple of the network's own.
        shared: Whether neighbouring copies of blocks that are alike, as those of a text model are, have the same
            weights: one block, gone through several times.
        same_start: Whether a copy begins with the weights of the block that it stands for; else with its own.

    Raises:
        ConfigError: A size is out of range, or copies cannot have one start: they are narrower or wider, or shared.
    """

    depth: int | None = None
    width: float = 1.0
    shared: bool = False
    same_start: bool = False

    def __post_init__(self) -> None:
        check_counts(depth=self.depth)
        check_width(self.width)
        if self.same_start and (self.shared or self.width != 1):
            other = "shared" if self.shared else f"{self.width:g} times as wide"
            raise ConfigError(
                f"copies of same_start are {other}; each begins as one block: expected width=1, not shared"
            )

    def of(self, part: Part) -> tuple[list[nn.Module], Tree]:
        """Fresh copies of units that are still to come after a part, each reading what the one before gives.

        Returns:
            The copies, in order, and what the last one gives, of one sample, on the meta device: the part's features
            themselves where nothing is to come.

        Raises:
            ConfigError: A unit cannot be copied.
        """
        units = [unit for later in part.ahead for unit in later]
        if self.depth is None:
            chosen = [later[0] for later in part.ahead]
        else:
            chosen = [units[place] for place in sampled(len(units), self.depth)]
        copies: list[nn.Module] = []
        features, before, same = part.features, None, False
        for unit in chosen:
            if unit.fresh is None:
                raise ConfigError(
                    "a block still to come reads the network's input, so that no copy of it reads features"
                )
            # Alike: made by the same function. That of the last one may read something narrower than it gives.
            if self.shared and unit.fresh == before and same:
                last = copies.pop()
                copies.append(Repeated(last.block, last.times + 1) if isinstance(last, Repeated) else Repeated(last, 2))
                continue
            copy, given = unit.fresh(features, self.width)
            before, same, features = unit.fresh, shapes_of(given) == shapes_of(features), given
            copies.append(copy)
        return copies, features


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
