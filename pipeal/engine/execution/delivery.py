"""Which failure the caller has been given already, so that the end of the ``with`` does not raise it again."""

from __future__ import annotations

from types import TracebackType


class Delivery:
    """Within it, what the engine raises goes to the caller.

    Attributes:
        failure: What the last such call raised; None where it went well.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def __enter__(self) -> None:
        """Begins without a failure that the caller has been given."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.failure = error
