"""What a run on text can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeal.config.schema import Count, DataConfig, Flag, ModelConfig, RunConfig, Share, Text


@dataclass(frozen=True)
class TextModelConfig(ModelConfig):
    """Which text model, and how wide.

    Attributes:
        name: ``lstm`` or ``transformer``.
        embedding_dim: Numbers per word vector.
        x_hid: Hidden width of the encoder side (``f`` and ``b``).
        y_hid: Width of the label code (``g`` and ``h``).
        n_heads: Attention heads; they divide ``embedding_dim``. A model without attention ignores it.
        dropout: The share of activations that training drops.
        pretrained: Where the word vectors come from; ``none`` learns them from scratch.
        vectors: The text file of those vectors; None looks for the usual name under the data folder.
    """

    name: Text = "transformer"
    embedding_dim: Count = 300
    x_hid: Count = 256
    y_hid: Count = 128
    n_heads: Count = 6
    dropout: Share = 0.3
    pretrained: Literal["none", "glove", "fasttext"] = "none"
    vectors: Text | None = None


@dataclass(frozen=True)
class BatchingConfig:
    """How texts are joined into batches.

    Attributes:
        kind: ``fixed``: ``batch_size`` samples in random order. ``length``: as many, of similar length.
            ``token-budget``: samples of similar length, as many as the budget holds once padded.
        batch_size: Samples per batch, for ``fixed`` and ``length``.
        budget_tokens: Longest length × samples of a batch is at most this, for ``token-budget``.
        max_samples: The most samples in a batch under ``token-budget``, however short; None for no limit.
    """

    kind: Literal["fixed", "length", "token-budget"] = "token-budget"
    batch_size: Count = 256
    budget_tokens: Count = 8192
    max_samples: Count | None = 512


@dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Where the texts are, and how they become numbers.

    Attributes:
        max_len: The most words kept of a text; None for the published length of the data set.
        vocab_size: The most words in the vocabulary, specials included.
        min_frequency: A word seen less often is unknown.
        drop_stop_words: Whether "the", "and" and their like are dropped.
        batching: How samples are joined into batches.
    """

    max_len: Count | None = None
    vocab_size: Count = 30_000
    min_frequency: Count = 1
    drop_stop_words: Flag = True
    batching: BatchingConfig = field(default_factory=BatchingConfig)


@dataclass(frozen=True)
class TextConfig(RunConfig):
    """One run on text.

    Attributes:
        model: Which model, and how wide.
        data: Where the texts are, and how they become numbers.
    """

    dataset: Text = "agnews"
    model: TextModelConfig = field(default_factory=TextModelConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)
