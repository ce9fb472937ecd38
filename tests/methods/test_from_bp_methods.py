"""Every method trains a user's own network, in the pieces that AL trains it in."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

from pipeal import BP, ALPackage, ConfigError, DataError, Encoder, Pipeline
from pipeal.core.methods import METHODS, Loss, Method
from pipeal.core.tree import Tree
from pipeal.methods.greedy import Greedy
from pipeal.methods.network import Network
from tests.integration.law import left_behind
from tests.methods.refusing import PIPEALS, skipped_where_refused

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 5


def mlp() -> nn.Module:
    """It writes in place at its cut."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Dropout(0.1),
        nn.ReLU(inplace=True), nn.Linear(16, CLASSES),
    )  # fmt: skip


class Words(nn.Module):
    """A classifier of padded texts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 12, 0.1, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~mask)
        weights = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * weights).sum(1) / weights.sum(1))


class Speaks(nn.Module):
    """A language model: what is said at a place, from those before it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)
        self.first, self.second = (nn.Conv1d(width, width, 3) for _ in range(2))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.first(F.pad(x.transpose(1, 2), (2, 0))).relu().transpose(1, 2)
        x = x + self.second(F.pad(x.transpose(1, 2), (2, 0))).relu().transpose(1, 2)
        return self.out(x)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    split: tuple[str, ...]
    batch: Callable[[int], tuple[Tree, Tensor]]
    """Inputs and labels, of so many rows."""
    options: Mapping[str, Any]


def of(shape: tuple[int, ...], rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, *shape, generator=random), torch.arange(rows) % CLASSES


def texts(rows: int) -> tuple[Tree, Tensor]:
    """What a text is of stands at its beginning."""
    ids = torch.randint(20, (rows, 7), generator=torch.Generator().manual_seed(rows))
    y = torch.arange(rows) % CLASSES
    ids[:, 0] = y
    return (ids, torch.arange(7) < 3 + torch.arange(rows).unsqueeze(1) % 5), y


def said(rows: int) -> tuple[Tree, Tensor]:
    text = (torch.arange(9) + torch.arange(rows).unsqueeze(1)) % CLASSES
    y = text[:, 1:].clone()
    y[0, -2:] = -100
    return text[:, :-1], y


CASES = {
    "mlp": Case(mlp, ("2", "5"), lambda rows: of((6,), rows), {}),
    "resnet18": Case(
        lambda: resnet18(num_classes=CLASSES), ("layer2", "layer3", "layer4"), lambda rows: of((3, 32, 32), rows), {}
    ),
    "words": Case(Words, ("blocks.1", "blocks.2", "head"), texts, {}),
    "speaks": Case(Speaks, ("first", "second"), said, {"task": "per-place"}),
}


NAMES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "resnet18" else []) for name in CASES]
)
"""Eleven million weights take their time; every method trains them in ``make test``, though."""


def built(name: str, method: str, **options: Any) -> ALPackage:
    case = CASES[name]
    torch.manual_seed(0)
    with skipped_where_refused(method):
        return ALPackage.from_bp(
            case.build(), case.batch(4)[0], CLASSES, split=case.split, method=method, **{**case.options, **options}
        )


