from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading, torch
from pipeal.engine.allocator import keep_freed_memory
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
@pytest.mark.parametrize(("where", "numbers"), [("main", 9_000_000), ("worker", 2_000_000), ("worker", 9_000_000)])
def test_freed_memory_is_used_again_without_asking_the_system(where: str, numbers: int) -> None:
    """In workers, too: theirs was given back after every batch, 6,338 pages of a language model's of 128 texts."""
    left = faults("leave", where, numbers)
    # Where the first small blocks come to lie is chance, and costs the heap a few large ones in one program of five.
    assert any(faults("keep", where, numbers) * 10 < left for _ in range(5))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_how_many_heaps_there_may_be_is_what_the_user_has_said() -> None:
    said = faults("keep", "worker", 2_000_000, MALLOC_ARENA_MAX="8")
    assert any(said > 10 * faults("keep", "worker", 2_000_000) for _ in range(5))  # as above


def faults(mode: str, where: str, numbers: int, **environment: str) -> int:
    """Pages that a program of its own asks the system for."""
    command = [sys.executable, "-c", PROGRAM, mode, where, str(numbers)]
    own = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"} | environment
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=own).stdout)
