"""A plugin of pytest that writes each test's end as a line of JSON at once: a run that is killed leaves what it found.

``python -m pytest -p gpu_smoke.test_lines`` with ``GPU_SMOKE_LINES=FILE`` in the environment.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test's call, or what kept it from being called."""
    if report.when == "call" or not report.passed:
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        _write({"test": report.nodeid, "outcome": outcome, "seconds": report.duration, "line": _first_line(report)})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that could not be read."""
    if report.failed:
        _write({"test": report.nodeid, "outcome": "error", "seconds": 0.0, "line": _first_line(report)})


def _first_line(report: Any) -> str:
    """Of the error, or the reason of a skip."""
    found = report.longrepr
    if report.passed or found is None:
        return ""
    if isinstance(found, tuple):
        return str(found[2])
    crash = getattr(found, "reprcrash", None)
    lines = (str(found) if crash is None else crash.message).strip().splitlines()
    errors = [line for line in lines if crash is None and line.startswith("E ")]
    return (errors or lines or [""])[0][:300]


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["GPU_SMOKE_LINES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
