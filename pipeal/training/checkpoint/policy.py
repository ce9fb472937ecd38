"""When a training is saved: every some batches, after every epoch, and when it is asked to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from pipeal.core.errors import Interrupted, NonFiniteError, first_line
from pipeal.engine import Pipeline
from pipeal.engine.state.snapshot import Snapshot
from pipeal.training.checkpoint.finite import FiniteCheck
from pipeal.training.checkpoint.writer import PATIENCE_S, CheckpointWriter, Job, Outcome
from pipeal.training.position import Position

_log = logging.getLogger(__name__)

QUIET_S = 3.0
"""How long the last checkpoint may take before it is spoken of."""


@dataclass(eq=False)
class CheckpointPolicy:
    """Saves a training through a :class:`CheckpointWriter`, which writes while training goes on.

    What a layer has learnt is looked at before it is written: states that are not finite are no checkpoint. They end
    the training as soon as that is known, or with ``ends_on_broken=False`` are told of by the writer.

    Attributes:
        writer: Writes the checkpoints.
        every: Batches between two of them, to which those up to the next update may come; None saves after epochs
            alone.
        asked_to_end: The exit code to end with, as soon as there is one.
        facts: About the data; kept beside the position.
        ends_on_broken: Whether states that are not finite end the training. They are then looked at before each
            evaluation as well.
        look_until: As long as the position's ``batches`` are no more, they are looked at after each update, for
            which the pipeline is waited for.
        way_back: What goes on with a training that was asked to end, in words.
        begun: The position's ``batches`` as the training goes on; then those behind which it was last seen.
        config: Of the run; kept likewise, for a checkpoint that is found elsewhere.
    """

    writer: CheckpointWriter
    every: int | None
    asked_to_end: Callable[[], int | None]
    facts: Mapping[str, Any]
    _: KW_ONLY
    ends_on_broken: bool = True
    look_until: int = 0
    way_back: str = "the same command"
    begun: int = 0
    config: Mapping[str, Any] | None = None
    _check: FiniteCheck = field(default_factory=FiniteCheck, init=False)
    _asked: list[Outcome] = field(default_factory=list, init=False)  # under way, and those that were broken
    _looked_at: Snapshot | None = field(default=None, init=False)
    _sees: bool = field(default=True, init=False)  # whether the states could be had when last looked at

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        """Saves where it is due; true when the training is asked to end.

        Raises:
            NonFiniteError: A layer has learnt what is not finite.
        """
        self._looked_at = None
        if self.asked_to_end() is not None:
            return True
        if (broken := self._broken()) is not None:
            raise broken
        if position.batches <= self.look_until:
            self._looked_at = self._look(pipe, position)
        if self.every is not None and position.batches // self.every > self.begun // self.every:
            self._save(pipe, position)
        self.begun = position.batches
        return False

    def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
        """Looks at what was learnt; raises as :meth:`after_batch`."""
        if self.ends_on_broken:
            self._looked_at = self._look(pipe, position)

    def after_epoch(self, pipe: Pipeline, position: Position) -> None:
        """Saves when an epoch was trained, evaluated and counted, and marks the best so far."""
        self._save(pipe, position)

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        """Saves, waits until it is written, though not without end, and ends.

        Raises:
            Interrupted: The training ends here because it was asked to.
            Exception: A stage failed before all had come by, and the training would have ended by that anyway.
        """
        after, from_last = f"interrupted after {position.where}", f"{self.way_back} goes on from the last checkpoint"
        code = self.asked_to_end() or 1
        if pipe.gathers:  # no more batches were to be had in the middle of an update
            raise Interrupted(f"{after}, in the middle of an update; {from_last}", code)
        if position.rows and not position.batches and self._written() and not self.writer.failing:
            # The checkpoint at the end of the turn before says as much; in its place, it would be the best no more.
            raise Interrupted(f"interrupted before turn {position.turn}; {from_last}", code)
        failures = self.writer.failures
        snapshot, outcome = self._save(pipe, position)
        if not self._written():
            self.writer.give_up()
            late = f"{after}, which was not saved within {PATIENCE_S:g} s"
            raise Interrupted(f"{late}; {self.way_back} goes on from the checkpoint before it", code)
        if outcome.written:
            raise Interrupted(f"{after}, and saved; {self.way_back} goes on from there", code)
        if snapshot.ended:
            snapshot.wait()  # raises what ended it; nothing else would, since nothing more is submitted
        why = self._broken() if self.writer.failures == failures else self.writer.last_failure
        raise Interrupted(f"{after}, which could not be saved: {why}", code)

    def _written(self) -> bool:
        """Waits for the last checkpoint, and says so if that takes its time."""
        if self.writer.flush(QUIET_S):
            return True
        _log.info("saving; another signal ends the run at once, without its last batches")
        return self.writer.flush(PATIENCE_S - QUIET_S)

    def _broken(self) -> NonFiniteError | None:
        """What the writer has found in a checkpoint that was asked for, the first if in several."""
        return next((outcome.broken for outcome in self._asked if outcome.broken is not None), None)

    def _save(self, pipe: Pipeline, position: Position) -> tuple[Snapshot, Outcome]:
        snapshot, self._looked_at = self._looked_at or pipe.snapshot(), None
        job = Job(
            position.step,
            snapshot,
            position={"turn": position.turn, "epoch": position.epoch, "batch": position.part.batches},
            state={"training": position.state(), "data": self.facts, "config": self.config},
            losses=position.losses,
            check=self._check,
            tells_broken=not self.ends_on_broken,
            best=is_best(position),
        )
        outcome = self.writer.submit(job)
        self._asked = [asked for asked in self._asked if asked.broken or not asked.done] + [outcome]
        return snapshot, outcome

    def _look(self, pipe: Pipeline, position: Position) -> Snapshot | None:
        """A snapshot whose states are finite; None where they could not be had, which is told and ends no training."""
        snapshot = pipe.snapshot()
        try:
            self._check(snapshot, snapshot.wait(pipe.options.stall_timeout_s), position.step)
        except Exception as error:
            if snapshot.ended or isinstance(error, NonFiniteError):
                raise
            if self._sees:  # or it has been told
                why = f"the states of step {position.step} could not be looked at: {first_line(error)}"
                _log.warning(f"{why}; the training goes on")
            self._sees = False
            return None
        self._sees = True
        return snapshot


def is_best(position: Position) -> bool:
    """Whether it is the end of the best epoch so far, by what is held out; none is where nothing is."""
    if position.part.batches or not position.epoch:
        return False
    *before, row = position.rows
    if row.score is None:
        return False
    return all(other.score is None or row.score > other.score for other in before)
