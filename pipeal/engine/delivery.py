"""Which failures of a pipeline its caller has been told."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from pipeal.core.errors import PipealError, ScheduleError, first_line


class Delivery:
    """Within it, what the engine raises goes to the caller; the end of the ``with`` shall not raise it again.

    What ended the pipeline comes out of every later call, too. Raised as it is, a Ctrl-C of then would look like one of
    now: a thread that was told gets an error that says since when.

    Attributes:
        failure: What the last such call raised; None where it went well.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._told: set[int] = set()
        """The threads that have got it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        thread = get_ident()
        if error is not self.failure:
            self.failure, self._told = error, set()
        was_told = thread in self._told
        self._told.add(thread)
        if error is not None and was_told:
            where = [str(note).partition(";")[0] for note in getattr(error, "__notes__", [])[:1]]
            raise ScheduleError(
                f"the pipeline has failed, and its layers may stand at different batches, since "
                f"{', '.join([first_line(error), *where])}; leave its `with`, and load what was saved before"
            ) from error


def is_same(failure: BaseException, told: BaseException | None) -> bool:
    """Whether a failure was told: such as is found by looking at layers is found by each who looks.

    Errors of pipeal alone are compared by their words. Two Ctrl-C have the same, none, and are two.
    """
    return failure is told or (
        isinstance(told, PipealError) and type(failure) is type(told) and failure.args == told.args
    )
