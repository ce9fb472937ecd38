"""Measures what layers cost here: seconds by training on real batches, bytes by looking at what is kept and sent."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from statistics import fmean, median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import PlacementError
from pipeal.core.modules import layers_of, module_of
from pipeal.core.options import DEFAULTS, EngineOptions, PacketFormat
from pipeal.core.protocols import TrainableLayer
from pipeal.core.samples import pair_of
from pipeal.core.thin import nearest, thin
from pipeal.core.tree import Tree, tensors
from pipeal.engine.devices.base import Device, Stamp
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.schedule import Action
from pipeal.engine.state.layer_state import layer_state
from pipeal.engine.trace import Span, Window
from pipeal.planning.pure.layer_cost import LayerCost

WARM_UP = 2
"""Batches that come first and are not counted: allocators fill, kernels are chosen."""


def measure(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    options: EngineOptions = DEFAULTS,
    *,
    device: str = "cpu",
    rounds: int = 3,
) -> tuple[LayerCost, ...]:
    """What each layer costs per batch on a device, the layers run one after the other.

    Seconds are means over the batches, of several rounds the median, and so are the mean bytes of packets. All others
    are those of the largest batch. What a backward needs for a moment is not among them.

    Args:
        model: The layers; copies of them are trained.
        batches: Real batches, as :meth:`Pipeline.run` takes; the first few only warm up.
        options: How they will be run; on one thread where that is left open. A loss that is not finite ends no
            measurement.
        device: Where to measure.
        rounds: How often.

    Raises:
        PlacementError: Too few batches.
        OutOfMemoryError: They do not fit.
    """
    return measure_in_turns([(model, batches)], options, device=device, rounds=rounds)[0]


def measure_in_turns(
    cases: Sequence[tuple[nn.Module | Iterable[TrainableLayer], Sequence[Any]]],
    options: EngineOptions | Sequence[EngineOptions] = DEFAULTS,
    *,
    device: str = "cpu",
    rounds: int = 3,
    alone: bool = False,
) -> list[tuple[LayerCost, ...]]:
    """As :func:`measure`, of models, each with its batches, that are to be compared: in each round all come in turn.

    The options are those of all, or of each in turn. ``alone`` leaves out what other programs had of the core
    meanwhile (:func:`layer_costs`).
    """
    each = [options] * len(cases) if isinstance(options, EngineOptions) else options
    copies = {id(model): deepcopy(layers_of(model)) for model, _ in cases}
    spent: list[list[list[dict[Action, float]]]] = [[] for _ in cases]
    for _ in range(max(1, rounds)):
        for (model, batches), own, found in zip(cases, each, spent, strict=True):
            found.append(layer_costs(copies[id(model)], batches, own, device=device, alone=alone))
    costs = []
    for (model, batches), own, found in zip(cases, each, spent, strict=True):
        sizes = [_bytes_of(pair_of(batch)) for batch in batches]
        largest = batches[sizes.index(max(sizes))]
        mean = fmean(sizes[WARM_UP:]) / max(1, *sizes)
        counted = count_bytes(copies[id(model)], largest, own, device)
        costs.append(tuple(_with_means(cost, mean, [one[n] for one in found]) for n, cost in enumerate(counted)))
    return costs


def _with_means(cost: LayerCost, mean: float, rounds: Sequence[dict[Action, float]]) -> LayerCost:
    """With seconds, and with the mean packet: a packet is taken to be as large as the batch that it is of."""
    forward, backward, update = (median(own[action] for own in rounds) for action in Action)
    mean_out_bytes = round(cost.out_bytes * mean)
    return replace(cost, forward_s=forward, backward_s=backward, update_s=update, mean_out_bytes=mean_out_bytes)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it, Python collects no garbage, as in ``timeit``: after compiling, one look through it takes 0.6 s."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def layer_costs(
    model: nn.Module | Iterable[TrainableLayer],
    batches: Sequence[Any],
    options: EngineOptions = DEFAULTS,
    *,
    device: str = "cpu",
    goes_on: Callable[[], bool] = lambda: True,
    alone: bool = False,
) -> list[dict[Action, float]]:
    """The seconds of each layer's forward, backward and update per batch, the layers run one after the other.

    Trains the layers it is given; pass a copy to keep them.

    Args:
        model: The layers.
        batches: Batches as :meth:`Pipeline.run` takes; the first :data:`WARM_UP` are not counted. Layers that are
            compiled train on all of them once before that, to have seen every shape.
        options: How they will be run; on one thread where that is left open. A loss that is not finite ends no
            measurement.
        device: Where to measure.
        goes_on: Asked after each batch that counts but the first whether to take another one.
        alone: Whether seconds on one core of a CPU are those that the core was at work for the layers. Others that run
            there meanwhile do not count, but a layer that sleeps or waits does not, either.

    Raises:
        PlacementError: Too few batches.
        OutOfMemoryError: They do not fit.
    """
    counted = counted_of(batches)

    def bounded() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number > WARM_UP and not goes_on():
                return
            yield batch

    layers = layers_of(model)
    before = [] if options.compile == "none" else batches  # so that nothing is left to compile on the clock
    window = Window(len(before) + WARM_UP, counted)
    options = _measurable(options)
    kind = _OnOneCore if alone and device == "cpu" and options.threads == 1 else Pipeline
    with kind(layers, [device], "sequential", trace=window, options=options) as pipe:
        pipe.run(before)
        taken = pipe.run(bounded()).batches
        return seconds_by_layer(pipe.spans(), len(layers), taken - WARM_UP)


class _Core(Device):
    """One core, on the clock of what the calling thread had of it."""

    def stamp(self) -> Stamp:
        return thread_time()


class _OnOneCore(Pipeline):
    """Works on the caller's thread, backward included, and times that alone."""

    def _open_devices(self, devices: Sequence[str | torch.device]) -> list[Device]:
        return [_Core(torch.device(device)) for device in devices]


