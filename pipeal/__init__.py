"""pipeal: pipelined model-parallel training for PyTorch with Associated Learning."""

from pipeal.al import AE, AL, BP, ENC, ALPackage, Dropout, Encoder, LabelAE, set_device
from pipeal.engine import ExitPolicy, Pipeline, RunReport, Window
from pipeal.errors import ConfigError, DataError, PipealError, PlacementError, ScheduleError, StallError

__version__ = "0.1.0"

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
    "PipealError",
    "Pipeline",
    "PlacementError",
    "RunReport",
    "ScheduleError",
    "StallError",
    "Window",
    "set_device",
]
