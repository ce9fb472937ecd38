"""The engine: schedules, stages on devices, workers. It knows packets and layers that train themselves."""

from pipeal.engine.costs import Placement
from pipeal.engine.device import open_device, parse_device
from pipeal.engine.exit_policy import EarlyExits, ExitPolicy
from pipeal.engine.fence import Fence, LayerState
from pipeal.engine.layer_state import layer_state, load_layer_state
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.planning import plan
from pipeal.engine.report import RunReport
from pipeal.engine.schedule import SCHEDULES, Action, Schedule, Task, schedule_named, violations
from pipeal.engine.simulate import simulate
from pipeal.engine.trace import Span, Window
from pipeal.partition import balance

__all__ = [
    "SCHEDULES",
    "Action",
    "EarlyExits",
    "ExitPolicy",
    "Fence",
    "LayerState",
    "Pipeline",
    "Placement",
    "RunReport",
    "Schedule",
    "Span",
    "Task",
    "Window",
    "balance",
    "layer_state",
    "load_layer_state",
    "open_device",
    "parse_device",
    "plan",
    "schedule_named",
    "simulate",
    "violations",
]
