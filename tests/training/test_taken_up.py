"""What a checkpoint holds of a training is held against itself before anything is done with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, DataError, Pipeline
from pipeal.engine.state.layer_file import read_layer
from pipeal.engine.state.layer_state import layer_state
from pipeal.training.checkpoint import manifest
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
    assert [tuple(losses.shape) for losses in found.position.losses.values()] == [(3, 2), (3, 1)]
    assert found.position.totals.splits == 2


@pytest.mark.parametrize(
    ("losses", "splits", "told"),
    [
        ([torch.zeros(3, 2)] * 3, 0, "losses of the layers [0, 1, 2], states of [0, 1]"),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], 0, "losses: [(3, 2), (4, 2)] of 3 batches"),
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


def layers_of(*widths: int) -> list[AL]:
    return [AL(ENC(nn.Linear(4, 4), nn.Linear(4, w)), AE(nn.Linear(4, w), nn.Linear(w, 4))) for w in widths]


def trained(folder: Path, *widths: int) -> tuple[ResumedTraining, list[AL]]:
    """A checkpoint of layers, and what it is of."""
    found = layers_of(*widths)
    with Pipeline(found, "cpu", "sequential", threads=1) as pipe:
        pipe.run([(torch.randn(3, 4), torch.randn(3, 4))])
    position = Position(batches=1, part=Part(0.5, 1, 3))
    with CheckpointStore(folder) as store:
        state = {"training": position.state(), "data": {}}
        path = store.save(1, dict(enumerate(map(layer_state, found))), {}, state, epoch={"losses": [], "splits": 0})
    return ResumedTraining.of(Checkpoint.open(path)), found


def test_all_layers_are_held_against_their_states_before_one_is_loaded(tmp_path: Path) -> None:
    resumed, wanted = trained(tmp_path / "one", 4, 4, 4)
    for other, told in (((4, 4, 8), "layer 2: the state does not fit the layer"), ((4, 4), "has the layers")):
        model = layers_of(*other)
        before = [value.clone() for one in model for value in one.state_dict().values()]
        with pytest.raises(DataError, match=told):
            resumed.load_into(model)
        assert all(map(torch.equal, before, [value for one in model for value in one.state_dict().values()]))
        with torch.device("meta"):
            shape = layers_of(*other)
        with pytest.raises(DataError, match=told):  # as a run asks, before a layer is made
            resumed.check(shape)
    with torch.device("meta"):
        shape = layers_of(4, 4, 4)
    resumed.check(shape)
    model = layers_of(4, 4, 4)
    resumed.load_into(model)
    values = [[value for one in found for value in one.state_dict().values()] for found in (model, wanted)]
    assert all(map(torch.equal, *values))


def test_states_are_read_one_at_a_time_as_they_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were in memory, beside the model that they were for."""
    read: list[str] = []
    monkeypatch.setattr(
        manifest, "read_layer", lambda path, **how: (read.append(path.name), read_layer(path, **how))[1]
    )
    resumed, _ = trained(tmp_path, 4, 4)
    assert read == ["epoch.safetensors"]
    assert [resumed.states[number]["module"].keys() for number in (1, 0)]
    assert read[1:] == ["layer-001.safetensors", "layer-000.safetensors"]
