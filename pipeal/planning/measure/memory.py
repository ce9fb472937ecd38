"""Measures what training holds: of each block alone, for :mod:`pipeal.planning.pure.memory`, and of a whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeal.core.host_memory import give_freed_memory_back
from pipeal.core.modules import layers_of, module_of
from pipeal.core.options import EngineOptions, with_keywords
from pipeal.core.protocols import TrainableLayer
from pipeal.core.samples import pair_of
from pipeal.core.thin import nearest, rounded
from pipeal.core.tree import Tree, map_tensors, move
from pipeal.engine.checks import require_layers
from pipeal.engine.devices import Device, open_device, parse_device
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.runner.precision import make_ready, settings
from pipeal.engine.schedule import Action
from pipeal.engine.sizes import check_sizes, layers_of_stages
from pipeal.engine.state.layer_state import layer_state
from pipeal.engine.state.stateful import stateful
from pipeal.planning.measure.allocations import Allocations, Levels, bytes_by_place
from pipeal.planning.measure.layers import uncollected
from pipeal.planning.measure.resident import Resident, untouched_bytes
from pipeal.planning.pure.memory import BlockMemory, Parts, way_of_layers


def stage_memory(
    model: nn.Module | Iterable[TrainableLayer],
    batch: Any,
    sizes: Sequence[int] | None = None,
    *,
    device: str = "cpu",
    options: EngineOptions | None = None,
    **keywords: Any,
) -> list[Parts]:
    """What each stage holds while a pipeline trains on a batch, under ``sequential`` or ``pipelined``.

    Packets that wait between stages are not among it.

    Args:
        model: As for :class:`pipeal.Pipeline`; copies of its layers are made, and trained one at a time.
        batch: A pair ``(x, y)``, or an object with attributes ``x`` and ``y``.
        sizes: How many layers each stage has; None for one stage of all.
        device: Where to measure.
        options: Those of the pipeline, of which the precision, the format of packets, ``within_stage`` and
            ``offload="disk"`` count.
        keywords: As for :class:`pipeal.Pipeline`.

    Returns:
        Bytes by part and at most (``peak``), for each stage.

    Raises:
        PlacementError: The sizes do not cover the layers.
        DataError: The batch is no pair.
    """
    options, layers = with_keywords(options, keywords), deepcopy(layers_of(model))
    require_layers(layers)
    stages = len(sizes) if isinstance(sizes, Sequence) else 1
    sizes = check_sizes([len(layers)] if sizes is None else sizes, len(layers), stages)
    with torch.random.fork_rng([device] if parse_device(device).type == "cuda" else []):
        (blocks,) = measure_blocks(layers, [pair_of(batch)], options, device=device)
    way = way_of_layers(options.within_stage, offloaded=options.offload == "disk")
    return [way.parts([blocks[number] for number in numbers]) for numbers in layers_of_stages(sizes)]


def measure_blocks(
    layers: Sequence[TrainableLayer],
    batches: Sequence[Any],
    options: EngineOptions,
    *,
    device: str = "cpu",
    end_to_end: bool = False,
) -> list[list[BlockMemory]]:
    """What each layer holds, one at a time, on each of some batches; the layers are trained on them, twice on each.

    Args:
        layers: Of a model, in order, or the blocks of :func:`pipeal.methods.bp_parts.bp_parts`.
        batches: Each ``(x, y)``.
        options: Of which the precision and the format of packets count.
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
            # Not in the watched turn: what is held to count its pages is let go of late.
            pages = _train(layers, move(batch, place), options, handle, None, end_to_end)
            with Allocations(place, _parameters(layers)) as watch:
                packets = _train(layers, move(batch, place), options, handle, watch, end_to_end)
            levels = watch.levels()
            found.append([_block(layer, packets[n], pages[n], levels, n) for n, layer in enumerate(layers)])
    return found