def answer_losses(package: ALPackage, x: Tree, y: Tensor) -> list[float]:
    """Those of all exits, as its batches have them: with their own statistics, and without dropout."""
    for part in package.modules():
        part.train(isinstance(part, nn.modules.batchnorm._BatchNorm))
    with torch.no_grad():
        answers = [package.infer(x, exit_at) for exit_at in range(1, len(package) + 1)]
    package.train()
    return [float(F.cross_entropy(answer.flatten(0, -2), y.flatten().long())) for answer in answers]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_every_method_trains_every_users_network(name: str, method: str) -> None:
    """Its losses fall, taken together, and the network answers better; of a method that is not pipeal's some exit: a
    probe of detached features, as that of the documentation, lags behind those of the last layer of a ResNet."""
    package = built(name, method, lr=1e-2 if name != "resnet18" else 1e-3)
    x, y = CASES[name].batch(10)
    before, start = answer_losses(package, x, y), [one.detach().clone() for one in package.parameters()]
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        report = pipe.run([(x, y)] * 20)
    # Of some methods, the last layer has the loss of its answer alone.
    assert max(losses.shape[1] for losses in report.losses) == len(METHODS[method].losses)
    assert all(torch.isfinite(losses).all() for losses in report.losses)
    first, *_, last = sum(losses.sum(1) for losses in report.losses)
    assert last < 0.95 * first
    better = [after < 0.95 * one for one, after in zip(before, answer_losses(package, x, y), strict=True)]
    assert better[-1] if method in PIPEALS else any(better)
    moved = [not torch.equal(old, new) for old, new in zip(start, package.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("method", METHODS)
@NAMES
def test_pieces_are_taken_with_the_weights_that_they_have(name: str, method: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    net = case.build().eval()
    kept, modes = copy.deepcopy(net.state_dict()), [part.training for part in net.modules()]
    with skipped_where_refused(method):
        package = ALPackage.from_bp(net, case.batch(4)[0], CLASSES, split=case.split, method=method, **case.options)
    own = {id(one) for one in package.parameters()}
    assert all(id(one) in own for one in net.parameters())
    assert all(torch.equal(value, kept[key]) for key, value in net.state_dict().items())
    assert [part.training for part in net.modules()] == modes
    assert len(package) == (1 if METHODS[method].is_whole else len(case.split) + 1)
    counted = sum(one.numel() for one in package.parameters())
    assert package.effective_parameters() + package.affiliated_parameters() == counted


@pytest.mark.parametrize("method", METHODS)
@NAMES
def test_every_exit_answers_and_is_exported(name: str, method: str) -> None:
    package = built(name, method).eval()
    x, y = CASES[name].batch(4)
    shape = (*y.shape, CLASSES)
    with torch.no_grad():
        for exit_at in range(1, len(package) + 1):
            answer = package.infer(x, exit_at)
            assert answer.shape == shape
            torch.testing.assert_close(package.to_bp(exit_at)(x), answer)
        exported = torch.export.export(package.to_bp(), (x,)).module()
        torch.testing.assert_close(exported(x), answer)
        if type(x) is tuple:  # padding changes no answer
            ids, mask = x
            torch.testing.assert_close(package.infer((ids.masked_fill(~mask, 7), mask)), answer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "resnet18"])
def test_every_schedule_leaves_what_sequential_leaves(name: str, method: str) -> None:
    batches = [CASES[name].batch(rows) for rows in (6, 6, 4)]
    expected = left_behind(built(name, method), batches, "sequential", 1)
    stages = 1 if METHODS[method].is_whole and name != "mlp" else 2  # a row of modules may lie on several devices
    for schedule in ("pipelined", "backward-overlap"):
        found = left_behind(built(name, method), batches, schedule, stages)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), schedule


@pytest.mark.parametrize("method", METHODS)
@NAMES
def test_a_network_on_the_meta_device_becomes_real_layer_by_layer(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]
    whole = built(name, method)
    torch.manual_seed(0)
    net = case.build()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    with torch.device("meta"):
        bare = case.build()
    options = {"split": case.split, "method": method, **case.options}
    found = ALPackage.from_bp(bare, case.batch(4)[0], CLASSES, weights=tmp_path / "net.safetensors", **options)
    real = [name for name, one in found.named_parameters() if not one.is_meta]
    assert not real, f"{real}: a head fills its own parameters in reset_parameters(), by the key of its layer"
    assert [row.cells()[:-1] for row in found.summary().layers] == [row.cells()[:-1] for row in whole.summary().layers]
    found.materialize(1)
    assert list(found.state_dict()) == list(whole.state_dict())
    wanted = {id(one): key for key, one in bare.named_parameters()}
    given = net.state_dict()
    own = [(wanted[id(one)], one) for one in found.parameters() if id(one) in wanted]
    assert len(own) == len(wanted)
    assert all(torch.equal(one, given[key]) for key, one in own)
    x, y = case.batch(6)
    with Pipeline(found, "cpu", "sequential", threads=1) as pipe:
        assert all(torch.isfinite(losses).all() for losses in pipe.run([(x, y)]).losses)


def test_backpropagation_trains_the_network_itself() -> None:
    net, (x, y) = mlp(), of((6,), 10)
    ((layer),) = ALPackage.from_bp(net, x, CLASSES, method="bp", optimizer=torch.optim.SGD, lr=0.5)
    assert isinstance(layer, BP)
    assert layer.model is net
    plain = copy.deepcopy(net)
    layer.eval()
    plain.eval()
    layer(x, y)
    layer.backward_and_update()
    F.cross_entropy(plain(x), y).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach() - 0.5 * theirs.grad)


