"""Ranks, stages, replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import PlacementError
from pipeal.engine.distributed.mesh import Mesh


@given(stages=st.integers(1, 9), replicas=st.integers(1, 9))
def test_every_rank_is_one_stage_of_one_replica(stages: int, replicas: int) -> None:
    mesh = Mesh.of_world(stages * replicas, replicas)
    assert mesh == Mesh(stages, replicas)
    for rank in range(mesh.size):
        assert mesh.rank_of(mesh.replica_of(rank), mesh.stage_of(rank)) == rank
        assert rank in mesh.column(mesh.stage_of(rank))
    assert sorted(rank for stage in range(stages) for rank in mesh.column(stage)) == list(range(mesh.size))


def test_a_mesh_that_does_not_divide_the_world_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"engine\.replicas: 3 replicas do not divide 4 ranks .* one of 1, 2, 4"):
        Mesh.of_world(4, 3)


def test_more_stages_than_layers_are_refused() -> None:
    Mesh(3, 2).check_layers(3)
    with pytest.raises(PlacementError, match=r"6 ranks in 2 replicas make 3 stages, but the model has 2 layers; .* 4"):
        Mesh(3, 2).check_layers(2)
