"""The tests marked ``cuda``, file by file: each file a process of its own, which is stopped at its limit."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_smoke.commands import Command, Ended

MEMORY = "memory_does_not_grow"
"""The test that runs in a process of its own: what other tests allocate changes what it measures."""

_FIRST = ("engine/test_cuda.py", "data/grouping/test_gradients.py", "engine/test_fence_cuda.py",
          "engine/test_inference_cuda.py", "engine/test_finite_cuda.py",
          "integration/test_no_host_waits_cuda.py")  # fmt: skip
"""Whose failures say most; then all others, the distributed ones last."""
_MARK = re.compile(r"^(@|pytestmark = |    @)pytest\.mark\.cuda$", re.MULTILINE)
_FILE_S, _TEST_S = 150.0, 60.0


@dataclass(frozen=True)
class MarkedFile:
    """Tests that share a process.

    Attributes:
        name: For the page.
        command: Runs them.
        lines: Where each leaves how it ended.
    """

    name: str
    command: Command
    lines: Path


def marked_files(root: Path) -> list[str]:
    """The files that have tests marked ``cuda``, by what should be known first."""
    files = [path for path in (root / "tests").rglob("test_*.py") if _MARK.search(path.read_text(encoding="utf-8"))]
    names = sorted(str(path.relative_to(root)) for path in files)
    first = [f"tests/{name}" for name in _FIRST if f"tests/{name}" in names]
    others = [name for name in names if name not in first]
    return first + sorted(others, key=lambda name: "distributed" in name)


def commands(root: Path, work: Path, *, stand_in: bool, files: Sequence[str] | None = None) -> list[MarkedFile]:
    """What to run: of a stand-in, where these tests only skip, all files in one process."""
    found = list(files) if files else marked_files(root)
    if stand_in:
        return [_file(work, "all files", found)]
    made = []
    for name in found:
        if name == "tests/engine/test_cuda.py":
            made.append(_file(work, f"{name} ({MEMORY} alone)", [name, "-k", MEMORY]))
            made.append(_file(work, name, [name, "-k", f"not {MEMORY}"]))
        else:
            made.append(_file(work, name, [name]))
    return made


def _file(work: Path, name: str, arguments: Sequence[str]) -> MarkedFile:
    lines = work / f"{name.replace('/', '-').partition(' ')[0]}-{len(list(work.iterdir()))}.jsonl"
    lines.touch()
    own = ["-q", "-p", "gpu_smoke.test_lines", "-p", "no:cacheprovider", "-m", "cuda", "-o", f"timeout={_TEST_S:.0f}"]
    command = Command(
        name,
        [sys.executable, "-m", "pytest", *own, *arguments],
        _FILE_S,
        {"GPU_SMOKE_LINES": str(lines), "CI": "true"},
    )
    return MarkedFile(name, command, lines)


def found(file: MarkedFile, ended: Ended) -> dict[str, Any]:
    """What came of a file, for the JSON."""
    whole, _, _ = file.lines.read_text(encoding="utf-8", errors="replace").rpartition(
        "\n"
    )  # a kill may cut the last one
    lines = [json.loads(line) for line in whole.splitlines()]
    count = Counter(line["outcome"] for line in lines)
    failures = [
        {"test": line["test"], "line": line["line"]} for line in lines if line["outcome"] in ("failed", "error")
    ]
    reasons = Counter(line["line"].removeprefix("Skipped: ") for line in lines if line["outcome"] == "skipped")
    how = "" if ended.code == 1 and failures else ended.how
    return {
        "file": file.name,
        "passed": count["passed"],
        "failed": count["failed"] + count["error"],
        "skipped": count["skipped"],
        "skip_reasons": dict(reasons),
        "seconds": ended.seconds,
        "ended": f"{how}: {ended.last_line}" if how and not ended.why else how,
        "failures": failures,
    }
