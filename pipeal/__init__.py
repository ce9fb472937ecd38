"""pipeal: pipelined model-parallel training for PyTorch with Associated Learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeal.core.errors import (
    ConfigError,
    DataError,
    LayerError,
    PipealError,
    PlacementError,
    ScheduleError,
    StallError,
)

if TYPE_CHECKING:
    from pipeal.engine import ExitPolicy, Pipeline, RunReport, Window
    from pipeal.methods.al import AE, AL, BP, ENC, ALPackage, Dropout, Encoder, LabelAE, set_device
    from pipeal.planning import Placement, plan, stage_memory

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
    "stage_memory",
]


def __getattr__(name: str) -> Any:
    """Loads what needs PyTorch when it is first asked for (PEP 562): that takes seconds, which ``--help`` does not."""
    if name in __all__:
        for room in map(import_module, ("pipeal.engine", "pipeal.methods.al", "pipeal.planning")):
            if name in room.__all__:
                globals()[name] = found = getattr(room, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For consoles that complete names: also those that are not loaded yet."""
    return [*globals(), *__all__]
