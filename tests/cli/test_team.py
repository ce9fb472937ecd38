"""What rank 0 and the others settle before anything is read."""

from __future__ import annotations

import pytest

from pipeal.cli import team
from pipeal.cli.team import require_devices
from pipeal.config import EngineConfig
from pipeal.engine.distributed.world import World
from pipeal.errors import PlacementError
from tests.engine.distributed.ranks import each, ranks


def test_a_device_that_one_rank_lacks_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: after minutes of reading data that rank alone said so, and the others that it was lost."""

    def rank_device(world: World, engine: EngineConfig, kind: str) -> str:
        return "cuda:99" if world.rank == 1 else "cpu"

    monkeypatch.setattr(team, "rank_device", rank_device)
    with ranks(3) as worlds:
        errors = each(worlds, lambda world: require_devices(world, EngineConfig(), "cuda"))
    assert [type(error) for error in errors] == [PlacementError] * 3
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 1 (stage 1) on {worlds[0].peers[1].host}: ")
    assert "cuda:99" in str(errors[0])
