"""What each way to train a model takes on one device: forecast from its blocks here, and measured in processes of their
own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import active_children, get_context
from typing import Protocol

import torch
from torch import nn

from pipeal.config import RunConfig
from pipeal.core.errors import ConfigError, PipealError, a_type
from pipeal.core.host_memory import reset_peak
from pipeal.core.methods import BASELINE, DEFAULT
from pipeal.core.options import EngineOptions
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, batch_size, map_tensors
from pipeal.engine.devices import fastest_precision, parse_device
from pipeal.engine.devices.allocator import keep_freed_memory, map_large_blocks
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.runner.recompute import kept_in_short
from pipeal.methods.bp import BP
from pipeal.methods.bp_parts import bp_parts
from pipeal.planning.measure.memory import measure_blocks, measure_kernels, watch_training
from pipeal.planning.measure.resident import Resident
from pipeal.planning.pure.memory import WAYS, BlockMemory, Form, Model, Parts
from pipeal.run.build import Experiment
from pipeal.run.form_costs import first_batches, largest
from pipeal.run.opening import engine_options
from pipeal.run.plan_costs import Wanted, experiment_of

_FEWEST = 4
"""Samples of the larger of two batches that blocks are measured on: of one sample, batch norm makes nothing."""


_BATCHES = 2
"""On which a measured training learns before its peak is read: the first one opens the optimizers' states."""


class Subject(Protocol):
    """A model and its batch; pickled, it is made again in the process of each measurement."""

    @property
    def device(self) -> str:
        """Where it is trained."""
        ...

    @property
    def options(self) -> EngineOptions:
        """How it is trained."""
        ...

    def layers(self, form: Form) -> Sequence[TrainableLayer]:
        """New layers of a form; that for backpropagation is one :class:`pipeal.methods.bp.BP` of a row of blocks."""
        ...

    def batch(self) -> tuple[Tree, Tree]:
        """The input and the target of a batch, in which each tensor has an entry per sample."""
        ...


@dataclass(frozen=True)
class Built:
    """A model of an experiment that is there, on the largest batch of its first epoch, of 4,096 of them at most.

    Attributes:
        experiment: Makes both.
        device: Where it is trained.
        options: How.
    """

    experiment: Experiment
    device: str
    options: EngineOptions

    def layers(self, form: Form) -> Sequence[TrainableLayer]:
        """See :class:`Subject`."""
        return list(self.experiment.package(_METHODS[form].name, self.experiment.config.train.seed))

    def batch(self) -> tuple[Tree, Tree]:
        """See :class:`Subject`."""
        found = largest(first_batches(self.experiment, self.experiment.config.train.seed))
        return found.x, found.y


@dataclass(frozen=True)
class Configured:
    """A model of the registry on a batch of its data set: the largest of the first epoch, of 4,096 at most.

    Attributes:
        wanted: Which, and how it is configured.
    """

    wanted: Wanted

    @property
    def config(self) -> RunConfig:
        """All of it.

        Raises:
            PipealError: As for a training.
        """
        config: RunConfig = _experiment(self.wanted).config
        return config

    @property
    def device(self) -> str:
        """A GPU if there is one."""
        return "cuda:0" if torch.cuda.is_available() else "cpu"

    @property
    def options(self) -> EngineOptions:
        """As configured, and on all cores where that is left open."""
        precision = self.config.train.precision
        options = engine_options(self.config, fastest_precision(self.device) if precision == "auto" else precision)
        return replace(options, threads=options.threads or torch.get_num_threads(), on_oom="raise")

    def layers(self, form: Form) -> Sequence[TrainableLayer]:
        """See :class:`Subject`."""
        return self._built.layers(form)

    def batch(self) -> tuple[Tree, Tree]:
        """See :class:`Subject`."""
        return self._built.batch()

    @property
    def _built(self) -> Built:
        return Built(_experiment(self.wanted), self.device, self.options)


