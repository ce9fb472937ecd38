"""What the first stage sends down a line: the batches of every epoch, and after each epoch what is to be answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from pipeal.config import RunConfig
from pipeal.core.errors import DataError
from pipeal.core.samples import pair_of
from pipeal.line.items import ASK, BATCH, END, EVALUATE, ROW, Item
from pipeal.run.build import Experiment
from pipeal.run.opening import course_of, seed_of
from pipeal.training.learning_rate import epoch_scale

PARTS = ("train", "held", "test")
"""What is answered after an epoch, in this order, where there is such a part of the data."""


@dataclass
class FeedPosition:
    """How much of it was sent.

    Attributes:
        begun: The first item.
        epoch: Epochs, with their answers.
        batches: Batches of all epochs.
        done: Batches of the epoch under way.
        trained: That all of them were, and the answers have begun.
        asked: Batches to answer, after this epoch.
        ended: The last item.
        samples: Of the epoch under way, as are what follows; see :class:`pipeal.training.position.Part`.
    """

    begun: bool = False
    epoch: int = 0
    batches: int = 0
    done: int = 0
    trained: bool = False
    asked: int = 0
    ended: bool = False
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    padded: int = 0
    shapes: list[list[int]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """What :class:`pipeal.training.position.Part` is made of, as JSON."""
        return {
            "seconds": self.seconds,
            "batches": self.done,
            "samples": self.samples,
            "tokens": self.tokens,
            "padded": self.padded,
            "shapes": self.shapes,
        }

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        new = FeedPosition(begun=True, epoch=self.epoch + 1, batches=self.batches)
        vars(self).update(vars(new))


class Feed:
    """Items in their order, from anywhere.

    Args:
        experiment: Has read the data.
        config: With every choice made.
        first: The first item's facts and tree.
        position: Where to go on; moves along, ahead of the item that is given.
    """

    def __init__(self, experiment: Experiment, config: RunConfig, first: Item, position: FeedPosition) -> None:
        self.experiment = experiment
        self._config = config
        self._first = first
        self.position = position

    def items(self) -> Generator[Item, None, None]:
        """All that are still to come."""
        at, course = self.position, course_of(self._config)
        if not at.begun:
            at.begun = True
            yield self._first
        with closing(self.experiment.train_batches(seed_of(self._config, 1))) as batches:
            while at.epoch < course.epochs:
                if not at.trained:
                    batches.set_epoch(at.epoch, at.done)
                    size, count = len(batches), Counter({tuple(shape): n for *shape, n in at.shapes})
                    if at.done > size:
                        raise DataError(f"the line stands behind batch {at.done} of an epoch of {size}; begin it anew")
                    scale = epoch_scale(course, at.epoch, size, at.batches - at.done)
                    before_s, begin = at.seconds, perf_counter()
                    for batch in batches:
                        x, y = pair_of(batch)
                        number, here = at.batches, at.done
                        updates = (here + 1) % course.accumulate == 0 or here + 1 == size
                        count[len(batch), batch.padded // len(batch)] += 1
                        at.shapes = [[*shape, times] for shape, times in sorted(count.items())]
                        at.batches, at.done = at.batches + 1, at.done + 1
                        at.samples, at.tokens = at.samples + len(batch), at.tokens + batch.tokens
                        at.padded += batch.padded
                        at.seconds = before_s + perf_counter() - begin
                        facts = {"batch": number, "lr_scale": scale(number), "updates": updates}
                        yield Item(BATCH, facts, (x, y))
                        at.seconds = before_s + perf_counter() - begin
                    if not at.done:
                        raise DataError(f"epoch {at.epoch + 1} has no batches; every sample was left out")
                    at.trained = True
                    yield Item(EVALUATE, {"epoch": at.epoch + 1, "part": at.part()})
                for part, x, y in islice(self._asked(), at.asked, None):
                    at.asked += 1
                    yield Item(ASK, {"part": part}, (x, y))
                epoch = at.epoch + 1
                at.next_epoch()
                yield Item(ROW, {"epoch": epoch})
        if not at.ended:
            at.ended = True
            yield Item(END)

    def _asked(self) -> Iterator[tuple[str, Any, Any]]:
        experiment = self.experiment
        parts = (experiment.train_evaluation(), experiment.held_out(), experiment.test_evaluation())
        for name, batches in zip(PARTS, parts, strict=True):
            if batches is not None:
                for batch in batches:
                    yield name, *pair_of(batch)
