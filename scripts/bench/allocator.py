"""Pages that a program asks the system for, with glibc's own rules and once it is told to keep what is freed.

    python scripts/bench/allocator.py [--turns 5] [--json FILE]

Each figure is of a process of its own: after three large tensors were made and freed, ten more are, in the first
thread or in another, as a stage's worker is. Kept memory should cost a tenth of the pages at most. Where small
blocks come to lie first is chance, and costs the heap large ones in one process of five: hence the median of turns.
The last row lets the user say how many heaps there may be (``MALLOC_ARENA_MAX``), which is then left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track

from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

PROGRAM = """
import resource, sys, threading, torch
from pipeal.engine.devices.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate():
    for _ in range(3): torch.ones(numbers)
    before = faults()
    for _ in range(10): torch.ones(numbers)
    print(faults() - before)
numbers = int(sys.argv[3])
if sys.argv[2] == "worker":
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
else:
    allocate()
"""

CASES: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("main", 9_000_000, {}),
    ("worker", 2_000_000, {}),
    ("worker", 9_000_000, {}),
    ("worker", 2_000_000, {"MALLOC_ARENA_MAX": "8"}),
)
"""Thread, numbers in a tensor, and what the user has said."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write all figures there")
    given = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("the settings are glibc's, and this is no Linux")
    found: list[dict[str, Any]] = [
        {"thread": where, "numbers": numbers, "said": said, "left": [], "kept": []} for where, numbers, said in CASES
    ]
    for _ in track(range(given.turns), "turns"):
        for row in found:
            for mode, pages in (("leave", row["left"]), ("keep", row["kept"])):
                pages.append(page_faults(mode, row["thread"], row["numbers"], row["said"]))
    rows = [
        [
            row["thread"],
            row["numbers"],
            " ".join(f"{key}={value}" for key, value in row["said"].items()) or "-",
            *(f"{median(row[way]):.0f} ({min(row[way])} to {max(row[way])})" for way in ("left", "kept")),
            "yes" if median(row["kept"]) * 10 < median(row["left"]) else "no",
        ]
        for row in found
    ]
    columns = ["thread", "floats of a tensor", "environment", "pages, glibc's rules", "pages, kept", "a tenth at most"]
    print_table("pages asked for by ten tensors", columns, rows)
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": found, "environment": environment()}, indent=1) + "\n")


def page_faults(mode: str, where: str, numbers: int, said: dict[str, str]) -> int:
    """Pages that a process of its own asks the system for."""
    command = [sys.executable, "-c", PROGRAM, mode, where, str(numbers)]
    own = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"} | said
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=own).stdout)


if __name__ == "__main__":
    main()
