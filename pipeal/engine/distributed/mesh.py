"""Which process does what: a mesh of stages and replicas over the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

from pipeal.core.errors import PlacementError


@dataclass(frozen=True)
class Mesh:
    """Stages × replicas; stage ``s`` of every replica holds the same layers.

    ::

        replica 0   rank 0 ─► rank 1 ─► rank 2        rank = replica · stages + stage
        replica 1   rank 3 ─► rank 4 ─► rank 5        gradients are averaged down a column

    Attributes:
        stages: Into how many parts the layers are divided.
        replicas: How many share the samples of a batch.

    Raises:
        PlacementError: Either is below 1.

    >>> mesh = Mesh(stages=3, replicas=2)
    >>> mesh.size, mesh.stage_of(4), mesh.replica_of(4), mesh.rank_of(replica=1, stage=1), mesh.column(1)
    (6, 1, 1, 4, [1, 4])
    """

    stages: int
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1 or self.replicas < 1:
            raise PlacementError(
                f"a mesh of {self.stages} stages and {self.replicas} replicas; expected at least 1 of each"
            )

    @classmethod
    def of_world(cls, size: int, replicas: int = 1) -> Mesh:
        """The mesh in which so many ranks have so many replicas.

        Raises:
            PlacementError: They do not divide the ranks.

        >>> Mesh.of_world(6, replicas=2)
        Mesh(stages=3, replicas=2)
        """
        if replicas < 1 or size % replicas:
            raise PlacementError(
                f"engine.replicas: {replicas} replicas do not divide {size} ranks into stages; expected one of "
                f"{', '.join(str(count) for count in range(1, size + 1) if size % count == 0)}, or other ranks"
            )
        return cls(size // replicas, replicas)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.stages * self.replicas

    def stage_of(self, rank: int) -> int:
        """The stage that a rank is."""
        return rank % self.stages

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        return rank // self.stages

    def rank_of(self, replica: int, stage: int) -> int:
        """The rank of a stage."""
        return replica * self.stages + stage

    def column(self, stage: int) -> list[int]:
        """The ranks that hold the layers of a stage, by replica."""
        return [self.rank_of(replica, stage) for replica in range(self.replicas)]

    def name_of(self, rank: int) -> str:
        """A rank as messages name it.

        >>> Mesh(2, 2).name_of(3), Mesh(2).name_of(1)
        ('rank 3 (stage 1 of replica 1)', 'rank 1 (stage 1)')
        """
        of_replica = f" of replica {self.replica_of(rank)}" if self.replicas > 1 else ""
        return f"rank {rank} (stage {self.stage_of(rank)}{of_replica})"

    def check_layers(self, layers: int, unit: str = "layer") -> None:
        """Refuses more stages than there are layers, or other units that are divided among them.

        Raises:
            PlacementError: There are.
        """
        if self.stages > layers:
            per = f" in {self.replicas} replicas" if self.replicas > 1 else ""
            raise PlacementError(
                f"{self.size} ranks{per} make {self.stages} stages, but the model has {layers} "
                f"{unit}{'s' if layers > 1 else ''}; expected at most {layers * self.replicas}"
            )
