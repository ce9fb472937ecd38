"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeal.config.types import Count, Positive, Share


@dataclass(frozen=True)
class AugLocalConfig:
    """What a part's head looks ahead to (:mod:`pipeal.methods.auglocal`).

    Attributes:
        depth: The most copies of blocks still to come that the first part's head has, evenly spaced; None for one of
            the first block of every part still to come.
        width: Of the copies, as a multiple of the network's.
        pyramid: How far the number of copies falls from ``depth`` towards one, from the first hidden part to the last,
            as a share of the way. Without a ``depth`` it does nothing.
    """

    depth: Count | None = None
    width: Positive = 1.0
    pyramid: Share = 0.5


@dataclass(frozen=True)
class MethodsConfig:
    """Options by method.

    Attributes:
        auglocal: What a part's head looks ahead to.
    """

    auglocal: AugLocalConfig = field(default_factory=AugLocalConfig)
