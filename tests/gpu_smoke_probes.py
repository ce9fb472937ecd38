"""Probes for the tests of ``scripts/gpu_smoke.sh``: each in a process of its own, which imports no torch."""

from __future__ import annotations

import time

from gpu_smoke.place import Place
from gpu_smoke.predictions import Finding


def claims(_: Place) -> Finding:
    """Says that a prediction is true, wherever it runs."""
    return Finding(True, "7 ms", "by counting", affected=True, affected_figure="8 ms", figures={"ms": 7.0})


def raises(_: Place) -> Finding:
    """Fails."""
    raise ValueError("no such kernel")


def hangs(_: Place) -> Finding:
    """Never ends by itself."""
    while True:
        time.sleep(1)
