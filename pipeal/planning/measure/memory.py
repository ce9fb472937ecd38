"""Measures what training holds: of each block alone, for :mod:`pipeal.planning.pure.memory`, and of a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeal.core.modules import module_of
from pipeal.core.options import EngineOptions
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, map_tensors, move
from pipeal.engine.devices import Device, open_device, parse_device
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.runner.precision import make_ready, settings
from pipeal.engine.schedule import Action
from pipeal.engine.state.layer_state import layer_state
from pipeal.engine.state.stateful import stateful
from pipeal.planning.measure.allocations import Allocations, Levels, bytes_by_place
from pipeal.planning.measure.layers import uncollected
from pipeal.planning.measure.resident import Resident, untouched_bytes
from pipeal.planning.pure.memory import BlockMemory, Parts


def measure_blocks(
    layers: Sequence[TrainableLayer],
    batches: Sequence[Any],
    options: EngineOptions,
    *,
    device: str = "cpu",
    end_to_end: bool = False,
) -> list[list[BlockMemory]]:
    """What each layer holds, one at a time, on each of some batches; the layers are trained on them.

    Args:
        layers: Of a model, in order, or the blocks of :func:`pipeal.methods.bp_parts.bp_parts`.
        batches: Each ``(x, y)``.
        options: Of which the precision counts.
        device: Where.
        end_to_end: Whether they stand for a network with one backward: what a block hands on is then held by graphs
            alone when it goes backward. Otherwise the next layer has it.

    Raises:
        RuntimeError: The graph of one block does not fit into memory.
    """
    place, handle = parse_device(device), open_device(device)
    make_ready(layers, options.precision)
    for layer in layers:
        handle.take(module_of(layer))
    found = []
    with uncollected(), handle.active():
        _train(layers, move(batches[0], place), options, handle, None, end_to_end)  # opens the optimizers' states
        for batch in batches:
            with Allocations(place, _parameters(layers)) as watch:
                packets = _train(layers, move(batch, place), options, handle, watch, end_to_end)
            levels = watch.levels()
            found.append([_block(layer, packets[n], levels, n) for n, layer in enumerate(layers)])
    return found


@dataclass(frozen=True, slots=True)
class _Packets:
    """Bytes of what comes and of what is new in what goes, what the graph keeps of each, and what of all that it keeps
    was not written to, and where there is such, the physical memory that the backward adds."""

    comes: int
    comes_kept: int
    goes: int
    goes_kept: int
    untouched: int
    backward: int


def _train(
    layers: Sequence[TrainableLayer],
    batch: Any,
    options: EngineOptions,
    handle: Device,
    watch: Allocations | None,
    end_to_end: bool,
) -> list[_Packets]:
    """Has each layer learn from a batch; nothing but its graph holds what has come when it goes backward."""
    found: list[_Packets] = []

    def during(name: str, action: Action = Action.UPDATE) -> AbstractContextManager[object]:
        stack = settings(action, handle, options.precision)
        stack.enter_context(nullcontext() if watch is None else watch.mark(f"{name} {len(found)}"))
        return stack

    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.update(bytes_by_place(tensor))
        return tensor.detach()  # itself would be a circle, of an output and its graph

    x, y = _copy(batch)  # which nothing else holds
    for layer in layers:
        came = bytes_by_place((x, y))
        with during("alone", Action.FORWARD), torch.no_grad():
            layer(x, y)
        kept.clear()
        with during("forward", Action.FORWARD), saved_tensors_hooks(keep, Tensor.detach):
            out = layer(x, y)
        goes = {place: size for place, size in bytes_by_place(out).items() if place not in came}
        untouched = sum(untouched_bytes(*each) for each in kept.items()) if handle.types == ["cpu"] else 0
        comes_kept, goes_kept = (sum(size for place, size in each.items() if place in kept) for each in (came, goes))
        x, y = _copy(out) if end_to_end else out
        del out
        physical = Resident(torch.device("cpu")) if untouched and watch is not None else None
        with during("backward", Action.BACKWARD):
            layer.backward()
        added = 0 if physical is None else physical.peak()
        with during("update"):
            layer.update()
        found.append(_Packets(sum(came.values()), comes_kept, sum(goes.values()), goes_kept, untouched, added))
    return found


def _block(layer: TrainableLayer, packets: _Packets, levels: Mapping[str, Levels], number: int) -> BlockMemory:
    alone, forward, backward, update = (
        levels[f"{name} {number}"] for name in ("alone", "forward", "backward", "update")
    )
    return BlockMemory(
        weights=_weights([layer]),
        gradients=backward.most_gradients,
        optimizer=_optimizers([layer]),
        comes=packets.comes,
        comes_kept=packets.comes_kept,
        goes=packets.goes,
        goes_kept=packets.goes_kept,
        graph=forward.after - forward.before - (packets.goes - packets.goes_kept),
        forward=forward.most - forward.before,
        forward_alone=alone.most - alone.before,
        backward=backward.most_beside_gradients - backward.before,
        backward_whole=backward.most - backward.before,
        update=update.most - update.before,
        untouched=packets.untouched,
        # Room for operators that use it again: the backward of oneDNN's LSTM fills some of its own.
        filled=min(packets.untouched, max(0, packets.backward - (backward.most - backward.before))),
    )


@uncollected()
def watch_training(
    layers: Sequence[TrainableLayer], batch: Any, pipe: Pipeline, device: str, *, offloaded: bool = False
) -> Parts:
    """What a pipeline holds while it trains on one more batch, after a first one that opened its optimizers' states.

    Args:
        layers: All of the pipeline's.
        batch: ``(x, y)``.
        pipe: An open pipeline on one device, in this thread.
        device: That device.
        offloaded: Whether only the layer at work counts.
    """
    batch_bytes = sum(bytes_by_place(batch).values())
    weights = [_weights([layer]) for layer in layers] if offloaded else [_weights(layers)]
    optimizer = [_optimizers([layer]) for layer in layers] if offloaded else [_optimizers(layers)]
    with Allocations(parse_device(device), _parameters(layers)) as watch, ExitStack() as hooks:
        if offloaded:
            _mark_work(layers, watch, hooks)
        pipe.run([batch])
    levels = watch.levels()
    all_of_it = levels[""]
    at_once = weights[0] + optimizer[0] + all_of_it.most
    if offloaded:
        whole = zip(weights, optimizer, strict=True)
        works = [levels[f"work {number}"].most + own for number, own in enumerate(weights)]
        updates = [levels[f"update {number}"].most + sum(own) for number, own in enumerate(whole)]
        at_once = max(works + updates)
    return Parts(
        max(weights),
        all_of_it.most_gradients,
        max(optimizer),
        batch_bytes + all_of_it.most_beside_gradients,
        batch_bytes + at_once,
        0,
    )


def _mark_work(layers: Sequence[TrainableLayer], watch: Allocations, hooks: ExitStack) -> None:
    """Marks when each layer is at work, up to its update and in it, from the one's beginning to the other's."""
    current, now = ExitStack(), [""]
    hooks.callback(current.close)

    def begins(name: str) -> None:
        if now[0] != name:
            current.close()
            current.enter_context(watch.mark(name))
            now[0] = name

    for number, layer in enumerate(layers):
        module = module_of(layer)
        work, update = (partial(begins, f"{what} {number}") for what in ("work", "update"))
        hooks.callback(module.register_forward_pre_hook(lambda *_, work=work: work()).remove)
        for optimizer in stateful(module)[0].values():
            hooks.callback(optimizer.register_step_pre_hook(lambda *_, update=update: update()).remove)


def _weights(layers: Sequence[TrainableLayer]) -> int:
    modules = [module_of(layer) for layer in layers]
    return sum(bytes_by_place([[*module.parameters(), *module.buffers()] for module in modules]).values())


def _optimizers(layers: Sequence[TrainableLayer]) -> int:
    states = [layer_state(layer, Tensor.detach)["optimizers"] for layer in layers]
    return sum(bytes_by_place([each["state"] for state in states for each in state.values()]).values())


def _parameters(layers: Sequence[TrainableLayer]) -> Any:
    return chain.from_iterable(module_of(layer).parameters() for layer in layers)


def _copy(tree: Tree) -> Tree:
    return map_tensors(Tensor.clone, tree)
