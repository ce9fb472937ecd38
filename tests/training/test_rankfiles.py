"""Layers that other ranks have written: whole in a checkpoint, or told, and never left lying about."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeal.core.errors import DataError
from pipeal.engine import LayerState, Snapshot
from pipeal.training.checkpoint.rank_files import KeptLayer, RankFiles
from pipeal.training.checkpoint.store import CheckpointStore


def snapshot(number: int) -> Snapshot:
    made = Snapshot(batch=10 * number, layers=[1, 2])
    made.number = number
    return made


def states(value: float = 0.5) -> dict[int, LayerState]:
    return {number: LayerState(state(number + value), None) for number in (1, 2)}


def state(value: float) -> dict[str, object]:
    return {"module": {"weight": torch.tensor([value])}, "gradients": {}, "optimizers": {}}


def kept(written: dict[str, object]) -> dict[int, KeptLayer]:
    return {number: KeptLayer.of(written, number) for number in (1, 2)}


def test_what_ranks_have_written_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        ranks = RankFiles(tmp_path, "a", pipeline=1)
        lost = ranks(snapshot(1), states())  # its checkpoint gave way to a newer one
        written = ranks(snapshot(2), states())
        assert written["not_finite"] == {"1": None, "2": None}
        path = store.save(20, {0: state(0.5), **kept(written)}, {}, {})
        later = ranks(snapshot(3), states())
        assert not KeptLayer.of(lost, 1).path.exists()
        assert KeptLayer.of(later, 1).path.exists()
        found = store.newest(pytest.fail)
        assert found is not None
        assert found.path == path
        assert [float(layer["module"]["weight"]) for layer in found.layers().values()] == [0.5, 1.5, 2.5]
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", path.name]


def test_what_a_killed_run_left_of_it_is_cleared_away(tmp_path: Path) -> None:
    RankFiles(tmp_path, "a", pipeline=3)(snapshot(7), states())
    with CheckpointStore(tmp_path):
        assert [one.name for one in tmp_path.iterdir()] == [".lock"]


def test_what_an_attempt_behind_a_cut_cable_still_writes_does_not_get_in_the_way_of_the_next(tmp_path: Path) -> None:
    """Both counted their snapshots from 1, and wrote into one folder."""
    with CheckpointStore(tmp_path) as store:
        new = RankFiles(tmp_path, "b", pipeline=1)(snapshot(1), states(0.5))
        old = RankFiles(tmp_path, "a", pipeline=1)(snapshot(1), states(7.0))
        store.save(10, {0: state(0.5), **kept(new)}, {}, {})
        found = store.newest(pytest.fail)
        assert found is not None
        assert float(found.layers()[1]["module"]["weight"]) == 1.5
        assert KeptLayer.of(old, 1).path.exists()  # and goes with the folder, at the end


def test_a_state_that_is_not_finite_is_told_with_its_layer(tmp_path: Path) -> None:
    written = RankFiles(tmp_path, "a", pipeline=1)(snapshot(1), states(float("nan")))
    assert written["not_finite"] == {"1": "weight", "2": "weight"}


def test_a_file_that_was_changed_on_its_way_is_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        written = kept(RankFiles(tmp_path, "a", pipeline=1)(snapshot(1), states()))
        written[2].path.write_bytes(written[2].path.read_bytes()[:-1])
        store.save(10, {0: state(0.5), **written}, {}, {})
        bad: list[str] = []
        assert store.newest(bad.append) is None
        assert "layer-002.safetensors is truncated" in bad[0]


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / ".parts").write_text("in the way")
    with pytest.raises(DataError, match="cannot write a layer's file below"):
        RankFiles(tmp_path, "a", pipeline=1)(snapshot(1), states())
