"""What all tests of the engine share: one intra-op thread in the caller, and no limit that a busy machine can reach."""

from __future__ import annotations

import pytest

STOP_S = 60.0
"""How long the end of a pipeline waits for threads. As a user has it, 2 s, a busy machine may keep one from ending in
time; and a thread that never ends is a test's own, which patches this with little."""


@pytest.fixture(autouse=True)
def _one_thread_each(one_thread: None) -> None:
    """It computes with the bits of a worker with one thread."""


@pytest.fixture(autouse=True)
def _ends_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is then never told together with threads that only came late."""
    for module in ("execution.executors", "distributed.executor", "distributed.follower"):
        monkeypatch.setattr(f"pipeal.engine.{module}.STOP_S", STOP_S)


@pytest.fixture
def counted_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Layers that take time set the clock, and nothing else does: a busy machine does not show.

    Returns:
        What it shows.
    """
    now = [0.0]
    monkeypatch.setattr("bench.virtual.sleep", lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("pipeal.engine.devices.base.time.perf_counter", lambda: now[0])
    return now
