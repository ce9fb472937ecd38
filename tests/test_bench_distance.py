"""scripts/bench/distance.py: the other methods run, and rows are made of what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"

ROWS = """
import json
from distance import carried_out, of_updates, parts_of
from long_line import LinkKind

assert parts_of("1f1b") == [4, 8, 16, 32]  # torch refuses fewer micro-batches than stages, here four
for method in ("gpipe", "1f1b", "data parallel", "local SGD"):
    order = {"method": method, "step": (0.001, 0.002), "samples": 64, "packets": 8, "parts": (2, 4), "local_steps": 3}
    order |= {"weights_bytes": 4096, "warm_ups": 1, "updates": 2}
    found = carried_out(order, 2)
    rows = [of_updates({**one, "passed": {}}, order, LinkKind()) for one in found]
    print(json.dumps({"method": method, "rows": rows}))
"""


@pytest.mark.slow
def test_other_methods_have_rows() -> None:
    """They had none: a key was read that no rank said, the loopback has another name, and stages sent no gradients."""
    # In a process of its own: ranks are forked, which is not for one with threads.
    done = subprocess.run(
        [sys.executable, "-c", ROWS], cwd=BENCH, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {one["method"]: one["rows"] for one in map(json.loads, done.stdout.splitlines())}
    assert {method: len(rows) for method, rows in found.items()} == {
        "gpipe": 2, "1f1b": 2, "data parallel": 1, "local SGD": 1,
    }  # fmt: skip
    for rows in found.values():
        for row in rows:
            assert min(row["packet_ms"], row["ideal_ms"], row["bound_ms"]) > 0.0