def test_a_network_without_an_answer_of_its_own_gets_a_head() -> None:
    images = torch.randn(4, 3, 8, 8)
    (layer,) = ALPackage.from_bp(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), images, CLASSES, method="bp")
    assert layer.inference(images, "f").shape == (4, CLASSES)
    assert [*layer.model.state_dict()] == ["0.0.weight", "0.0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("method", ["greedy", "bp"])
@pytest.mark.parametrize(
    ("task", "outputs", "y"),
    [
        ("classification", 3, torch.tensor([[0.2, 0.5, 0.3]] * 4)),
        ("classification", 3, torch.tensor([2, 0, 1, 1], dtype=torch.uint8)),
        ("multilabel", 3, torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])),
        ("regression", 3, torch.randn(4, 3)),
        ("regression", 1, torch.randn(4)),
    ],
)
def test_the_loss_is_that_of_the_task(task: Any, outputs: int, y: Tensor, method: str) -> None:
    x = torch.randn(4, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
    package = ALPackage.from_bp(net, x, outputs, task=task, split=["2"], method=method)
    package(x, y)
    answers = [package.infer(x)] if method == "bp" else [package.infer(x, at) for at in (1, 2)]
    for (loss,), logits in zip(package.losses(), answers, strict=True):
        rows = []
        for answer, target in zip(logits.tolist(), y.tolist(), strict=True):
            if task == "classification":
                logs = torch.tensor(answer).log_softmax(0).tolist()
                soft = target if isinstance(target, list) else [float(place == target) for place in range(outputs)]
                rows.append(-sum(p * log for p, log in zip(soft, logs, strict=True)))
            else:
                wanted = target if isinstance(target, list) else [target]
                for found, value in zip(answer, wanted, strict=True):
                    sure = torch.tensor(found).sigmoid().item()
                    error = -torch.tensor(sure if value else 1 - sure).log().item()
                    rows.append(error if task == "multilabel" else (found - value) ** 2)
        assert loss == pytest.approx(sum(rows) / len(rows), abs=1e-5)
    with pytest.raises(DataError, match="targets are"):
        package(x, torch.zeros(4, outputs + 1, 2))


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(self.down(x).relu()).relu())


def test_pixels_are_told_by_every_layer_classes_last_and_by_the_network_as_it_does() -> None:
    images, y = torch.randn(2, 3, 6, 8), torch.randint(3, (2, 6, 8))
    y[0, 0] = 255
    net = Segments()
    labels = y.masked_fill(y == 255, -100)
    package = ALPackage.from_bp(net, images, 3, task="per-place", split=["up", "out"], method="greedy")
    package(images, labels)
    for exit_at in (1, 2, 3):
        answer = package.infer(images, exit_at)
        assert answer.shape == (2, 6, 8, 3)
        wanted = F.cross_entropy(answer.movedim(-1, 1), labels)
        torch.testing.assert_close(torch.tensor(package.losses()[exit_at - 1][0]), wanted.detach())
    whole = ALPackage.from_bp(net, images, 3, task="per-place", method="bp", ignore_index=255)
    whole(images, y)
    torch.testing.assert_close(whole.infer(images), net(images))
    torch.testing.assert_close(
        torch.tensor(whole.losses()[0][0]), F.cross_entropy(net(images), y, ignore_index=255).detach()
    )
    with pytest.raises(ConfigError, match=r"ignore_index is 255; expected a number below 0 with method='greedy'"):
        ALPackage.from_bp(net, images, 3, task="per-place", split=["out"], method="greedy", ignore_index=255)


