"""The engine in several processes, one per stage and replica, on ``torch.distributed``."""

from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World, open_world

__all__ = ["DistributedPipeline", "Launch", "Mesh", "World", "open_world", "serve"]
