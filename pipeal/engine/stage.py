"""A stage: neighbouring layers on one device, and the three actions on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeal.engine.device import Device, Precision, Ready
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock, Window
from pipeal.errors import ScheduleError
from pipeal.packet import Packet, Path, Shapes, TrainableLayer, Tree, describe, module_of, shapes_of, tensors
from pipeal.random import keyed, may_draw


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


class LossLog:
    """The local losses of a stage's layers, batch by batch, on their device until the caller takes them.

    Written by the stage's thread, taken while it rests. Kept as one block per thousand batches: a scalar of its own
    takes a GPU's allocator 512 bytes.
    """

    def __init__(self) -> None:
        self._single: dict[int, list[list[Tensor]]] = {}
        self._blocks: dict[int, list[Tensor]] = {}

    def add(self, layer: int, losses: list[Tensor]) -> None:
        """Keeps one batch's losses of one layer."""
        single = self._single.setdefault(layer, [])
        single.append(losses)
        if len(single) == 1000:
            self._join(layer)

    def take(self) -> dict[int, Tensor]:
        """By layer, ``(batches, losses)`` float32 on the CPU; forgets them."""
        for layer in list(self._single):
            self._join(layer)
        taken = {layer: torch.cat(blocks).cpu() for layer, blocks in self._blocks.items()}
        self._single, self._blocks = {}, {}
        return taken

    def _join(self, layer: int) -> None:
        rows = self._single.pop(layer)
        block = torch.stack([loss.float() for row in rows for loss in row]).view(len(rows), -1)
        self._blocks.setdefault(layer, []).append(block)


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
        self.losses = LossLog()
        self._in_hand: Parcel | None = None
        self._had: dict[int, Shapes] = {}
        self._draws = {}
        for index, layer in self.layers:
            module = module_of(layer)
            module.to(device.device)
            self._draws[index] = may_draw(module)

    def reset(self) -> None:
        """Forgets what an earlier, perhaps failed, life of the pipeline left behind."""
        self._in_hand = None
        self.losses.take()
        self.clock.forget()

    def run(self, action: Action, parcel: Parcel | None = None) -> Parcel | None:
        """Does one action on every layer; a forward takes a parcel and returns the one to hand on."""
        if action is Action.FORWARD:
            assert parcel is not None
            return self._forward(parcel)
        held = self._in_hand
        assert held is not None  # the executors keep the order F, B, U
        # With autograd's own threads off, the backward of stages that share a GPU runs on their workers instead of
        # on the one thread that autograd has for that GPU, and the key, which is thread-local, holds there too.
        own_types = torch.autocast(self.device.device.type, enabled=False)  # whatever the caller's autocast is
        with self.device.active(), own_types, torch.autograd.set_multithreading_enabled(False):
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
        self._had.clear()
        self.device.limit_run_ahead()
        with self.device.active(), torch.enable_grad(), self.autocast():
            with self._noting(Action.FORWARD, packet):
                x, y = self.device.receive((packet.x, packet.y), parcel.ready)
            packet = replace(packet, x=x, y=y)
            # Of the input, later actions need only the number and the learning rate; the tensors may go.
            self._in_hand = replace(parcel, packet=replace(packet, x=None, y=None), ready=None)
            for index, layer in self.layers:
                self._had[index] = shapes_of((packet.x, packet.y))
                with self._acting(index, layer, Action.FORWARD, parcel):
                    versions = _versions((packet.x, packet.y))
                    x, y = layer(packet.x, packet.y)
                    losses = layer.loss()
                    if _versions((packet.x, packet.y)) != versions:
                        raise ScheduleError(
                            "the forward changed its input in place, which the layer before still needs for its "
                            "backward; use operators that do not (such as inplace=False) on what a layer receives"
                        )
                packet = replace(packet, x=x, y=y)
                if losses is not None:
                    # A user's own loss() may hold a graph, or be numbers already.
                    self.losses.add(index, [torch.as_tensor(loss).detach() for loss in losses])
            return Parcel(parcel.sequence, packet, self.device.mark_ready((x, y)))

    def infer(self, x: Tree, ready: Ready, paths: Sequence[Path]) -> tuple[Tree, Ready]:
        """Passes ``x`` through the stage's layers along each of ``paths`` in turn, ``h`` in reverse order.

        Args:
            x: An input, a feature or a code, as the first path takes.
            ready: When it may be read.
            paths: ``("f",)`` climbs all layers, ``("b",)`` crosses the bridge of the last, ``("h",)`` descends.
        """
        self.device.limit_run_ahead()
        with self.device.active(), torch.no_grad(), self.autocast():
            x = self.device.receive(x, ready)
            for path in paths:
                layers = {"f": self.layers, "b": self.layers[-1:], "h": self.layers[::-1]}[path]
                for _, layer in layers:
                    x = layer.inference(x, path)
            self.device.end_batch()
            return x, self.device.mark_ready(x)

    def up_to(self, depth: int) -> Stage:
        """This stage, or, if the exit after layer ``depth`` (from 1) lies within it, its part up to there."""
        if self.layers[-1][0] < depth:
            return self
        part = copy(self)
        part.layers = [(index, layer) for index, layer in self.layers if index < depth]
        return part

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of forwards, whatever the caller's is.

        Without autocast's cache, which all threads of the process would share.
        """
        kind = self.device.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)

    @contextmanager
    def _acting(self, index: int, layer: TrainableLayer, action: Action, parcel: Parcel) -> Iterator[None]:
        """Keys and times an action, and says where it was if it fails."""
        packet = parcel.packet
        key = (self.seed, index, packet.batch, *_KEY[action])
        # An optimizer may add noise; which one a layer has is its own affair.
        whole_default = self._draws[index] or action is Action.UPDATE
        with (
            self._noting(action, packet, index, layer),
            self.clock.action(index, action, packet.batch, parcel.sequence),
            keyed(*key, whole_default=whole_default),
        ):
            yield

    @contextmanager
    def _noting(
        self, action: Action, packet: Packet, index: int | None = None, layer: TrainableLayer | None = None
    ) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            at = f"in the {_NAMES[action]} of stage {self.number}"
            if index is not None:
                at = f"{at}, layer {index} ({type(layer).__name__})"
            had = shapes_of((packet.x, packet.y)) if index is None else self._had[index]
            add_note(error, f"{at}, batch {packet.batch}, device {self.device}; input {describe(had)}")
            raise


_NAMES = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}

# A forward's key is (seed, layer, batch) alone: what anyone can redo by hand with :func:`pipeal.random.keyed`.
_KEY: dict[Action, tuple[int, ...]] = {Action.FORWARD: (), Action.BACKWARD: (1,), Action.UPDATE: (2,)}


def _versions(tree: Tree) -> list[int]:
    """How often each tensor was written to; tensors made in inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(tree)]


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
