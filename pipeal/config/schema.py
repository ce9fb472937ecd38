"""What a run can be told: frozen dataclasses whose every default works.

The types carry the checks (pydantic applies them in :mod:`pipeal.config.load`) and, as their description, the
words for what is wanted. Scalars are strict: the text ``"3"`` is no number, and ``true`` is not 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

Text: TypeAlias = Annotated[str, Field(strict=True, min_length=1, description="text")]
Flag: TypeAlias = Annotated[bool, Field(strict=True, description="true or false")]
Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, description="a whole number, at least 0")]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=1, description="a whole number, at least 1")]
Threads: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1024, description="a whole number from 1 to 1024")]
Seed: TypeAlias = Annotated[
    int, Field(strict=True, ge=0, lt=2**63, description="a whole number, at least 0 and below 2^63")
]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a number above 0")]
NotNegative: TypeAlias = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False, description="a number, at least 0")
]
Share: TypeAlias = Annotated[float, Field(strict=True, ge=0, lt=1, description="a number, at least 0 and below 1")]
Texts: TypeAlias = Annotated[tuple[Text, ...], Field(min_length=1, description="a list of texts")]
Counts: TypeAlias = Annotated[
    tuple[Count, ...], Field(min_length=1, description="a list of whole numbers, each at least 1")
]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how wide.

    Attributes:
        name: The model's name, such as ``lstm`` or ``transformer``.
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
    """How samples are joined into batches.

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
class DataConfig:
    """Where the data is, and how text becomes numbers.

    Attributes:
        root: The folder that holds the data sets; None for ``data`` in the current folder.
        download: Whether a data set that is not there is fetched.
        max_len: The most words kept of a text; None for the published length of the data set.
        vocab_size: The most words in the vocabulary, specials included.
        min_frequency: A word seen less often is unknown.
        drop_stop_words: Whether "the", "and" and their like are dropped.
        batching: How samples are joined into batches.
    """

    root: Text | None = None
    download: Flag = True
    max_len: Count | None = None
    vocab_size: Count = 30_000
    min_frequency: Count = 1
    drop_stop_words: Flag = True
    batching: BatchingConfig = field(default_factory=BatchingConfig)


@dataclass(frozen=True)
class LrConfig:
    """The learning rate and its course.

    Attributes:
        base: The rate at the start.
        end: The rate at the end of a decay; None for 0.
        ae: The rate of the label side at the start; None for ``base``. It decays by the same factor.
        decay: ``none`` keeps the rate; ``cosine`` goes from ``base`` to ``end`` along half a cosine.
        per: When the rate changes: after each ``batch`` or each ``epoch``.
        warmup: Batches over which the rate rises to its course from nothing.
    """

    base: Positive = 1e-3
    end: NotNegative | None = None
    ae: Positive | None = None
    decay: Literal["none", "cosine"] = "cosine"
    per: Literal["epoch", "batch"] = "batch"
    warmup: Whole = 50


@dataclass(frozen=True)
class TrainConfig:
    """How training goes.

    Attributes:
        mode: Train the ``al`` form, the ``bp`` form, or both for ``compare``.
        epochs: Passes over the training data.
        repeat: Turns: whole trainings, each with the next seed.
        seed: The seed of the first turn.
        lr: The learning rate and its course.
        precision: The type of the matrix products: ``fp32``, or ``bf16`` under autocast; ``auto`` is ``bf16`` where
            the hardware computes in it at full speed.
        train_accuracy_samples: How many training samples the training accuracy is taken on; None for all.
    """

    mode: Literal["al", "bp", "compare"] = "al"
    epochs: Count = 10
    repeat: Count = 1
    seed: Seed = 0
    lr: LrConfig = field(default_factory=LrConfig)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    train_accuracy_samples: Count | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How the layers are run; nothing here but ``threads`` changes the result, and it only in rounding.

    Attributes:
        schedule: What may run beside what.
        devices: One device per stage, such as ``[cuda:0, cuda:1]``; ``auto`` takes what helps.
        sizes: Layers per stage; None balances them.
        queue_depth: Packets that may wait before a stage.
        threads: Threads inside each worker's operators; None lets the engine choose.
        stall_timeout_s: Seconds without progress after which the watchdog ends the run.
        trace_batches: Batches recorded for the timeline.
    """

    schedule: Literal["sequential", "backward-overlap", "al-fm", "pipelined"] = "pipelined"
    devices: Text | Texts = "auto"
    sizes: Counts | None = None
    queue_depth: Count = 2
    threads: Threads | None = None
    stall_timeout_s: Positive = 300.0
    trace_batches: Count = 40


@dataclass(frozen=True)
class RunConfig:
    """One run: everything the command needs to know.

    Attributes:
        dataset: The data set's name.
        model: Which model, and how wide.
        data: Where the data is, and how text becomes numbers.
        train: How training goes.
        engine: How the layers are run.
        out: The folder in which each run gets a folder of its own.
    """

    dataset: Text = "agnews"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    out: Text = "runs"
