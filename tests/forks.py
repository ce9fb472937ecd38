"""Processes forked from one that has imported what a run does, and done nothing else.

To import it takes four seconds of a core, and few tests are about that: the others start their ranks here. What is to
be found and killed by its environment, and what a user types, is started as a program. So are some ranks: those of here
have one hash seed, by which they might agree on the order of a set.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cheap import cheapen

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch._dynamo", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"),  # a run imports on its way
        *("pipeal.cli.text", "pipeal.cli.vision", "pipeal.run.train"),
    ]
)


class Fork:
    """Such a process, with what of :class:`subprocess.Popen` tests use."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, within_s: float | None = None) -> int:
        self._process.join(within_s)
        assert self._process.exitcode is not None, f"it goes on after {within_s} s"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def forked(log: Path, environment: Mapping[str, str], cwd: Path, work: Callable[..., Any], *given: Any) -> Fork:
    """Starts a process that calls ``work(*given)`` on one intra-op thread.

    Args:
        log: What it says goes there.
        environment: All of it.
        cwd: Where it is.
        work: A function of a module.
        given: Its arguments.
    """
    log.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TMPDIR", raising=False)  # what it imports may keep a folder there until the session has ended
        forkserver.ensure_running()
    process = _context.Process(target=_run, args=(log, dict(environment), cwd, work, given))
    process.start()
    return Fork(process)


def run_python(*arguments: str) -> None:
    """As ``python *arguments``, a script's path or ``-c`` and code, and its arguments; runs are cheap."""
    cheapen(pytest.MonkeyPatch())
    first, *more = arguments
    if first == "-c":
        code, *more = more
        sys.argv = ["-c", *more]
        exec(compile(code, "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
    else:
        sys.argv = [first, *more]
        runpy.run_path(first, run_name="__main__")


def _run(log: Path, environment: Mapping[str, str], cwd: Path, work: Callable[..., Any], given: Sequence[Any]) -> None:
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None
    np.random.seed()
    torch.set_num_threads(1)
    gc.freeze()
    work(*given)
