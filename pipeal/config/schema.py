"""What a run can be told: frozen dataclasses whose every default works.

Their types (:mod:`pipeal.config.types`) carry the checks, which pydantic applies in :mod:`pipeal.config.load`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipeal.config.methods import MethodsConfig
from pipeal.config.types import (
    Count,
    Counts,
    Flag,
    Grid,
    Methods,
    Mode,
    Multiple,
    NotNegative,
    Patience,
    Positive,
    Seed,
    Share,
    Text,
    Texts,
    Threads,
    Whole,
)
from pipeal.core.methods import COMPARED, DEFAULT
from pipeal.core.names import DEFAULT_SCHEDULE, ScheduleName
from pipeal.core.options import (
    DEFAULTS,
    Compile,
    Matmul,
    Offload,
    OnOom,
    PacketFormat,
    Precision,
    Recompute,
    WithinStage,
)

Decay: TypeAlias = Literal["none", "cosine"]
"""How the learning rate falls: :func:`pipeal.training.learning_rate.epoch_scale`."""

Per: TypeAlias = Literal["epoch", "batch"]
"""How often it does."""


@dataclass(frozen=True)
class AheadConfig:
    """How far the bridges of AL layers look ahead, where ``model.bridges`` is ``lookahead``.

    Attributes:
        depth: The most copies of blocks still to come that a bridge goes through; None for one of the first block of
            every part still to come.
        width: Of the copies, as a multiple of the network's.
        shared: Whether neighbouring copies of blocks that are alike share their weights.
        same_start: Whether a copy begins with the weights of the block that it stands for, and bridges alike. With
            copies of *all* blocks still to come, ``one-hot`` labels and no dropout, the layers of a character model or
            a ResNet then learn what backpropagation would have them learn, bit for bit; see
            :mod:`pipeal.methods.lookahead`.
    """

    depth: Count | None = None
    width: Multiple = 1.0
    shared: Flag = False
    same_start: Flag = False


@dataclass(frozen=True)
class ModelConfig:
    """Which model; each kind of data adds its own sizes.

    Attributes:
        name: The model's name, such as ``lstm`` or ``resnet``; or one of another library, ``hf:FOLDER`` or
            ``torchvision:NAME`` (:mod:`pipeal.models.imported`).
        weights: A safetensors file of starting weights, by the names of the model's BP form, or for a model of another
            library by those that it has there; None starts at random, or with the weights in the folder.
        parts: Into how many parts with local losses the network's blocks are divided, as evenly as can be, whatever the
            number of stages; None for the usual ones.
        ahead: How far bridges look ahead that do.
    """

    name: Text
    weights: Text | None = None
    parts: Count | None = None
    ahead: AheadConfig = field(default_factory=AheadConfig)


@dataclass(frozen=True)
class DataConfig:
    """Where the data is; each kind of data adds how it is read.

    Attributes:
        root: The folder that holds the data sets; None for ``data`` in the current folder.
        download: Whether a data set that is not there is fetched.
        held_out: The share of the training samples that is not trained on but kept to choose the best epoch, the best
            checkpoint and settings by, and to calibrate the early exit on; of a language model, the end of what is
            trained on. With 0 none is chosen, and the early exit is left out.
        cache_dir: The folder for what is made out of the data to be read faster, decoded images and word vectors; None
            for the user's cache folder. Of characters nothing is made.
    """

    root: Text | None = None
    download: Flag = True
    cache_dir: Text | None = None
    held_out: Share = 0.05


USUAL_RATE = 1e-3
"""The learning rate where none is given, of a run that is long enough."""


@dataclass(frozen=True)
class LrConfig:
    """The learning rate and its course.

    What is left at None is chosen once in a run's life by the number of its updates, for AL and BP alike
    (:func:`pipeal.training.learning_rate.usual_course`), told where the run is a short one, and written into its
    ``config.yaml``. What is given stays.

    Attributes:
        base: The rate at the start; None for 0.001, and in a run of fewer than 160 updates for a rate that is as many
            times as high as the run is too short, at most 0.003.
        end: The rate at the end of a decay, at most ``base``; None for 0.
        ae: The rate of the label side of the AL form at the start; None for ``base``. It decays by the same factor.
        decay: ``none`` keeps the rate; ``cosine`` goes from ``base`` to ``end`` along half a cosine.
        per: When the rate changes: after each ``batch`` or each ``epoch``.
        warmup: Batches over which the rate rises to its course from nothing; None for a fifth of the run's updates, at
            most 50 of them. With ``accumulate``, an update is of several batches.
    """

    base: Positive | None = None
    end: NotNegative | None = None
    ae: Positive | None = None
    decay: Decay = "cosine"
    per: Per = "batch"
    warmup: Whole | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """When a training is saved, and what is kept of it. It is also saved after every epoch and when it is ended.

    Attributes:
        every: Batches between two checkpoints; None for none within an epoch.
        keep: So many of the newest are kept, and the best one.
    """

    every: Count | None = 500
    keep: Count = 2


@dataclass(frozen=True)
class TrainConfig:
    """How training goes.

    Attributes:
        mode: The method to train by, one of :data:`pipeal.core.methods.METHODS`, such as ``al`` or ``bp``; ``compare``
            trains several.
        methods: Those that ``compare`` trains side by side, two or more, in the order of the tables.
        epochs: Passes over the training data.
        repeat: Turns: whole trainings, each with the next seed.
        seed: The seed of the first turn.
        lr: The learning rate and its course.
        accumulate: So many batches make one update, which is that of one batch of all their samples, up to rounding;
            those that an epoch ends with may be fewer.
        precision: The type of the matrix products: ``fp32``, or ``bf16`` or ``fp16`` under autocast; ``auto`` is
            ``bf16`` where the hardware has instructions for it. In ``fp16`` each layer scales its losses.
        exit_tolerance: The share of samples that the calibrated early exit may get wrong beside the full path.
        train_accuracy_samples: How many training samples the training accuracy is taken on; None for all.
        on_non_finite: What a non-finite loss, or weight, does: ``raise`` ends the run, and keeps the batch for a look;
            ``skip`` leaves that layer's update out, and counts it; ``stop-and-rewind`` goes back to the newest good
            checkpoint, and over the same batches again without the one that did it.
        checkpoint: When it is saved.
        tensorboard: Whether the epochs are also written for TensorBoard, which is an extra of the package.
    """

    mode: Mode = DEFAULT.name
    methods: Methods = COMPARED
    epochs: Count = 10
    repeat: Count = 1
    seed: Seed = 0
    lr: LrConfig = field(default_factory=LrConfig)
    accumulate: Count = 1
    precision: Literal["auto", Precision] = "auto"
    exit_tolerance: Share = 0.005
    train_accuracy_samples: Count | None = None
    on_non_finite: Literal["raise", "skip", "stop-and-rewind"] = "raise"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: Flag = False


@dataclass(frozen=True)
class EngineConfig:
    """How the layers are run; only ``threads``, ``compile``, ``matmul`` and ``packet`` change the result, in rounding.

    Attributes:
        schedule: What may run beside what. Of backpropagation, under ``torchrun``, ``gpipe`` and ``1f1b`` have a stage
            of the network in each process, and anything else all of it.
        micro_batches: Of each batch under ``gpipe`` and ``1f1b``; None for four for each stage.
        devices: One device per stage, such as ``[cuda:0, cuda:1]``; ``auto`` takes what helps.
        sizes: Layers per stage; None balances them.
        replicas: Of a run under ``torchrun``: how many share the samples of each batch. Each has a process per stage.
        queue_depth: Packets that may wait before a stage.
        compile: Whether layers go through ``torch.compile``: ``static`` compiles each shape of batches on its own,
            ``dynamic`` all at once.
        matmul: The precision of matrix products of fp32 numbers: ``highest``; ``high``, TF32 on GPUs that have it; or
            ``medium``, which is bf16 on CPUs that have it.
        packet: How what each layer hands on to the next is rounded: ``as_is`` not at all; ``bf16``; ``int8``, with a
            scale for each row; or ``int8-stochastic``, up or down by chance. Between stages packets travel so.
        on_oom: What a batch that does not fit into a stage's memory does: ``raise`` ends the run; ``split`` learns
            from it in parts, with the same update up to rounding.
        within_stage: The order of a stage's layers: ``layer`` ends one before the next, so that one layer's activations
            are in memory; ``stage`` has all go forward first; None for the schedule's own.
        recompute: What is computed again in a backward instead of kept: ``none``, or the ``blocks`` of each layer.
        offload: Where layers lie that are not at work: ``none`` keeps them on the device, ``host`` in the memory of the
            host (GPUs, not over processes), ``disk`` in mapped files (CPUs).
        offload_folder: The folder of these files, which have no names; None for that of the run.
        threads: Threads inside each worker's operators; None lets the engine choose.
        stall_timeout_s: Seconds without progress of a stage after which the watchdog ends the run. What is done in the
            caller's own thread is not watched: all stages in ``sequential``, and making batches.
        peer_timeout_s: Of a run under ``torchrun``: seconds without a sign of life after which a process is given up.
        trace_batches: Batches recorded for the timeline.
    """

    schedule: ScheduleName = DEFAULT_SCHEDULE
    micro_batches: Count | None = None
    devices: Text | Texts = "auto"
    sizes: Counts | None = None
    replicas: Count = 1
    queue_depth: Count = DEFAULTS.queue_depth
    compile: Compile = "none"
    matmul: Matmul = "highest"
    packet: PacketFormat = "as_is"
    on_oom: OnOom = "raise"
    within_stage: WithinStage | None = None
    recompute: Recompute = "none"
    offload: Offload = "none"
    offload_folder: Text | None = None
    threads: Threads | None = None
    stall_timeout_s: Positive = DEFAULTS.stall_timeout_s
    peer_timeout_s: Patience = 60.0
    trace_batches: Count = 40


@dataclass(frozen=True)
class TuneConfig:
    """Which settings are tried before a run, on every form alike; each form goes on with its best.

    Attributes:
        grid: Texts such as ``train.lr.base=3e-4,1e-3,3e-3``; of several, every combination is tried. A range of numbers
            grows where the best is at its edge.
        epochs: Of a trial; None for as many as the run has.
    """

    grid: Grid = ()
    epochs: Count | None = None


@dataclass(frozen=True)
class RunConfig:
    """One run: what training needs to know whatever the data is. See :class:`TextConfig` and :class:`VisionConfig`.

    Attributes:
        dataset: The data set's name.
        model: Which model, and how wide.
        data: Where the data is, and how it is read.
        train: How training goes.
        engine: How the layers are run.
        tune: Which settings are tried before.
        methods: Options of the methods that have some; each is read where that method trains.
        out: The folder in which each run gets a folder of its own.
    """

    dataset: Text
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    methods: MethodsConfig = field(default_factory=MethodsConfig)
    out: Text = "runs"
