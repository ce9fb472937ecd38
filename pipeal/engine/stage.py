"""A stage: neighbouring layers on one device, and the three actions on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeal.engine.compiling import Compile, CompiledLayer
from pipeal.engine.device import Device, Precision, Ready
from pipeal.engine.schedule import Action
from pipeal.engine.trace import StageClock, Window
from pipeal.errors import ScheduleError
from pipeal.packet import Packet, Path, Shapes, TrainableLayer, Tree, describe, module_of, shapes_of, tensors
from pipeal.random import keyed, may_draw, updates_may_draw


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
        compile: Whether, and for which shapes, forwards and inferences are compiled.
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
        compile: Compile = "none",
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
        self._draws: dict[int, dict[Action, bool]] = {}
        self._compiled: dict[int, CompiledLayer] = {}
        self._abandoned = threading.Event()
        for index, layer in self.layers:
            module = module_of(layer)
            module.to(device.device)
            draws = may_draw(module)
            self._draws[index] = {
                Action.FORWARD: draws,
                Action.BACKWARD: draws,
                Action.UPDATE: updates_may_draw(module),
            }
            if compile != "none":
                name = f"layer {index} ({type(layer).__name__})"
                self._compiled[index] = CompiledLayer(layer, name, compile, draws=draws)

    def reset(self) -> None:
        """Forgets what an earlier, perhaps failed, life of the pipeline left behind."""
        self._in_hand = None
        self._abandoned.clear()
        self.losses.take()
        self.clock.forget()

    def abandon(self) -> None:
        """Ends a wait for the compiler: the pipeline is about to stop."""
        self._abandoned.set()

    def run(self, action: Action, parcel: Parcel | None = None) -> Parcel | None:
        """Does one action on every layer; a forward takes a parcel and returns the one to hand on."""
        if action is Action.FORWARD:
            assert parcel is not None
            return self._forward(parcel)
        held = self._in_hand
        assert held is not None  # the executors keep the order F, B, U
        with self.device.active(), self._settings(action):
            for index, layer in self.layers:
                with self._admitted(action, index):
                    if action is Action.BACKWARD:
                        self._act(action, index, layer, held, layer.backward)
                    else:
                        self._act(action, index, layer, held, partial(_update, layer, held.packet.lr_scale))
        if action is Action.UPDATE:
            self._in_hand = None
            self.device.end_batch()
        return None

    def _forward(self, parcel: Parcel) -> Parcel:
        number, scale = parcel.packet.batch, parcel.packet.lr_scale
        # Of the packet, later actions need only these two; the tensors may go.
        self._in_hand = Parcel(parcel.sequence, Packet(number, None, None, scale))
        self._had.clear()
        self.device.limit_run_ahead()
        with self.device.active(), self._settings(Action.FORWARD):
            try:
                x, y = self.device.receive((parcel.packet.x, parcel.packet.y), parcel.ready)
            except BaseException as error:
                had = describe(shapes_of((parcel.packet.x, parcel.packet.y)))
                add_note(
                    error, f"in the forward of stage {self.number}, batch {number}, device {self.device}; input {had}"
                )
                raise
            for index, layer in self.layers:
                self._had[index] = shapes_of((x, y))
                with self._admitted(Action.FORWARD, index, (x, y)):
                    x, y = self._act(Action.FORWARD, index, layer, parcel, partial(self._climb, index, layer, x, y))
            return Parcel(parcel.sequence, Packet(number, x, y, scale), self.device.mark_ready((x, y)))

    def _climb(self, index: int, layer: TrainableLayer, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """One layer's forward, and what it leaves behind."""
        versions = _versions((x, y))
        onward = layer(x, y)
        losses = layer.loss()
        if _versions((x, y)) != versions:
            raise ScheduleError(
                "the forward changed its input in place, which the layer before still needs for its backward; "
                "use operators that do not (such as inplace=False) on what a layer receives"
            )
        if losses is not None:
            # A user's own loss() may hold a graph, or be numbers already.
            self.losses.add(index, [torch.as_tensor(loss).detach() for loss in losses])
        return onward

    def infer(
        self,
        index: int,
        layer: TrainableLayer,
        path: Path,
        x: Tree,
        *,
        compiled: bool,
        abandoned: threading.Event | None,
    ) -> Tree:
        """Passes ``x`` through one block of a layer, compiled if that is wanted and the stage compiles at all.

        Raises:
            Abandoned: The event was set during a wait for the compiler.
        """
        found = self._compiled.get(index)
        if found is None:
            return layer.inference(x, path)
        return found.inference(x, path, abandoned, compiled=compiled)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forwards, whatever the caller's is.

        Without autocast's cache, which all threads of the process would share.
        """
        kind = self.device.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)

    def _settings(self, action: Action) -> AbstractContextManager[Any]:
        """What is local to a thread and decides what an action computes: set, where it is not so already."""
        wanted: list[AbstractContextManager[Any]] = []
        forward = action is Action.FORWARD
        if forward and self.precision == "bf16":
            wanted.append(self.autocast())
        elif torch.is_autocast_enabled(self.device.device.type):  # the caller's
            wanted.append(torch.autocast(self.device.device.type, enabled=False))
        if forward and not torch.is_grad_enabled():
            wanted.append(torch.enable_grad())
        if action is Action.BACKWARD:
            # With autograd's own threads off, the backward of stages that share a GPU runs on their workers instead
            # of on the one thread that autograd has for that GPU, and the key, which is thread-local, holds there too.
            wanted.append(torch.autograd.set_multithreading_enabled(False))
        if len(wanted) == 1:
            return wanted[0]
        stack = ExitStack()
        for setting in wanted:
            stack.enter_context(setting)
        return stack

    def _admitted(self, action: Action, index: int, inputs: Tree = None) -> AbstractContextManager[None]:
        """The layer's turn to act: at once, unless something is being compiled or it may compile something itself."""
        compiled = self._compiled.get(index)
        if compiled is None:
            return _AT_ONCE
        if action is Action.FORWARD:
            return compiled.forward(inputs, self._abandoned)
        return compiled.after_forward(action is Action.BACKWARD, self._abandoned)

    def _act(self, action: Action, index: int, layer: TrainableLayer, parcel: Parcel, work: Callable[[], Any]) -> Any:
        """Keys and times an action, and says where it was if it fails."""
        batch = parcel.packet.batch
        begin = self.device.stamp()
        try:
            with keyed(self.seed, index, batch, *_KEY[action], whole_default=self._draws[index][action]):
                result = work()
        except BaseException as error:
            add_note(
                error,
                f"in the {_NAMES[action]} of stage {self.number}, layer {index} ({type(layer).__name__}), "
                f"batch {batch}, device {self.device}; input {describe(self._had[index])}",
            )
            raise
        self.clock.add(index, action, batch, parcel.sequence, begin)
        return result


_AT_ONCE = nullcontext()

_NAMES = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}

# A forward's key is (seed, layer, batch) alone: what anyone can redo by hand with :func:`pipeal.random.keyed`.
_KEY: dict[Action, tuple[int, ...]] = {Action.FORWARD: (), Action.BACKWARD: (1,), Action.UPDATE: (2,)}


def _update(layer: TrainableLayer, lr_scale: float) -> None:
    layer.scale_lr(lr_scale)
    layer.update()


def _versions(tree: Tree) -> list[int]:
    """How often each tensor was written to; tensors made in inference mode do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(tree)]


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
