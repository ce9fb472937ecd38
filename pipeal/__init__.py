"""pipeal: pipelined model-parallel training for PyTorch with Associated Learning."""

import logging

from pipeal.core.errors import (
    ConfigError,
    DataError,
    LayerError,
    PipealError,
    PlacementError,
    ScheduleError,
    StallError,
)
from pipeal.engine import ExitPolicy, Pipeline, RunReport, Window
from pipeal.methods.al import AE, AL, BP, ENC, ALPackage, Dropout, Encoder, LabelAE, set_device
from pipeal.planning import Placement, plan

__version__ = "0.1.0"

# Silent by default, also of warnings: who uses pipeal as a library chooses the handlers. The commands install theirs.
logging.getLogger("pipeal").addHandler(logging.NullHandler())

__all__ = [
    "AE",
    "AL",
    "BP",
    "ENC",
    "ALPackage",
    "ConfigError",
    "DataError",
    "Dropout",
    "Encoder",
    "ExitPolicy",
    "LabelAE",
    "LayerError",
    "PipealError",
    "Pipeline",
    "Placement",
    "PlacementError",
    "RunReport",
    "ScheduleError",
    "StallError",
    "Window",
    "plan",
    "set_device",
]
