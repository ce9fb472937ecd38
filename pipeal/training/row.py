"""What one epoch of a run came to."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochRow:
    """What one epoch of one turn came to.

    Attributes:
        turn: The training this epoch belongs to, from 1.
        epoch: From 1.
        train_acc: Share of training samples classified rightly after the epoch, 0 to 1.
        test_acc: The same of the test samples.
        train_time: Seconds of training since the turn began, evaluation left out.
        epoch_time: Seconds of training in this epoch.
        samples_per_s: Training samples per second of ``epoch_time``.
        tokens_per_s: Tokens per second of ``epoch_time``, padding left out.
        losses: Mean local losses by layer, as its method orders them: ``(associated, autoencoder)`` of an AL layer.
        train_loss: Of a language model, the estimated loss on what is trained on, in nats; its accuracies are of next
            characters. None for others.
        test_loss: The same of what is not trained on.
        held_acc: As ``test_acc``, of the samples held out from training, by which epochs are chosen; None where nothing
            is held out, and in rows of older runs.
        held_loss: As ``test_loss``, likewise.
    """

    turn: int
    epoch: int
    train_acc: float
    test_acc: float
    train_time: float
    epoch_time: float
    samples_per_s: float
    tokens_per_s: float
    losses: tuple[tuple[float, ...], ...] = ()
    train_loss: float | None = None
    test_loss: float | None = None
    held_acc: float | None = None
    held_loss: float | None = None

    @property
    def score(self) -> float | None:
        """What epochs are chosen by, the higher, the better; None where nothing is held out, or that has diverged.

        The held-out loss, turned round, where there is one, else the held-out accuracy: never what the test set says.
        """
        score = self.held_acc if self.held_loss is None else -self.held_loss
        return score if score is not None and math.isfinite(score) else None