class Checkpointed(nn.Module):
    """A block that is computed again in the backward as a whole, whatever it consists of.

    Args:
        block: ``x -> features``.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tree) -> Tree:
        """As the block."""
        out: Tree = kept_in_short(self.block, self.block, x)
        return out


def checkpoint_blocks(layer: BP) -> BP:
    """Puts every block of a network that is a row under activation checkpointing; returns the same layer.

    Raises:
        ConfigError: The network is no ``nn.Sequential``.
    """
    if not isinstance(layer.model, nn.Sequential):
        raise ConfigError(f"found {a_type(layer.model)}; expected an nn.Sequential, whose blocks can be told")
    for name, block in list(layer.model.named_children()):
        setattr(layer.model, name, Checkpointed(block))
    return layer


_METHODS = {"layers": DEFAULT, "whole": BASELINE}


@lru_cache(maxsize=1)
def _experiment(wanted: Wanted) -> Experiment:
    return experiment_of(wanted)


def resized(batch: tuple[Tree, Tree], samples: int) -> tuple[Tree, Tree]:
    """The first samples of a batch, over again where it has fewer; shares no memory with it."""
    rows = torch.arange(samples) % batch_size(batch[0])
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], batch)


def forecast(subject: Subject, samples: int) -> Model:
    """Measures each block alone, on so many samples or on the subject's batch if that has fewer, and on half of them;
    and what libraries keep for batches of one size.

    Raises:
        ConfigError: The form for backpropagation is no row of blocks.
    """
    map_large_blocks()  # so that pages that are never written to can be told
    batch = subject.batch()
    large = max(_FEWEST, min(samples, batch_size(batch[0])))
    batches = [resized(batch, count) for count in (large // 2, large)]

    def looked_at(form: Form, new: int) -> tuple[tuple[list[BlockMemory], list[BlockMemory]], int]:
        layers, whole = subject.layers(form), form == "whole"
        row = bp_parts(list(layers)) if whole else layers  # type: ignore[arg-type]
        small, full = measure_blocks(row, batches, subject.options, device=subject.device, end_to_end=whole)
        unmet = resized(batch, new)
        return (small, full), measure_kernels(row, unmet, subject.options, device=subject.device, end_to_end=whole)

    with torch.random.fork_rng(devices=[]):
        # Each with a size of its own for kernels: of one that was met before, they are there already.
        (al, al_kernels), (bp, bp_kernels) = looked_at("layers", large + 1), looked_at("whole", large + 2)
    return Model((large // 2, large), al, bp, (al_kernels, bp_kernels))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way of training took, in a process of its own; in bytes.

    Attributes:
        parts: Of what was allocated; ``resident`` is the most physical memory above that of the idle process, with
            large blocks given back as soon as they are freed; of a GPU, the most of its tensors.
        resident_kept: The same with freed memory kept, as commands train by default.
        idle: What the idle process holds, which has trained before; of a GPU, tensors that are left.
    """

    parts: Parts
    resident_kept: int
    idle: int


def measure(subject: Subject, way: str, samples: int) -> Measured:
    """Trains by one way in a fresh process.

    Args:
        subject: What to train.
        way: A name of :data:`pipeal.planning.pure.memory.WAYS`.
        samples: Of the batch.

    Raises:
        PipealError: The process was ended from outside: memory ran out.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        try:
            return alone.submit(_measured, subject, way, samples).result()
        except BrokenProcessPool as error:
            raise PipealError(
                f"{way}: the process that measured it was ended by the system, most likely because memory ran out; "
                "leave out --measure, or lower --batch"
            ) from error
        except BaseException:
            for process in active_children():
                process.terminate()  # or leaving the executor waits until it has measured
            raise


def _measured(subject: Subject, way: str, samples: int) -> Measured:
    own = subject.batch()
    own = resized(own, min(samples, batch_size(own[0])))
    map_large_blocks()
    # What libraries load and build for these kernels is there once, however large the model and the batch: the idle
    # process has trained on two samples. Buffers that libraries keep for a larger batch count as training's.
    with _training(subject, way) as (_, pipe):
        pipe.run([resized(own, 2)] * 2)
    del pipe
    resident = Resident(parse_device(subject.device))
    with _training(subject, way) as (layers, pipe):
        batch = resized(own, samples)
        pipe.run([batch] * _BATCHES)
        most = resident.peak()
    del layers, pipe, batch
    keep_freed_memory()
    kept = Resident(parse_device(subject.device))
    with _training(subject, way) as (layers, pipe):
        batch = resized(own, samples)
        pipe.run([batch] * _BATCHES)
        most_kept = kept.peak()  # before the profiler takes memory of its own
        parts = watch_training(layers, batch, pipe, subject.device, offloaded=WAYS[way].offloaded)
        return Measured(replace(parts, resident=most), most_kept, resident.before)


@contextmanager
def _training(subject: Subject, name: str) -> Iterator[tuple[Sequence[TrainableLayer], Pipeline]]:
    """New layers, and an open pipeline that trains them by one way."""
    way = WAYS[name]
    layers = subject.layers(way.form)
    if way.checkpointed:
        layers = [checkpoint_blocks(layer) for layer in layers if isinstance(layer, BP)]
    options = replace(way.options(subject.options), on_non_finite="ignore")
    with Pipeline(layers, [subject.device], "sequential", options=options) as pipe:
        if way.offloaded:
            reset_peak()  # a generator would have made the layers one after the other
        yield layers, pipe
