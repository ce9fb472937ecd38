"""What neighbouring layers cost as one stage: the sums that layouts are searched with and forecasts are made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import TypeVar

from pipeal.engine.schedule import Action, Schedule
from pipeal.planning.pure.hardware import Group, Setup
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
        by_layer: Whether each layer of a stage ends before the next one begins (:mod:`pipeal.engine.schedule`).
    """

    def __init__(self, row: Sequence[LayerCost], *, by_layer: bool = False) -> None:
        self.row = row
        self._by_layer = by_layer
        self._resident = sums([cost.resident_bytes for cost in row])
        self._active = sums([cost.activation_bytes for cost in row])
        self._largest = [[cost.activation_bytes for cost in row]] if by_layer else []  # of 1, 2, 4, … layers from each
        while by_layer and len(before := self._largest[-1]) > (reach := 2 ** (len(self._largest) - 1)):
            self._largest.append([max(pair) for pair in zip(before, before[reach:], strict=False)])

    def durations(self, layers: range, group: Group, setup: Setup, averaging: Averaging) -> dict[Action, float]:
        """Seconds per batch of a stage, by task; an update begins with what is left of averaging gradients.

        Where each layer ends before the next one begins, the forward is all before the packet goes on.

        Args:
            layers: Its layers.
            group: What it is on.
            setup: Of which its replicas and the link count.
            averaging: When gradients are averaged.
        """
        own = self.row[layers.start : layers.stop]
        averages_them = group.count * setup.replicas > 1
        speed = group.device.speed
        seconds = task_seconds(
            [
                {
                    Action.FORWARD: cost.forward_s / speed / group.count,
                    Action.BACKWARD: cost.backward_s / speed / group.count,
                    Action.UPDATE: cost.update_s / speed,
                }
                for cost in own
            ],
            by_layer=self._by_layer,
            updates_last=averages_them,
        )
        if averages_them:
            each = averages(own, group, setup, averaging)
            if averaging.alone:
                seconds[Action.UPDATE] += sum(average_s for _, average_s, _ in each)
            else:
                *_, learnt_s = learnt(each)
                backward_s = sum(cost.backward_s for cost in own) / speed / group.count
                seconds[Action.UPDATE] = max(seconds[Action.UPDATE], learnt_s - backward_s / averaging.parts)
        return seconds

    def memory_bytes(self, start: int, end: int, group: Group, waiting: int = 0) -> int:
        """What each device of a stage holds at most.

        Args:
            start: Its first layer.
            end: The layer after its last.
            group: What it is on, and on how many batches at once it holds a graph.
            waiting: How many packets may wait behind it; they count as its memory, but for the last stage's.
        """
        if self._by_layer:
            power = (end - start).bit_length() - 1
            shared = max(self._largest[power][start], self._largest[power][end - 2**power])
        else:
            shared = group.held * (self._active[end] - self._active[start])
        shared += waiting * self.row[end - 1].out_bytes if end < len(self.row) else 0
        return self._resident[end] - self._resident[start] + ceil(shared / group.count)


