"""Which devices get which layers, and what training takes there: measured, forecast, tried."""

from pipeal.planning.measure.memory import stage_memory
from pipeal.planning.placement import Placement
from pipeal.planning.planner import plan
from pipeal.planning.pure.simulate import simulate

__all__ = ["Placement", "plan", "simulate", "stage_memory"]
