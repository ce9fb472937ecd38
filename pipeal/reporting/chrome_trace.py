"""A trace of actions in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

One process per stage, one thread per layer, one complete event per forward, backward and update.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeal.core.atomic import write_whole
from pipeal.engine.trace import Span
from pipeal.reporting.timeline import ACTIONS

# Reserved colour names of the format, near the timeline's: blue, orange, green.
_COLOURS = {"F": "rail_response", "B": "rail_idle", "U": "rail_load"}


def write_chrome_trace(spans: Iterable[Span], path: str | Path, devices: Sequence[str]) -> None:
    """Writes spans as a trace file; a reader sees the old file or the new one, never a part.

    Args:
        spans: What was recorded, in any order; times become microseconds since the first of them.
        path: The JSON file to write.
        devices: The device of each stage.

    Raises:
        DataError: The system refused to write.
    """
    events = sorted(spans, key=lambda span: (span.begin, span.stage, span.layer))
    # One event per line: a trace is read by people too, and compared line by line.
    lines = ",\n".join(json.dumps(event) for event in [*_names(events, devices), *_actions(events)])
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


def _actions(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    origin = spans[0].begin if spans else 0.0
    for span in spans:
        action = span.action.value
        name, _ = ACTIONS[action]
        yield {
            # Perfetto colours by the name without its number: all forwards alike.
            "name": f"{name} {span.batch}",
            "cat": name,
            "ph": "X",
            "ts": round((span.begin - origin) * 1e6, 3),
            "dur": round(max(0.0, span.end - span.begin) * 1e6, 3),
            "pid": span.stage,
            "tid": span.layer + 1,
            "cname": _COLOURS[action],
            "args": {"stage": span.stage, "layer": span.layer + 1, "batch": span.batch},
        }
