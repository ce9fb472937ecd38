"""Configuration ends at the door: YAML and command-line values become checked dataclasses here, once."""

from pipeal.config.effects import check_effects as check_effects
from pipeal.config.language import LanguageConfig as LanguageConfig
from pipeal.config.language import LanguageModelConfig as LanguageModelConfig
from pipeal.config.load import all_values as all_values
from pipeal.config.load import dump_config as dump_config
from pipeal.config.load import find_config as find_config
from pipeal.config.load import given_keys as given_keys
from pipeal.config.load import is_left_over as is_left_over
from pipeal.config.load import leaves as leaves
from pipeal.config.load import load_config as load_config
from pipeal.config.load import nested as nested
from pipeal.config.load import read_config as read_config
from pipeal.config.load import value_at as value_at
from pipeal.config.schema import EngineConfig as EngineConfig
from pipeal.config.schema import LrConfig as LrConfig
from pipeal.config.schema import RunConfig as RunConfig
from pipeal.config.schema import TrainConfig as TrainConfig
from pipeal.config.schema import TuneConfig as TuneConfig
from pipeal.config.text import BatchingConfig as BatchingConfig
from pipeal.config.text import GroupingConfig as GroupingConfig
from pipeal.config.text import TextConfig as TextConfig
from pipeal.config.text import TextDataConfig as TextDataConfig
from pipeal.config.text import TextModelConfig as TextModelConfig
from pipeal.config.vision import ImageDataConfig as ImageDataConfig
from pipeal.config.vision import VisionConfig as VisionConfig
from pipeal.config.vision import VisionModelConfig as VisionModelConfig
