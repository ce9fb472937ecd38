"""Options of methods: keyword arguments of their ``make_layers``, with the same defaults.

A method that has some adds a class here, and a field to :class:`MethodsConfig` with its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeal.config.types import Count, Flag, Multiple, NotNegative, Positive, Share


@dataclass(frozen=True)
class AugLocalConfig:
    """What a part's head looks ahead to (:mod:`pipeal.methods.auglocal`).

    Attributes:
        depth: The most copies of blocks still to come that the first part's head has, evenly spaced; None for one of
            the first block of every part still to come.
        width: Of the copies, as a multiple of the network's.
        pyramid: How far the number of copies falls from ``depth`` towards one, from the first hidden part to the last,
            as a share of the way. Without a ``depth`` it does nothing.
        same_start: Whether a copy begins with the weights of the block that it stands for, and heads alike.
    """

    depth: Count | None = None
    width: Multiple = 1.0
    pyramid: Share = 0.5
    same_start: Flag = False


@dataclass(frozen=True)
class BPConfig:
    """How backpropagation begins (:mod:`pipeal.methods.bp`).

    Attributes:
        same_start: Whether it begins with the weights with which other methods begin that have ``same_start``, of the
            same seed, to be compared bit for bit; of networks that draw their weights and end in one linear map.
    """

    same_start: Flag = False


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
    width: Multiple = 1.0


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
        auglocal: What a part's head looks ahead to.
        bp: How backpropagation begins.
        infopro: How much a part is asked for.
        predsim: How features are compared and classified.
        scpl: How vectors are projected and contrasted.
        deinforeg: What vectors are asked for, and how they are projected.
    """

    auglocal: AugLocalConfig = field(default_factory=AugLocalConfig)
    bp: BPConfig = field(default_factory=BPConfig)
    infopro: InfoProConfig = field(default_factory=InfoProConfig)
    predsim: PredSimConfig = field(default_factory=PredSimConfig)
    scpl: SCPLConfig = field(default_factory=SCPLConfig)
    deinforeg: DeInfoRegConfig = field(default_factory=DeInfoRegConfig)
