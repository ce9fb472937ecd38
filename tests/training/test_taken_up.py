"""What a checkpoint holds of a training is held against itself before anything is done with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.core.errors import DataError
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from pipeal.training.position import Part, Position


def saved(folder: Path, layers: int, losses: list[torch.Tensor], splits: Any = 0) -> Checkpoint:
    position = Position(batches=3, part=Part(0.5, 3, 12))
    with CheckpointStore(folder) as store:
        states: dict[int, dict[str, Any]] = {number: {} for number in range(layers)}
        state = {"training": position.state(), "data": {}}
        return Checkpoint.open(store.save(3, states, {}, state, epoch={"losses": losses, "splits": splits}))


def test_losses_of_every_layer_are_taken_up(tmp_path: Path) -> None:
    found = ResumedTraining.of(saved(tmp_path, 2, [torch.zeros(3, 2), torch.zeros(3, 1)], splits=2))
    assert [tuple(losses.shape) for losses in found.position.losses] == [(3, 2), (3, 1)]
    assert found.position.totals.splits == 2


@pytest.mark.parametrize(
    ("losses", "splits", "told"),
    [
        ([torch.zeros(3, 2)], 0, "losses of 1 layers, states of 2"),
        ([torch.zeros(3, 2)] * 3, 0, "losses of 3 layers, states of 2"),
        ([torch.zeros(3, 2), torch.zeros(2, 2)], 0, "losses: [(3, 2), (2, 2)] of 3 batches"),
        ([], -1, "splits is no number of updates"),
        ([], "many", "splits is no number of updates"),
    ],
)
def test_what_does_not_fit_together_is_one_line(
    losses: list[torch.Tensor], splits: Any, told: str, tmp_path: Path
) -> None:
    """It ended in a traceback at the end of the epoch, and updates were counted backwards."""
    with pytest.raises(DataError, match=rf"is no checkpoint of a training .*{re.escape(told)}"):
        ResumedTraining.of(saved(tmp_path, 2, losses, splits))
