"""A trace of actions in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

One process per stage, one thread per layer, one complete event per forward, backward and update; and where layers are
kept in the memory of the host, one thread for each way there, with an event per copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeal.core.atomic import write_whole
from pipeal.engine.trace import CopySpan, Span
from pipeal.reporting.timeline import ACTIONS, COPIES

# Reserved colour names of the format, near the timeline's: blue, orange, green.
_COLOURS = {"F": "rail_response", "B": "rail_idle", "U": "rail_load", "bring": "rail_animation", "send": "terrible"}
_THREADS = {"bring": 10**6, "send": 10**6 + 1}
"""Beyond all layers."""


def write_chrome_trace(
    spans: Iterable[Span], path: str | Path, devices: Sequence[str], copies: Iterable[CopySpan] = ()
) -> None:
    """Writes spans as a trace file; a reader sees the old file or the new one, never a part.

    Args:
        spans: What was recorded, in any order; times become microseconds since the first of them.
        path: The JSON file to write.
        devices: The device of each stage.
        copies: Of layers, beside their work, in any order.

    Raises:
        DataError: The system refused to write.
    """
    events = sorted(spans, key=lambda span: (span.begin, span.stage, span.layer))
    # One event per line: a trace is read by people too, and compared line by line.
    moved = sorted(copies, key=lambda copy: copy.begin)
    origin = min((each[0].begin for each in (events, moved) if each), default=0.0)
    found = [*_names(events, devices), *_actions(events, origin), *_copies(moved, origin)]
    lines = ",\n".join(json.dumps(event) for event in found)
    write_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def _names(spans: Sequence[Span], devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the metadata events: what processes and threads are called, and their order."""
    for stage, device in enumerate(devices):
        yield _metadata("process_name", stage, 0, name=f"stage {stage} · {device}")
        yield _metadata("process_sort_index", stage, 0, sort_index=stage)
    for stage, layer in sorted({(span.stage, span.layer) for span in spans}):
        yield _metadata("thread_name", stage, layer + 1, name=f"layer {layer + 1}")
        yield _metadata("thread_sort_index", stage, layer + 1, sort_index=layer + 1)


def _metadata(kind: str, stage: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": stage, "tid": thread, "args": args}


def _copies(copies: Sequence[CopySpan], origin: float) -> Iterator[dict[str, Any]]:
    for stage, way in sorted({(copy.stage, copy.way.value) for copy in copies}):
        yield _metadata("thread_name", stage, _THREADS[way], name=COPIES[way][0])
    for copy in copies:
        way = copy.way.value
        yield _event(copy, COPIES[way][0], copy.layer + 1, _THREADS[way], _COLOURS[way], origin)


def _actions(spans: Sequence[Span], origin: float) -> Iterator[dict[str, Any]]:
    for span in spans:
        action = span.action.value
        yield _event(span, ACTIONS[action][0], span.batch, span.layer + 1, _COLOURS[action], origin)


def _event(span: Span | CopySpan, name: str, number: int, thread: int, colour: str, origin: float) -> dict[str, Any]:
    """A complete event. Perfetto colours by the name without its number: all forwards alike."""
    return {
        "name": f"{name} {number}",
        "cat": name,
        "ph": "X",
        "ts": round((span.begin - origin) * 1e6, 3),
        "dur": round(max(0.0, span.end - span.begin) * 1e6, 3),
        "pid": span.stage,
        "tid": thread,
        "cname": colour,
        "args": {"stage": span.stage, "layer": span.layer + 1, "batch": span.batch},
    }
