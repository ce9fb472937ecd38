"""Random packages, and the loop that says by hand what training them must give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import cos, pi
from time import sleep
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Dropout, LabelAE
from pipeal.core.options import PacketFormat
from pipeal.core.rng import keyed
from pipeal.core.thin import nearest, rounded
from pipeal.engine import SCHEDULES, Schedule

FEATURES, CLASSES, HEADS = 6, 3, 2

ORDERS: dict[str, Schedule] = SCHEDULES | {
    f"{name}/{order}": SCHEDULES[name].within(order)
    for name, order in (("sequential", "stage"), ("al-fm", "layer"), ("pipelined", "stage"))
}
"""Every schedule with every order of a stage's layers that it has."""


class Functional(nn.Module):
    """A user's block that draws from PyTorch's default generator in all the ways it likes."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide_in, wide_out)

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(self.linear(x), 0.3, self.training)
        if self.training:
            out = out + 0.1 * torch.rand_like(out) * torch.randn(out.shape[-1])
            out = out[:, torch.randperm(out.shape[-1])]
        return out


class Attention(nn.Module):
    """A user's block with dropout inside the fused attention operator."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(wide_in, 3 * wide_out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 1, -1)).unbind(1)
        keys, values = torch.cat([k, q], 2), torch.cat([v, k], 2)
        return F.scaled_dot_product_attention(q, keys, values, dropout_p=0.4 if self.training else 0.0).flatten(1)


class OnFirst(nn.Sequential):
    """Works on the first of a pair and passes the second on: blocks whose inputs are tuples."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(x[0]) * x[1], x[1]


class First(nn.Sequential):
    """A bridge from such a pair."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(x[0])


class OwnENC(ENC):
    """A user's encoder side: another loss, and noise of its own."""

    draws_from_default = True

    def forward(self, x: Any, code: Tensor) -> tuple[Tensor, Any]:
        out = self.f(x)
        bridged = self.b(out)
        return F.smooth_l1_loss(bridged + 0.01 * torch.randn_like(bridged), code), out


class OwnAE(AE):
    """A user's label side: another loss, and dropout of its own."""

    draws_from_default = True

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.tanh(self.g(y))
        return F.l1_loss(self.h(F.dropout(code, 0.2, self.training)), y), code


class PublishedAL(AL):
    """A layer in the published code's style: losses under names of its own, two backwards, no ``super()``."""

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        self.__ae_loss, code = self.ae(y)
        code = code.detach()
        self.__enc_loss, out = self.enc(x, code.clone())
        return (tuple(part.detach() for part in out) if isinstance(out, tuple) else out.detach()), code

    def backward(self) -> None:
        self.__ae_loss.backward()
        self.__enc_loss.backward()

    def loss(self) -> tuple[Tensor, ...] | None:
        return self.__enc_loss.detach(), self.__ae_loss.detach()


class SilentAL(AL):
    """As :class:`PublishedAL`, but it reports no losses."""

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        self.__kept, code = self.ae(y)
        enc_loss, out = self.enc(x, code.detach())
        self.__kept = self.__kept + enc_loss
        return (tuple(part.detach() for part in out) if isinstance(out, tuple) else out.detach()), code.detach()

    def backward(self) -> None:
        self.__kept.backward()


Block = Callable[[int, int], nn.Module]

