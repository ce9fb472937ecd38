"""A number of layers: cut where they cost about the same, the same everywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision.models import VisionTransformer, resnet18

from pipeal import ALPackage, ConfigError
from pipeal.methods.cutting.cut import cut

VECTORS = torch.randn(4, 6)


def linears(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(module for pair in pairs for module in (nn.Linear(*pair), nn.ReLU())))


def names(model: nn.Module, count: int, sample: Tensor) -> list[str]:
    return [part.name for part in cut(model, count, sample)]


@pytest.mark.parametrize(
    ("widths", "count", "wanted"),
    [
        ((6, 8, 8, 8, 8), 2, ["0", "4"]),
        ((6, 8, 8, 8, 8), 4, ["0", "2", "4", "6"]),
        ((6, 8, 8, 64, 64), 2, ["0", "6"]),  # the last costs more than all before
        ((6, 64, 64, 32, 8), 2, ["0", "4"]),
        ((6, 8), 1, ["0"]),
    ],
)
def test_costs_decide_and_activations_stay_behind_their_layer(
    widths: tuple[int, ...], count: int, wanted: object
) -> None:
    assert names(linears(*widths), count, VECTORS) == wanted
    assert names(linears(*widths).train(), count, VECTORS) == wanted


def test_what_costs_too_much_is_looked_into() -> None:
    images = torch.randn(2, 3, 32, 32)
    assert names(resnet18(num_classes=5), 1, images) == ["0"]
    four = names(resnet18(num_classes=5), 4, images)
    assert len(four) == 4
    assert all(name.startswith("layer") for name in four[1:])
    vit = VisionTransformer(32, 16, 4, 2, 32, 48, num_classes=5)
    assert all(name.startswith("encoder.layers.encoder_layer_") for name in names(vit, 4, images)[1:])


class Recurrent(nn.LSTM):
    """The answers of an LSTM alone."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "costly", [lambda: Recurrent(16, 16), lambda: nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)]
)
def test_recurrences_and_encoders_cost_what_they_do(costly: Callable[[], nn.Module]) -> None:
    """PyTorch's counter found no FLOPs in either, and the cut was at module 2, as bytes have it."""
    row = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), costly(), costly(), nn.Linear(16, 16))
    assert names(row, 2, torch.randn(4, 256, 16)) == ["0", "3"]


def test_what_cannot_be_followed_stays_whole() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if x.sum() < 1e9 else x

    whole = nn.Sequential(Branch(), nn.Linear(6, 6))
    assert names(whole, 2, VECTORS) == ["0", "1"]
    with pytest.raises(ConfigError, match=r"split is 4, but only 3 submodules have"):
        cut(whole, 4, VECTORS)


def test_lists_are_grouped() -> None:
    modules = list(linears(6, 8, 8, 8))
    parts = cut(modules, 2, VECTORS)
    assert [[*part.module] for part in parts] == [modules[:4], modules[4:]]
    with pytest.raises(ConfigError, match="split is 7, but only 3 modules"):
        cut(modules, 7, VECTORS)


def test_counting_leaves_no_trace() -> None:
    whole = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    cut(whole, 2, VECTORS)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    assert all(part.training for part in whole.modules())


def test_from_bp_takes_a_number() -> None:
    package = ALPackage.from_bp(linears(6, 8, 8, 8, 8), VECTORS, 3, split=3, code=8)
    assert len(package) == 3
    assert package.infer(VECTORS).shape == (4, 3)


