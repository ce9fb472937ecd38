"""A progress that also knows what stages of other processes have ended, as far as the schedule asks for it."""

from __future__ import annotations

from collections.abc import Callable

from pipeal.engine.execution.channel import Link
from pipeal.engine.execution.worker import ACTIONS, SharedProgress
from pipeal.engine.schedule import Action, Schedule, Task


class RemoteProgress(SharedProgress):
    """Tells those stages of a task's end that wait for it.

    Args:
        stage: The stage of this process.
        stages: How many there are.
        links: Closed by :meth:`stop`.
        schedule: Says who waits for what.
        tell: Tells a stage.
        explain: Says of an exception what is behind it, if anything is.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        links: list[Link],
        schedule: Schedule,
        tell: Callable[[int, Task], None],
        explain: Callable[[BaseException], BaseException],
    ) -> None:
        super().__init__(stages, links)
        self._tell = tell
        self._explain = explain
        self._listeners = {action: listeners(schedule, stage, stages, action) for action in ACTIONS}

    def end(self, task: Task) -> None:
        """Notes that a task of this process's stage has ended, and tells who waits for it."""
        super().end(task)
        for stage in self._listeners[task.action]:
            self._tell(stage, task)

    def fail(self, error: BaseException) -> None:
        """Keeps the first failure, and stops everyone; also while an end in order is under way."""
        super().fail(error if self.failure is not None else self._explain(error))

    def hear(self, task: Task) -> None:
        """Notes that a task of another stage has ended."""
        super().end(task)


_BATCHES = range(1, 17)
"""Those that a schedule is asked about: it may treat some otherwise than the next. A stage that is told of more than it
waits for loses nothing; one that is not told of what it waits for stands still."""


def listeners(schedule: Schedule, stage: int, stages: int, action: Action) -> list[int]:
    """The other stages that must be told when this one has ended an action.

    A packet that arrives tells by itself that the stage before has ended its forward.

    >>> from pipeal.engine.schedule import SCHEDULES
    >>> [listeners(SCHEDULES["al-fm"], stage, 3, Action.UPDATE) for stage in range(3)]
    [[], [0], [0]]
    >>> listeners(SCHEDULES["pipelined"], 1, 3, Action.FORWARD)
    []
    """
    return [
        other
        for other in range(stages)
        if other != stage and not (action is Action.FORWARD and other == stage + 1)
        if any(
            before.stage == stage and before.action is action
            for wanted in ACTIONS
            for batch in _BATCHES
            for before in schedule.after(Task(batch, other, wanted), stages)
        )
    ]
