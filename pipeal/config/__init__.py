"""Configuration ends at the door: YAML and command-line values become checked dataclasses here, once."""

from pipeal.config.effects import check_effects
from pipeal.config.language import LanguageConfig, LanguageDataConfig, LanguageModelConfig
from pipeal.config.load import all_values, dump_config, find_config, given_keys, is_left_over, load_config, value_at
from pipeal.config.schema import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    LrConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TuneConfig,
)
from pipeal.config.text import BatchingConfig, GroupingConfig, TextConfig, TextDataConfig, TextModelConfig
from pipeal.config.vision import ImageDataConfig, VisionConfig, VisionModelConfig

__all__ = [
    "BatchingConfig",
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "GroupingConfig",
    "ImageDataConfig",
    "LanguageConfig",
    "LanguageDataConfig",
    "LanguageModelConfig",
    "LrConfig",
    "ModelConfig",
    "RunConfig",
    "TextConfig",
    "TextDataConfig",
    "TextModelConfig",
    "TrainConfig",
    "TuneConfig",
    "VisionConfig",
    "VisionModelConfig",
    "all_values",
    "check_effects",
    "dump_config",
    "find_config",
    "given_keys",
    "is_left_over",
    "load_config",
    "value_at",
]