class Narrowing(nn.Module):
    """Early convolutions cost by what goes through them, late ones by their weights; and loops over children."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Conv2d(3 if first else 8, 8, 3, padding=1) for first in (True, False, False)])
        self.deep = nn.ModuleList([nn.Conv2d(8 if first else 64, 64, 3, stride=2) for first in (True, False, False)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.wide, *self.deep):
            x = torch.relu(block(x))
        return x.mean((2, 3))


def test_the_rows_of_a_sample_do_not_move_the_cuts() -> None:
    """A package built on a sample of four rows did not take what one built on a hundred had saved."""
    found = {rows: tuple(names(Narrowing(), 3, torch.randn(rows, 3, 24, 24))) for rows in (1, 2, 3, 7, 100)}
    assert len(set(found.values())) == 1, found
    row = {
        rows: names(nn.Sequential(*Narrowing().wide, *Narrowing().deep), 3, torch.randn(rows, 3, 24, 24))
        for rows in (2, 99)
    }
    assert row[2] == row[99]


class OfAll(nn.Linear):
    """Reads a list of all that was before, as DenseNet's layers do."""

    def forward(self, found: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat(found, 1)).relu()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(OfAll(6 * (k + 1), 6) for k in range(4)) for _ in range(2))
        self.between = nn.Linear(30, 6)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.first:
            found.append(layer(found))
        found = [self.between(torch.cat(found, 1))]
        for layer in self.second:
            found.append(layer(found))
        return torch.cat(found, 1)


def test_a_number_cuts_where_all_weights_train(said: list[str]) -> None:
    """Symptom: of ``densenet121`` in four parts, those of the first that were cut within a block never trained. Cause:
    a layer there takes a list, of which the head sees the first and the others are detached."""
    for split in (2, 3):
        torch.manual_seed(0)
        package = ALPackage.from_bp(Dense(), VECTORS, 3, split=split, code=8)
        before = {name: weight.clone() for name, weight in package.named_parameters()}
        package(VECTORS, torch.tensor([0, 1, 2, 0]))
        package.backward()
        package.update()
        assert not [name for name, weight in package.named_parameters() if torch.equal(weight, before[name])]
    assert not [line for line in said if "will not train" in line]


class Segments(nn.Module):
    """Looks up words and what each belongs to, in tables that cost more than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(900, 8), nn.Embedding(900, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.segments(ids // 2)
        for block in self.blocks:
            x = block(x).relu()
        return x


def test_of_several_tables_the_first_alone_begins_a_part() -> None:
    """A part began at the second, which takes numbers of words: "no bridge for an output of (4, 8) int64"."""
    assert names(Segments(), 2, torch.arange(20).reshape(4, 5)) == ["words", "blocks.0"]


class Placed(nn.Module):
    """What all rows share, ``(1, T, D)``, goes through a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.of_places = nn.Parameter(torch.randn(1, 16, 32)), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.of_places(self.places)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_all_rows_share_is_no_batch_of_one_and_costs_the_same(count: int) -> None:
    found = {rows: tuple(names(Placed(), count, torch.randn(rows, 16, 32))) for rows in (1, 2, 3, 100)}
    assert len(set(found.values())) == 1, found


def test_a_table_names_the_cuts_of_a_number() -> None:
    images = torch.randn(2, 3, 24, 24)
    package = ALPackage.from_bp(Narrowing(), images, 5, split=3)
    *_, last = str(package.summary()).splitlines()
    assert last.startswith('cut at split=["')
    again = json.loads(last.removeprefix("cut at split="))
    named = ALPackage.from_bp(Narrowing(), images, 5, split=again)
    named.load_state_dict(package.state_dict())
    assert not any(line.startswith("cut at") for line in str(named.summary()).splitlines())


class Normed(nn.Module):
    """Parametrized maps, of which the wide ones cost more than a part should."""

    def __init__(self, parametrized: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a, self.b = parametrized(nn.Linear(6, 64)), parametrized(nn.Linear(64, 64))
        self.c = parametrized(nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@pytest.mark.parametrize("parametrized", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_maps_are_not_looked_into(parametrized: Callable[[nn.Module], nn.Module]) -> None:
    """Within one no part can begin, so that too few were found."""
    assert names(Normed(parametrized), 3, VECTORS) == ["a", "b", "c"]