@pytest.mark.parametrize("method", ["greedy", "bp"])
def test_encoders_are_cut_as_for_al(method: str) -> None:
    words = Words()
    (ids, mask), y = texts(4)
    blocks = nn.ModuleList(Masked(block) for block in words.blocks)
    encoder = Encoder(words.table, list(blocks), mask_as=lambda mask, _: ~mask, per_layer=2)
    package = ALPackage.from_bp(encoder, (ids, mask), CLASSES, method=method)
    package((ids, mask), y)
    package.backward()
    assert len(package) == (1 if method == "bp" else 3)
    answer = package.eval().infer((ids, mask))
    assert answer.shape == (4, CLASSES)
    torch.testing.assert_close(package.infer((ids.masked_fill(~mask, 7), mask)), answer)


@pytest.mark.parametrize("method", ["greedy", "bp"])
def test_heads_have_the_type_of_the_features(method: str) -> None:
    wide = [nn.Linear(6, 8).double(), nn.Tanh()]
    double = ALPackage.from_bp(wide, torch.randn(4, 6).double(), CLASSES, method=method)
    assert {one.dtype for one in double.parameters()} == {torch.float64}
    assert torch.get_default_dtype() is torch.float32


class Masked(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.block(x, src_key_padding_mask=mask)


def test_a_pool_of_the_users_stands_before_a_head() -> None:
    channels_last = [nn.Linear(3, 6), nn.Linear(6, 4)]
    images = torch.randn(4, 5, 5, 3)
    pool = {0: lambda x: x.mean((1, 2)), 1: nn.Sequential(nn.Flatten(), nn.Linear(100, 7))}
    package = ALPackage.from_bp(channels_last, images, CLASSES, method="greedy", pool=pool)
    assert [layer.head[-1].in_features for layer in package] == [6, 7]
    assert package[1].head[0] is not pool[1]
    with pytest.raises(ConfigError, match=r"layer 1 .*pool, given .* gives"):
        ALPackage.from_bp(channels_last, images, CLASSES, method="greedy", pool={0: pool[0], 1: lambda x: x})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"code": 12}, "code is 12, which does nothing with method='greedy'; leave it out"),
        ({"hidden": 12}, "hidden is 12, which does nothing with"),
        ({"labels": "published"}, "labels is 'published', which does nothing with"),
        ({"bridges": "flat"}, "bridges is 'flat', which does nothing with"),
        ({"blocks": {0: {"b": nn.Sequential(nn.ReLU(), nn.ReLU())}}}, "blocks is given, which does nothing with"),
        ({"lr": {"enc": 1e-3, "ae": 1e-3}}, "the greedy form has no sides: give one learning rate"),
        ({"method_options": {"dept": 2}}, "greedy has no option 'dept'"),
        ({"method": "al", "method_options": {"depth": 2}}, "al has no option 'depth'; method='auglocal' has"),
        ({"method_options": {"same_start": True}}, "greedy has no option 'same_start'; method='bp' or 'auglocal' has"),
        ({"method": "greed"}, "unknown method 'greed'; did you mean 'greedy'?"),
    ],
)
def test_what_is_for_another_method_is_refused_in_one_line(options: dict[str, Any], told: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with pytest.raises(ConfigError) as refused:
        ALPackage.from_bp(net, torch.randn(4, 6), 3, **{"method": "greedy", **options})
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def by_hand(network: Network, lr: Any, optimizer: Any) -> Iterator[Greedy]:
    """A method that leaves its rate to the optimizer."""
    for part in network.parts():
        yield Greedy(part.f, part.linear_head(network.outputs), lr=lr)


@pytest.mark.parametrize("method", [*METHODS, by_hand])
@pytest.mark.parametrize("lr", [(1e-3, 1e-4), "0.1", None, -1, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused_by_every_method(lr: Any, method: Any) -> None:
    """Symptom: only AL said so; of other methods a pair was a TypeError of PyTorch's, and -1 a ValueError."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(ConfigError, match=re.escape(f"lr is {lr!r}; expected a number, at least 0")):
        ALPackage.from_bp(net, torch.randn(4, 3, 6, 6), CLASSES, split=["2"], method=method, lr=lr)


def looking_ahead(network: Network, lr: Any, optimizer: Any, *, width: float = 1.0, first: int = 0) -> Iterator[Greedy]:
    """Heads of copies of the units still to come, from the so many-th on."""
    for part in network.parts():
        copies, features = [], part.features
        for (unit,) in part.ahead[first:]:
            assert unit.fresh is not None
            block, features = unit.fresh(features, width)
            copies.append(block)
        pool, size = network.pool(features)
        yield Greedy(part.f, nn.Sequential(*copies, pool, nn.Linear(size, network.outputs)), network.criterion(), lr)


@pytest.fixture
def lookahead(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("pipeal.methods.test_lookahead")
    module.make_layers = looking_ahead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    method = Method("test-lookahead", "Lookahead", "a form that looks ahead", (Loss("loss"),))
    monkeypatch.setitem(METHODS, method.name, method)  # type: ignore[arg-type]
    return method.name


class Skips(nn.Module):
    """A network of images, of which one goes round its blocks."""

    def __init__(self, long: bool) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 2, 2)
        self.blocks = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1) for _ in range(2))
        self.long = nn.Conv2d(8, 12, 2, 2) if long else None

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x).relu()
        x = self.down(first)
        for block in self.blocks:
            x = block(x).relu()
        return x if self.long is None else x + self.long(first)


def of_heads(method: str, long: bool) -> list[list[torch.Size]]:
    sample = torch.randn(4, 3, 16, 16)
    package = ALPackage.from_bp(Skips(long), sample, CLASSES, split=["blocks.0", "blocks.1"], method=method)
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        pipe.run([(sample, torch.arange(4))] * 2)
    return [[w.shape for name, w in layer.named_parameters() if not name.startswith("f.")] for layer in package]


@pytest.mark.parametrize("method", ["greedy", "dgl", "predsim", "scpl", "deinforeg"])
def test_heads_of_images_are_so_where_several_values_cross(method: str) -> None:
    """Symptom: DeInfoReg of a network with a long skip had no projectors, and nothing said so."""
    assert of_heads(method, long=True) == of_heads(method, long=False)


def test_what_rebuilds_an_image_is_told_where_several_values_cross() -> None:
    with pytest.raises(ConfigError, match="hands on more than an image where one of its parts ends"):
        of_heads("infopro", long=True)


@NAMES
def test_heads_take_fresh_copies_of_the_pieces_still_to_come(name: str, lookahead: str) -> None:
    package = built(name, lookahead, lr=1e-3)
    x, y = CASES[name].batch(6)
    pieces, heads = [layer.f for layer in package], [list(layer.head)[:-2] for layer in package]
    for number, copies in enumerate(heads):
        assert len(copies) == len(pieces) - number - 1
        for piece, taken in zip(pieces[number + 1 :], copies, strict=True):
            own = dict(piece.named_parameters())
            assert list(own) == [key for key, _ in taken.named_parameters()]
            for key, weight in taken.named_parameters():
                assert weight is not own[key]
                assert weight.isfinite().all()
                assert weight.requires_grad
                random = weight.dim() > 1 and "norm" not in key
                assert not random or not torch.equal(weight, own[key])
    before = answer_losses(package, x, y)[-1]
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        pipe.run([(x, y)] * 20)
    assert answer_losses(package, x, y)[-1] < before
    writers = [part for part in package.modules() if getattr(part, "inplace", False)]
    assert name != "mlp" or not writers  # also none of the copies, whose input is what a piece hands on
    with torch.device("meta"):
        bare = CASES[name].build()
    case = CASES[name]
    found = ALPackage.from_bp(bare, case.batch(4)[0], CLASSES, split=case.split, method=lookahead, **case.options)
    assert all(one.isfinite().all() for one in found.materialize(3).parameters())


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("classification", (True, False)),
        ("multilabel", (False, False)),
        ("regression", (False, False)),
        ("per-place", (True, True)),
    ],
)
def test_a_method_is_told_what_the_task_is(
    task: Any, told: tuple[bool, bool], lookahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def make_layers(network: Network, lr: Any, optimizer: Any) -> Iterator[Greedy]:
        seen.append((network.has_classes, network.per_place))
        return looking_ahead(network, lr, optimizer)

    monkeypatch.setattr(sys.modules["pipeal.methods.test_lookahead"], "make_layers", make_layers)
    ALPackage.from_bp([nn.Linear(6, 4)], torch.randn(4, 3, 6), 4, task=task, method=lookahead)
    assert seen == [told]


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Fails(Raw):
    def reset_parameters(self) -> None:
        raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("last", "options", "told"),
    [
        (nn.Linear(8, 8), {"width": 0.5}, r"copy of layer 1 \('1'\) of 0.5 times its width; expected 1"),
        (Raw(), {}, "nothing draws its 'weight'; give the module that has it a reset_parameters"),
        (Fails(), {}, "reset_parameters of a Fails raises RuntimeError: no luck"),
    ],
)
def test_a_copy_that_cannot_be_made_is_told(
    last: nn.Module, options: dict[str, Any], told: str, lookahead: str
) -> None:
    ALPackage.from_bp([nn.Linear(6, 8), last], torch.randn(4, 6), 3, method="greedy")  # which copies nothing
    with pytest.raises(ConfigError, match=told):
        ALPackage.from_bp([nn.Linear(6, 8), last], torch.randn(4, 6), 3, method=lookahead, method_options=options)


def test_a_copy_reads_other_features_where_it_can(lookahead: str) -> None:
    convolutions = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3).requires_grad_(False)]
    images = torch.randn(4, 3, 9, 9)
    package = ALPackage.from_bp(convolutions, images, 3, method=lookahead, method_options={"first": 1})
    assert package[0].head[:-1](torch.randn(2, 4, 7, 7)).shape == (2, 64)
    assert all(one.requires_grad for one in package[0].parameters())
    with pytest.raises(
        ConfigError, match=r"copy of layer 2 \('2'\), which cannot read \(1, 4, 7, 7\) float32: it raises"
    ):
        ALPackage.from_bp(
            [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 4, 3)], images, 3, method=lookahead,
            method_options={"first": 1},
        )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "per-place"])
def test_a_method_learns_a_task_or_says_that_it_cannot(task: Any, method: str) -> None:
    """Symptom: numbers taken for classes, or an error of PyTorch's in the first forward."""
    images = torch.randn(4, 3, 6, 8)
    net = Segments() if task == "per-place" else nn.Sequential(*cells(), nn.Flatten(), nn.Linear(192, 3))
    y = torch.randint(3, (4, 6, 8)) if task == "per-place" else torch.rand(4, 3).round()
    y = torch.tensor([0, 2, 2, 1]) if task == "classification" else y
    split = ["up", "out"] if task == "per-place" else ["2", "5"]
    try:
        package = ALPackage.from_bp(net, images, 3, task=task, split=split, method=method)
    except ConfigError as refused:
        told = str(refused)
        assert task != "classification", told  # of images every method makes something
        assert METHODS[method].label in told
        assert "\n" not in told
        return
    with Pipeline(package, "cpu", "sequential", threads=1) as pipe:
        first, *_, last = torch.stack([losses.sum() for losses in pipe.run([(images, y)] * 2).losses[-1]]).tolist()
    assert first != last


def cells() -> list[nn.Module]:
    return [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Identity()]
