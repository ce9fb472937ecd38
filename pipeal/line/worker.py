"""A stage of a line at work: what it does with an item, and what it sends on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.config import RunConfig
from pipeal.core.errors import DataError
from pipeal.core.modules import in_mode, module_of
from pipeal.core.packet import Packet
from pipeal.core.protocols import DOWN, TURN, UP, TrainableLayer
from pipeal.core.tree import Tree
from pipeal.engine.devices import open_device, take_over
from pipeal.engine.inference.trips import Step, Visit, make, walk
from pipeal.engine.runner.precision import ready
from pipeal.engine.schedule import Action
from pipeal.engine.stage import Stage, bring_to_rest
from pipeal.engine.state.layer_state import State, layer_state
from pipeal.engine.state.snapshot import Snapshot
from pipeal.engine.trace import Window
from pipeal.line.items import ASK, BATCH, CHECKPOINT, DECODER, END, EVALUATE, LAYER, ROW, STATE, Item
from pipeal.line.top import Top
from pipeal.run.build import Models
from pipeal.run.opening import engine_options, made_ready, seed_of
from pipeal.training.position import joined, means_of, numbered

Emit = Callable[[Item], None]


class StageWorker:
    """The layers of a stage, and their part in each item. What it sends follows from what it is given alone.

    ::

        batch      F, send, B, U            evaluate   its layers' mean losses, then how their answers come down
        ask        climb, send              checkpoint, end    what its layers have learnt
        the rest   send on                  at the top nothing is sent: it answers, and keeps the rows

    Args:
        number: Of the stage, for messages.
        models: Makes the layers.
        config: With every choice made.
        own: The numbers of this stage's.
        device: Where they are.
        emit: Sends an item to the next stage; waits while there is no room.
        states: What they go on from; None for their first weights.
        top: Of the last stage; None for others.
        first_batch: The number of the first batch that comes.

    Attributes:
        next_batch: The number of the next batch, from ``first_batch`` on.
        gathers: Whether gradients wait for a later update.
    """

    def __init__(
        self,
        number: int,
        models: Models,
        config: RunConfig,
        own: range,
        device: str,
        emit: Emit,
        states: Mapping[int, State] | None,
        top: Top | None,
        first_batch: int = 0,
    ) -> None:
        seed = seed_of(config, 1)
        options = engine_options(config)
        layers = list(made_ready(models.layers(config.train.mode, seed, own), config, states=states, here=own))
        self._stage = Stage(
            number,
            [(index, layers[index]) for index in own],
            open_device(device),
            options,
            seed=seed,
            window=Window(0, 0),
            last=len(layers) - 1,
        )
        if self._stage.device.device.type == "cuda":
            torch.cuda.synchronize(self._stage.device.device)  # the weights have arrived before other streams read
        self._stage.device.follow_caller()
        self._below = layers[: own.start]
        """On the meta device; the top needs of them what comes down."""
        self._emit = emit
        self._top = top
        self._losses: dict[int, Tensor] = {}
        self._splits: Counter[int] = Counter()
        self._mode = ExitStack()
        self.next_batch = first_batch
        self.gathers = self._evaluates = False
        self._settings = ExitStack()
        self._settings.enter_context(ready([layer for _, layer in self._stage.layers], options.precision))

    def close(self) -> None:
        """Leaves the layers; a second time does nothing."""
        self._mode.close()
        self._settings.close()
        self._stage.drop_unlearnt()

    def handle(self, item: Item) -> None:
        """Does what an item asks for."""
        {
            BATCH: self._learn,
            EVALUATE: self._evaluate,
            DECODER: self._pass_on if self._top is None else self._take_decoder,
            ASK: self._ask,
            ROW: self._row,
            LAYER: self._pass_on if self._top is None else self._top.take_layer,
            STATE: self._pass_on,
            CHECKPOINT: self._save,
            END: self._save,
        }[item.kind](item)

    def state(self) -> tuple[dict[int, State], dict[str, Any]]:
        """By layer what it has learnt, and what is counted of the epoch under way; copies, on the CPU."""
        snapshot = Snapshot(self.next_batch, [number for number, _ in self._stage.layers])
        self._stage.save(snapshot, lambda: None)
        found = snapshot.wait()
        since = {number: one.losses for number, one in found.items() if one.losses is not None}
        return {number: one.state for number, one in found.items()}, {
            "next_batch": self.next_batch,
            "evaluates": self._evaluates,
            "splits": {str(number): self._splits[number] + one.splits for number, one in found.items()},
            "losses": numbered(joined(self._losses, since)),
        }

    def go_on(self, counted: Mapping[str, Any]) -> None:
        """Takes up what :meth:`state` had counted."""
        self.next_batch = counted["next_batch"]
        self._losses = {int(number): losses for number, losses in counted["losses"].items()}
        self._splits = Counter({int(number): splits for number, splits in counted["splits"].items()})
        if counted["evaluates"]:
            self._enter_evaluation()

    def _pass_on(self, item: Item) -> None:
        if self._top is None:
            self._emit(item)

    def _learn(self, item: Item) -> None:
        facts = item.facts
        number, updates = facts["batch"], facts["updates"]
        if number != self.next_batch:
            raise DataError(f"batch {number} came, where batch {self.next_batch} was expected; begin the line anew")
        x, y = item.tree
        packet = Packet(number, x, y, facts["lr_scale"], updates, number)
        onward = self._stage.run(Action.FORWARD, packet)
        if self._top is None:
            assert onward is not None
            self._emit(Item(BATCH, facts, take_over((onward.x, onward.y), onward.ready)))
        self._stage.run(Action.BACKWARD)
        self._stage.run(Action.UPDATE)
        self.next_batch, self.gathers = number + 1, not updates

    def _evaluate(self, item: Item) -> None:
        bring_to_rest([self._stage])
        losses = joined(self._losses, self._stage.losses.take())
        self._losses = {}
        facts = dict(item.facts)
        told: dict[str, Any] = facts.setdefault("layers", {})
        splits, overflows = self._stage.take_splits(), self._stage.overflows()
        for number, _ in self._stage.layers:
            means, non_finite = means_of(losses[number]) if number in losses else ([], 0)
            told[str(number)] = {
                "losses": means,
                "non_finite": non_finite,
                "splits": self._splits[number] + splits[number],
                "overflows": overflows[number],
            }
        self._splits.clear()
        self._enter_evaluation()
        if self._top is not None:
            self._top.begin_evaluation(facts)
            return
        self._emit(Item(EVALUATE, facts))
        for number, layer in self._stage.layers:
            if (state := _on_the_way_down(layer)) is not None:
                self._emit(Item(DECODER, {"layer": number}, state))

    def _enter_evaluation(self) -> None:
        self._evaluates = True
        self._mode.enter_context(in_mode([module_of(layer) for _, layer in self._stage.layers], False))

    def _take_decoder(self, item: Item) -> None:
        number = item.facts["layer"]
        if not isinstance(number, int) or not 0 <= number < len(self._below):
            raise DataError(f"what comes down of layer {number!r} came; this stage begins at {len(self._below)}")
        _load_decoder(self._below[number], item.tree, self._stage.device.device)

    def decoders(self) -> dict[int, dict[str, Tensor]]:
        """What has come of the layers below for answers, for a snapshot."""
        found = ((number, _on_the_way_down(layer)) for number, layer in enumerate(self._below))
        return {
            number: state
            for number, state in found
            if state is not None and not any(tensor.is_meta for tensor in state.values())
        }

    def take_decoders(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Takes up what :meth:`decoders` gave."""
        for number, state in states.items():
            _load_decoder(self._below[number], dict(state), self._stage.device.device)

    def _ask(self, item: Item) -> None:
        x, y = item.tree
        layers = self._stage.layers
        climbed = self._visit([(UP, *layer) for layer in layers], x)
        if self._top is None:
            self._emit(Item(ASK, item.facts, (self._stage.thin(climbed), y)))
            return
        answer = self._visit([(TURN, *layers[-1]), *((DOWN, *layer) for layer in reversed(layers))], climbed)
        below: list[Step] = [(DOWN, number, layer) for number, layer in reversed([*enumerate(self._below)])]
        if below:
            answer = self._visit(below, answer, at=_down)
        assert isinstance(answer, Tensor)
        assert isinstance(y, Tensor)
        self._top.answer(item.facts["part"], answer, y.to(answer.device))

    def _visit(self, steps: Sequence[Step], tree: Tree, at: Callable[..., Tree] | None = None) -> Tree:
        go = partial(walk, self._stage, whole=True, batch=None, abandoned=None) if at is None else at
        return take_over(
            *make(Visit(self._stage, lambda there: go(steps=list(steps), tree=there), tree, None, "answer"))
        )

    def _row(self, item: Item) -> None:
        self._mode.close()
        self._evaluates = False
        if self._top is None:
            self._emit(item)
        else:
            self._top.end_evaluation()

    def _save(self, item: Item) -> None:
        bring_to_rest([self._stage])
        goes_on = item.kind == CHECKPOINT  # and so what is under way must be copies
        for number, layer in self._stage.layers:
            state = layer_state(layer, lambda tensor: tensor.detach().to("cpu", copy=goes_on))
            found = Item(LAYER, {"layer": number}, state)
            if self._top is None:
                self._emit(found)
            else:
                self._top.take_layer(found)
        if self._top is None:
            self._emit(item)
        else:
            self._top.save(ended=item.kind == END)


