"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeal.config.types import Count, NotNegative, Positive, Share


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
class InfoProConfig:
    """How much a part is asked for (:mod:`pipeal.methods.infopro`): weights change linearly over the hidden parts.

    Attributes:
        lambda_1: The weight of the reconstruction loss in the first part.
        lambda_2: That of the cross entropy there.
        lambda_1_last: The weight of the reconstruction loss in the last part but one; the last has none.
        lambda_2_last: That of the cross entropy there.
        width: Of heads and decoders, as a multiple of the published ones.
    """

    lambda_1: NotNegative = 5.0
    lambda_2: NotNegative = 0.05
    lambda_1_last: NotNegative = 0.2
    lambda_2_last: NotNegative = 0.5
    width: Positive = 1.0


@dataclass(frozen=True)
class MethodsConfig:
    """Options by method.

    Attributes:
        auglocal: What a part's head looks ahead to.
        infopro: How much a part is asked for.
    """

    auglocal: AugLocalConfig = field(default_factory=AugLocalConfig)
    infopro: InfoProConfig = field(default_factory=InfoProConfig)
