"""Frames of messages, as ZeroMQ gives them."""

from __future__ import annotations

from typing import Any


class Frame:
    """A frame of these bytes."""

    def __init__(self, content: Any) -> None:
        self.buffer = memoryview(bytearray(bytes(content)))
