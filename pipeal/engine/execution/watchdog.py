"""The watchdog's words: which stage stands still, where every thread is, and a file with all of it.

The file (``stall-<date>-<time>.txt``) has the stacks of all Python threads of the process, also of those that are not
the engine's, such as loaders; what waits in each queue; and how far each stage is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from time import perf_counter

from pipeal.core.errors import StallError, first_line
from pipeal.engine.execution.worker import TICK_S, StageThread
from pipeal.engine.runner.compile_gate import GATE


def wait_for_end(threads: Iterable[StageThread], timeout_s: float) -> None:
    """Waits for threads that were told to stop; for as long as one compiles, which may take minutes, at no charge.

    Args:
        threads: Those that have started.
        timeout_s: How long all may take together.

    Raises:
        StallError: A thread did not come back; it is left behind, as a daemon.
    """
    started = [thread for thread in threads if thread.ident is not None]
    until = perf_counter() + timeout_s
    for thread in started:
        while thread.is_alive() and perf_counter() < until:
            thread.join(min(TICK_S, max(0.0, until - perf_counter())))
            if GATE.busy():
                until = perf_counter() + timeout_s
    left = [thread for thread in started if thread.is_alive()]
    if left:
        raise stall_report(left, timeout_s)


def stall_report(
    threads: Iterable[StageThread],
    timeout_s: float,
    dump_folder: str | Path | None = None,
    state: Iterable[object] = (),
) -> StallError:
    """Names the stage that stands still and shows where every thread is.

    Args:
        threads: The stages' threads.
        timeout_s: How long nothing moved.
        dump_folder: Where a file with the stacks of all threads is left, which the error names; None for none.
        state: What else the file shall say.
    """
    now = perf_counter()
    workers = list(threads)
    acting = [worker for worker in workers if not worker.doing[0].startswith("waiting")]
    oldest = min(acting or workers, key=lambda worker: worker.doing[1])
    frames = sys._current_frames()
    lines = [
        f"stage {oldest.stage.number} stands still: {oldest.doing[0]} for {now - oldest.doing[1]:.1f} s on "
        f"{oldest.stage.device} (limit {timeout_s:g} s without progress)"
    ]
    told = []
    for worker in workers:
        what, since = worker.doing
        told.append(f"stage {worker.stage.number}: {what}, for {now - since:.1f} s, {len(worker.inbox)} waiting")
        lines.append(told[-1])
        frame = frames.get(worker.ident or 0)
        if frame is not None:
            lines += ["".join(traceback.format_stack(frame)).rstrip()]
    lines[0] += dumped(dump_folder, [lines[0], *told, *map(str, state)])
    return StallError("\n".join(lines))


def dumped(folder: str | Path | None, lines: Iterable[str]) -> str:
    """Leaves a file with the stacks of all threads of this process, and says where, for a message."""
    if folder is None:
        return ""
    try:
        path = write_dump(folder, "\n".join(lines))
    except OSError as error:
        return f"; the stacks of all threads could not be written to {folder}: {first_line(error)}"
    return f"; the stacks of all threads are in {path}"


def write_dump(folder: str | Path, text: str) -> Path:
    """Writes a text and the stacks of all threads of the process into a new file.

    Args:
        folder: Made if it is not there.
        text: What comes first.

    Returns:
        The file.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    now = time.localtime()
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S', now)}, process {os.getpid()}", text, *_stacks()]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("stall-%Y%m%d-%H%M%S", now)
    for number in count(1):
        path = folder / (f"{stem}.txt" if number == 1 else f"{stem}-{number}.txt")
        try:
            file = path.open("x", encoding="utf-8", errors="backslashreplace")
        except FileExistsError:
            continue
        try:
            with file:
                file.write("\n\n".join(parts) + "\n")
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path
    raise AssertionError("unreachable: counting does not end")


def _stacks() -> Iterable[str]:
    """The stack of every Python thread, by its name."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = names.get(ident)
        name = "a thread that Python did not start" if thread is None else thread.name
        yield f"thread {ident}, {name}:\n" + "".join(traceback.format_stack(frame)).rstrip()
