"""How a process ends that is one of many."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, NoReturn, ParamSpec

from pipeal.core.errors import PipealError

if TYPE_CHECKING:
    from pipeal.engine.distributed.launch import Launch

P = ParamSpec("P")


def own_launch() -> Launch | None:
    """Which of several processes this is; None where it is alone."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from pipeal.engine.distributed.launch import Launch  # its room imports PyTorch, which one process may not need yet

    try:
        launch = Launch.found()
    except PipealError:  # the command itself says so
        return None
    return None if launch is None or launch.size == 1 else launch


def spoken() -> str:
    """What the one line for an error begins with.

    >>> spoken()
    'pipeal: '
    """
    launch = own_launch()
    return "pipeal: " if launch is None else f"pipeal: rank {launch.rank}: "


def at_once(run: Callable[P, NoReturn]) -> Callable[P, NoReturn]:
    """Lets a command that fails as one of many processes leave without waiting for its threads.

    Gloo's and NCCL's may wait for a peer that is gone, in code that nobody can interrupt, and the interpreter would
    wait for them. What is to be written has been written by then; the two streams are flushed here.
    """

    @wraps(run)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> NoReturn:
        if own_launch() is None:
            run(*arguments, **options)
        code: object = 1
        try:
            run(*arguments, **options)
        except SystemExit as end:
            code = end.code
            if not code:
                raise
        except BaseException:  # noqa: BLE001  a bug: told as Python would
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    return wrapped
