"""What a stage takes, for whoever asks it of many stages: sums that are looked up, and what is averaged meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pipeal.engine.schedule import Schedule
from pipeal.planning.pure.hardware import Link, PlannedDevice
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.stage_cost import Averaging, averages, learnt, sums


class StageSeconds:
    """When a stage's part of a batch is over, for any neighbouring layers on some devices of a kind.

    A stage that ends later never takes less; one that begins earlier neither, but for rounding.

    Args:
        row: The costs of all layers.
        device: What a stage is on.
        devices: On how many of them; they share each batch.
        together: How many devices average their gradients, those of other replicas included.
        link: Between any two.
        averaging: When they do.
        updates: Whether updates count, and averages before them.
        joining: A schedule that joins every batch: a part ends after all forwards up to it, or without those of a
            schedule that has all of them first. None for one without joins, whose parts end after their own.
    """

    def __init__(
        self,
        row: Sequence[LayerCost],
        device: PlannedDevice,
        *,
        devices: int,
        together: int,
        link: Link,
        averaging: Averaging,
        updates: bool = True,
        joining: Schedule | None = None,
    ) -> None:
        each = averages(row, device, devices=devices, together=together, link=link, how=averaging)
        counts = updates and any(average_s for _, average_s, _ in each)
        rest = [(cost.backward_s / devices + updates * cost.update_s) / device.speed for cost in row]
        if counts and averaging.alone:
            rest = [own_s + average_s for own_s, (_, average_s, _) in zip(rest, each, strict=True)]
        self._layers = len(row)
        self._averages = each if counts and not averaging.alone else []
        self._stages: dict[int, tuple[list[float], Iterator[float]]] = {}  # by their first layer: all asked for so far
        # Each a pair of sums over the layers: its time is the first at a stage's end, less the second at its start.
        forward = [cost.forward_s / devices / device.speed for cost in row]
        early = [cost.backward_s / devices / device.speed * (1 - 1 / averaging.parts) for cost in row]
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
        if self._averages:
            found, more = self._from(start)
            if not found or found[-1] <= limit_s:
                for seconds in more:
                    found.append(seconds)
                    if seconds > limit_s:
                        break
            return start + bisect_right(found, limit_s)
        ends, starts = self._busy
        end = max(start, bisect_right(ends, limit_s + starts[start]) - 1)
        # The sums round: what counts is the time itself.
        while end < self._layers and self(start, end + 1) <= limit_s:
            end += 1
        while end > start and self(start, end) > limit_s:
            end -= 1
        return end

    def work_s(self, layer: int) -> float:
        """The least that a layer adds to the time of any stage."""
        _, starts = self._busy
        return starts[layer + 1] - starts[layer]

    def _from(self, start: int) -> tuple[list[float], Iterator[float]]:
        """What stages from ``start`` on take, as far as it was asked for, and what further ones do."""
        if start not in self._stages:
            self._stages[start] = [], self._growing(start)
        return self._stages[start]

    def _growing(self, start: int) -> Iterator[float]:
        waiting = learnt(map(self._averages.__getitem__, range(start, self._layers)))
        for end, learnt_s in enumerate(waiting, start + 1):
            yield self._seconds(start, end, learnt_s)

    def _seconds(self, start: int, end: int, learnt_s: float) -> float:
        (ends, starts), (before, earlier) = self._busy, self._before
        return max(ends[end] - starts[start], before[end] - earlier[start] + learnt_s)


def _from_to(
    forward: Sequence[float], own: Sequence[float], joining: Schedule | None
) -> tuple[list[float], list[float]]:
    after = sums(own)
    if joining is not None and joining.forwards_first:
        return after, after
    both = sums([one + other for one, other in zip(forward, own, strict=True)])
    return both, both if joining is None else after
