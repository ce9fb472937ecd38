"""Configuration ends at the door: YAML and command-line values become checked dataclasses here, once."""

from pipeal.config.load import dump_config, find_config, load_config
from pipeal.config.schema import (
    BatchingConfig,
    DataConfig,
    EngineConfig,
    LrConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "BatchingConfig",
    "DataConfig",
    "EngineConfig",
    "LrConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "dump_config",
    "find_config",
    "load_config",
]
