"""The rungs of ladder.py: what each adds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from pipeal.core.options import Compile, Precision
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.cpus import cores

Form: TypeAlias = Literal["al", "bp"]

FORMS: tuple[Form, ...] = ("al", "bp")
MODELS = ("charlm", "transformer", "lstm", "resnet")
PLAIN = "plain"
"""The rung that all others are held against."""
ONE_THREAD = "one thread"
"""The rung that processes of one thread each are held against."""

SHARED = {"charlm": 64}
"""Samples of a batch that processes on a CPU share, for models whose usual batch is too small for that: a few samples
take as long as twice as many. The rung that they are held against has as many."""

_MOST_STAGES = 4
"""No model has fewer layers."""

TEXTS = ("transformer", "lstm")
"""Models whose batches each have a shape of their own."""


@dataclass(frozen=True)
class Setting:
    """How a rung trains; the defaults are those of plain PyTorch.

    Attributes:
        form: ``al`` or ``bp``.
        operators: ``plain``: those of plain.py. ``joined``: those, but heads share a projection. ``ours``.
        folded: A language model's codes are multiplied into its bridges, once for all places.
        by_length: Texts of similar length in a batch, as many batches as of random ones.
        keeps_memory: The C library keeps what is freed.
        channels_last: Images and convolutions.
        tf32: Products of float32 matrices on a GPU.
        precision: ``bf16`` under autocast; ``fp16`` needs a pipeline.
        fused: Adam in one operator.
        touched: Of the word vectors, updates change those in the batch alone, which is another optimizer.
        engine: The loop is a :class:`pipeal.Pipeline`'s, with all layers in one stage.
        accumulate: Batches to one update; needs a pipeline.
        compile: As for :class:`pipeal.Pipeline`, which it needs.
        threads: Of a process that has all stages in one; None for as many as there are cores.
        staged: In the stages that ``--devices auto`` takes on such devices, or in a stage for each process; needs a
            pipeline, too.
        ahead: The next batches are made ready, in pinned memory, while the GPU works: of texts by a thread, of images
            by processes.
        processes: Under torchrun: of a stage each, or replicas.
        batch: Samples of a batch, of all processes together; None for as many as the configuration has.
    """

    form: Form
    operators: Literal["plain", "joined", "ours"] = "plain"
    folded: bool = False
    by_length: bool = False
    keeps_memory: bool = False
    channels_last: bool = False
    tf32: bool = False
    precision: Precision = "fp32"
    fused: bool = False
    touched: bool = False
    engine: bool = False
    accumulate: int = 1
    compile: Compile = "none"
    threads: int | None = None
    staged: bool = False
    ahead: bool = False
    processes: int = 1
    batch: int | None = None

    @property
    def piped(self) -> bool:
        """Whether it is a pipeline that trains: as asked for, or for something that no plain loop does."""
        needed = self.compile != "none" or self.precision == "fp16" or self.accumulate > 1
        return self.engine or needed

    @property
    def of_pipeline(self) -> dict[str, Any]:
        """What every pipeline of this setting is opened with."""
        return {"precision": self.precision, "compile": self.compile}


@dataclass(frozen=True)
class Rung:
    """A setting and its name.

    Attributes:
        name: What it adds.
        setting: All of it.
        aside: Whether the next rung does without it.
    """

    name: str
    setting: Setting
    aside: bool = False


def rungs_of(
    model: str, form: Form, device: torch.device, without: Sequence[str] = (), batch: int | None = None
) -> list[Rung]:
    """What can be tried there, the lowest first, without rungs whose names have one of the words.

    What such a rung adds, those above it do without as well, unless it is part of what they add: the best operators are
    joined, and what is compiled is so by a pipeline.

    Args:
        model: One of :data:`MODELS`.
        form: In which.
        device: Where.
        without: The words.
        batch: Samples of every rung's batches; None for as many as the configuration has.

    Raises:
        ValueError: One of the words is in the name of the lowest, which all others are held against.
    """
    ladder = [Rung(PLAIN, Setting(form, batch=batch))]
    if unwanted := [word for word in without if word in PLAIN]:
        raise ValueError(f"found {unwanted[0]!r}, which is in {PLAIN!r}, what all rungs are held against; leave it in")

    def add(name: str, *, aside: bool = False, **changes: Any) -> None:
        if any(word in name for word in without):
            return
        base = next(rung.setting for rung in reversed(ladder) if not rung.aside)
        ladder.append(Rung(f"({name})" if aside else f"+ {name}", replace(base, **changes), aside))

    if model in TEXTS:
        add("batches by length", by_length=True)
    if model == "resnet":
        add("channels last", channels_last=True)
    if model == "charlm":
        add("heads in one projection", operators="joined")
    operators = {"charlm": "fused attention", "lstm": "LSTM unpacked, dropout", "transformer": "attention, dropout"}
    if model in operators:
        add(operators[model], operators="ours")
    if model == "charlm" and form == "al":
        add("codes folded into bridges", folded=True)
    if device.type == "cpu" and sys.platform.startswith("linux"):
        add("freed memory kept", keeps_memory=True)
    if device.type == "cuda":
        add("batches made ahead", ahead=True)
        add("tf32", tf32=True)
    if fastest_precision(device) == "bf16":
        add("bf16", precision="bf16")
    add("fused Adam", fused=True)
    if model in TEXTS:
        add("touched word vectors", aside=True, touched=True)  # another optimizer, slower at first
    add("engine, in one stage", engine=True)
    add("4 batches to an update", aside=True, accumulate=4)
    if device.type == "cuda" and ladder[-1].setting.fused:  # which alone can leave out an update
        add("fp16", aside=True, precision="fp16")
    if model not in TEXTS:  # where each batch has another shape
        add("compiled", aside=device.type != "cpu", compile="static")
    processes = torch.cuda.device_count() if device.type == "cuda" else cores()
    if form == "al":
        add("stages", staged=True)
        if processes > 1:
            stages = min(processes, _MOST_STAGES)
            add(f"stages in {stages} processes", staged=True, processes=stages)
    if processes > 1:
        changes: dict[str, Any] = {"staged": False, "processes": 1}
        batches = ""
        if device.type == "cpu":
            if model in SHARED and batch is None:
                changes["batch"] = SHARED[model]
                batches = f", batches of {SHARED[model]}"
            add(f"{ONE_THREAD}{batches}", aside=True, threads=1, **changes)
        add(f"data parallel × {processes}{batches}", **changes | {"processes": processes})
    return ladder


def ends_of(ladder: Sequence[Rung]) -> list[Rung]:
    """The lowest rung, and the highest that trains all layers in one stage of one process."""
    alone = [rung for rung in ladder if not (rung.aside or rung.setting.staged or rung.setting.processes > 1)]
    return [alone[0], alone[-1]]
