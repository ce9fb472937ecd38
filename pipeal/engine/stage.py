"""A stage: neighbouring layers on one device, and the three actions on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pipeal.engine.device import Device, Ready
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock, Window
from pipeal.packet import Packet, Path, TrainableLayer, Tree, module_of, shapes
from pipeal.random import keyed, may_draw

Precision: TypeAlias = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packet between two stages.

    Attributes:
        sequence: The packet's place in this pipeline's life, counted from 0.
        packet: The packet.
        ready: When its tensors may be read.
    """

    sequence: int
    packet: Packet
    ready: Ready = None


@dataclass(frozen=True, slots=True)
class LossReport:
    """The local losses of one layer on one batch, still on the layer's device."""

    batch: int
    layer: int
    losses: tuple[Tensor, ...]


class Stage:
    """Runs the layers of one stage. Knows nothing of threads or of other stages.

    Args:
        number: The stage's number.
        layers: Its layers, by their number in the whole model, in order.
        device: The stage's own handle on its device; the layers are moved there.
        seed: With the layer's and the batch's number, the key of all randomness.
        precision: ``bf16`` runs forwards under autocast.
        window: The batches whose spans are kept.
    """

    def __init__(
        self,
        number: int,
        layers: Sequence[tuple[int, TrainableLayer]],
        device: Device,
        *,
        seed: int,
        precision: Precision,
        window: Window,
    ) -> None:
        self.number = number
        self.layers = list(layers)
        self.device = device
        self.seed = seed
        self.precision = precision
        self.clock = StageClock(device, number, window)
        self.reports: deque[LossReport] = deque()  # appended by the stage, taken by the caller
        self._in_hand: Parcel | None = None
        self._draws = {}
        for index, layer in self.layers:
            module = module_of(layer)
            module.to(device.device)
            self._draws[index] = may_draw(module)

    def run(self, action: Action, parcel: Parcel | None = None) -> Parcel | None:
        """Does one action on every layer; a forward takes a parcel and returns the one to hand on."""
        if action is Action.FORWARD:
            assert parcel is not None
            return self._forward(parcel)
        held = self._in_hand
        assert held is not None  # the executors keep the order F, B, U
        with self.device.active():
            for index, layer in self.layers:
                with self._acting(index, layer, action, held):
                    if action is Action.BACKWARD:
                        layer.backward()
                    else:
                        layer.scale_lr(held.packet.lr_scale)
                        layer.update()
        if action is Action.UPDATE:
            self._in_hand = None
            self.device.end_batch()
        return None

    def _forward(self, parcel: Parcel) -> Parcel:
        packet = parcel.packet
        self.device.limit_run_ahead()
        with self.device.active(), torch.enable_grad(), self.autocast():
            x, y = self.device.receive((packet.x, packet.y), parcel.ready)
            packet = replace(packet, x=x, y=y)
            self._in_hand = replace(parcel, packet=packet)
            for index, layer in self.layers:
                key = (self.seed, index, packet.batch)
                with (
                    self._acting(index, layer, Action.FORWARD, replace(parcel, packet=packet)),
                    keyed(*key, whole_default=self._draws[index]),
                ):
                    x, y = layer(packet.x, packet.y)
                packet = replace(packet, x=x, y=y)
                losses = layer.loss()
                if losses is not None:
                    self.reports.append(LossReport(packet.batch, index, losses))
            # From here only the number and the learning rate matter; the input may go.
            self._in_hand = replace(parcel, packet=replace(packet, x=None, y=None), ready=None)
            return Parcel(parcel.sequence, packet, self.device.mark_ready((x, y)))

    def infer(self, x: Tree, ready: Ready, paths: Sequence[Path]) -> tuple[Tree, Ready]:
        """Passes ``x`` through the stage's layers along each of ``paths`` in turn, ``h`` in reverse order.

        Args:
            x: An input, a feature or a code, as the first path takes.
            ready: When it may be read.
            paths: ``("f",)`` climbs all layers, ``("b",)`` crosses the bridge of the last, ``("h",)`` descends.
        """
        with self.device.active(), torch.no_grad(), self.autocast():
            x = self.device.receive(x, ready)
            for path in paths:
                layers = {"f": self.layers, "b": self.layers[-1:], "h": self.layers[::-1]}[path]
                for _, layer in layers:
                    x = layer.inference(x, path)
            return x, self.device.mark_ready(x)

    def up_to(self, depth: int) -> Stage:
        """This stage, or, if the exit after layer ``depth`` (from 1) lies within it, its part up to there."""
        if self.layers[-1][0] < depth:
            return self
        part = copy(self)
        part.layers = [(index, layer) for index, layer in self.layers if index < depth]
        return part

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of forwards. Without autocast's cache, which all threads of the process would share."""
        with ExitStack() as stack:
            if self.precision == "bf16":
                kind = self.device.device.type
                stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False))
            yield

    @contextmanager
    def _acting(self, index: int, layer: TrainableLayer, action: Action, parcel: Parcel) -> Iterator[None]:
        """Times an action, and says where it was if it fails."""
        packet = parcel.packet
        try:
            with self.clock.action(index, action, packet.batch, parcel.sequence):
                yield
        except Exception as error:
            name = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}[action]
            had = f"; input {shapes((packet.x, packet.y))}" if action is Action.FORWARD else ""
            add_note(
                error,
                f"in the {name} of stage {self.number}, layer {index} ({type(layer).__name__}), "
                f"batch {packet.batch}, device {self.device}{had}",
            )
            raise


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
