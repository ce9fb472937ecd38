"""The rungs of ladder.py: what each adds, the data of each model, and the training of one rung on it."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from plain import plain_adam, train_plainly, write_plainly
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pipeal.al import ALPackage
from pipeal.cli.build_language import language_experiment
from pipeal.cli.build_text import text_experiment
from pipeal.cli.build_vision import vision_experiment
from pipeal.config import LanguageConfig, TextConfig, VisionConfig, find_config, load_config
from pipeal.data import WHOLE, BatchLoader, PlannedBatchSampler, Share
from pipeal.engine import Pipeline
from pipeal.engine.allocator import keep_freed_memory
from pipeal.engine.compiling import Compile
from pipeal.engine.costs import Placement, place
from pipeal.engine.device import Precision, fastest_precision
from pipeal.engine.threads import cores
from pipeal.packet import move, pair_of

Form: TypeAlias = Literal["al", "bp"]

FORMS: tuple[Form, ...] = ("al", "bp")
MODELS = ("charlm", "transformer", "lstm", "resnet")
PLAIN = "plain"
"""The rung that all others are held against."""
ONE_THREAD = "one thread"
"""The rung that processes of one thread each are held against."""

_TEXTS = ("transformer", "lstm")

WARM_UP = 2
"""Batches of a turn that are not timed."""

_RISE = 10
"""Batches over which the learning rate rises."""

_EVALUATED = 1_000
"""Test samples, or blocks, that the loss is taken on."""


@dataclass(frozen=True)
class Setting:
    """How a rung trains; the defaults are those of plain PyTorch.

    Attributes:
        form: ``al`` or ``bp``.
        operators: ``plain``: those of plain.py. ``joined``: those, but heads share a projection. ``ours``.
        by_length: Texts of similar length in a batch, as many batches as of random ones.
        keeps_memory: The C library keeps what is freed.
        channels_last: Images and convolutions.
        tf32: Products of float32 matrices on a GPU.
        precision: ``bf16`` under autocast.
        fused: Adam in one operator.
        touched: Of the word vectors, updates change those in the batch alone, which is another optimizer.
        by_class: Label sides work once for each class.
        compile: As for :class:`pipeal.Pipeline`.
        threads: Of a process that has all stages in one; None for as many as there are cores.
        staged: In the stages that ``--devices auto`` takes.
        processes: Replicas under torchrun.
    """

    form: Form
    operators: Literal["plain", "joined", "ours"] = "plain"
    by_length: bool = False
    keeps_memory: bool = False
    channels_last: bool = False
    tf32: bool = False
    precision: Precision = "fp32"
    fused: bool = False
    touched: bool = False
    by_class: bool = False
    compile: Compile = "none"
    threads: int | None = None
    staged: bool = False
    processes: int = 1


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


def rungs_of(model: str, form: Form, device: torch.device, without: Sequence[str] = ()) -> list[Rung]:
    """What can be tried there, the lowest first; rungs whose names have one of the words, and all above, do without it.

    Raises:
        ValueError: One of the words is in the name of the lowest, which all others are held against.
    """
    ladder = [Rung(PLAIN, Setting(form))]
    if unwanted := [word for word in without if word in PLAIN]:
        raise ValueError(f"found {unwanted[0]!r}, which is in {PLAIN!r}, what all rungs are held against; leave it in")

    def add(name: str, *, aside: bool = False, **changes: Any) -> None:
        if any(word in name for word in without):
            return
        base = next(rung.setting for rung in reversed(ladder) if not rung.aside)
        ladder.append(Rung(f"({name})" if aside else f"+ {name}", replace(base, **changes), aside))

    if model in _TEXTS:
        add("batches by length", by_length=True)
    if model == "resnet":
        add("channels last", channels_last=True)
    if model == "charlm":
        add("heads in one projection", operators="joined")
    operators = {"charlm": "fused attention", "lstm": "LSTM unpacked, dropout", "transformer": "attention, dropout"}
    if model in operators:
        add(operators[model], operators="ours")
    left_out = any(word in operators.get(model, "") for word in without)
    ours: dict[str, Any] = {} if left_out else {"operators": "ours"}
    if device.type == "cpu" and sys.platform.startswith("linux"):
        add("freed memory kept", keeps_memory=True)
    if device.type == "cuda":
        add("tf32", tf32=True)
    if fastest_precision(device) == "bf16":
        add("bf16", precision="bf16")
    add("fused Adam", fused=True)
    if model in _TEXTS:
        add("touched word vectors", touched=True)
    if model == "resnet" and form == "al":
        add("labels by class", by_class=True)
    if model not in _TEXTS:  # where each batch has another shape
        add("compiled", aside=True, compile="static", **ours)
    if form == "al":
        add("stages", staged=True, **ours)
    processes = torch.cuda.device_count() if device.type == "cuda" else cores()
    if processes > 1:
        if device.type == "cpu":
            add(ONE_THREAD, aside=True, staged=False, touched=False, threads=1, **ours)
        add(f"data parallel × {processes}", staged=False, touched=False, processes=processes, **ours)
    return ladder


@dataclass(frozen=True)
class Measured:
    """A turn of a rung.

    Attributes:
        step_s: Seconds per batch.
        samples_per_s: Texts, blocks of text, or images.
        tokens_per_s: Words or characters, without padding; 0 of images.
        peak_bytes: Of memory that the training took; None where that is not known.
        loss: After the last batch, of the evaluated samples, in nats.
    """

    step_s: float
    samples_per_s: float
    tokens_per_s: float
    peak_bytes: int | None
    loss: float

    def __str__(self) -> str:
        return f"{1e3 * self.step_s:.1f} ms, {self.samples_per_s:,.0f} samples/s, loss {self.loss:.4f}"


@dataclass(frozen=True)
class Task:
    """A model, its data, and where it is trained.

    Attributes:
        model: One of :data:`MODELS`.
        device: Where.
        experiment: As its configuration has it, in our fastest form.
        evaluated: Batches that the loss is taken on.
    """

    model: str
    device: torch.device
    experiment: Any
    evaluated: Sequence[Any]
    placements: dict[Setting, Placement] = field(default_factory=dict)

    def of(self, setting: Setting) -> Any:
        """The experiment that a setting trains."""
        config = self.experiment.config
        if self.model in _TEXTS and not setting.by_length:
            batches = len(self.experiment.train_batches(0))
            samples = -(-len(self.experiment.train) // batches)  # as many batches of either kind
            batching = replace(config.data.batching, kind="fixed", batch_size=samples)
            config = replace(config, data=replace(config.data, batching=batching))
        codes = "per-class" if setting.by_class else "per-sample"
        if self.model == "resnet":
            model = replace(config.model, channels_last=setting.channels_last, label_codes=codes)
            return replace(self.experiment, config=replace(config, model=model))
        if self.model in _TEXTS:
            updates = "touched" if setting.touched else "dense"
            config = replace(config, model=replace(config.model, embedding_updates=updates, label_codes=codes))
            return replace(self.experiment, config=config, models=replace(self.experiment.models, config=config))
        return self.experiment

    def package(self, setting: Setting, seed: int) -> ALPackage:
        """A new model."""
        package: ALPackage = self.of(setting).package(setting.form, seed)
        if setting.operators != "ours":
            write_plainly(package, joined=setting.operators == "joined")
        if not setting.fused:
            plain_adam(package)
        return package

    def batches(self, setting: Setting, seed: int, share: Share = WHOLE, epoch: int | None = None) -> Iterator[Any]:
        """Those of one epoch, or of all."""
        found = self.of(setting).train_batches(seed, share)
        for number in count() if epoch is None else [epoch]:
            found.set_epoch(number)
            yield from found

    def loss(self, package: ALPackage) -> float:
        """The mean cross entropy of the evaluated samples, in float32."""
        package.eval().to(self.device)
        total = count = 0.0
        with torch.no_grad():
            for batch in self.evaluated:
                x, y = move(pair_of(batch), self.device)
                logits = package.infer(x)
                total += F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum").item()
                count += y.numel()
        return total / count

    def devices(self, setting: Setting) -> int:
        """How many GPUs a setting computes on; 1 on a CPU, whose cores are one device."""
        if self.device.type != "cuda":
            return 1
        return len(set(self.placement(setting).devices)) if setting.staged else setting.processes

    @cached_property
    def work(self) -> dict[Form, float]:
        """Operations of matrix products per token, or per image, that training needs in either form."""
        found: dict[Form, float] = {}
        for form in FORMS:
            setting = Setting(form, by_length=True)
            package, batch = self.package(setting, 0), next(self.batches(setting, 0))
            x, y = pair_of(batch)
            with FlopCounterMode(display=False) as counted:
                for layer in package:
                    x, y = layer(x, y)
                    layer.backward()
            found[form] = counted.get_total_flops() / (batch.tokens or len(batch))
        return found

    def placement(self, setting: Setting) -> Placement:
        """What ``--devices auto`` takes."""
        if setting not in self.placements:
            batches = list(islice(self.batches(setting, 0), 8))
            package = self.package(setting, 0)
            self.placements[setting] = place(package, batches, "pipelined", precision=setting.precision, rounds=1)
        return self.placements[setting]


def task_of(model: str, device: torch.device, data_root: str) -> Task:
    """Reads a model's data.

    Raises:
        DataError: It is not there.
    """
    values = {"data": {"root": data_root, "download": False}, "engine": {"devices": [str(device)]}}
    if model == "charlm":
        path = find_config("shakespeare", f"charlm-{'gpu' if device.type == 'cuda' else 'cpu'}")
        text = language_experiment(load_config(LanguageConfig, path, values=values), lambda _: None)
        config = text.config
        few = -(-_EVALUATED // config.data.batch_size)
        estimate = replace(text, config=replace(config, data=replace(config.data, estimate_batches=few)))
        return Task(model, device, text, list(estimate.test_evaluation()))
    if model == "resnet":
        path = find_config("cifar10", model)
        images = vision_experiment(load_config(VisionConfig, path, values=values), lambda _: None)
        test = images.dataset.test
        part = replace(images, dataset=replace(images.dataset, test=test.subset(spread(len(test)))))
        return Task(model, device, images, list(part.test_evaluation()))
    path = find_config("agnews", model)
    news = text_experiment(load_config(TextConfig, path, values=values), lambda _: None)
    few_news = news.test.subset(spread(len(news.test)))
    sampler = PlannedBatchSampler(few_news.lengths, 16_384, shuffle=False)
    return Task(model, device, news, list(BatchLoader(few_news, sampler)))


def spread(samples: int) -> Any:
    """Some of so many, evenly."""
    return np.linspace(0, samples - 1, min(samples, _EVALUATED)).astype(np.int64)


class Clock:
    """Seconds since it was made, GPUs' work included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wait()
        self.begin = perf_counter()

    def seconds(self) -> float:
        """So far."""
        self._wait()
        return perf_counter() - self.begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Counted:
    """Counts the samples and tokens of batches that pass by."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = iter(batches)
        self.samples = self.tokens = 0

    def take(self, number: int) -> Iterator[Any]:
        """The next ones; what was counted before is forgotten."""
        self.samples = self.tokens = 0
        for batch in islice(self.batches, number):
            self.samples += len(batch)
            self.tokens += batch.tokens
            yield batch


def train(task: Task, setting: Setting, seed: int, steps: int) -> Measured:
    """A new model through so many batches, the first of them unmeasured."""
    placement = task.placement(setting) if setting.staged else None
    memory = Memory(task.device, keep=setting.keeps_memory)
    torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
    package = task.package(setting, seed)
    batches = Counted(task.batches(setting, seed))
    if placement is None and setting.compile == "none":
        torch.set_num_threads(setting.threads or cores())
        package.to(task.device)
        numbers = count()

        def run(some: Iterable[Any]) -> None:
            train_plainly(package, some, task.device, setting.precision, (rise(number) for number in numbers))

        found = timed(task.device, batches, steps, run, memory)
    else:
        devices = [str(task.device)] if placement is None else placement.devices
        schedule = "sequential" if placement is None else "pipelined"
        options: dict[str, Any] = {
            "sizes": None if placement is None else placement.sizes,
            "threads": cores() if placement is None else placement.threads,
            "precision": setting.precision,
            "compile": setting.compile,
            "seed": seed,
        }
        with Pipeline(package, devices, schedule, **options) as pipe:
            found = timed(task.device, batches, steps, lambda some: pipe.run(some, rise), memory)
    return replace(found, loss=task.loss(package))


def timed(
    device: torch.device, batches: Counted, steps: int, run: Callable[[Iterable[Any]], object], memory: Memory
) -> Measured:
    """Runs them, the later ones on the clock. The loss is left for later."""
    run(batches.take(WARM_UP))
    clock = Clock(device)
    run(batches.take(steps - WARM_UP))
    seconds = clock.seconds()
    return Measured(
        seconds / (steps - WARM_UP), batches.samples / seconds, batches.tokens / seconds, memory.peak(), math.nan
    )


def rise(batch: int) -> float:
    """The factor on the learning rates, from a batch's number."""
    return min(1.0, (batch + 1) / _RISE)


class Memory:
    """The most memory that is taken from now on, beside what is taken already.

    Args:
        device: Of a GPU its tensors are counted; of the process on a CPU its pages, where the system forgets a peak.
        keep: Whether the C library keeps what is freed (:func:`pipeal.engine.allocator.keep_freed_memory`).
    """

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
            return
        self._before = None
        if sys.platform.startswith("linux"):
            with suppress(AttributeError):  # a C library that is not glibc
                library = ctypes.CDLL(None)
                library.malloc_trim(0)
                # Where its own rule, which cannot be had back, ends at best: blocks of up to 32 MiB are kept. So what
                # it brings to keep all of them is more, if anything, than is measured.
                library.mallopt(_MMAP_THRESHOLD, 2**25)
                library.mallopt(_TRIM_THRESHOLD, 2**26)
            if keep:
                keep_freed_memory()
            with suppress(OSError):  # where a sandbox forbids it, the peak is not known
                Path("/proc/self/clear_refs").write_text("5")
                self._before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes."""
        if self._before is None:
            return None
        most = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _status("VmHWM")
        return most - self._before


_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_MMAP_THRESHOLD = -3


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
