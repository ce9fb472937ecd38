"""What a run on text can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pipeal.config.schema import DataConfig, ModelConfig, RunConfig
from pipeal.config.types import Count, Counts, Flag, Share, Text, Texts, Whole, one_of
from pipeal.core.methods import with_all


@dataclass(frozen=True)
class GroupingConfig:
    """Whether layers compute a batch in groups of similar length, each cut to its own longest sample.

    It saves where the samples of a batch differ in length, as under ``batching.kind: fixed``.

    Attributes:
        thresholds: So many lengths, the best for the training samples, divide a batch; 0 does not divide it.
        cost: What grows with the length a sample is padded to: its ``length`` (linear layers), or its ``square``
            (attention over long texts).
        layers: Which layers, counted from 1, the embedding being the first; None for all above it. Under
            backpropagation these are the same blocks.
    """

    thresholds: Whole = 0
    cost: Literal["length", "square"] = "length"
    layers: Counts | None = None


@dataclass(frozen=True)
class TextModelConfig(ModelConfig):
    """Which text model, and how wide.

    Attributes:
        name: ``lstm``, ``transformer`` or ``hf:FOLDER``.
        embedding_dim: Numbers per word vector.
        x_hid: Hidden width of the encoder side (``f`` and ``b``).
        y_hid: Width of the label code (``g`` and ``h``).
        n_heads: Attention heads; they divide ``embedding_dim``. A model without attention ignores it.
        dropout: The share of activations that training drops.
        pretrained: Where the word vectors come from; ``none`` learns them from scratch.
        vectors: The text file of those vectors; None looks for the usual name under the data folder.
        embedding_updates: Which word vectors an update changes: all, the ``dense`` step of Adam, or those that were
            ``touched``, looked up in the batch: faster on a CPU, and another optimizer (:mod:`pipeal.methods.touched`).
        grouping: Whether layers compute a batch in groups of similar length.
        bridges: Of the AL form: ``pooled`` averages over the words; ``lookahead`` goes through fresh copies of blocks
            still to come before.
    """

    name: Text = "transformer"
    embedding_dim: Count = 300
    x_hid: Count = 256
    y_hid: Count = 128
    n_heads: Count = 6
    dropout: Share = 0.3
    pretrained: Literal["none", "glove", "fasttext"] = "none"
    vectors: Text | None = None
    embedding_updates: Literal["dense", "touched"] = "dense"
    grouping: GroupingConfig = field(default_factory=GroupingConfig)
    bridges: Literal["pooled", "lookahead"] = "pooled"


KINDS: Mapping[str, tuple[str, ...]] = {
    "fixed": ("batch_size",),
    "bucket": ("batch_size", "bucket_width", "bucket_samples", "largest_first"),
    "size-aware": ("budget_tokens", "cost", "oversize", "largest_first"),
    "token-budget": ("budget_tokens", "max_samples"),
    "plan": ("budget_tokens", "max_samples", "oversize", "largest_first", "shapes", "spare_batches"),
    "stream": ("budget_tokens", "max_samples", "bounds", "pad_to", "buffer_samples", "max_wait"),
}
"""The kinds of batching and the options of :class:`BatchingConfig` that each heeds; for another kind an option is
refused: it is unclear what was meant. Each is the module of :mod:`pipeal.data.batching` with its name."""

Kind: TypeAlias = Annotated[
    str, Field(strict=True, description=with_all(tuple(KINDS))), one_of("kind of batching", KINDS)
]


@dataclass(frozen=True)
class BatchingConfig:
    """How texts are joined into batches. An option is for the kinds named beside it.

    Attributes:
        kind: ``fixed``: samples in random order. ``bucket``: samples from one range of lengths each. ``size-aware``: in
            random order, as many as the budget holds. ``token-budget``: of similar length, as many as the budget holds
            once padded. ``plan``: the fewest batches that the budget allows, and the least padding in them.
            ``stream``: what can be done without knowing any length beforehand.
        batch_size: Samples per batch; ``fixed``, ``bucket``.
        budget_tokens: The most tokens of a batch, padding included; ``size-aware``, ``token-budget``, ``plan``,
            ``stream``.
        max_samples: The most samples of a batch, however short; None for no limit; ``token-budget``, ``plan``,
            ``stream``.
        bucket_width: The widest range of lengths; ``bucket``.
        bucket_samples: A range ends where it holds so many samples; ``bucket``.
        cost: What the budget counts: tokens with their padding (``padded``) or without (``sum``); ``size-aware``.
        oversize: What to do with a sample that is over the budget by itself: ``raise`` an error, ``drop`` it, or make
            it a ``single`` batch; ``size-aware``, ``plan``.
        largest_first: Begin each epoch with the costliest batch, so that what does not fit into memory fails at once;
            ``bucket``, ``size-aware``, ``plan``.
        shapes: Pad to at most so many different lengths, and fill batches as far as the budget goes, so that each epoch
            has the same few shapes, for kernels that are compiled for each; None for any; ``plan``.
        spare_batches: So many batches more than the fewest, for less padding; ``plan``.
        bounds: The number of different lengths to pad to; ``stream``.
        pad_to: The ``bound`` of the longest sample of a batch, or the ``longest`` sample; ``stream``.
        buffer_samples: The most samples that wait for others of their length; ``stream``.
        max_wait: The most samples that pass by while one waits; None for eight buffers; ``stream``.
    """

    kind: Kind = "plan"
    batch_size: Count = 256
    budget_tokens: Count = 8192
    max_samples: Count | None = 512
    bucket_width: Count = 16
    bucket_samples: Count = 1024
    cost: Literal["padded", "sum"] = "padded"
    oversize: Literal["raise", "drop", "single"] = "raise"
    largest_first: Flag = False
    shapes: Count | None = None
    spare_batches: Whole = 0
    bounds: Count = 64
    pad_to: Literal["bound", "longest"] = "bound"
    buffer_samples: Count = 10_000
    max_wait: Count | None = None

    @property
    def heeded(self) -> dict[str, Any]:
        """The options that the kind heeds, by name."""
        return {name: getattr(self, name) for name in KINDS[self.kind]}


@dataclass(frozen=True)
class ColumnsConfig:
    """Which columns of a CSV file, or keys of a JSON line, hold what; for the data set ``file``.

    Attributes:
        text: The text; several are joined by a space, in this order, as AG News joins title and description.
        label: The class, a word or a number.
    """

    text: Texts = ("text",)
    label: Text = "label"


@dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Where the texts are, and how they become numbers.

    Attributes:
        file: What the data set ``file`` stands for, a CSV file with a header or a file of JSON lines; named in the
            place of the data set.
        test_file: Another one, to test on; None draws ``test_share`` of ``file``, always the same.
        test_share: How much of ``file`` is tested on where there is no ``test_file``.
        columns: What is in which column of both.
        max_len: The most words kept of a text; None for the published length of the data set.
        vocab_size: The most words in the vocabulary, specials included.
        min_frequency: A word seen less often is unknown.
        drop_stop_words: Whether "the", "and" and their like are dropped.
        batching: How samples are joined into batches.
        prefetch: Training batches that a thread makes ready ahead; 0 makes each in the thread that feeds the training,
            None chooses: 2 where there is a GPU, else 0.
    """

    file: Text | None = None
    test_file: Text | None = None
    test_share: Share = 0.2
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    max_len: Count | None = None
    vocab_size: Count = 30_000
    min_frequency: Count = 1
    drop_stop_words: Flag = True
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    prefetch: Whole | None = None


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
