"""A training as a checkpoint holds it, to go on with; which checkpoint is taken is decided in ``run.training``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeal.core.errors import DataError, PipealError, first_line
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.state.layer_state import State, check_layer_states, load_layer_state
from pipeal.training.checkpoint.store import Checkpoint
from pipeal.training.position import Position


@dataclass(frozen=True)
class ResumedTraining:
    """What a checkpoint holds.

    Attributes:
        position: Where the training stood.
        states: Of the layers, by their number; each is read when it is looked up.
        facts: About the data it was trained on.
        path: Of the checkpoint.
    """

    position: Position
    states: Mapping[int, State]
    facts: Mapping[str, Any]
    path: Path

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
            if not position.losses.keys() <= states.keys():  # layers may report none
                raise ValueError(f"losses of the layers {sorted(position.losses)}, states of {sorted(states)}")
            splits = epoch.get("splits", 0)  # older ones have none
            if not isinstance(splits, int) or splits < 0:
                raise TypeError("splits is no number of updates")
            position.totals.splits += splits  # those that the report of this epoch will not know of
            return cls(position, states, dict(checkpoint.state["data"]), checkpoint.path)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PipealError):
                raise
            raise DataError(f"{checkpoint.path} is no checkpoint of a training ({first_line(error)})") from error

    def check(self, layers: Sequence[TrainableLayer]) -> None:
        """Asks whether the states fit layers, which may be on the meta device; nothing is changed.

        Raises:
            DataError: The checkpoint is of another model.
        """
        if sorted(self.states) != list(range(len(layers))):
            raise DataError(f"the checkpoint has the layers {sorted(self.states)}, the model {len(layers)}")
        check_layer_states(layers, self.states)

    def load_into(self, layers: Sequence[TrainableLayer]) -> None:
        """Puts the states into the layers of a model, one after the other, once all are known to fit.

        Raises:
            DataError: The checkpoint is of another model; all layers are as they were.
        """
        self.check(layers)
        for number, layer in enumerate(layers):
            load_layer_state(layer, self.states[number])
