"""Checkpoints of the first format, which are read and no longer written.

::

    layer-000.pt    {"state": …, "losses": […], "splits": 0}    what is counted of the epoch is in the first layer's
    layer-001.pt    {"state": …}

Each file is a ``torch.save`` of plain values, which loads with ``weights_only=True``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeal.core.errors import DataError, first_line


def state_of(path: Path) -> dict[str, Any]:
    """The state of a layer, on the CPU.

    Raises:
        DataError: Its file is gone, or holds something else than plain values.
    """
    state: dict[str, Any] = _content(path)["state"]
    return state


def epoch_of(path: Path) -> dict[str, Any]:
    """What is counted of the epoch under way, by the file of the first layer; raises as :func:`state_of`."""
    content = _content(path)
    return {name: content[name] for name in ("losses", "splits") if name in content}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is refused: it does not load as tensors, numbers, texts and collections of them "
            f"({first_line(error)}); nothing in it was run; take another checkpoint"
        ) from error
    if not (isinstance(content, dict) and isinstance(content.get("state"), dict)):
        raise DataError(f"{path} holds no state of a layer; take another checkpoint")
    return content
