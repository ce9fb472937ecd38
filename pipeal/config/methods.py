"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeal.config.types import Count, Flag, NotNegative, Positive, Share


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
class SCPLConfig:
    """How vectors are projected and contrasted (:mod:`pipeal.methods.scpl`).

    Attributes:
        temperature: What cosines are divided by.
        projector: What features go through before they are compared; None for ``mlp`` of images, ``identity`` of texts.
        hidden: Between the maps of ``mlp``; None for 512 of images, and as wide as the features of texts.
        width: After the last map; None for 1024 of images, and as wide as the features of texts.
        cells: The most that a side of an image is divided into, whose means are projected; None for every pixel.
    """

    temperature: Positive = 0.1
    projector: Literal["identity", "linear", "mlp"] | None = None
    hidden: Count | None = None
    width: Count | None = None
    cells: Count | None = 4


@dataclass(frozen=True)
class DeInfoRegConfig:
    """What vectors are asked for, and how they are projected (:mod:`pipeal.methods.deinforeg`).

    Attributes:
        variance: What the variance term counts for.
        invariance: What that of the similarities counts for.
        covariance: What the covariance term counts for.
        classifier: What the cross entropy counts for.
        width: Of the projector's three maps, for images.
        cells: The most that a side of an image is divided into, whose means are projected; None for every pixel.
    """

    variance: NotNegative = 1.0
    invariance: NotNegative = 1.0
    covariance: NotNegative = 1.0
    classifier: NotNegative = 0.001
    width: Count = 2048
    cells: Count | None = 4


@dataclass(frozen=True)
class MethodsConfig:
    """Options by method.

    Attributes:
        predsim: Of similarities.
        scpl: Of contrastive losses.
        deinforeg: Of variances and covariances.
    """

    predsim: PredSimConfig = field(default_factory=PredSimConfig)
    scpl: SCPLConfig = field(default_factory=SCPLConfig)
    deinforeg: DeInfoRegConfig = field(default_factory=DeInfoRegConfig)
