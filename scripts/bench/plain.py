"""Our models in the operators that are at hand in plain PyTorch, with the same weights: where ladder.py begins.

Attention by explicit products and softmax, in a language model head by head as lessons write it, ``nn.Dropout``, texts
of different lengths packed for one bidirectional ``nn.LSTM``, Adam as it comes: correct, padding reaches no answer, and
nothing is done to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeal.core.options import Precision
from pipeal.core.samples import pair_of
from pipeal.core.tree import move
from pipeal.methods.al import ALPackage, Dropout, TouchedAdam
from pipeal.methods.al.place_codes import WhichCode
from pipeal.models.causal import CausalAttention
from pipeal.models.features import Features
from pipeal.models.lstm import LSTMBlock
from pipeal.models.transformer import SelfAttention


class ExplicitAttention(nn.Module):
    """Attention over the words of each text, or over what is before each place where there is no mask."""

    def __init__(self, fast: SelfAttention | CausalAttention) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = fast.heads, fast.qkv, fast.out

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        else:
            seen = mask[:, None, None]
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Heads(nn.Module):
    """Causal attention of a lesson: each head has three maps of its own."""

    def __init__(self, fast: CausalAttention) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        width = fast.out.in_features // fast.heads
        parts = [
            (weight.split(width), bias.split(width))
            for weight, bias in zip(fast.qkv.weight.detach().chunk(3), fast.qkv.bias.detach().chunk(3), strict=True)
        ]
        for number in range(fast.heads):
            head = {name: nn.Linear(fast.qkv.in_features, width) for name in "qkv"}
            for linear, (weights, biases) in zip(head.values(), parts, strict=True):
                linear.weight.data.copy_(weights[number])
                linear.bias.data.copy_(biases[number])
            self.heads.append(nn.ModuleDict(head))
        self.out = fast.out

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        seen = torch.ones(length, length, device=x.device).tril()
        mixed = []
        for head in self.heads:
            assert isinstance(head, nn.ModuleDict)
            q, k, v = head["q"](x), head["k"](x), head["v"](x)
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            mixed.append(scores.masked_fill(seen == 0, float("-inf")).softmax(-1) @ v)
        return self.out(torch.cat(mixed, -1))


class PackedLSTM(nn.Module):
    """Both directions in one operator, on texts packed step by step."""

    def __init__(self, fast: LSTMBlock) -> None:
        super().__init__()
        self.dropout = nn.Dropout(fast.dropout.p)
        onward = fast.onward
        self.lstm = nn.LSTM(onward.input_size, onward.hidden_size, batch_first=True, bidirectional=True)
        for ending, lstm in (("", onward), ("_reverse", fast.back)):
            for name, weight in list(lstm.named_parameters()):
                setattr(self.lstm, name + ending, weight)

    def forward(self, x: Features) -> Features:
        features, mask = x
        lengths = mask.sum(1).cpu()
        packed = pack_padded_sequence(self.dropout(features), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=mask.shape[1])
        return out, mask


class Answers(nn.Module):
    """What WhichCode asks for, place by place: the bridge's answer, then that times the code of each character."""

    draws_from_default = False

    def __init__(self, fast: WhichCode) -> None:
        super().__init__()
        self.f, self.b, self.cri = fast.f, fast.b, fast.cri

    def forward(self, x: Any, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, codes = labels
        out = self.f(x)
        logits = self.b(out) @ codes[0].t() / codes.shape[-1] ** 0.5
        return self.cri(logits, y), out


_JOINED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    Dropout: lambda fast: nn.Dropout(fast.p),
    SelfAttention: ExplicitAttention,
    CausalAttention: ExplicitAttention,
    LSTMBlock: PackedLSTM,
}


def write_plainly(package: ALPackage, *, joined: bool = False) -> None:
    """Puts those operators in the place of ours, with weights of the same values.

    Args:
        package: It is altered, and needs new optimizers (:func:`adam_anew`): some of the weights are new.
        joined: Whether the heads of a language model's attention keep their one projection.
    """
    _replace(package, _JOINED if joined else {**_JOINED, CausalAttention: Heads})


def answer_everywhere(package: ALPackage) -> None:
    """Has a language model's bridges answer at every place before the codes are asked; the weights are the same."""
    _replace(package, {WhichCode: Answers})


def adam_anew(package: ALPackage, *, fused: bool = False) -> None:
    """Gives all layers a new Adam of the weights that they have now, with the rates and memories of the old one.

    Args:
        package: Its optimizers are replaced; one that changes touched rows alone stays of that kind, which is fused.
        fused: In one operator, or as it comes.
    """
    for layer in package:
        for name, optimizer in list(vars(layer).items()):
            if isinstance(optimizer, torch.optim.Adam):
                module = {"enc_opt": "enc", "ae_opt": "ae", "opt": "model"}[name]
                rate, betas = optimizer.param_groups[0]["initial_lr"], optimizer.param_groups[0]["betas"]
                groups = [{"params": list(getattr(layer, module).parameters()), "initial_lr": rate}]
                if isinstance(optimizer, TouchedAdam):
                    new: torch.optim.Adam = TouchedAdam(groups, lr=rate, betas=betas)
                else:
                    # Not False, which on a GPU is slower than as it comes.
                    new = torch.optim.Adam(groups, lr=rate, betas=betas, fused=fused or None)
                setattr(layer, name, new)


def _replace(module: nn.Module, plain: dict[type[nn.Module], Callable[[Any], nn.Module]]) -> None:
    for name, child in module.named_children():
        if type(child) in plain:
            setattr(module, name, plain[type(child)](child))
        else:
            _replace(child, plain)


def train_plainly(
    package: ALPackage,
    batches: Iterable[Any],
    device: torch.device,
    precision: Precision = "fp32",
    scales: Iterable[float] = repeat(1.0),
) -> None:
    """The loop that anyone would write: batch by batch, layer by layer.

    Args:
        package: The layers, on the device.
        batches: Of ``(x, y)``.
        device: Where.
        precision: Of forwards.
        scales: The factor on the learning rates, batch by batch.
    """
    package.train()
    for batch, scale in zip(batches, scales, strict=False):
        x, y = move(pair_of(batch), device)
        for layer in package:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                x, y = layer(x, y)
            layer.backward()
            layer.scale_lr(scale)
            layer.update()
