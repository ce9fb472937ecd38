"""Annotated modules that the tests group, and the batches they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeal.data.grouping import AnnotatedModule, DataCollection

WIDTH = 4


class Model(AnnotatedModule):
    """Texts of vectors to one vector each."""

    def get_input_annot(self) -> Any:
        return "(b, l_seq, m_in)"

    def get_output_annot(self) -> Any:
        return "(b, m_out)"

    def get_mask_hint(self) -> Any:
        return ["seq"]


class Linear(Model):
    """A linear map at each position, then the maximum over those that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)


class LSTM(Model):
    """An LSTM, then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.unsqueeze(-1) / mask.sum(1)[:, None, None]
        return (self.lstm(x)[0] * weights).sum(1)


class Attention(Model):
    """Self-attention with a mask; gives a vector for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=~mask)[0]

    def get_output_annot(self) -> Any:
        return "(b, l_seq, m_in)"


class Pairs(AnnotatedModule):
    """Features of pairs (a word of one text, a word of the other) added into both texts: two length dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        scores = self.linear(x).sin() * mask.unsqueeze(-1)
        return {"sums": (scores.sum(2), scores.sum(1)), "pairs": scores}

    def get_input_annot(self) -> Any:
        return "(b, l_left, l_right, ..)"

    def get_output_annot(self) -> Any:
        return {"sums": ("(b, l_left, m_out)", "(b, l_right, m_out)"), "pairs": "(b, l_left, l_right, m_out)"}

    def get_mask_hint(self) -> Any:
        return ["left", "right"]


TEXT_MODELS = {"linear": Linear, "lstm": LSTM, "attention": Attention}


def texts(lengths: list[int], seed: int = 0) -> DataCollection:
    draw = torch.Generator().manual_seed(seed)
    return DataCollection("(B, L_sequence, 4)", [torch.randn(length, WIDTH, generator=draw) for length in lengths])


def pairs(sizes: list[tuple[int, int]], seed: int = 0) -> DataCollection:
    draw = torch.Generator().manual_seed(seed)
    samples = [torch.randn(left, right, WIDTH, generator=draw) for left, right in sizes]
    return DataCollection("(B, L_query, L_answer, M_x)", samples)
