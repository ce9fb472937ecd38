"""Early exits: how sure an answer is, and who leaves with it.

Asked by :mod:`pipeal.engine.inference.trips`, and over processes by ``distributed.remote_predictor``; its thresholds
are chosen by :mod:`pipeal.training.calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree


@dataclass(frozen=True)
class ExitPolicy:
    """Where each sample stops climbing: at the first exit whose confidence reaches the exit's threshold.

    The confidence is the greatest softmax probability of the exit's logits over its temperature.

    Attributes:
        thresholds: One per exit, from the first to the last. A threshold above 1 switches its exit off: neither its
            bridge nor its way down is computed. The last one does not matter, for there all that are left stop.
        temperatures: One per exit, above 0.

    Raises:
        ConfigError: The lengths differ, or a value is none of the above.
    """

    thresholds: tuple[float, ...]
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.thresholds) != len(self.temperatures):
            raise ConfigError(
                f"an exit policy has {len(self.thresholds)} thresholds and {len(self.temperatures)} temperatures; "
                "give one of each per exit"
            )
        if any(isnan(threshold) for threshold in self.thresholds):
            raise ConfigError(f"the thresholds {self.thresholds} hold a NaN; write inf to switch an exit off")
        if not all(0 < temperature < inf for temperature in self.temperatures):
            raise ConfigError(f"the temperatures are {self.temperatures}; expected numbers above 0")

    @property
    def tried(self) -> list[int]:
        """The exits that are computed, from 1: those switched on, and the last."""
        last = len(self.thresholds)
        return [number for number, at in enumerate(self.thresholds, 1) if at <= 1 or number == last]


@dataclass(frozen=True, eq=False)
class EarlyExits:
    """The answers of a batch under an :class:`ExitPolicy`.

    Attributes:
        logits: ``(B, classes)``, each row from the exit where its sample left.
        exits: ``(B,)`` int64, the exits taken, from 1.
    """

    logits: Tensor
    exits: Tensor


def confidence(logits: Tensor, temperature: float) -> Tensor:
    """The greatest softmax probability of ``logits / temperature``: ``(B, classes)`` to ``(B,)`` float32.

    Logits that are not finite have a confidence of 0: samples that can climb on do.
    """
    return (logits.float() / temperature).softmax(-1).amax(-1).nan_to_num(0.0).clamp_max(1.0)


def decide(depth: int, threshold: float, temperature: float, tree: Tree) -> Tree:
    """Writes the answers of an exit, and says who climbs on.

    Args:
        depth: The exit, from 1.
        threshold: The confidence that is enough there.
        temperature: Of its confidence.
        tree: The logits of those who came this far, and ``(logits, exits, rows)`` so far, where ``rows`` are theirs;
            None at the first exit.

    Returns:
        ``(logits, exits, rows)`` with ``rows`` of those who climb on, and their places among those who came.
    """
    came, answers = tree
    if came.dim() != 2:
        raise ConfigError(
            f"an exit policy weighs logits of shape (B, classes), but exit {depth} gives {tuple(came.shape)}; "
            "predict without a policy"
        )
    if answers is None:
        rows = torch.arange(len(came), device=came.device)
        logits, exits = came, torch.full_like(rows, depth)
    else:
        before, exits, rows = answers
        # Not in place: a decoder may have handed on a tensor that is not ours.
        logits, exits = before.index_copy(0, rows, came), exits.index_fill(0, rows, depth)
    sure = confidence(came, temperature) >= threshold
    # On a GPU the host waits here: how many are left decides what is computed next.
    staying = sure.logical_not().nonzero().flatten()
    return (logits, exits, rows[staying]), staying
