"""When a training is saved: every some batches, after every epoch, and when it is asked to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from pipeal.al import ALPackage
from pipeal.engine import Pipeline
from pipeal.engine.fence import Fence
from pipeal.engine.layer_state import State, load_layer_state
from pipeal.errors import DataError, Interrupted, PipealError, first_line
from pipeal.train.checkpoint import Checkpoint
from pipeal.train.position import Position, joined
from pipeal.train.saver import PipelineEnded, Saver


class CheckpointKeeper:
    """Saves a training through a :class:`Saver`, which writes while training goes on.

    Args:
        saver: Writes the checkpoints.
        every: Batches between two of them; None saves after epochs alone.
        asked_to_end: The exit code to end with, as soon as there is one.
        facts: About the data; kept beside the position.
    """

    def __init__(
        self, saver: Saver, every: int | None, asked_to_end: Callable[[], int | None], facts: Mapping[str, Any]
    ) -> None:
        self.saver = saver
        self.every = every
        self.asked_to_end = asked_to_end
        self.facts = facts

    def after_batch(self, pipe: Pipeline, position: Position) -> bool:
        """Saves where it is due; true when the training is asked to end."""
        if self.asked_to_end() is not None:
            return True
        if self.every is not None and position.batches % self.every == 0:
            self._save(pipe, position)
        return False

    def after_epoch(self, pipe: Pipeline, position: Position) -> None:
        """Saves, and marks the best epoch so far."""
        *before, row = position.rows
        self._save(pipe, position, best=all(row.score > other.score for other in before))

    def leave(self, pipe: Pipeline, position: Position) -> NoReturn:
        """Saves, waits until it is written, and ends.

        Raises:
            Interrupted: Always.
        """
        failures = self.saver.failures
        self._save(pipe, position)
        self.saver.flush()
        where = f"batch {position.part.batches} of epoch {position.epoch + 1}"
        code = self.asked_to_end() or 1
        if self.saver.failures > failures:
            raise Interrupted(f"interrupted after {where}, which could not be saved: {self.saver.last_failure}", code)
        raise Interrupted(f"interrupted after {where}, and saved; the same command goes on from there", code)

    def _save(self, pipe: Pipeline, position: Position, *, best: bool = False) -> None:
        collect = partial(_layers, pipe.fence(), list(position.losses))
        where = {"turn": position.turn, "epoch": position.epoch, "batch": position.part.batches}
        state = {"training": position.state(), "data": self.facts}
        self.saver.submit(position.step, collect, where, state, best=best)


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
            states = {number: layer["state"] for number, layer in layers.items()}
            return cls(position, states, checkpoint.state["data"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PipealError):
                raise
            raise DataError(f"{checkpoint.path} is no checkpoint of a training ({first_line(error)})") from error

    def load_into(self, package: ALPackage) -> None:
        """Puts the states into the layers of a new package.

        Raises:
            DataError: The checkpoint is of another model.
        """
        if len(self.states) != len(package):
            raise DataError(f"the checkpoint has {len(self.states)} layers, the model {len(package)}")
        for number, layer in enumerate(package):
            load_layer_state(layer, self.states[number])


def _layers(fence: Fence, earlier: list[Tensor]) -> dict[int, dict[str, Any]]:
    """What the layers' files hold: their states; and in the first, all losses of the epoch under way."""
    try:
        passed = fence.wait()
    except Exception as error:
        if fence.ended:
            raise PipelineEnded from error
        raise
    losses = joined(earlier, [found.losses for found in passed.values() if found.losses is not None])
    first, *others = passed
    return {first: {"state": passed[first].state, "losses": losses}} | {
        number: {"state": passed[number].state} for number in others
    }
