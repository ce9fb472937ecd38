from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from pipeal.engine.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3): torch.ones(16_000_000)
before = faults()
for _ in range(10): torch.ones(16_000_000)
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    def faults(mode: str) -> int:
        run = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert faults("keep") * 10 < faults("leave")
