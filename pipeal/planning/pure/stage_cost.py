"""What neighbouring layers cost as one stage: the sums that layouts are searched with and forecasts are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import TypeVar

from pipeal.core.errors import PlacementError
from pipeal.engine.schedule import Action
from pipeal.planning.pure.hardware import Link, PlannedDevice
from pipeal.planning.pure.layer_cost import LayerCost

Number = TypeVar("Number", int, float)

Averaged = tuple[float, float, float]
"""Seconds: what a device does for a layer, what averaging its gradients takes after that, what the device does then."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """When devices average the gradients of a layer: after its backward, while others go backward or update.

    Attributes:
        down: Whether the last layer goes backward first, as in backpropagation; otherwise the first.
        parts: Into how many micro-batches a batch is cut: the gradients of a layer are whole after the last one.
        alone: Whether nothing else is done meanwhile, as where averaging is work of cores that all share; it then
            begins after the last backward, and takes longest.
    """

    down: bool = False
    parts: int = 1
    alone: bool = False


class LayerSums:
    """The layers of a model on one kind of device; a stage is those from ``start`` to before ``end``.

    Several devices of a stage share each batch: each has its part of the samples, and all have the weights.

    Args:
        row: The costs of all layers.
    """

    def __init__(self, row: Sequence[LayerCost]) -> None:
        self.layers = len(row)
        self._row = row
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
        averaging: Averaging,
    ) -> dict[Action, float]:
        """Seconds per batch of a stage, by action; an update begins with what is left of averaging gradients.

        Args:
            start: Its first layer.
            end: The layer after its last.
            device: What it is on.
            devices: On how many of them.
            together: How many devices average their gradients, those of other replicas included.
            link: Between any two.
            averaging: When that is.
        """
        forward, backward, update = ((row[end] - row[start]) / device.speed for row in self._seconds.values())
        if together > 1:
            each = averages(self._row[start:end], device, devices=devices, together=together, link=link, how=averaging)
            if averaging.alone:
                update += sum(average_s for _, average_s, _ in each)
            else:
                *_, learnt_s = learnt(each)
                update = max(update, learnt_s - backward / devices / averaging.parts)
        return {Action.FORWARD: forward / devices, Action.BACKWARD: backward / devices, Action.UPDATE: update}

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


def averages(
    row: Sequence[LayerCost], device: PlannedDevice, *, devices: int, together: int, link: Link, how: Averaging
) -> list[Averaged]:
    """What :func:`learnt` is made of, for each of the layers in order.

    Args:
        row: Their costs.
        device: What they are on.
        devices: On how many of them.
        together: How many devices average.
        link: Between any two.
        how: When they do.
    """
    found = []
    for cost in row:
        backward_s = cost.backward_s / device.speed / devices / how.parts
        average_s, update_s = link.all_reduce_s(cost.parameter_bytes, together), cost.update_s / device.speed
        # Backwards that come down end with the first layer's. Played backwards in time, which takes as long, they begin
        # with it: updates, then averages, then backwards.
        found.append((update_s, average_s, backward_s) if how.down else (backward_s, average_s, update_s))
    return found


def learnt(layers: Iterable[Averaged]) -> Iterator[float]:
    """For the first layer, the first two, …: seconds from their first backward to their last update.

    Layer by layer the device goes backward, the link averages what is there, and the device updates what is averaged,
    as if it could do so beside the backwards of others. It cannot: a stage takes at least all of both.

    >>> list(learnt([(2.0, 3.0, 1.0), (2.0, 1.0, 1.0)]))
    [6.0, 7.0]
    """
    first_s = averaged_s = then_s = 0.0
    for own_s, average_s, after_s in layers:
        first_s += own_s
        averaged_s = max(averaged_s, first_s) + average_s
        then_s = max(then_s, averaged_s) + after_s
        yield then_s


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
