"""What a run of a language model can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeal.config.schema import DataConfig, ModelConfig, RunConfig
from pipeal.config.types import Count, Share, Text, Whole


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """Which language model, and how wide; the last three are of the AL form alone.

    Attributes:
        name: ``charlm``.
        block: The most characters that it looks back on, and the length of what it is trained on.
        width: The width of the features.
        heads: Attention heads.
        layers: Blocks.
        dropout: The share of activations that training drops.
        per_layer: Blocks that share a layer with a local loss.
        code: The width of the label codes; None for four times as many as there are characters, and at most 512 or
            four times ``width``, whichever is more; with ``one-hot`` labels there are just as many.
        labels: How label sides and associated losses are built: ``codes``, codes that begin ``one-hot``, or as
            ``published``.
        bridges: What the bridges of all AL layers but the last have before their linear map: another ``block``, fresh
            copies of blocks still to come (``lookahead``), or nothing (``linear``).
    """

    name: Text = "charlm"
    block: Count = 16
    width: Count = 32
    heads: Count = 3
    layers: Count = 2
    dropout: Share = 0.2
    per_layer: Count = 1
    code: Count | None = None
    labels: Literal["codes", "one-hot", "published"] = "codes"
    bridges: Literal["linear", "block", "lookahead"] = "linear"


@dataclass(frozen=True)
class LanguageDataConfig(DataConfig):
    """Which text, and what is drawn from it.

    Attributes:
        text: A UTF-8 file, for the data set ``text``; None for ``shakespeare``.
        batch_size: Blocks of a batch.
        prefetch: As for classified texts.
        steps: Batches of an epoch; after each epoch the losses are estimated and the training is saved.
        estimate_batches: Random batches of either part of the text, the same each time, that a loss is the mean of.
    """

    text: Text | None = None
    batch_size: Count = 16
    prefetch: Whole | None = None
    steps: Count = 250
    estimate_batches: Count = 100


@dataclass(frozen=True)
class LanguageConfig(RunConfig):
    """One run of a language model.

    Attributes:
        model: Which model, and how wide.
        data: Which text, and what is drawn from it.
    """

    dataset: Text = "shakespeare"
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    data: LanguageDataConfig = field(default_factory=LanguageDataConfig)
