"""Projectors: maps between features and the loss or answer of a head, as contrastive methods have them.

No class here draws random numbers.
"""

from __future__ import annotations

from torch import nn

from pipeal.methods.norm import BatchNorm


def projector(given: int, width: int) -> list[nn.Module]:
    """Three linear maps, of vectors ``given`` wide, each ``width`` wide, with batch norm and ReLU between them.

    As in VICReg (Bardes, Ponce and LeCun, 2021), and normed also where a batch is one sample.
    """
    maps: list[nn.Module] = [nn.Linear(given, width)]
    for _ in range(2):
        maps += [BatchNorm(width), nn.ReLU(), nn.Linear(width, width)]
    return maps
