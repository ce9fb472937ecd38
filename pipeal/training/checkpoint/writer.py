"""Checkpoints written beside the training, which no failing disk stops."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from torch import Tensor

from pipeal.core.errors import NonFiniteError, PipealError, StallError, UntidyError, first_line
from pipeal.engine.state.snapshot import LayerState, Snapshot
from pipeal.training.checkpoint.finite import FiniteCheck
from pipeal.training.checkpoint.rank_files import KeptLayer
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.position import joined, numbered

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job:
    """A checkpoint that is asked for.

    Attributes:
        step: See :meth:`pipeal.training.checkpoint.store.CheckpointStore.save`, as for ``best``.
        snapshot: Gives the states of the layers, when every stage has come by.
        position: Where the run stands; what JSON can hold.
        state: Anything else, likewise.
        losses: Of the epoch under way, by layer, before those that the snapshot has.
        check: What the states must pass.
        tells_broken: Whether a state that is not finite is a failure like any; else it is the training's to tell, by
            :attr:`Outcome.broken`.
        best: It is the best so far.
    """

    step: int
    snapshot: Snapshot
    position: Mapping[str, Any]
    state: Mapping[str, Any]
    losses: Mapping[int, Tensor] = field(default_factory=dict)
    check: FiniteCheck = field(default_factory=FiniteCheck)
    tells_broken: bool = True
    best: bool = False


@dataclass(eq=False)
class Outcome:
    """What became of a job. The writer's thread fills it in; any may read it.

    Attributes:
        done: Nothing more will become of it: it was carried out, or gave way to a newer one.
        written: Whether it is on the disk.
        broken: What in the states was not finite.
    """

    done: bool = False
    written: bool = False
    broken: NonFiniteError | None = None


PATIENCE_S = 300.0
"""How long the end of a training waits for its last checkpoint."""

HURRY_S = 2.0
"""How long it does when it is not wanted any more."""


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one after the other. Used with ``with``, outside of the pipeline's.

    While one is written, at most two wait: the newest and the newest best one, so that a slow disk costs checkpoints,
    not memory. A write that fails is counted, and the training goes on: the last good checkpoint stays. Logged, from
    the writer's thread, are the first, second, fourth, eighth … failure in a row, and the first success after them.

    Args:
        store: Where to.

    Attributes:
        failures: How many writes failed; a run in which any did should say so with its exit code.
        replaced: How many gave way to newer ones before they were begun.
        last_failure: What the last failed write said.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.failures = self.replaced = 0
        self.last_failure: str | None = None
        self._store = store
        self._in_a_row = self._untidy = 0
        self._patience_s = PATIENCE_S
        self._changed = threading.Condition()
        self._waiting: list[tuple[Job, Outcome]] = []
        self._busy = False
        self._closed = False
        self._crash: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.give_up()  # a signal, while this one or another was waited for
        try:
            self.close()
        except StallError as stall:
            if error is None:
                raise
            _log.warning(str(stall))  # what ended the training is the news

    def submit(self, job: Job) -> Outcome:
        """Asks for a checkpoint, and does not wait for it.

        A snapshot whose states do not come is a failure, unless its pipeline has ended, which the training is told.

        Returns:
            What becomes of it, in time.

        Raises:
            TypeError: The position or the state holds what JSON cannot.
            RuntimeError: The writer is closed.
        """
        # As they are now: the run goes on and changes them.
        position, state = json.loads(json.dumps(job.position)), json.loads(json.dumps(job.state))
        job, outcome = replace(job, position=position, state=state, losses=dict(job.losses)), Outcome()
        with self._changed:
            self._require_alive()
            if self._closed:
                raise RuntimeError(f"the checkpoint of step {job.step} came after the writer was closed")
            if self._thread is None:
                # A daemon: a disk that never answers must not keep the process.
                thread = threading.Thread(target=self._run, name="pipeal-writer", daemon=True)
                thread.start()
                self._thread = thread  # only now: one that the system refused is not waited for
            # A best one is kept waiting beside the newest: what replaced it would not be as good.
            stay = [] if job.best else [waiting for waiting in self._waiting if waiting[0].best]
            self.replaced += len(self._waiting) - len(stay)
            self._drop_waiting(stay)
            self._waiting.append((job, outcome))
            self._changed.notify_all()
        return outcome

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything asked for is written, or has failed; False if that took too long."""
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._busy or self._waiting), timeout_s)
            self._require_alive()
            return done

    def give_up(self) -> None:
        """What waits is not written any more, and :meth:`close` hardly waits for what is being written."""
        with self._changed:
            self._drop_waiting()
            self._patience_s = HURRY_S

    def close(self, timeout_s: float | None = None) -> None:
        """Writes what waits and ends the thread; a second time does nothing.

        A job that waits for a pipeline ends with it: close that first.

        Args:
            timeout_s: How long to wait; None for ``PATIENCE_S``, or ``HURRY_S`` after :meth:`give_up`.

        Raises:
            StallError: The thread still waits or writes after ``timeout_s``; it is left behind.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            timeout_s = self._patience_s if timeout_s is None else timeout_s
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StallError(
                f"a checkpoint is still not written {timeout_s:g} s after the end of the training, and left out; "
                f"look at the disk below {self._store.folder}"
            )
        self._thread = None
        self._require_alive()

    @property
    def failing(self) -> bool:
        """Whether the last write failed: what was trained since the one before it would be lost."""
        return self._in_a_row > 0

    def _drop_waiting(self, but: Sequence[tuple[Job, Outcome]] = ()) -> None:
        for waiting in self._waiting:
            waiting[1].done = waiting not in but
        self._waiting = [*but]

    def _require_alive(self) -> None:
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as crash:  # noqa: BLE001  raised in the next call
            with self._changed:
                self._crash, self._closed = crash, True
                self._drop_waiting()
                self._busy = False
                self._changed.notify_all()

    def _step(self) -> bool:
        """Carries out a job; False when none will come. Its states are let go before the next is waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            job, outcome = self._waiting.pop(0)
            self._busy = True
        self._carry_out(job, outcome)
        outcome.done = True
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _carry_out(self, job: Job, outcome: Outcome) -> None:
        untidy: UntidyError | None = None
        try:
            passed = job.snapshot.wait()
            job.check(job.snapshot, passed, job.step)
            layers = {number: _content(number, found) for number, found in passed.items()}
            self._store.save(job.step, layers, job.position, job.state, job.best, _counted(job, passed))
        except UntidyError as error:
            untidy = error
        except Exception as error:  # noqa: BLE001  told, counted, and the training goes on
            if job.snapshot.ended:
                return  # why is raised where the training runs
            if isinstance(error, NonFiniteError) and not job.tells_broken:
                outcome.broken = error
            else:
                self._failed(job.step, error)
            return
        self._written(job, outcome)
        self._untidy = 0 if untidy is None else self._untidy + 1
        if untidy is not None:
            self._warn(str(untidy), self._untidy)

    def _written(self, job: Job, outcome: Outcome) -> None:
        outcome.written = True
        if self._in_a_row:
            self._in_a_row = 0
            _log.info(f"checkpoints are written again, that of step {job.step} is the first")

    def _failed(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._in_a_row += 1
        known = isinstance(error, PipealError)
        self.last_failure = str(error) if known else f"the checkpoint of step {step} failed: {first_line(error)}"
        self._warn(self.last_failure, self._in_a_row)

    def _warn(self, what: str, in_a_row: int) -> None:
        """Ever less often."""
        if in_a_row & (in_a_row - 1) == 0:
            row = f" ({in_a_row} in a row now)" if in_a_row > 1 else ""
            _log.warning(f"{what}; the training goes on{row}")


def _content(number: int, found: LayerState) -> Mapping[str, Any] | KeptLayer:
    """What the file of a layer holds, or the file, where the rank that has the layer has written it."""
    return found.state if found.kept is None else KeptLayer.of(found.kept, number)


def _counted(job: Job, passed: Mapping[int, LayerState]) -> dict[str, Any]:
    """What is counted of the epoch under way."""
    since = {number: found.losses for number, found in passed.items() if found.losses is not None}
    return {"losses": numbered(joined(job.losses, since)), "splits": sum(found.splits for found in passed.values())}
