"""Losses that are not finite: seen without holding a GPU up, and what then happens.

``raise``
    ends the run with a :class:`~pipeal.core.errors.NonFiniteError`. On a CPU that is before the layer is updated. On a
    GPU no one waits: the losses of :data:`LOOK_EVERY` forwards are copied to the host together, and read when they have
    arrived, so that the error comes some batches late, but not after a drain, and to those who wait for a snapshot.
``skip``
    leaves this layer's update on this batch out, as if the batch had never been: weights, optimizer states and buffers
    stay as they were. What the layer hands on goes on; if that is not finite, the following layers leave the batch out
    as well. On a GPU the host waits, before it asks for the update, until the *forward* has ended. It has asked for the
    backward by then, so that the device has work meanwhile; optimizers that can take the decision on the device
    (``found_inf``) would still leave buffers, and whatever else an update does, changed. Weights that are not finite
    would have every later batch left out, and so end the run.
``ignore``
    does nothing. The losses are in the report in any case.

Only losses are looked at: a gradient that is not finite behind a loss that is shows in the next batch's loss. A loss
too large for ``float32``, in which losses are reported, counts as not finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import NonFiniteError
from pipeal.core.modules import scaler_of
from pipeal.core.options import OnNonFinite
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree, tensors
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Passed, Runner

LOOK_EVERY = 32
"""The forwards of a stage on a GPU whose losses are looked at together: a copy for each would cost more."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Arriving:
    """Losses on their way to the host: for each layer and batch how many, and all of them in one row."""

    counts: list[tuple[int, int, int]]
    values: Tensor
    ready: Any  # a Ready that is there

    def first_error(self, more: str | None = None) -> NonFiniteError | None:
        """The first batch with a loss that is not finite, once they are ready; ``more`` says what follows from it."""
        values = self.values.tolist()
        start = 0
        for layer, batch, count in self.counts:
            row = tuple(values[start : start + count])
            start += count
            if not _all_finite(row):
                return NonFiniteError(_message(layer, batch, row, more or _LATE), layer, batch, row, is_to_blame=False)
        return None


class FiniteWatch:
    """Looks at the losses of one stage. Used by the stage's thread, and by the caller while that rests.

    Args:
        device: The stage's device.
        policy: What happens on a loss that is not finite.
    """

    def __init__(self, device: Device, policy: OnNonFinite) -> None:
        self.policy = policy
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Drops what was seen so far."""
        self._unseen: list[tuple[int, int, list[Tensor]]] = []
        self._arriving: deque[Arriving] = deque()
        self._left_out: dict[int, NonFiniteError | Arriving] = {}
        self._failure: NonFiniteError | None = None

    def look(self, layer: int, batch: int, losses: list[Tensor], cause: Callable[[], str]) -> None:
        """Sees the losses of a forward.

        Args:
            layer: The layer's number.
            batch: The batch's number.
            losses: Its losses, detached.
            cause: Says where values that are not finite come from.

        Raises:
            NonFiniteError: Under ``raise``: one of them, or on a GPU one of an earlier batch, is not finite.
        """
        if self.policy == "ignore" or not losses:
            return
        if self._device.lags:
            if self.policy == "skip":
                self._left_out[layer] = self._send([(layer, batch, losses)])
                return
            self._unseen.append((layer, batch, losses))
            if len(self._unseen) == LOOK_EVERY:
                self._send_unseen()
            self._read(wait=False)
            raise_first([self._failure])
            return
        values = tuple(_number(loss) for loss in losses)
        if not _all_finite(values):
            why = cause()
            message = _message(layer, batch, values, _ON_TIME.format(why))
            # What an earlier layer hands on may be broken by its weights, where it has no losses or is on a GPU.
            is_to_blame = why == _NOTHING or (layer == 0 and why != _WEIGHTS)
            error = NonFiniteError(message, layer, batch, values, is_to_blame=is_to_blame)
            if self.policy == "raise":
                raise error
            self._left_out[layer] = error

    def not_finite(self, layer: int) -> NonFiniteError | None:
        """Under ``skip``, before a layer's update: why it must be left out. Waits for the forward, and no longer."""
        found = self._left_out.pop(layer, None)
        if not isinstance(found, Arriving):
            return found
        found.ready.synchronize()
        return found.first_error(_ON_TIME.format("On a GPU its cause is not looked for"))

    def settle(self) -> NonFiniteError | None:
        """Looks at all that has not been seen, and waits for it; the first failure, if any."""
        self._send_unseen()
        self._read(wait=True)
        return self._failure

    def unsettled(self) -> list[Arriving]:
        """What has not been seen, on its way to the host, for someone else to look at as well; waits for nothing.

        Raises:
            NonFiniteError: There is a failure among what has arrived.
        """
        self._send_unseen()
        self._read(wait=False)
        raise_first([self._failure])
        return list(self._arriving)

    def _send_unseen(self) -> None:
        if self._unseen:
            with self._device.active():
                self._arriving.append(self._send(self._unseen))
            self._unseen = []

    def _send(self, rows: list[tuple[int, int, list[Tensor]]]) -> Arriving:
        """Has losses copied to the host; call it where the device is active."""
        flat = torch.cat([loss.float().reshape(-1) for _, _, losses in rows for loss in losses])
        counts = [(layer, batch, sum(loss.numel() for loss in losses)) for layer, batch, losses in rows]
        return Arriving(counts, self._device.snapshot(flat), self._device.mark())

    def _read(self, *, wait: bool) -> None:
        while self._arriving and self._failure is None:
            found = self._arriving[0]
            if not found.ready.query():
                if not wait:
                    return
                found.ready.synchronize()
            self._arriving.popleft()
            self._failure = found.first_error()


