"""What a run on images can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeal.config.schema import DataConfig, ModelConfig, RunConfig
from pipeal.config.types import Count, Flag, Multiple, Pixels, Text, Whole
from pipeal.core.names import Augmentation


@dataclass(frozen=True)
class VisionModelConfig(ModelConfig):
    """Which vision model, and how wide; hidden widths, bridges and labels are of the AL form alone.

    Attributes:
        name: ``vgg``, ``resnet``, ``torchvision:NAME`` or ``hf:FOLDER``.
        x_hid: Hidden width of the bridges; without effect where ``labels`` is ``codes`` or ``one-hot``, unless
            ``bridges`` is ``mlp``.
        y_hid: Width of the label code (``g`` and ``h``); without effect where ``labels`` is ``one-hot``.
        width: The channels of every convolution, as a multiple of the published ones.
        activation: After every convolution.
        bridges: ``pooled`` averages an image down to a few cells before the bridge's linear layers; ``flat``, the
            published one, takes every pixel; ``mlp`` goes through three further maps with batch norm, and
            ``lookahead`` through fresh copies of blocks still to come, both in all layers but the last.
        labels: ``inverse`` starts the label sides as near inverses of each other; ``published`` has sigmoids at both
            ends and PyTorch's own start, and stays at chance for its first epochs; ``codes`` asks which class was
            meant, of codes that are learnt, and ``one-hot`` of codes that begin one-hot and stay so. With these two,
            ``pooled`` bridges are one linear map of means over the image.
        channels_last: Whether images and convolutions are laid out channel by channel (NHWC), which is faster.
    """

    name: Text = "resnet"
    x_hid: Count = 1000
    y_hid: Count = 700
    width: Multiple = 1.0
    activation: Literal["relu", "leaky-relu"] = "relu"
    bridges: Literal["pooled", "flat", "lookahead", "mlp"] = "pooled"
    labels: Literal["inverse", "published", "codes", "one-hot"] = "inverse"
    channels_last: Flag = True


@dataclass(frozen=True)
class ImageDataConfig(DataConfig):
    """Where the images are, and how they become batches.

    Attributes:
        size: The side of the square images, in pixels; others are resized.
        augmentation: What training images go through: ``none``; ``basic``, a random crop and flip; ``strong``, colour
            changes as well.
        batch_size: Images per training batch.
        workers: Processes that prepare batches; 0 prepares them in the training process, null chooses.
        on_broken: What a broken image does: ``raise`` ends the run, ``skip`` leaves it out and counts it.
        cache: Whether decoded images are kept on disk for the next run, in ``cache_dir``; or a folder for them alone.
    """

    size: Pixels = 32
    augmentation: Augmentation = "basic"
    batch_size: Count = 128
    workers: Whole | None = None
    on_broken: Literal["raise", "skip"] = "raise"
    cache: Flag | Text = True


@dataclass(frozen=True)
class VisionConfig(RunConfig):
    """One run on images.

    Attributes:
        model: Which model, and how wide.
        data: Where the images are, and how they become batches.
    """

    dataset: Text = "tinyimagenet"
    model: VisionModelConfig = field(default_factory=VisionModelConfig)
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