BLOCKS: dict[str, Block] = {
    "linear": lambda i, o: nn.Sequential(nn.Linear(i, o), nn.Tanh()),
    "nn.Dropout": lambda i, o: nn.Sequential(nn.Dropout(0.2), nn.Linear(i, o), nn.ReLU(), nn.Dropout(0.5)),
    "pipeal.Dropout": lambda i, o: nn.Sequential(nn.Linear(i, o), Dropout(0.3), nn.GELU(), Dropout(0.1)),
    "both": lambda i, o: nn.Sequential(Dropout(0.3), nn.Linear(i, o), nn.Dropout(0.3), Dropout(0.2)),
    "batch norm": lambda i, o: nn.Sequential(nn.Linear(i, o), nn.BatchNorm1d(o), nn.RReLU()),
    "functional": Functional,
    "attention": Attention,
}
KINDS: dict[str, tuple[type[AL], type[ENC], type[AE]]] = {
    "AL": (AL, ENC, AE),
    "own ENC": (AL, OwnENC, AE),
    "own AE": (AL, ENC, OwnAE),
    "published AL": (PublishedAL, ENC, AE),
    "silent AL": (SilentAL, OwnENC, OwnAE),
}
OPTIMIZERS: dict[str, Any] = {
    "adam": None,
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class Layer:
    """How to build one layer."""

    block: str = "linear"
    kind: str = "AL"
    width: int = 4
    code: int = 3
    optimizer: str = "adam"


@dataclass(frozen=True)
class Case:
    """A package, its data and its learning rate, all rebuilt alike on every call.

    Attributes:
        layers: How to build them.
        rows: The size of each batch.
        pairs: Whether inputs are tuples ``(features, mask)``.
        seed: Of weights, data and keyed randomness.
    """

    layers: tuple[Layer, ...]
    rows: tuple[int, ...] = (4, 4, 4, 2)
    pairs: bool = False
    seed: int = 0
    late_s: float = field(default=0.0, compare=False)

    def build(self) -> ALPackage:
        torch.manual_seed(self.seed)
        wide, code, built = FEATURES, CLASSES, []
        for number, layer in enumerate(self.layers):
            al, enc, ae = KINDS[layer.kind]
            f, b = BLOCKS[layer.block](wide, layer.width), nn.Linear(layer.width, layer.code)
            g, h = nn.Linear(code, layer.code), nn.Linear(layer.code, code)
            side = LabelAE(g, h, CLASSES) if number == 0 else ae(g, h)
            encoder = enc(OnFirst(f), First(b)) if self.pairs else enc(f, b)
            built.append(al(encoder, side, {"enc": 0.01, "ae": 0.02}, OPTIMIZERS[layer.optimizer]))
            wide, code = layer.width, layer.code
        if self.late_s:
            for number, layer in enumerate(built):
                _come_late(layer, random.Random(number), self.late_s)
        return ALPackage(built)

    def batches(self) -> list[tuple[Any, Tensor]]:
        draw = torch.Generator().manual_seed(self.seed + 1)
        out: list[tuple[Any, Tensor]] = []
        for rows in self.rows:
            x, y = torch.randn(rows, FEATURES, generator=draw), torch.randint(CLASSES, (rows,), generator=draw)
            mask = (torch.rand(rows, 1, generator=draw) > 0.3).float()
            out.append(((x, mask) if self.pairs else x, y))
        return out


def _come_late(layer: AL, rng: random.Random, most_s: float) -> None:
    """Makes every action take a random time, to shake the order in which threads get their turn."""

    def late(then: Callable[..., Any], *args: Any) -> Any:
        sleep(rng.random() * most_s)
        return then(*args)

    for name in ("forward", "backward", "update"):
        setattr(layer, name, partial(late, getattr(layer, name)))


def cosine(batch: int) -> float:
    """A learning rate that differs for every batch."""
    return 0.55 + 0.45 * cos(pi * batch / 13)


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: every tensor of it, by name."""

    tensors: dict[str, Tensor]

    def differences(self, other: Outcome) -> list[str]:
        """The names under which the two do not hold the same bits."""
        names = sorted(self.tensors.keys() | other.tensors.keys())
        return [name for name in names if _bits(self.tensors.get(name)) != _bits(other.tensors.get(name))]


def _bits(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def outcome(package: ALPackage, losses: Sequence[Tensor], predictions: Sequence[Tensor]) -> Outcome:
    """Weights, buffers, optimizer states, learning rates, losses and predictions of a trained package."""
    found = {f"weights/{name}": value.clone() for name, value in package.state_dict().items()}
    for number, layer in enumerate(package):
        for side, optimizer in (("enc", layer.enc_opt), ("ae", layer.ae_opt)):
            state = optimizer.state_dict()
            for index, values in state["state"].items():
                for name, value in values.items():
                    as_tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    found[f"{side}_opt/{number}/{index}/{name}"] = as_tensor.clone()
            rates = [group["lr"] for group in optimizer.param_groups]
            found[f"lr/{side}/{number}"] = torch.tensor(rates, dtype=torch.float64)
    found |= {f"losses/{number}": rows for number, rows in enumerate(losses)}
    found |= {f"prediction/{number}": value for number, value in enumerate(predictions)}
    return Outcome(found)


def train_by_hand(
    package: ALPackage,
    batches: Sequence[tuple[Any, Any]],
    lr_scale: Callable[[int], float] = cosine,
    *,
    seed: int = 0,
    first_batch: int = 0,
    packet: PacketFormat = "as_is",
) -> list[Tensor]:
    """The reference of law 1: layer by layer, in one thread. Returns the losses, one ``(batches, 2)`` a layer."""
    rows: list[list[Tensor]] = [[] for _ in package]
    package.train()
    for batch, (x, y) in enumerate(batches, first_batch):
        for number, layer in enumerate(package):
            with keyed(seed, number, batch, whole_default=True):
                x, y = layer(x, y)
            with keyed(seed, number, batch, 5):
                x, y = rounded(x, packet), rounded(y, packet)
            found = layer.loss()
            if found is not None:
                rows[number].append(torch.stack(found).float())
            layer.backward()
            layer.scale_lr(lr_scale(batch))
            layer.update()
    return [torch.stack(row) for row in rows if row]


@torch.no_grad()
def predictions_by_hand(package: ALPackage, x: Any, packet: PacketFormat = "as_is") -> list[Tensor]:
    """Evaluation along every exit, block by block; what goes up from layer to layer is rounded, to the nearest."""
    package.eval()
    found = []
    for depth in range(1, len(package) + 1):
        value = x
        for number, layer in enumerate(package[:depth]):
            value = layer.inference(rounded(value, nearest(packet)) if number else value, "f")
        value = package[depth - 1].inference(value, "b")
        for layer in reversed(list(package[:depth])):
            value = layer.inference(value, "h")
        found.append(value)
    return found


def reference(case: Case, packet: PacketFormat = "as_is") -> Outcome:
    """What every schedule must leave of ``case``."""
    package, batches = case.build(), case.batches()
    losses = train_by_hand(package, batches, seed=case.seed, packet=packet)
    return outcome(package, losses, predictions_by_hand(package, batches[0][0], packet))


def cuts(layers: int, stages: int) -> Iterator[list[int]]:
    """All ways to cut a row of layers into that many stages.

    >>> list(cuts(3, 2))
    [[1, 2], [2, 1]]
    """
    if stages == 1:
        yield [layers]
        return
    for first in range(1, layers - stages + 2):
        yield from ([first, *rest] for rest in cuts(layers - first, stages - 1))


def layer_cases() -> st.SearchStrategy[Layer]:
    return st.builds(
        Layer,
        block=st.sampled_from(sorted(BLOCKS)),
        kind=st.sampled_from(sorted(KINDS)),
        width=st.integers(1, 9),
        code=st.integers(1, 5),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    )


def cases() -> st.SearchStrategy[Case]:
    """Packages of 1 to 5 layers; batches of 2 to 7 rows (batch norm refuses one), the last one smaller."""
    rows = st.tuples(st.lists(st.integers(3, 7), min_size=0, max_size=6), st.integers(2, 3))
    return st.builds(
        Case,
        layers=st.lists(layer_cases(), min_size=1, max_size=5).map(tuple),
        rows=rows.map(lambda found: (*found[0], found[1])),
        pairs=st.booleans(),
        seed=st.integers(0, 2**31),
    )
