"""The published text models and training step, in the operators they were written with: the baseline of text.py.

Written from the thesis' description: attention by explicit softmax, a layer norm of elementary operators, nn.Dropout
everywhere (attention probabilities included), unfused Adam, an LSTM that runs over the padding, and a new thread for
each layer and batch, joined before the next batch.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE

Features = tuple[Tensor, Tensor]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.scale * centred / (x.std(-1, keepdim=True) + 1e-6) + self.shift


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = self.dropout(scores.masked_fill(~mask[:, None, None], -1e9).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Encoder(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.feed = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width))
        self.norms = nn.ModuleList(Norm(width) for _ in range(3))
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(2))

    def forward(self, features: Features) -> Features:
        x, mask = features
        x = x + self.dropouts[0](self.attention(self.norms[0](x), mask))
        x = x + self.dropouts[1](self.feed(self.norms[1](x)))
        return self.norms[2](x), mask


class Recurrent(nn.Module):
    """Runs over the padding: law 6 does not hold here."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)

    def forward(self, features: Any) -> Any:
        x, state = features if len(features) == 2 and isinstance(features[1], tuple) else (features[0], None)
        return self.lstm(x, state)


class Embedding(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, tokens: Tensor) -> Features:
        return self.table(tokens), tokens != 0


class MeanOverAll(nn.Module):
    def forward(self, features: Features) -> Tensor:
        return features[0].mean(1)


class MeanOverWords(nn.Module):
    def forward(self, features: Features) -> Tensor:
        x, mask = features
        return (x * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)


class LastStates(nn.Module):
    def forward(self, features: Any) -> Tensor:
        return features[1][0].sum(0)


def published(model: str, words: int, classes: int) -> ALPackage:
    """``lstm`` or ``transformer`` with the published sizes, 4 AL layers."""
    width, hidden, code = 300, 256, 128
    optimizer = partial(torch.optim.Adam, fused=False, foreach=False)

    def side(inner: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inner, code), nn.Tanh())

    def bridge(pool: nn.Module, inner: int) -> nn.Module:
        return nn.Sequential(pool, side(inner))

    label = LabelAE(side(classes), nn.Sequential(nn.Linear(code, classes), nn.Tanh()), classes)
    layers = [AL(ENC(Embedding(words, width), bridge(MeanOverAll(), width)), label, 2.5e-4, optimizer)]
    for number in range(3):
        if model == "lstm":
            f: nn.Module = Recurrent(2 * hidden if number else width, hidden)
            enc = ENC(f, bridge(LastStates(), hidden))
        else:
            enc = ENC(Encoder(width, hidden, heads=6, dropout=0.3), bridge(MeanOverWords(), width))
        layers.append(AL(enc, AE(side(code), nn.Linear(code, code)), 2.5e-4, optimizer))
    return ALPackage(layers)


def published_step(package: ALPackage, x: Any, y: Any) -> None:
    """Forward layer by layer, each backward and update in a thread of its own, all joined."""
    threads = []
    for layer in package:
        x, y = layer(x, y)
        threads.append(threading.Thread(target=layer.backward_and_update))
        threads[-1].start()
    for thread in threads:
        thread.join()
