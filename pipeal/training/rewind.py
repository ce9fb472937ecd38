"""What a training that met a number that is not finite does next: which batch it leaves out, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeal.core.errors import NonFiniteError
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint
from pipeal.training.position import Position

MOST_LEFT_OUT = 8
"""Batches of one epoch, or updates of several, that are left out at most: where more break the model, it diverges, and
no batch is to blame. Each costs the way back to a checkpoint."""


@dataclass(frozen=True)
class Decision:
    """What is done about a number that is not finite.

    Attributes:
        goes_back: Whether the training goes on from a checkpoint; else it ends.
        why: In words.
    """

    goes_back: bool
    why: str


@dataclass
class Rewinds:
    """Of one turn.

    Where it is not known which batch is to blame (the weights were broken before, by an update whose loss was finite;
    or a GPU told of it late), none is left out: the training goes back and looks after every update, until it is there
    again. The batches on that way are the same, and so one of them breaks it again, and is known then: by its loss, or
    else as one of those that the update learnt from, which are all left out.

    Attributes:
        accumulate: So many batches, counted from the epoch's first, make one update.
        look_until: Up to so many batches of the turn, each update is looked at.
    """

    accumulate: int = 1
    look_until: int = 0

    def plan(self, error: NonFiniteError, position: Position) -> Decision:
        """Decides what is done about an error, and notes in the position which batch is left out."""
        left_out, begun = position.totals.left_out, position.batches - position.part.batches
        what = "has a loss that is not finite on" if error.losses else "is not finite after"
        found = f"layer {error.layer} {what} batch {error.batch} of turn {position.turn}"
        blamed = position.totals.blamed
        if sum(turn == position.turn and batch >= begun for turn, batch in blamed) >= MOST_LEFT_OUT:
            what = "batches" if self.accumulate == 1 else "batches, or updates of several,"
            return Decision(
                False,
                f"{MOST_LEFT_OUT} {what} of this epoch were left out before, the most there may be: the model "
                "diverges, and no batch is to blame; lower the learning rate, or train in fp32",
            )
        if not (error.is_to_blame or error.batch < self.look_until):
            self.look_until = error.batch + 1
            return Decision(True, f"{found}; another may be to blame, and is looked for")
        first = error.batch if error.losses else error.batch - (error.batch - begun) % self.accumulate
        here = {(position.turn, batch) for batch in range(first, error.batch + 1)} - left_out
        if not here:
            return Decision(
                False,
                f"batch {error.batch} was left out before, so that it cannot have done it; lower the learning rate, or "
                "train in fp32",
            )
        left_out |= here
        blamed.add((position.turn, error.batch))
        if len(here) == 1:
            return Decision(True, f"{found}, which is left out from now on")
        return Decision(True, f"{found}, which is left out from now on with the {len(here) - 1} others of its update")


def go_back(
    layers: Sequence[TrainableLayer],
    position: Position,
    saved: Checkpoint | None,
    begun: Position,
    fresh: Callable[[], Iterable[TrainableLayer]],
) -> bool:
    """Takes up a checkpoint of the turn, or where there is none its beginning; False where neither is to be had.

    Args:
        layers: The model; becomes what it was there, where it is.
        position: Moved there; what is left out stays so.
        saved: The newest checkpoint.
        begun: Where this process began the turn.
        fresh: Makes the layers that a turn begins with.

    Raises:
        DataError: The checkpoint does not fit.
    """
    resumed = None if saved is None else ResumedTraining.of(saved)
    if resumed is not None and resumed.position.turn == position.turn:
        resumed.load_into(layers)
        position.go_back_to(resumed.position)
    elif begun.batches == 0:
        for layer, made in zip(layers, fresh(), strict=True):
            load_layer_state(layer, layer_state(made))
        position.go_back_to(begun)
    else:
        return False
    return True
