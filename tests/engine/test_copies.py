"""What repeats itself in memory travels once."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeal.core.tree import carried


def test_what_is_repeated_travels_once() -> None:
    """Between GPUs the codes of all classes were copied for each sample of a batch."""
    codes, sparse = torch.arange(12.0).view(2, 6), torch.eye(3).to_sparse()
    travelled: list[int] = []

    def carry(tensor: Tensor) -> Tensor:
        travelled.append(tensor.numel())
        return tensor.clone()

    for tensor, elements in ((codes.expand(5, 2, 6), 12), (codes[:, None].expand(2, 7, 6), 12), (codes.t(), 12)):
        travelled.clear()
        arrived = carried(tensor, carry)
        assert torch.equal(arrived, tensor)
        assert (travelled, arrived.stride()) == ([elements], tensor.stride())
    assert carried(sparse, carry).layout == sparse.layout
