"""How every command ends: 0, or one clear line and 2 for a user's mistake, or 130 for Ctrl-C."""

from __future__ import annotations

import errno
import signal
import sys
from typing import NoReturn

import click

from pipeal.errors import PipealError, StallError

_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""A full or protected disk: nobody's bug."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Open files, processes, memory."""


def run(command: click.Command, arguments: list[str] | None = None) -> NoReturn:
    """Runs a command and leaves the process.

    Args:
        command: What to run.
        arguments: Its arguments; None for those of the process.
    """
    # As Ctrl-C: the run unwinds, its workers end, and what there is by then is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        command.main(arguments, standalone_mode=False)
    except click.UsageError as error:
        _leave(f"{error.format_message()} (see --help)", 2)
    except click.ClickException as error:
        _leave(error.format_message(), 2)
    except StallError as error:  # nobody's mistake: the stacks are the message
        _leave(str(error), 1)
    except PipealError as error:
        _leave("; ".join([str(error), *getattr(error, "__notes__", [])]), 2)
    except (KeyboardInterrupt, click.Abort):
        _leave("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has left
        sys.stderr.close()
        sys.exit(1)
    except MemoryError as error:
        _leave(f"out of memory ({error}); lower the sizes of batches or of the model", 1)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            _leave(f"{error.strerror}: this machine has no more of them; lower data.workers, or raise its limit", 1)
        if error.errno not in _SYSTEM:
            raise
        _leave(f"{error.filename or 'output'}: {error.strerror}; make room or choose another --out", 1)
    sys.exit(0)


def _leave(message: str, code: int) -> NoReturn:
    print(f"pipeal: {message}", file=sys.stderr)
    sys.exit(code)
