"""Benchmarks start themselves under ``torchrun``."""

from __future__ import annotations

import os
import subprocess
import sys


def torchrun(processes: int, file: str, *arguments: str) -> None:
    """Runs a script in so many processes of this machine.

    Each begins with one intra-op thread, whatever ``OMP_NUM_THREADS`` says here.

    Raises:
        CalledProcessError: One of them failed, and has said with what.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run([*command, file, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
