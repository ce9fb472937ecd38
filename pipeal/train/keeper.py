"""When a training is saved: every some batches, after every epoch, and when it is asked to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from pipeal.al import ALPackage
from pipeal.engine import Pipeline
from pipeal.engine.fence import Fence, LayerState
from pipeal.engine.finite_state import not_finite_in
from pipeal.engine.layer_state import State, load_layer_state
from pipeal.errors import DataError, Interrupted, NonFiniteError, PipealError, first_line
from pipeal.train.checkpoint import Checkpoint
from pipeal.train.position import Position, joined
from pipeal.train.saver import PATIENCE_S, PipelineEnded, Saver

QUIET_S = 3.0
"""How long the last checkpoint may take before it is spoken of."""


class CheckpointKeeper:
    """Saves a training through a :class:`Saver`, which writes while training goes on.

    What a layer has learnt is looked at before it is written: states that are not finite are no checkpoint. They end
    the training as soon as that is known, or with ``ends_on_broken=False`` are told of by the saver.

    Args:
        saver: Writes the checkpoints.
        every: Batches between two of them; None saves after epochs alone.
        asked_to_end: The exit code to end with, as soon as there is one.
        facts: About the data; kept beside the position.
        ends_on_broken: Whether states that are not finite end the training. They are then looked at before each
            evaluation as well.
        look_until: As long as the position's ``batches`` are no more, they are looked at after each batch, for which
            the pipeline is waited for.
    """

    def __init__(
        self,
        saver: Saver,
        every: int | None,
        asked_to_end: Callable[[], int | None],
        facts: Mapping[str, Any],
        *,
        ends_on_broken: bool = True,
        look_until: int = 0,
    ) -> None:
        self.saver = saver
        self.every = every
        self.asked_to_end = asked_to_end
        self.facts = facts
        self.ends_on_broken = ends_on_broken
        self.look_until = look_until
        self._sound: int | None = None  # the batches before which all was finite, when last looked at
        self._broken: NonFiniteError | None = None  # set by the saver's thread
        self._looked_at: Fence | None = None

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        """Saves where it is due; true when the training is asked to end.

        Raises:
            NonFiniteError: A layer has learnt what is not finite.
        """
        self._looked_at = None
        if self.asked_to_end() is not None:
            return True
        if self._broken is not None:
            raise self._broken
        if position.batches <= self.look_until:
            self._look(pipe, position)
        if self.every is not None and position.batches % self.every == 0:
            self._save(pipe, position)
        return False

    def before_evaluation(self, pipe: Pipeline, position: Position) -> None:
        """Looks at what was learnt; raises as :meth:`after_batch`."""
        if self.ends_on_broken:
            self._looked_at = self._look(pipe, position)

    def after_epoch(self, pipe: Pipeline, position: Position) -> None:
        """Saves, and marks the best epoch so far."""
        *before, row = position.rows
        self._save(pipe, position, best=all(row.score > other.score for other in before))

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        """Saves, waits until it is written, though not without end, and ends.

        Raises:
            Interrupted: Always.
        """
        failures = self.saver.failures
        self._save(pipe, position)
        where = f"batch {position.part.batches} of epoch {position.epoch + 1}"
        code = self.asked_to_end() or 1
        if not self._written():
            self.saver.give_up()
            raise Interrupted(
                f"interrupted after {where}, which was not saved within {PATIENCE_S:g} s; the same command goes on "
                "from the checkpoint before it",
                code,
            )
        why = self._broken if self.saver.failures == failures else self.saver.last_failure
        if why is not None:
            raise Interrupted(f"interrupted after {where}, which could not be saved: {why}", code)
        raise Interrupted(f"interrupted after {where}, and saved; the same command goes on from there", code)

    def _written(self) -> bool:
        """Waits for the last checkpoint, and says so if that takes its time."""
        if self.saver.flush(QUIET_S):
            return True
        self.saver.say("saving; another signal ends the run at once, without its last batches")
        return self.saver.flush(PATIENCE_S - QUIET_S)

    def _save(self, pipe: Pipeline, position: Position, *, best: bool = False) -> None:
        fence, self._looked_at = self._looked_at or pipe.fence(), None
        collect = partial(self._layers, fence, list(position.losses), position.step)
        where = {"turn": position.turn, "epoch": position.epoch, "batch": position.part.batches}
        state = {"training": position.state(), "data": self.facts}
        self.saver.submit(position.step, collect, where, state, best=best)

    def _look(self, pipe: Pipeline, position: Position) -> Fence:
        fence = pipe.fence()
        self._require_sound(fence, fence.wait(pipe.stall_timeout_s), position.step)
        return fence

    def _layers(self, fence: Fence, earlier: list[Tensor], step: int) -> dict[int, dict[str, Any]]:
        """What the layers' files hold: their states; and in the first, what is counted of the epoch under way.

        Runs on the saver's thread.
        """
        try:
            passed = fence.wait()
            self._require_sound(fence, passed, step)
        except NonFiniteError as error:
            if not (self.ends_on_broken or fence.ended):
                raise
            if not fence.ended:
                self._broken = self._broken or error
            raise PipelineEnded from error
        except Exception as error:
            if fence.ended:
                raise PipelineEnded from error
            raise
        losses = joined(earlier, [found.losses for found in passed.values() if found.losses is not None])
        splits = sum(found.splits for found in passed.values())
        first, *others = passed
        return {first: {"state": passed[first].state, "losses": losses, "splits": splits}} | {
            number: {"state": passed[number].state} for number in others
        }

    def _require_sound(self, fence: Fence, passed: Mapping[int, LayerState], step: int) -> None:
        """Raises for a layer whose state is not finite, and says what is known of the batch that did it."""
        for number, found in passed.items():
            name = not_finite_in(found.state)
            if name is None:
                continue
            last = fence.batch - 1
            is_to_blame = self._sound == last
            since = "" if self._sound is None else f", though it was before batch {self._sound}"
            which = "the update on that batch" if is_to_blame else "the update on that batch, or on one before it,"
            raise NonFiniteError(
                f"layer {number} is not finite after batch {last} (step {step}){since}: {name}; {which} made it so, "
                "with losses that were finite. Lower the learning rate, or train in fp32, and go on from the last "
                "checkpoint, or let the run do so and leave the batch out (train.on_non_finite=stop-and-rewind)",
                number,
                last,
                (),
                is_to_blame=is_to_blame,
            )
        self._sound = max(fence.batch, self._sound or 0)


@dataclass(frozen=True)
class TakenUp:
    """What a checkpoint holds.

    Attributes:
        position: Where the training stood.
        states: Of the layers, by their number.
        facts: About the data it was trained on.
    """

    position: Position
    states: Mapping[int, State]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TakenUp:
        """Reads a checkpoint that a :class:`CheckpointKeeper` had saved.

        Raises:
            DataError: It was saved by something else.
        """
        try:
            layers = checkpoint.layers()
            position = Position.of(checkpoint.state["training"], layers[0]["losses"])
            if not isinstance(splits := layers[0].get("splits", 0), int):  # older ones have none
                raise TypeError("splits is no number")
            position.totals.splits += splits  # those that the report of this epoch will not know of
            states = {number: layer["state"] for number, layer in layers.items()}
            return cls(position, states, dict(checkpoint.state["data"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PipealError):
                raise
            raise DataError(f"{checkpoint.path} is no checkpoint of a training ({first_line(error)})") from error

    def load_into(self, package: ALPackage) -> None:
        """Puts the states into the layers of a new package.

        Raises:
            DataError: The checkpoint is of another model.
        """
        if sorted(self.states) != list(range(len(package))):
            raise DataError(f"the checkpoint has the layers {sorted(self.states)}, the model {len(package)}")
        for number, layer in enumerate(package):
            try:
                load_layer_state(layer, self.states[number])
            except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
                if isinstance(error, PipealError):
                    raise
                raise DataError(f"layer {number} of the checkpoint is no state ({first_line(error)})") from error
