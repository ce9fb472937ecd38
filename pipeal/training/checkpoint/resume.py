"""A training as a checkpoint holds it, to go on with; which checkpoint is taken is decided in ``run.training``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeal.core.errors import DataError, PipealError, first_line
from pipeal.engine.state.layer_state import State, load_layer_states
from pipeal.methods.al import ALPackage
from pipeal.training.checkpoint.store import Checkpoint
from pipeal.training.position import Position


@dataclass(frozen=True)
class ResumedTraining:
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
    def of(cls, checkpoint: Checkpoint) -> ResumedTraining:
        """Reads a checkpoint that a :class:`~pipeal.training.checkpoint.policy.CheckpointPolicy` had saved.

        Raises:
            DataError: It was saved by something else.
        """
        try:
            epoch = checkpoint.epoch()
            position = Position.of(checkpoint.state["training"], epoch["losses"])
            states = checkpoint.layers()
            if len(position.losses) not in (0, len(states)):
                raise ValueError(f"losses of {len(position.losses)} layers, states of {len(states)}")
            splits = epoch.get("splits", 0)  # older ones have none
            if not isinstance(splits, int) or splits < 0:
                raise TypeError("splits is no number of updates")
            position.totals.splits += splits  # those that the report of this epoch will not know of
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
        load_layer_states(list(package), [self.states[number] for number in range(len(package))])
