"""What a form costs by counting, the same on every machine and whatever runs beside it: FLOPs and bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from pipeal.config import RunConfig
from pipeal.core.by_size import BySize
from pipeal.core.modules import module_of
from pipeal.core.options import Precision
from pipeal.core.protocols import DOWN, TURN, UP, TrainableLayer
from pipeal.core.tree import Tree, batch_size, detach, map_tensors, move, tensors
from pipeal.data import Batch
from pipeal.engine.runner.parts import cut
from pipeal.engine.sizes import layers_of_stages
from pipeal.planning.measure.layers import count_bytes
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.memory import BlockMemory, way_of_layers
from pipeal.run.build import Experiment
from pipeal.run.opening import engine_options, new_layers, schedule_of
from pipeal.training.exit_costs import inference_flops, learning_flops

LOOKED_AT = 4096
"""Batches of the first epoch that stand for all of it; images and blocks are all of one size. Far fewer would not do:
those that a stream begins with are of its longest texts, of which few make a batch full."""

ROWS = 2
"""Samples of a batch whose FLOPs are counted, with those of one more: all of a batch are padded to one length, and cost
the same, beside what a batch costs whatever it holds, such as codes of all classes. Where samples are compared with
each other this is too little: by as much as the comparisons cost."""

COUNTING = 2
"""Which rules of counting these are: goes up with each change, so that no table mixes figures of two."""


@dataclass(frozen=True)
class FormCosts:
    """FLOPs of products, convolutions, attention and recurrences, and the bytes that training holds at once.

    What is cheap beside them (normalisation, activations, look-ups, losses, the optimizers' steps) has no part in the
    FLOPs. Padding has: texts cost what their padded length costs, counted at some lengths of the first epoch. Nor are
    packets between stages, batches, what a kernel needs for a moment and what an allocator keeps among the bytes.
    Gradients and activations are those of all stages, which work side by side: of each those of its largest layer, or
    of all, as the order of its layers is. Where gradients wait, for further batches
    (``train.accumulate``) or for those of other replicas, all layers' are there.

    Attributes:
        training_flops: Per sample, forward and backward of all losses.
        inference_flops: Per sample, up through all layers and down again.
        weights_bytes: Of all parameters that are trained.
        gradients_bytes: Of theirs, those that are there at once.
        optimizer_bytes: What the optimizers keep.
        activation_bytes: What the graphs keep for the backward, of the largest batch looked at.
        packet_bytes: Per sample, what every layer but the last hands on to the next, padding included.
    """

    training_flops: float
    inference_flops: float
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    packet_bytes: float

    @property
    def memory_bytes(self) -> int:
        """All bytes counted."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activation_bytes

    def summary(self) -> dict[str, object]:
        """Every figure, for ``summary.json``."""
        figures = asdict(self)
        per_sample = {f"{name}_per_sample": figures.pop(name) for name in _PER_SAMPLE}
        return {
            **per_sample,
            "counted_memory_bytes": {**figures, "all": self.memory_bytes},
        }


_PER_SAMPLE = ("training_flops", "inference_flops", "packet_bytes")


def form_costs(experiment: Experiment, config: RunConfig) -> FormCosts:
    """Counts on the new layers of a form, one after the other, and on the training batches of its first epoch.

    Args:
        experiment: What is run.
        config: Of the form, with every choice made.
    """
    places = {*config.engine.devices}
    device = torch.device(places.pop() if len(places) == 1 else "cpu")
    by_size, elements, samples, batches = BySize[list[tuple[Tree, Tree]]](), 0, 0, 0
    whole: Batch | None = None
    for batch in first_batches(experiment, config.train.seed):
        few, more = few_rows(batch, experiment), few_rows(batch, experiment, ROWS + 1)
        by_size.add([few] if batch_size(few) == batch_size(more) else [few, more], batch.x)
        whole = batch if whole is None else largest((whole, batch))
        elements, samples, batches = elements + _elements(batch), samples + len(batch), batches + 1
    assert whole is not None  # an epoch has batches
    looked_at = [[_Counted(batch_size(few), *move(few, device)) for few in some] for some in by_size.some()]
    onward, rows = move((whole.x, whole.y), device), list[LayerCost]()
    options = engine_options(config)
    options = replace(
        options,
        threads=torch.get_num_threads(),
        precision=_countable(options.precision, device),
        on_oom="raise",
        offload="none",
    )
    with torch.random.fork_rng(devices=[]):
        for layer in new_layers(experiment, config, 1):
            module = module_of(layer).to(device)
            if config.engine.offload != "none":
                gc.collect()  # the layer before and its pipeline refer to each other, and would stay for a while
            for one in chain.from_iterable(looked_at):
                one.pass_through(layer)
            # Its graphs, states and scalers are those of a training.
            handed_on: list[Any] = []
            module.register_forward_hook(lambda _, __, output, to=handed_on: to.append(output))
            rows += count_bytes([layer], onward, options, str(device))
            onward = detach(handed_on[0])
    # A packet is taken to be as large as the batch that it is of.
    sent_of_input = sum(row.out_bytes for row in rows[:-1]) / _elements(whole)
    gradients, activations = _at_once(rows, config)

    def per_sample(flops: Callable[[_Counted], int]) -> float:
        parts = [_parts([(one.rows, flops(one)) for one in some]) for some in looked_at]
        each, shared = (by_size.mean(part) for part in zip(*parts, strict=True))
        return each + shared * batches / samples

    return FormCosts(
        per_sample(lambda one: one.learning),
        per_sample(lambda one: one.inference),
        sum(row.parameter_bytes for row in rows),
        gradients,
        sum(row.optimizer_bytes for row in rows),
        activations,
        sent_of_input * elements / samples,
    )


@dataclass
class _Counted:
    """A batch, of which a few rows go through layer after layer, and their FLOPs so far."""

    rows: int
    x: Tree
    y: Tree
    learning: int = 0
    climb_and_descent: int = 0
    turn: int = 0

    @property
    def inference(self) -> int:
        """Of the full path, which turns at the last layer alone."""
        return self.climb_and_descent + self.turn

    def pass_through(self, layer: TrainableLayer) -> None:
        _, flops = inference_flops(layer, self.x)
        self.turn = flops[TURN]
        self.climb_and_descent += flops[UP] + flops[DOWN]
        (self.x, self.y), learning = learning_flops(layer, self.x, self.y)
        self.learning += learning


def _parts(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """FLOPs of each sample, and of what all of a batch share: from two numbers of samples, with the FLOPs of both. Of
    one number, which is all of a batch, each sample has its share.

    >>> _parts([(2, 50), (3, 70)]), _parts([(2, 50)])
    ((20.0, 10.0), (25.0, 0.0))
    """
    rows, flops = counts[-1]
    if len(counts) == 1:
        return flops / rows, 0.0
    each = (flops - counts[0][1]) / (rows - counts[0][0])
    return each, flops - rows * each


def _at_once(rows: Sequence[LayerCost], config: RunConfig) -> tuple[int, int]:
    """Bytes of gradients and of activations: of a stage as ``pipeal memory`` counts them, of stages together."""
    engine = config.engine
    every = sum(row.parameter_bytes for row in rows)
    if sum(engine.sizes or (0,)) != len(rows):  # blocks of the one layer of a form that is whole
        return every, sum(row.activation_bytes for row in rows)
    way = way_of_layers(schedule_of(config).within_stage)
    blocks = [BlockMemory(gradients=row.parameter_bytes, graph=row.activation_bytes) for row in rows]
    stages = [way.parts([blocks[number] for number in stage]) for stage in layers_of_stages(engine.sizes or ())]
    # Replicas average while the next layers are at work, and update last; a layer that leaves memory leaves it updated.
    wait = config.train.accumulate > 1 or (engine.replicas > 1 and engine.offload == "none")
    return (
        every if wait else sum(parts.gradients for parts in stages),
        sum(parts.activations for parts in stages),
    )


def first_batches(experiment: Experiment, seed: int) -> Iterator[Batch]:
    """The training batches of a run's first epoch, up to :data:`LOOKED_AT`; one alone where all are of one size."""
    with closing(experiment.train_batches(seed)) as batches:
        batches.set_epoch(0)
        yield from islice(iter(batches), 1 if experiment.lengths is None else LOOKED_AT)


def few_rows(batch: Batch, experiment: Experiment, most: int = ROWS) -> tuple[Tree, Tree]:
    """Inputs and targets of the samples of a batch whose FLOPs are counted: of one that is grouped, all."""
    rows = len(batch) if "grouped_at" in experiment.facts else min(len(batch), most)
    found: tuple[Tree, Tree] = map_tensors(Tensor.clone, cut((batch.x, batch.y), range(rows)))  # not the whole batch
    return found


def largest(batches: Iterable[Batch]) -> Batch:
    """The one with the largest input, padding included."""
    return max(batches, key=_elements)


def _elements(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in tensors(batch.x))


def _countable(precision: Precision, device: torch.device) -> Precision:
    """The same bytes where a CPU without arithmetic in fp16 looks at a model of several GPUs."""
    return "bf16" if precision == "fp16" and device.type == "cpu" else precision
