"""How every command ends: 0, or one clear line and an exit code.

| code | |
| --- | --- |
| 0 | all of it is done, and on the disk |
| 1 | no one's mistake: memory or room on the disk ran out, a loss is not finite, a stage stands still, a worker died |
| 2 | a user's mistake |
| 130, 143 | Ctrl-C, SIGTERM |
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn

import click

from pipeal.core.errors import PipealError, StallError, exit_code
from pipeal.core.messages import logged_to

if TYPE_CHECKING:
    from pipeal.engine.distributed.launch import Launch

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk that takes no more."""

_SYSTEM = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM)
"""A full or protected disk: no bug."""

_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)
"""A folder that has the name of a file, a file that has that of a folder, links in a circle."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Open files, processes, memory."""

_NO_THREAD = "can't start new thread"
"""What Python says, without a number, where no further thread may be started."""

_ADVICE = "this machine has no more of them; lower data.workers or engine.threads, or raise its limit"
"""What to do about either."""

_NO_PRIMITIVE = "could not create a primitive"
"""What oneDNN says on a CPU where it gets no memory; nothing says that it has no other reason."""

TERMINATED = 143
"""The exit code after SIGTERM."""

_LONGEST = 1_000
"""Characters of the one line for a mistake."""


@contextmanager
def loading() -> Iterator[None]:
    """Shows that PyTorch is being loaded, which takes seconds.

    A command imports the rooms that need it inside this context, and not at the top of its file: so ``--help``, a
    mistyped name and the completion of a shell answer at once.
    """
    from rich.console import Console  # ``--help`` needs none

    with Console(stderr=True).status("loading PyTorch"):
        yield


def run(command: click.Command, arguments: list[str] | None = None) -> NoReturn:
    """Runs a command and leaves the process.

    Args:
        command: What to run.
        arguments: Its arguments; None for those of the process.
    """
    if _own_launch() is None:
        _run(command, arguments)
    # One of many processes that fails leaves without waiting for its threads: Gloo's and NCCL's may wait for a peer
    # that is gone, in code that cannot be interrupted, and the interpreter would wait for them. What is to be written
    # has been written by then.
    code: object = 1
    try:
        _run(command, arguments)
    except SystemExit as end:
        code = end.code
        if not code:
            raise
    except BaseException:  # noqa: BLE001  a bug: told as Python would
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _own_launch() -> Launch | None:
    """Which of several processes this is; None where it is alone."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from pipeal.engine.distributed.launch import Launch  # its room imports PyTorch, which one process may not need yet

    try:
        launch = Launch.found()
    except PipealError:  # the command itself says so
        return None
    return None if launch is None or launch.size == 1 else launch


def _run(command: click.Command, arguments: list[str] | None) -> NoReturn:
    # As Ctrl-C: the run unwinds, its workers end, and what there is by then is written.
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be text, nor terminals know every letter
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _messages_shown():
            command.main(arguments, standalone_mode=False)
    except click.UsageError as error:
        _leave(f"{error.format_message()} (see --help)", 2)
    except click.ClickException as error:
        _leave(error.format_message(), 2)
    except StallError as error:  # of several lines: it shows stacks
        _leave("\n".join([str(error), *_notes(error)]), 1)
    except PipealError as error:
        cause, code = error.__cause__, exit_code(error)
        full = isinstance(cause, OSError) and cause.errno in _FULL  # no mistake of the user
        _leave(one_line("; ".join([str(error), *_notes(error)])), 1 if full and code == 2 else code)
    except (KeyboardInterrupt, click.Abort):
        _leave("interrupted", 130)
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        _leave("interrupted", TERMINATED)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        from pipeal.core.outofmemory import bytes_asked, in_units, is_out_of_memory  # knows PyTorch's errors

        if _NO_THREAD in str(error):  # a worker process says so within its stack
            _leave(f"{_NO_THREAD}: {_ADVICE}", 1)
        if str(error) == _NO_PRIMITIVE:
            _leave(f"oneDNN {error}, as it does where memory runs out; lower the sizes of batches or of the model", 1)
        if not is_out_of_memory(error):
            raise
        asked = bytes_asked(error)
        what = str(error) if asked is None else f"{in_units(asked)} wanted"
        _leave(one_line(f"out of memory ({what}); lower the sizes of batches or of the model"), 1)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            _leave(f"{error.strerror}: {_ADVICE}", 1)
        if error.errno in _IN_THE_WAY and error.filename is not None:
            _leave(f"{error.filename}: {error.strerror}; move it out of the way or choose another --out", 1)
        if error.errno not in _SYSTEM:
            raise
        _leave(f"{error.filename or 'output'}: {error.strerror}; make room or choose another --out", 1)
    sys.exit(0)


class _Messages(logging.Handler):
    """Prints what pipeal logs on standard error, as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message; a closed pipe is raised, and ends the command."""
        # The stream is looked up each time: progress bars put their own in its place, which prints above them.
        print(self.format(record), file=sys.stderr)


def _messages_shown() -> AbstractContextManager[object]:
    """Shows what pipeal logs within the ``with`` block; of several processes rank 0 speaks for all."""
    launch = _own_launch()
    return logged_to(_Messages() if launch is None or launch.rank == 0 else logging.NullHandler())


def _notes(error: BaseException) -> list[str]:
    """Where an error happened, without the stack of another process, which is for a bug."""
    return [str(note).partition("\n")[0].rstrip(":") for note in getattr(error, "__notes__", [])]


def _leave(message: str, code: int) -> NoReturn:
    launch = _own_launch()
    rank = "" if launch is None else f"rank {launch.rank}: "
    print(f"pipeal: {rank}{one_line(message) if code == 2 else message}", file=sys.stderr)
    sys.exit(code)


def one_line(message: str) -> str:
    """A message that repeats what a user typed, fit for a terminal: no line ends or control codes, of bounded length.

    >>> one_line("unknown key 'a\\nb'\\x1b[31m")
    "unknown key 'a b'\\\\x1b[31m"
    """
    words = " ".join(message.split())
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST // 2]} … {shown[-_LONGEST // 2 :]}"