def measure_kernels(
    layers: Sequence[TrainableLayer],
    batch: Any,
    options: EngineOptions,
    *,
    device: str = "cpu",
    end_to_end: bool = False,
) -> int:
    """Bytes that libraries keep once layers have learnt from a batch of a size that this process has not met before.

    Libraries generate kernels for the shapes that they meet, and cache them: oneDNN has a cache of primitives, which is
    about half of it. That is some MiB for each size of a batch, small or large, and however often a layer is repeated.

    Args:
        layers: That have learnt from batches of other sizes: what is there once for all sizes does not count.
        batch: ``(x, y)``.
        options: As for :func:`measure_blocks`, as are ``device`` and ``end_to_end``. Of a GPU, where tensors are what
            counts, there are none.
    """
    place, handle = parse_device(device), open_device(device)
    if place.type != "cpu":
        return 0
    with uncollected(), handle.active():
        resident = Resident(place)
        _train(layers, batch, options, handle, None, end_to_end)
        return max(0, resident.kept())


@dataclass(frozen=True, slots=True)
class _Packets:
    """Bytes of what comes and of what is new in what goes, what the graph keeps of each, what of all that it keeps was
    not written to, and, of an unwatched turn, the most of that which an operator of the backward writes to."""

    comes: int
    comes_kept: int
    goes: int
    goes_kept: int
    untouched: int
    filled: int


class _Workspaces:
    """What a graph keeps for operators that write to it in the backward: how much of it they fill.

    Each is held until the operator that asked for it has run: so long its pages can be counted.

    Attributes:
        filled: The most that was filled between two operators that ask for what was kept.
    """

    def __init__(self) -> None:
        self.filled = 0
        self._held: dict[int, tuple[Tensor, int]] = {}

    def unpack(self, kept: Tensor) -> Tensor:
        """What the backward gets of what was kept."""
        self.look()
        for place, size in bytes_by_place(kept).items():
            missing = untouched_bytes(place, size)
            if missing:
                self._held[place] = kept, missing
        return kept.detach()

    def look(self) -> None:
        """Counts what has been filled, and lets go of it."""
        filled = 0
        for place, (kept, before) in list(self._held.items()):
            added = before - untouched_bytes(place, kept.untyped_storage().nbytes())
            if added:
                filled += added
                del self._held[place]
        self.filled = max(self.filled, filled)


def _train(
    layers: Sequence[TrainableLayer],
    batch: Any,
    options: EngineOptions,
    handle: Device,
    watch: Allocations | None,
    end_to_end: bool,
) -> list[_Packets]:
    """Has each layer learn from a batch; nothing but its graph holds what has come when it goes backward. Pages are
    counted where nothing is watched, and the device is a CPU."""
    paged = watch is None and handle.types == ["cpu"]
    found: list[_Packets] = []

    def during(name: str, action: Action = Action.UPDATE) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(settings(action, handle, options.precision))
        stack.enter_context(nullcontext() if watch is None else watch.mark(f"{name} {len(found)}"))
        return stack

    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.update(bytes_by_place(tensor))
        return tensor.detach()  # itself would be a circle, of an output and its graph

    packet = "as_is" if end_to_end else nearest(options.packet)
    x, y = _copy(batch)  # which nothing else holds
    for layer in layers:
        came = bytes_by_place((x, y))
        if paged:
            give_freed_memory_back()  # glibc takes large blocks, too, out of what it keeps, where pages are there
        with during("alone", Action.FORWARD), torch.no_grad():
            layer(x, y)
        kept.clear()
        spaces = _Workspaces()
        with during("forward", Action.FORWARD), saved_tensors_hooks(keep, spaces.unpack if paged else Tensor.detach):
            out = rounded(layer(x, y), packet)  # on one device the next layer has it at once, in its full size
        goes = {place: size for place, size in bytes_by_place(out).items() if place not in came}
        untouched = sum(untouched_bytes(*each) for each in kept.items()) if paged else 0
        comes_kept, goes_kept = (sum(size for place, size in each.items() if place in kept) for each in (came, goes))
        x, y = _copy(out) if end_to_end else out
        del out
        with during("backward", Action.BACKWARD):
            layer.backward()
        spaces.look()
        with during("update"):
            layer.update()
        found.append(_Packets(sum(came.values()), comes_kept, sum(goes.values()), goes_kept, untouched, spaces.filled))
    return found


def _block(
    layer: TrainableLayer, packets: _Packets, pages: _Packets, levels: Mapping[str, Levels], number: int
) -> BlockMemory:
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
        untouched=pages.untouched,
        filled=pages.filled,  # the backward of oneDNN's LSTM does so with some of its own workspace
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
