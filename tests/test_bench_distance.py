"""scripts/bench/distance.py: the other methods run, and rows are made of what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benches import BENCH, Benches

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


def test_rows_name_the_machine_they_are_of(bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bore the name of the first, though a file grows on several."""
    distance = bench["distance"]
    row = distance.Row("pipeal", 0.0, 1000.0, 0, 16.0, 15.0, 15.1, 0.9, 1.0, 0.0)
    first = distance.Kept.read(tmp_path / "rows.json")
    first.add(row)
    first.add(replace(row, turn=1))
    monkeypatch.setattr(distance, "environment", lambda: {"cpu": "another"})
    second = distance.Kept.read(tmp_path / "rows.json")
    second.add(replace(row, turn=2))
    again = distance.Kept.read(tmp_path / "rows.json")
    assert [one["cpu"] for one in again.machines] == [first.here["cpu"], "another"]
    assert [one.machine for one in again.rows.values()] == [0, 0, 1]
