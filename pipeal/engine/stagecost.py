"""What neighbouring layers cost as one stage: the sums that layouts are searched with and forecasts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import TypeVar

from pipeal.engine.hardware import Link, PlannedDevice
from pipeal.engine.layercost import LayerCost
from pipeal.engine.schedule import Action
from pipeal.errors import PlacementError

Number = TypeVar("Number", int, float)


class LayerSums:
    """The layers of a model on one kind of device; a stage is those from ``start`` to before ``end``.

    Several devices of a stage share each batch: each has its part of the samples, and all have the weights.

    Args:
        row: The costs of all layers.
    """

    def __init__(self, row: Sequence[LayerCost]) -> None:
        self.layers = len(row)
        self._seconds = {
            Action.FORWARD: sums([cost.forward_s for cost in row]),
            Action.BACKWARD: sums([cost.backward_s for cost in row]),
            Action.UPDATE: sums([cost.update_s for cost in row]),
        }
        self._parameters = sums([cost.parameter_bytes for cost in row])
        self._resident = sums([cost.resident_bytes for cost in row])
        self._active = sums([cost.activation_bytes for cost in row])
        self._out = [cost.out_bytes for cost in row]
        self._mean_out = [cost.mean_out_bytes for cost in row]

    def durations(
        self,
        start: int,
        end: int,
        device: PlannedDevice,
        *,
        devices: int = 1,
        together: int = 1,
        link: Link,
        meanwhile: Sequence[int] | None = None,
    ) -> dict[Action, float]:
        """Seconds per batch of a stage, by action; an update begins with what is left of averaging gradients.

        Args:
            start: Its first layer.
            end: The layer after its last.
            device: What it is on.
            devices: On how many of them.
            together: How many devices average their gradients, those of other replicas included.
            link: Between any two.
            meanwhile: Its layers in the order of their backwards, where the gradients of each are averaged while other
                layers go backward or update, as in a run; None where nothing else is done then, which takes longest.
        """
        forward, backward, update = ((row[end] - row[start]) / device.speed for row in self._seconds.values())
        average_s = link.all_reduce_s(self._parameters[end] - self._parameters[start], together)
        average_s += (end - start - 1) * link.all_reduce_s(0, together)  # each layer's messages have a latency
        rest_s = update + average_s
        if meanwhile is not None and together > 1:
            rest_s = self._rest_s(meanwhile, device, devices, together, link)
        return {Action.FORWARD: forward / devices, Action.BACKWARD: backward / devices, Action.UPDATE: rest_s}

    def _rest_s(self, layers: Sequence[int], device: PlannedDevice, devices: int, together: int, link: Link) -> float:
        """From the last backward's end to the last update's: layer by layer the device goes backward, the link averages
        what is there, and then the device updates what has been averaged."""
        backward, update = self._seconds[Action.BACKWARD], self._seconds[Action.UPDATE]
        gone_s = averaged_s = 0.0
        ready_s = []
        for layer in layers:
            gone_s += (backward[layer + 1] - backward[layer]) / device.speed / devices
            size = self._parameters[layer + 1] - self._parameters[layer]
            averaged_s = max(averaged_s, gone_s) + link.all_reduce_s(size, together)
            ready_s.append(averaged_s)
        learnt_s = gone_s
        for layer, from_s in zip(layers, ready_s, strict=True):
            learnt_s = max(learnt_s, from_s) + (update[layer + 1] - update[layer]) / device.speed
        return learnt_s - gone_s

    def out_bytes(self, end: int) -> int:
        """The largest packet that a stage hands on, in bytes; 0 after the last layer."""
        return self._out[end - 1] if end < self.layers else 0

    def mean_out_bytes(self, end: int) -> int:
        """Its packet in the mean over the batches, in bytes; 0 after the last layer."""
        return self._mean_out[end - 1] if end < self.layers else 0

    def memory_bytes(self, start: int, end: int, *, devices: int = 1, held: float = 1.0, waiting: int = 0) -> int:
        """What each device of a stage holds at most.

        Args:
            start: Its first layer.
            end: The layer after its last.
            devices: On how many it is.
            held: On how many batches at once it holds a graph.
            waiting: How many packets may wait behind it; they count as its memory.
        """
        shared = held * (self._active[end] - self._active[start]) + waiting * self.out_bytes(end)
        return self._resident[end] - self._resident[start] + ceil(shared / devices)


def sums(values: Sequence[Number]) -> list[Number]:
    """Of the first 0, 1, 2, … values."""
    return list(accumulate(values, initial=values[0] - values[0]))


def require_costs(
    costs: Mapping[str, Sequence[LayerCost]], devices: Sequence[PlannedDevice], stage_replicas: int, replicas: int
) -> None:
    """Refuses what no layout could be found for.

    Raises:
        PlacementError: No device, one of unknown costs or of no speed, costs that do not fit each other, no replica.
    """
    if not devices:
        raise PlacementError("no device to lay layers out on; expected at least one")
    for device in devices:
        if not costs.get(device.kind):
            known = ", ".join(sorted(costs)) or "none"
            raise PlacementError(f"no costs of a device of kind {device.kind!r}; measured kinds: {known}")
        if not 0 < device.speed < inf:
            raise PlacementError(f"a device's speed is {device.speed}; expected a number above 0")
    counts = {device.kind: len(costs[device.kind]) for device in devices}
    if len(set(counts.values())) > 1:
        raise PlacementError(f"the kinds of devices have costs of different numbers of layers: {counts}")
    if stage_replicas < 1 or replicas < 1:
        raise PlacementError(f"found {min(stage_replicas, replicas)} replicas; expected at least 1")