def _down(steps: Sequence[Step], tree: Tree) -> Tree:
    for _, _, layer in steps:
        tree = layer.inference(tree, DOWN)
    return tree


def _part_down(layer: TrainableLayer) -> nn.Module | None:
    """The module that an answer passes on its way down through a layer: its ``h``, or all of a layer that says nothing
    of its blocks; None where it passes nothing."""
    if not getattr(type(layer).inference, "through_blocks", False):
        return module_of(layer)
    blocks: Mapping[str, nn.Module] = layer.blocks()  # type: ignore[attr-defined]
    return blocks.get(DOWN)


def _on_the_way_down(layer: TrainableLayer) -> dict[str, Tensor] | None:
    part = _part_down(layer)
    # Copies: the layer goes on learning, perhaps before they are on their way.
    return None if part is None else {name: tensor.detach().clone() for name, tensor in _tensors(part)}


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that no state has."""
    yield from part.named_parameters()
    yield from part.named_buffers()


def _load_decoder(layer: TrainableLayer, state: Mapping[str, Tensor], device: torch.device) -> None:
    part = _part_down(layer)
    if part is None or {name for name, _ in _tensors(part)} != set(state):
        raise DataError("what comes down of a layer is not that of this line's model; begin the line anew")
    for name, tensor in state.items():
        owner, _, own = name.rpartition(".")
        module = part.get_submodule(owner)
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(tensor.to(device), requires_grad=False)
        else:
            module._buffers[own] = tensor.to(device)
    module_of(layer).eval()
