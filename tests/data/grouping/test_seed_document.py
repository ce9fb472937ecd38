"""The example of the published grouping demo: its module, its labels, its thresholds, its way through a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from pipeal.data.batching.bounds import find_thresholds
from pipeal.data.grouping import AnnotatedModule, DataCollection, LengthThresholdGrouper, UniGrouper

WIDTH = 16


class Words(nn.Module):
    """Embedding, linear map, maximum over what is no padding, linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.linear, self.proj = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert x.shape == mask.shape
        assert x.dim() == 2
        hidden = self.linear(self.emb(x)).masked_fill(~mask[:, :, None], -torch.inf)
        return self.proj(hidden.amax(1))[:, 0]


class AnnotatedWords(Words, AnnotatedModule):
    def get_mask_hint(self) -> Any:
        return ["seq"]

    def get_input_annot(self) -> Any:
        return "(b, l_seq)"

    def get_output_annot(self) -> Any:
        return "(b)"


@pytest.fixture(scope="module")
def dataset() -> list[tuple[Tensor, int]]:
    draw = np.random.default_rng(0)
    weights = 1 / 4.0 ** np.arange(4)
    lengths = draw.choice([1, 4, 16, 64], 192, p=weights / weights.sum())
    return [(torch.from_numpy(draw.integers(0, 8, length)), int(draw.integers(2))) for length in lengths]


def standard_collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(x) for x, _ in samples)
    xs = torch.stack([pad(x, (0, longest - len(x))) for x, _ in samples])
    mask = torch.stack([pad(torch.ones_like(x, dtype=torch.bool), (0, longest - len(x))) for x, _ in samples])
    return xs, mask, torch.tensor([y for _, y in samples], dtype=torch.float32)


def new_collate(samples: list[tuple[Tensor, int]]) -> tuple[DataCollection, Tensor]:
    xs = [x for x, _ in samples]
    return DataCollection("(B, L_sequence)", xs), torch.tensor([y for _, y in samples], dtype=torch.float32)


def test_the_demos_thresholds(dataset: list[tuple[Tensor, int]]) -> None:
    lengths = [len(x) for x, _ in dataset]
    assert find_thresholds(lengths, cost_fn=lambda x: x, k=3, num_trials=100) == [1, 4, 16]


def test_training_with_batch_grouping_is_training_in_the_standard_way(dataset: list[tuple[Tensor, int]]) -> None:
    torch.manual_seed(0)
    model, new_model = Words(), AnnotatedWords()
    new_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    new_optimizer = torch.optim.SGD(new_model.parameters(), lr=0.1)
    grouper = LengthThresholdGrouper("sequence", [1, 4, 16])
    loader = DataLoader(dataset, batch_size=64, collate_fn=standard_collate)  # type: ignore[arg-type]
    new_loader = DataLoader(dataset, batch_size=64, collate_fn=new_collate)  # type: ignore[arg-type]
    batches = 0
    for (x, mask, y), (batch, new_y) in zip(loader, new_loader, strict=True):
        out = model(x, mask)
        ((y - out) ** 2).mean().backward()

        batch.group(grouper=grouper)
        assert [group.value.shape[1] for group in batch.data_groups] == [1, 4, 16, 64]
        grouped = batch.apply(new_model)
        grouped.regroup(grouper=UniGrouper())
        new_out = grouped.data_groups[0].value
        ((new_y - new_out) ** 2).mean().backward()

        torch.testing.assert_close(new_out, out, rtol=0, atol=1e-5)
        for old, new in zip(model.parameters(), new_model.parameters(), strict=True):
            torch.testing.assert_close(new.grad, old.grad, rtol=0, atol=1e-5)
        for each in (optimizer, new_optimizer):
            each.step()
            each.zero_grad()
        batches += 1
    assert batches == 3
