"""What a trained classifier answers to texts or images that no data set has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from pipeal.core.errors import DataError
from pipeal.run.trained import Trained

AT_ONCE = 64
"""Inputs that are answered together."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        given: The text, or the name of the image's file.
        probabilities: Of each class by its name, the likeliest first; of a run without names, by its number from 0.
    """

    given: str
    probabilities: Mapping[str, float]

    @property
    def label(self) -> str:
        """The likeliest class."""
        return next(iter(self.probabilities))


def answers(
    trained: Trained, given: Iterable[str], exit_at: int | None = None, *, at_once: int = AT_ONCE
) -> Iterator[Answer]:
    """Answers inputs in their order, each read as the run reads its own.

    Args:
        trained: The run's model.
        given: Texts, or names of image files.
        exit_at: How many layers to climb, from 1; None for all.
        at_once: How many are read before they are answered.

    Raises:
        DataError: The run is of no classifier, an image cannot be read, or the model's answers are not finite.
        ConfigError: There is no such exit.
    """
    if trained.read is None:
        raise DataError(
            f"{trained.folder}: a run of {trained.config.model.name}, a language model; pipeal generate asks it"
        )
    trained.check_exit(exit_at)
    rest = iter(given)
    while some := list(islice(rest, at_once)):
        with torch.no_grad():
            logits = trained.package.infer(trained.read(some), exit_at).float()
        if not logits.amax(1).isfinite().all():  # some may be masked
            raise DataError(
                "the model's answers are not finite: it has diverged; take an earlier checkpoint, or train again"
            )
        rows = logits.softmax(1)
        for one, row in zip(some, rows.tolist(), strict=True):
            names = trained.classes or [str(number) for number in range(len(row))]
            ordered = sorted(zip(names, row, strict=True), key=lambda pair: -pair[1])
            yield Answer(one, dict(ordered))
