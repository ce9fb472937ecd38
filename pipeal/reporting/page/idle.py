"""Where each stage's time went: at work, or idle, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeal.reporting.page.run import Run, number_at
from pipeal.reporting.page.shown import percent
from pipeal.reporting.timeline import ACTIONS

_IDLE = {
    "input": ("waiting for input", "#8f8f8f"),
    "space": ("waiting for space", "#b8b8b8"),
    "join": ("waiting at a join", "#d4d4d4"),
    "saving": ("copying for a checkpoint", "#c9a9b8"),
    "rest": ("between actions", "#ededed"),
}


@dataclass(frozen=True)
class StageShares:
    """How one stage spent the time of training, as shares of it.

    Attributes:
        device: Where it ran; empty if that is not known.
        busy: At work; on a GPU, by its host.
        kernels: On a GPU, the least share that had kernels to run; None on a CPU, or where that is not known.
        actions: By action, ``F``, ``B`` and ``U``.
        waiting: By reason, ``input``, ``space``, ``join``, ``saving``; and ``rest``, what is neither work nor a wait.
    """

    device: str
    busy: float
    actions: Mapping[str, float]
    waiting: Mapping[str, float]
    kernels: float | None = None

    @property
    def parts(self) -> list[tuple[float, str, str]]:
        """The share, the name and the colour of each part of its bar."""
        busy = [(share, *ACTIONS[action]) for action, share in self.actions.items()]
        return busy + [(share, *_IDLE[reason]) for reason, share in self.waiting.items()]

    @property
    def length(self) -> float:
        """What all parts come to, and at least 1."""
        return max(1.0, sum(share for share, _, _ in self.parts))

    @property
    def runs_ahead(self) -> bool:
        """Whether its thread does not wait for its device, so that times count twice."""
        return self.busy + sum(self.waiting.values()) > 1.02


def stage_shares(run: Run) -> list[StageShares]:
    """The shares of each stage; those that a summary does not tell are left out."""
    stages, devices = run.summary.get("stages"), run.summary.get("devices")
    devices = devices if isinstance(devices, list) else []
    found = []
    for place, stage in enumerate(stages if isinstance(stages, list) else []):
        busy = number_at(stage, "busy_share")
        actions = {action: number_at(stage, f"busy_s.{action}") or 0.0 for action in ACTIONS}
        seconds = sum(actions.values()) / busy if busy and any(actions.values()) else _trained_s(run)
        if busy is None or not seconds:
            continue
        waiting = {reason: (number_at(stage, f"waiting_s.{reason}") or 0.0) / seconds for reason in _IDLE}
        waiting["rest"] = max(0.0, 1 - busy - sum(waiting.values()))
        shares = {action: taken / seconds for action, taken in actions.items()}
        device = str(devices[place]) if place < len(devices) else ""
        kernels = number_at(stage, "kernel_busy_share_at_least")
        found.append(StageShares(device, busy, shares, waiting, kernels))
    return found


def stage_table(run: Run, stages: Sequence[StageShares]) -> tuple[list[str], list[list[object]]]:
    """Heads and rows: where each stage is, the bar of its shares, and the figures in it."""
    sizes: Any = run.summary.get("sizes")
    known = isinstance(sizes, list)
    on_gpus = any(stage.kernels is not None for stage in stages)
    rows: list[list[object]] = []
    for place, stage in enumerate(stages):
        name = f"stage {place}" + (f" · {stage.device}" if stage.device else "")
        layers = sizes[place] if known and place < len(sizes) and isinstance(sizes[place], int) else None
        least = [] if not on_gpus else [None if stage.kernels is None else f"≥ {percent(stage.kernels)}"]
        at_work, waiting = map(percent, (*stage.actions.values(), stage.busy)), map(percent, stage.waiting.values())
        rows.append([name, layers, stage, *at_work, *least, *waiting])
    busy = ["host-open", "kernel-busy"] if on_gpus else ["busy"]
    return ["stage", "layers", "", *(name for name, _ in ACTIONS.values()), *busy, *_IDLE], rows


def _trained_s(run: Run) -> float:
    """Seconds of training, of all turns."""
    return sum(row.epoch_time for row in run.rows)
