"""Most of what a small run takes, left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

WHITE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)
"""A PNG of one pixel."""


def cheapen(patch: pytest.MonkeyPatch) -> None:
    """Pictures are one white pixel, costs are counted on one batch, no numbers of threads are tried, comparisons end
    without a forecast."""
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).write_bytes(WHITE))
    patch.setattr("pipeal.run.form_costs.LOOKED_AT", 1)
    patch.setattr("pipeal.run.outlook.MOST_S", 0.0)
