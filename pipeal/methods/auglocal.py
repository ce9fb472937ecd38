"""AugLocal: every layer answers through fresh copies of blocks still to come, and learns by the loss of that answer.

::

        x ──► f ──► x'  (detached, to the next layer)
                └─► copy ──► copy ──► … ──► pool ──► linear ──► answer ──┐ cross entropy
        y ───────────────────────────────────────────────────────────────┘ (and on to the next layer, as it is)

After Ma, Wu, Si and Tan, "Scaling Supervised Local Learning with Augmented Auxiliary Networks" (ICLR 2024;
ChenxiangMA/AugLocal). What a part learns suits the blocks above it, because its head is made like them. As there: the
copies are spaced evenly over the blocks still to come, are as wide as these (or a multiple), become fewer towards the
top where ``depth`` says how many, and the last part has the network's own linear classifier.

Other than there:

- ``depth`` may be None, and is by default: a copy of the first block of every part still to come. So heads shrink
  towards the top by themselves, and what they cost goes with the number of parts, not with that of blocks.
- Their code leaves the last ``depth + 1`` blocks in one part; here the parts are the caller's.
- Halves are rounded up where blocks are spaced (:func:`pipeal.methods.lookahead.sampled`).
- A head of one copy has no batch norm before its linear map, which could not learn from a batch of one sample.
- On texts and language the copies are those of the network's own blocks as well; the paper has images alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from pipeal.core.errors import ConfigError
from pipeal.methods.greedy import Greedy
from pipeal.methods.lookahead import Ahead
from pipeal.methods.network import Network
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, one_rate


def make_layers(
    network: Network,
    lr: LearningRates,
    optimizer: OptimizerFactory | None,
    *,
    depth: int | None = None,
    width: float = 1.0,
    pyramid: float = 0.5,
    same_start: bool = False,
) -> Iterator[Greedy]:
    """A layer for each part of a network; see :func:`pipeal.methods.make_layers`.

    Args:
        network: As there.
        lr: As there.
        optimizer: As there.
        depth: How many copies the first part's head has at most; None for one of the first block of every part still
            to come.
        width: Of the copies, as a multiple of the network's own.
        pyramid: How far the number of copies falls from ``depth`` towards one, from the first hidden part to the last,
            as a share of the way; the published runs have 0.5. Without a ``depth`` it does nothing.
        same_start: Whether copies, and the heads of all parts, begin as those of the network; the published ones draw
            their own. See :mod:`pipeal.methods.lookahead`, also on when that is backpropagation.

    Raises:
        ConfigError: An option is out of range, or a block cannot be copied.
    """
    rate = one_rate(lr, "AugLocal")
    if not 0 <= pyramid < 1:
        raise ConfigError(f"pyramid is {pyramid}; expected 0 <= pyramid < 1")
    ahead = Ahead(depth=depth, width=width, same_start=same_start)
    for part in network.parts(same_start=same_start):
        if depth is not None:
            wanted = fewer_above(depth, pyramid, part.number, hidden=part.number + len(part.ahead))
            ahead = replace(ahead, depth=wanted)
        copies, features = ahead.of(part)
        pool, size = network.pool(features)
        with part.alike():
            answer = network.linear(size, network.outputs)
        head = nn.Sequential(*copies, pool, answer)
        yield Greedy(part.f, head, network.criterion(), rate, optimizer)


def fewer_above(depth: int, pyramid: float, number: int, *, hidden: int) -> int:
    """How many copies the head of a hidden part has: ``depth`` in the first one, and linearly fewer above.

    >>> [fewer_above(5, 0.5, number, hidden=4) for number in range(4)]
    [5, 4, 4, 3]
    """
    share = pyramid * number / (hidden - 1) if hidden > 1 else 0.0
    return max(1, round(depth * (1 - share) + share))
