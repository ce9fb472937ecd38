"""The schedules of pipelined backpropagation, as data, to hold Associated Learning against.

A batch is cut into M micro-batches; all their gradients are summed before the update, so that every batch ends in a
flush. Time runs to the right, digits are micro-batches, ``U`` is the update::

    naive     M = 1      s0  F0 ·· ·· ·· B0 U          one stage works at a time
                         s1  ·· F0 ·· B0 U

    gpipe     M = 3      s0  F0 F1 F2 ·· ·· B2 B1 B0 U      (Huang et al., 2019) all forwards, then all backwards:
                         s1  ·· F0 F1 F2 B2 B1 B0 U          a stage holds M graphs

    1f1b      M = 3      s0  F0 F1 ·· B0 F2 B1 ·· B2 U      (PipeDream-Flush, Narayanan et al., 2021) as long, but
                         s1  ·· F0 B0 F1 B1 F2 B2 U          stage s of S holds at most S − s graphs

With K equal stages the share of time in which a stage is idle is ``(K − 1) / (M + K − 1)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pipeal.engine.schedule import Action, Task


@dataclass(frozen=True, slots=True)
class BackpropSchedule:
    """Rules for micro-batches, which are numbered on through all batches.

    Attributes:
        name: As the papers call it.
        micro_batches: Of each batch.
        alternates: Whether backwards begin as soon as they can, or after all forwards.
        joins: Every batch ends in a flush.
        by_layer: The backward of a layer needs that of the next one.
    """

    name: str
    micro_batches: int
    alternates: bool
    joins: ClassVar[bool] = True
    by_layer: ClassVar[bool] = False

    @property
    def serial(self) -> bool:
        """Whether at most one task runs at any time: a whole batch is in one place."""
        return self.micro_batches == 1

    def after(self, task: Task, stages: int) -> tuple[Task, ...]:
        """The tasks of other stages that must have ended before ``task``: a forward climbs, a backward comes down."""
        if task.action is Action.FORWARD and task.stage > 0:
            return (Task(task.batch, task.stage - 1, Action.FORWARD),)
        if task.action is Action.BACKWARD and task.stage + 1 < stages:
            return (Task(task.batch, task.stage + 1, Action.BACKWARD),)
        return ()

    def order(self, stages: int, batches: int) -> Iterator[Task]:
        """Stage by stage, what it does in its order.

        Args:
            stages: The number of stages.
            batches: The number of micro-batches, a multiple of those of a batch.

        >>> print(*BackpropSchedule("1f1b", 3, alternates=True).order(stages=1, batches=3))
        F0@s0 B0@s0 F1@s0 B1@s0 F2@s0 B2@s0 U2@s0
        """
        for first in range(0, batches, self.micro_batches):
            for stage in range(stages):
                yield from self._batch(first, stage, stages)

    def graphs(self, stage: int, stages: int) -> int:
        """On how many micro-batches a stage holds a graph, at most.

        >>> [one_f_one_b(3).graphs(stage, stages=4) for stage in range(4)], gpipe(3).graphs(3, stages=4)
        ([3, 3, 2, 1], 3)
        """
        return min(stages - stage, self.micro_batches) if self.alternates else self.micro_batches

    def _batch(self, first: int, stage: int, stages: int) -> Iterator[Task]:
        end = first + self.micro_batches
        ahead = min(stages - 1 - stage, self.micro_batches) if self.alternates else self.micro_batches
        yield from (Task(number, stage, Action.FORWARD) for number in range(first, first + ahead))
        if self.alternates:
            for number in range(first + ahead, end):
                yield Task(number, stage, Action.FORWARD)
                yield Task(number - ahead, stage, Action.BACKWARD)
            yield from (Task(number, stage, Action.BACKWARD) for number in range(end - ahead, end))
        else:
            yield from (Task(number, stage, Action.BACKWARD) for number in reversed(range(first, end)))
        yield Task(end - 1, stage, Action.UPDATE)


def naive() -> BackpropSchedule:
    """Model parallel training without a pipeline."""
    return BackpropSchedule("naive", 1, alternates=False)


def gpipe(micro_batches: int) -> BackpropSchedule:
    """All forwards of a batch, then all backwards."""
    return BackpropSchedule("gpipe", micro_batches, alternates=False)


def one_f_one_b(micro_batches: int) -> BackpropSchedule:
    """Forwards and backwards in turns, as soon as there is one to do."""
    return BackpropSchedule("1f1b", micro_batches, alternates=True)
