"""Where each stage's time went: at work, or idle, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeal.reporting.page.folder import Run, number_at
from pipeal.reporting.page.markup import Html, join, number, percent, table, tag

_BUSY = {"F": ("forward", "#0072B2"), "B": ("backward", "#E69F00"), "U": ("update", "#33B58C")}
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
        device: Where it ran; empty if nobody knows.
        busy: At work.
        actions: By action, ``F``, ``B`` and ``U``.
        waiting: By reason, ``input``, ``space``, ``join``, ``saving``; and ``rest``, what is neither work nor a wait.
    """

    device: str
    busy: float
    actions: Mapping[str, float]
    waiting: Mapping[str, float]


def stage_shares(run: Run) -> list[StageShares]:
    """The shares of each stage; those that a summary does not tell are left out."""
    stages, devices = run.summary.get("stages"), run.summary.get("devices")
    devices = devices if isinstance(devices, list) else []
    found = []
    for place, stage in enumerate(stages if isinstance(stages, list) else []):
        busy = number_at(stage, "busy_share")
        actions = {action: number_at(stage, f"busy_s.{action}") or 0.0 for action in _BUSY}
        seconds = sum(actions.values()) / busy if busy and any(actions.values()) else _trained_s(run)
        if busy is None or not seconds:
            continue
        waiting = {reason: (number_at(stage, f"waiting_s.{reason}") or 0.0) / seconds for reason in _IDLE}
        waiting["rest"] = max(0.0, 1 - busy - sum(waiting.values()))
        shares = {action: taken / seconds for action, taken in actions.items()}
        found.append(StageShares(str(devices[place]) if place < len(devices) else "", busy, shares, waiting))
    return found


def idle_reasons(run: Run) -> Html:
    """A bar for each stage, and the figures in it."""
    stages = stage_shares(run)
    if not stages:
        return tag("p", "summary.json tells no times of stages.", class_="note")
    sizes: Any = run.summary.get("sizes")
    rows = []
    for place, stage in enumerate(stages):
        name = f"stage {place}" + (f" · {stage.device}" if stage.device else "")
        cells = [percent(share) for share in (*stage.actions.values(), stage.busy, *stage.waiting.values())]
        rows.append([name, _layers(sizes, place), _bar(stage), *cells])
    heads = ["stage", "layers", "", *(name for name, _ in _BUSY.values()), "busy", *_IDLE]
    keys = (
        tag("li", tag("i", class_="box", style=f"background: {colour}"), name)
        for name, colour in (*_BUSY.values(), *_IDLE.values())
    )
    words = (
        "Shares of the seconds of training. Input: nothing came from the stage before, or from the loader. Space: the "
        "stage after had not taken what was ready. Join: the schedule lets batches wait for each other. Saving: what "
        "layers had learnt was copied for a checkpoint. Rest: neither, such as the work of handing on. "
    )
    if any(sum(stage.waiting.values()) + stage.busy > 1.02 for stage in stages):
        words += "Shares that make more than 100 % are of a thread that runs ahead of its device."
    return join([tag("ul", *keys, class_="keys"), table(heads, rows, class_="stages"), tag("p", words, class_="note")])


def _layers(sizes: Any, place: int) -> str:
    known = isinstance(sizes, list) and place < len(sizes) and isinstance(sizes[place], int)
    return number(sizes[place]) if known else "–"


def _bar(stage: StageShares) -> Html:
    shares = [(share, *_BUSY[action]) for action, share in stage.actions.items()]
    shares += [(share, *_IDLE[reason]) for reason, share in stage.waiting.items()]
    whole = max(1.0, sum(share for share, _, _ in shares))
    parts = [
        tag("i", style=f"width: {100 * share / whole:.2f}%; background: {colour}", title=f"{name} {percent(share)}")
        for share, name, colour in shares
        if share > 0
    ]
    return tag("div", *parts, class_="bar")


def _trained_s(run: Run) -> float:
    """Seconds of training, of all turns."""
    return sum(row.epoch_time for row in run.rows)
