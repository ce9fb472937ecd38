"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeal.config.types import Count, Flag, Share


@dataclass(frozen=True)
class PredSimConfig:
    """How features are compared and classified (:mod:`pipeal.methods.predsim`).

    Attributes:
        beta: What the similarity loss counts for; the cross entropy counts for the rest of 1.
        std: Whether images are compared by the spread of each channel; else by all their numbers.
        decoder: The most numbers that a classifier reads of an image.
    """

    beta: Share = 0.99
    std: Flag = True
    decoder: Count = 4096


@dataclass(frozen=True)
class MethodsConfig:
    """Options by method.

    Attributes:
        predsim: Of similarities.
    """

    predsim: PredSimConfig = field(default_factory=PredSimConfig)