@dataclass(eq=False)
class Watched(Runner):
    """Has the watch look at the losses of each forward.

    Attributes:
        index: The layer's number.
        module: The layer.
        watch: That of its stage.
    """

    index: int
    module: nn.Module
    watch: FiniteWatch

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`.

        Raises:
            NonFiniteError: As :meth:`FiniteWatch.look`.
        """
        passed = self.inner.forward(packet, x, y, rows)
        if passed.losses is not None:
            self.watch.look(self.index, packet.batch, passed.losses, partial(cause_of, x, y, self.module))
        return passed


def raise_first(found: Iterable[NonFiniteError | None]) -> None:
    """Raises the error of the earliest batch, if there is any."""
    errors = [error for error in found if error is not None]
    if errors:
        raise min(errors, key=lambda error: (error.batch, error.layer))


def cause_of(x: Tree, y: Tree, module: nn.Module) -> str:
    """Where values that are not finite come from, in words; reads everything."""
    if not _finite(tensors(x)):
        return "Its input was not finite already"
    if not _finite(tensors(y)):
        return "Its target was not finite already"
    if not _finite(module.parameters()):
        return _WEIGHTS
    return _NOTHING


def refuse_given_up(layers: Iterable[tuple[int, TrainableLayer]], batch: int) -> None:
    """Raises where fp16 leaves out every update of a layer; waits for a GPU.

    Args:
        layers: With their numbers.
        batch: The last one that they met.

    Raises:
        NonFiniteError: It does.
    """
    for number, layer in layers:
        scaler = scaler_of(layer)
        if scaler is not None and scaler.gave_up():
            raise NonFiniteError(
                f"the gradients of layer {number} overflow in fp16 however small its losses are made: "
                f"{scaler.overflows()} updates were left out by batch {batch}, and so is every later one. Lower the "
                "learning rate, or train in bf16 or fp32, and go on from the last checkpoint",
                number,
                batch,
                (),
                is_to_blame=False,
            )


def refuse_broken(module: nn.Module, found: NonFiniteError) -> None:
    """Raises where leaving out a batch does not help.

    Raises:
        NonFiniteError: The layer's weights are not finite, so that no later loss will be.
    """
    if not _finite(module.parameters()):
        raise NonFiniteError(
            f"the weights of layer {found.layer} are not finite before batch {found.batch}, so that every batch from "
            "now on would be left out; go on from a checkpoint before, with a lower learning rate or in fp32",
            found.layer,
            found.batch,
            found.losses,
            is_to_blame=False,
        )


_WEIGHTS = "Its weights were not finite already"
_NOTHING = "Its input and its weights were finite"
_ON_TIME = "{}. The layer was not updated on this batch."
_LATE = (
    "It was seen after later batches had begun, as a GPU is not waited for, so that the layer may have learnt from it: "
    "go on from a checkpoint before this batch."
)


def _message(layer: int, batch: int, losses: tuple[float, ...], more: str) -> str:
    numbers = ", ".join(f"{loss:.6g}" for loss in losses)
    return (
        f"layer {layer} has a loss that is not finite on batch {batch}: {numbers}. {more} "
        "Look at the batch's samples; lower the learning rate, or train in fp32; or leave such batches out "
        "(on_non_finite='skip', without replicas or stages of backpropagation)"
    )


def _number(loss: Tensor) -> float:
    return loss.item() if loss.numel() == 1 else loss.abs().max().item()


def _all_finite(values: tuple[float, ...]) -> bool:
    """Plain comparisons: a NaN is not less than anything."""
    return all(abs(value) <= _LARGEST for value in values)


@torch.no_grad()
def _finite(values: Iterable[Tensor]) -> bool:
    numbers = (value for value in values if value.is_floating_point() or value.is_complex())
    return all(bool(torch.isfinite(value).all()) for value in numbers)
