"""What the first stage sends down a line: the batches of every epoch, and after each epoch what is to be answered."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from pydantic import TypeAdapter

from pipeal.config import RunConfig
from pipeal.core.checked import checked
from pipeal.core.errors import DataError
from pipeal.core.samples import pair_of
from pipeal.engine.state.layer_state import State
from pipeal.line.items import ASK, BATCH, CHECKPOINT, END, EVALUATE, ROW, STATE, Item
from pipeal.run.build import Experiment
from pipeal.run.opening import course_of, seed_of
from pipeal.training.learning_rate import epoch_scale
from pipeal.training.position import Part, Position

PARTS = ("train", "held", "test")
"""What is answered after an epoch, in this order, where there is such a part of the data."""

PART = TypeAdapter(Part)


@dataclass
class FeedPosition:
    """How much of it was sent.

    Attributes:
        begun: The first item.
        handed: The number of the layer whose state comes next; None where no more are to come.
        epoch: Epochs, with their answers.
        batches: Batches of all epochs.
        part: What was sent of the epoch under way.
        trained: That all of it was, and the answers have begun.
        asked: Batches to answer, after this epoch.
        saved: The epochs that a checkpoint was made of.
        ended: The last item.
    """

    begun: bool = False
    handed: int | None = None
    epoch: int = 0
    batches: int = 0
    part: Part = field(default_factory=Part)
    trained: bool = False
    asked: int = 0
    saved: int = 0
    ended: bool = False

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        self.epoch, self.part, self.trained, self.asked = self.epoch + 1, Part(), False, 0

    @classmethod
    def after(cls, position: Position) -> FeedPosition:
        """That of a line which goes on with a training from the end of an epoch."""
        return cls(handed=0, epoch=position.epoch, batches=position.batches, saved=position.epoch)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = _POSITION.dump_python(self, mode="json")
        return found

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> FeedPosition:
        """What :meth:`state` gave.

        Raises:
            ValueError: It did not; in one line.
        """
        return checked(_POSITION, state)


_POSITION = TypeAdapter(FeedPosition)


class Feed:
    """Items in their order, from anywhere.

    Args:
        experiment: Has read the data.
        config: With every choice made.
        first: The first item's facts and tree.
        position: Where to go on; moves along, ahead of the item that is given.
        states: Of the layers, where they do not begin with their first weights.
        checkpoint_epochs: So many epochs from one checkpoint to the next; None for none but at the end.

    Attributes:
        total: How many batches all epochs have, if each has as many as the one under way; None before the first.
    """

    def __init__(
        self,
        experiment: Experiment,
        config: RunConfig,
        first: Item,
        position: FeedPosition,
        states: Mapping[int, State] | None = None,
        checkpoint_epochs: int | None = None,
    ) -> None:
        self.experiment = experiment
        self._checkpoint_epochs = checkpoint_epochs
        self._states = states or {}
        self._config = config
        self._first = first
        self.position = position
        self.total: int | None = None

    def items(self) -> Generator[Item, None, None]:
        """All that are still to come."""
        at, course = self.position, course_of(self._config)
        if not at.begun:
            at.begun = True
            yield self._first
        while at.handed is not None:
            number = at.handed
            at.handed = number + 1 if number + 1 in self._states else None
            yield Item(STATE, {"layer": number}, dict(self._states[number]))
        with closing(self.experiment.train_batches(seed_of(self._config, 1))) as batches:
            if at.trained:  # taken up before the end of the epoch
                self.total = at.batches + (course.epochs - at.epoch - 1) * at.part.batches
            while at.epoch < course.epochs:
                if self._is_to_save(at):
                    at.saved = at.epoch
                    yield Item(CHECKPOINT)
                if not at.trained:
                    part = at.part
                    batches.set_epoch(at.epoch, part.batches)
                    size = len(batches)
                    if part.batches > size:
                        raise DataError(
                            f"the line stands behind batch {part.batches} of an epoch of {size}; begin a new one"
                        )
                    self.total = at.batches - part.batches + (course.epochs - at.epoch) * size
                    scale = epoch_scale(course, at.epoch, size, at.batches - part.batches)
                    before_s, begin = part.seconds, perf_counter()
                    for batch in batches:
                        number, updates = at.batches, course.to_come(part.batches, size) == 1
                        part.count(batch)
                        at.batches, part.batches = at.batches + 1, part.batches + 1
                        part.seconds = before_s + perf_counter() - begin
                        facts = {"batch": number, "lr_scale": scale(number), "updates": updates}
                        yield Item(BATCH, facts, pair_of(batch))
                        part.seconds = before_s + perf_counter() - begin
                    if not part.batches:
                        raise DataError(f"epoch {at.epoch + 1} has no batches; every sample was left out")
                    at.trained = True
                    yield Item(EVALUATE, {"epoch": at.epoch + 1, "part": PART.dump_python(part, mode="json")})
                for name, x, y in islice(self._asked(), at.asked, None):
                    at.asked += 1
                    yield Item(ASK, {"part": name}, (x, y))
                epoch = at.epoch + 1
                at.next_epoch()
                yield Item(ROW, {"epoch": epoch})
        self.total = at.batches
        if not at.ended:
            at.ended = True
            yield Item(END)

    def _is_to_save(self, at: FeedPosition) -> bool:
        every, between = self._checkpoint_epochs, not (at.trained or at.part.batches)
        return every is not None and between and at.epoch > at.saved and at.epoch % every == 0

    def _asked(self) -> Iterator[tuple[str, Any, Any]]:
        experiment = self.experiment
        parts = (experiment.train_evaluation(), experiment.held_out(), experiment.test_evaluation())
        for name, batches in zip(PARTS, parts, strict=True):
            if batches is not None:
                for batch in batches:
                    yield name, *pair_of(batch)
