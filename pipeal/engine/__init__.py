"""The engine: schedules, stages on devices, workers. It knows packets and layers that train themselves."""

from pipeal.core.partition import balance
from pipeal.engine.devices import open_device, parse_device
from pipeal.engine.inference.exit_policy import EarlyExits, ExitPolicy
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.report import RunReport
from pipeal.engine.schedule import SCHEDULES, Action, Schedule, Task, schedule_named, violations
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.engine.state.snapshot import LayerState, Snapshot
from pipeal.engine.trace import CopySpan, Span, Window

__all__ = [
    "SCHEDULES",
    "Action",
    "CopySpan",
    "EarlyExits",
    "ExitPolicy",
    "LayerState",
    "Pipeline",
    "RunReport",
    "Schedule",
    "Snapshot",
    "Span",
    "Task",
    "Window",
    "balance",
    "layer_state",
    "load_layer_state",
    "open_device",
    "parse_device",
    "schedule_named",
    "violations",
]