def seconds_by_layer(spans: Iterable[Span], layers: int, batches: int) -> list[dict[Action, float]]:
    """What each layer took per batch, by action, of spans of so many batches."""
    totals: dict[tuple[int, Action], float] = defaultdict(float)
    for span in spans:
        totals[span.layer, span.action] += span.end - span.begin
    return [{action: totals[layer, action] / batches for action in Action} for layer in range(layers)]


def counted_of(batches: Sequence[Any]) -> int:
    """How many batches count, after those for warming up.

    Raises:
        PlacementError: None.
    """
    if len(batches) <= WARM_UP:
        raise PlacementError(f"{len(batches)} batches to measure with; expected at least {WARM_UP + 1}")
    return len(batches) - WARM_UP


def count_bytes(
    layers: Sequence[TrainableLayer], batch: Any, options: EngineOptions = DEFAULTS, device: str = "cpu"
) -> list[LayerCost]:
    """What each layer keeps and sends on one batch, without its seconds; the layers are trained on it."""
    with (
        # Of compiled layers the hooks would see nothing, and of what is computed again only the inputs: while one block
        # has its turn, all of it is there, too. Everything is counted, which is too much, rather than too little.
        Pipeline(
            layers, [device], "sequential", options=replace(_measurable(options), compile="none", recompute="none")
        ) as pipe,
        _watching(layers, nearest(options.packet)) as watched,
    ):
        pipe.run([batch])
    costs = []
    for layer, calls in zip(layers, watched, strict=True):
        # Where memory is short, the first call has failed and others have had parts: their packets are put together.
        whole, most = calls[0], max((call for call in calls if call.ended), key=lambda call: call.took_bytes)
        sent = most.sent_bytes * whole.took_bytes // most.took_bytes if most.took_bytes else most.sent_bytes
        state = layer_state(layer, Tensor.detach)  # no copy: it is only counted
        module = module_of(layer)
        weights = sum(weight.numel() * weight.element_size() for weight in module.parameters() if weight.requires_grad)
        activations = sum(most.kept.values())
        optimizers = [each["state"] for each in state["optimizers"].values()]
        costs.append(LayerCost(0.0, 0.0, 0.0, sent, weights, _bytes_of(optimizers), activations))
    return costs


def _measurable(options: EngineOptions) -> EngineOptions:
    return replace(options, threads=options.threads or 1, on_non_finite="ignore")


@dataclass
class _Call:
    """A layer's forward: the bytes that came and went, the memory that its graph keeps beside its weights, by place,
    and whether it ended as it should."""

    took_bytes: int
    sent_bytes: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    ended: bool = False


@contextmanager
def _watching(layers: Sequence[TrainableLayer], packet: PacketFormat) -> Iterator[list[list[_Call]]]:
    """For each layer, its forwards: several where memory does not suffice for one. What goes counts as it travels."""
    found: list[list[_Call]] = [[] for _ in layers]
    at_work: list[_Call] = []

    def keep(tensor: Tensor) -> Tensor:
        if at_work:
            storage = tensor.untyped_storage()
            at_work[-1].kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself would be a circle, of an output and its graph

    with ExitStack() as hooks:
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, Tensor.detach))
        for number, layer in enumerate(layers):
            module = module_of(layer)

            def enter(module: nn.Module, inputs: Tree, number: int = number) -> None:  # noqa: ARG001
                call = _Call(_bytes_of(inputs))
                found[number].append(call)
                at_work.append(call)

            def leave(module: nn.Module, inputs: Tree, output: Tree) -> None:  # noqa: ARG001
                call = at_work.pop()
                if output is not None:  # now: offloaded weights will be elsewhere
                    for own in chain(module.parameters(), module.buffers()):
                        call.kept.pop(own.untyped_storage().data_ptr(), None)
                call.ended, call.sent_bytes = output is not None, _bytes_of(thin(output, packet))

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)  # one that fails gives None
        yield found


def _bytes_of(tree: Tree) -> int:
    """What travels of a tree; of a tensor that was expanded, each element once."""
    return sum(_elements(tensor) * tensor.element_size() for tensor in tensors(tree))


def _elements(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.numel()
    return prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