class StageSeconds:
    """When a stage's part of a batch is over, for any neighbouring layers on some devices of a kind.

    A stage that ends later never takes less; one that begins earlier neither, but for rounding.

    Args:
        row: The costs of all layers.
        group: What a stage is on.
        setup: Of which its replicas and the link count.
        averaging: When gradients are averaged.
        updates: Whether updates count, and averages before them.
        joining: A schedule that joins every batch: a part ends after all forwards up to it, or without those of a
            schedule that has all of them first. None for one without joins, whose parts end after their own.
    """

    def __init__(
        self,
        row: Sequence[LayerCost],
        group: Group,
        setup: Setup,
        averaging: Averaging,
        *,
        updates: bool = True,
        joining: Schedule | None = None,
    ) -> None:
        device, count = group.device, group.count
        each = averages(row, group, setup, averaging)
        counts = updates and any(average_s for _, average_s, _ in each)
        rest = [(cost.backward_s / count + updates * cost.update_s) / device.speed for cost in row]
        if counts and averaging.alone:
            rest = [own_s + average_s for own_s, (_, average_s, _) in zip(rest, each, strict=True)]
        self._ends = range(len(row) + 1)
        self._averages = each if counts and not averaging.alone else []
        self._stages: dict[int, tuple[list[float], Iterator[float]]] = {}  # by their first layer: all asked for so far
        # Each a pair of sums over the layers: its time is the first at a stage's end, less the second at its start.
        forward = [cost.forward_s / count / device.speed for cost in row]
        early = [cost.backward_s / count / device.speed * (1 - 1 / averaging.parts) for cost in row]
        self._busy = _from_to(forward, rest, joining)
        self._before = _from_to(forward, early, joining)

    def __call__(self, start: int, end: int) -> float:
        """Seconds per batch, for the layers from ``start`` to before ``end``."""
        if not self._averages:
            ends, starts = self._busy
            return ends[end] - starts[start]
        if end == start + 1:  # asked of every layer, while few begin a stage
            return self._seconds(start, end, sum(self._averages[start]))
        found, more = self._from(start)
        while len(found) < end - start:
            found.append(next(more))
        return found[end - start - 1]

    def furthest(self, start: int, limit_s: float) -> int:
        """The last end of a stage from ``start`` on that takes no longer; ``start`` itself where there is none."""
        if not self._averages:
            return start + bisect_right(self._ends[start + 1 :], limit_s, key=lambda end: self(start, end))
        found, more = self._from(start)
        while (not found or found[-1] <= limit_s) and (seconds := next(more, None)) is not None:
            found.append(seconds)
        return start + bisect_right(found, limit_s)

    def work_s(self, layer: int) -> float:
        """The least that a layer adds to the time of any stage."""
        _, starts = self._busy
        return starts[layer + 1] - starts[layer]

    def _from(self, start: int) -> tuple[list[float], Iterator[float]]:
        """What stages from ``start`` on take, as far as it was asked for, and what further ones do."""
        if start not in self._stages:
            waiting = enumerate(learnt(map(self._averages.__getitem__, self._ends[start:-1])), start + 1)
            self._stages[start] = [], (self._seconds(start, end, learnt_s) for end, learnt_s in waiting)
        return self._stages[start]

    def _seconds(self, start: int, end: int, learnt_s: float) -> float:
        (ends, starts), (before, earlier) = self._busy, self._before
        return max(ends[end] - starts[start], before[end] - earlier[start] + learnt_s)


def task_seconds(
    layers: Sequence[Mapping[Action, float]], *, by_layer: bool, updates_last: bool = False
) -> dict[Action, float]:
    """What each of a stage's tasks takes, out of what its layers' actions take.

    Args:
        layers: The seconds of each layer's actions.
        by_layer: Whether each layer ends before the next one begins: the forward is then all before the last backward.
        updates_last: Whether updates still come last, since gradients are averaged before.

    >>> three = [{Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.UPDATE: 0.5}] * 3
    >>> list(task_seconds(three, by_layer=False).values()), list(task_seconds(three, by_layer=True).values())
    ([3.0, 6.0, 1.5], [8.0, 2.0, 0.5])
    """
    seconds = {action: sum(layer[action] for layer in layers) for action in Action}
    for action in (Action.BACKWARD, Action.UPDATE)[: 0 if not by_layer else 1 if updates_last else 2]:
        seconds[action] = layers[-1][action]
        seconds[Action.FORWARD] += sum(layer[action] for layer in layers[:-1])
    return seconds


def averages(row: Sequence[LayerCost], group: Group, setup: Setup, how: Averaging) -> list[Averaged]:
    """What :func:`learnt` is made of, for each of the layers in order.

    Args:
        row: Their costs.
        group: What they are on.
        setup: Of which its replicas and the link count.
        how: When they average.
    """
    found = []
    for cost in row:
        backward_s = cost.backward_s / group.device.speed / group.count / how.parts
        average_s = setup.link.all_reduce_s(cost.parameter_bytes, group.count * setup.replicas)
        update_s = cost.update_s / group.device.speed
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


def _from_to(
    forward: Sequence[float], own: Sequence[float], joining: Schedule | None
) -> tuple[list[float], list[float]]:
    after = sums(own)
    if joining is not None and joining.forwards_first:
        return after, after
    both = sums([one + other for one, other in zip(forward, own, strict=True)])
    return both, both if joining is None else after
