"""A method that somebody writes: its ordinary mistakes, each told in one line where it was made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, ConfigError, LayerError, Pipeline, ScheduleError
from pipeal.core.methods import METHODS, Loss, Method
from pipeal.core.protocols import TURN, UP
from pipeal.core.tree import Tree
from pipeal.methods import Network, make_layers
from pipeal.methods.greedy import Greedy
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import OptimizerFactory, open_optimizer
from pipeal.models import TextDims, build_text
from pipeal.training.evaluation import accuracy
from tests.methods.test_greedy import built

BATCHES = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(2)]


class OfPart(LocalLayer):
    def __init__(self, part: Any, classes: int, rate: float) -> None:
        super().__init__()
        self.f, self.pool, self.head = part.f, part.pool, part.linear_head(classes)
        self.opt = open_optimizer(None, self, rate)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.f(x)
        self.keep(F.cross_entropy(self.head(out), y))
        return out.detach(), y

    def blocks(self) -> dict[Any, nn.Module]:
        return {UP: self.f, TURN: self.head}


def test_from_bp_takes_a_method_that_is_a_function() -> None:
    """A method had to be a file of pipeal's own for a user's network to be trained by it."""

    def mine(network: Network, lr: Any, optimizer: OptimizerFactory | None, slower: float = 1.0) -> Iterator[OfPart]:
        for part in network.parts():
            yield OfPart(part, network.outputs, lr / slower)

    found = []
    for method in (mine, "greedy"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        package = ALPackage.from_bp(net, BATCHES[0][0], 3, split=2, method=method)
        with Pipeline(package, "cpu*2", threads=1) as pipe:
            pipe.run(BATCHES)
            assert pipe.predict(BATCHES[0][0]).shape == (6, 3)
        found.append([*package.parameters()])
    assert all(map(torch.equal, *found))
    slow = ALPackage.from_bp(net, BATCHES[0][0], 3, split=2, method=mine, method_options={"slower": 4.0})
    assert slow[0].opt.param_groups[0]["lr"] == 1e-3 / 4
    for wrong, told in (
        (OfPart, r"method is the class OfPart itself .*; expected a name, .* or a function make_layers\("),
        (3, "method is int; expected a name"),
        ("greddy", "unknown method 'greddy'; did you mean 'greedy'"),
    ):
        with pytest.raises(ConfigError, match=told):
            ALPackage.from_bp(net, BATCHES[0][0], 3, split=2, method=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="code is 8, which does nothing with method='mine'"):
        ALPackage.from_bp(net, BATCHES[0][0], 3, split=2, method=mine, code=8)
    with pytest.raises(ConfigError, match="unknown option of mine 'slwer'; did you mean 'slower'"):
        ALPackage.from_bp(net, BATCHES[0][0], 3, split=2, method=mine, method_options={"slwer": 4.0})


class Own(LocalLayer):
    """A probe and the squares of the features; mistakes are made in its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.open()

    def open(self) -> None:
        self.opt: Any = open_optimizer(None, self, 1e-2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.f(x)
        self.give(F.cross_entropy(self.head(out.detach()), y), out)
        return self.onward(out, y)

    def give(self, answer: Tensor, out: Tensor) -> None:
        self.keep(answer, out.square().mean())

    def onward(self, out: Tensor, y: Tensor) -> Any:
        return out.detach(), y

    def blocks(self) -> dict[str, nn.Module]:
        return {UP: self.f, TURN: self.head}


class NotScalar(Own):
    def give(self, answer: Tensor, out: Tensor) -> None:
        self.keep(answer, out.square())


class Number(Own):
    def give(self, answer: Tensor, out: Tensor) -> None:
        self.keep(answer, out.square().mean().item())  # type: ignore[arg-type]


class NoLoss(Own):
    def give(self, answer: Tensor, out: Tensor) -> None:
        self.keep()


class OneWeight(Own):
    def give(self, answer: Tensor, out: Tensor) -> None:
        self.keep(answer, out.square().mean(), weights=[0.5])


class KeepsNothing(Own):
    def give(self, answer: Tensor, out: Tensor) -> None:
        pass


class NotDetached(Own):
    def onward(self, out: Tensor, y: Tensor) -> Any:
        return out, y


class NoTarget(Own):
    def onward(self, out: Tensor, _: Tensor) -> Any:
        return out.detach()


class Triple(Own):
    def onward(self, out: Tensor, y: Tensor) -> Any:
        return out.detach(), y, y


class NoOptimizer(Own):
    def open(self) -> None:
        pass


class HalfAnOptimizer(Own):
    def open(self) -> None:
        self.opt = open_optimizer(None, self.f, 1e-2)


MISTAKES: dict[type[Own], tuple[type[Exception], str]] = {
    NotScalar: (LayerError, r"loss 2 .* has the shape \(6, 4\); expected one number: take its mean\(\)"),
    Number: (LayerError, r"loss 2 .* class float, which has no gradient; .* leave \.item\(\)"),
    NoLoss: (LayerError, r"keep\(\) got no loss"),
    OneWeight: (LayerError, "2 losses, and weights for 1"),
    KeepsNothing: (ScheduleError, r"a layer of your own gives them to keep\(\)"),
    NotDetached: (LayerError, r"not detached: .*; return detach\(out\), y"),
    NoTarget: (LayerError, "the forward returned an object of the class Tensor; expected a pair"),
    Triple: (LayerError, "the forward returned a tuple of 3; expected a pair"),
    NoOptimizer: (LayerError, "NoOptimizer, has no optimizer; set self.opt"),
    HalfAnOptimizer: (LayerError, r"HalfAnOptimizer, has its parameters head\.weight, head\.bias, which would never"),
}


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_is_told_in_the_layer_that_made_it(kind: type[Own]) -> None:
    """Symptom: a loss of many numbers, or one gone, was told by autograd; what was not detached, by the next layer's
    backward; and a head that no optimizer had never learned, in silence."""
    error, told = MISTAKES[kind]
    with pytest.raises(error, match=told) as caught, Pipeline(ALPackage([kind(), Own()]), "cpu*2", threads=1) as pipe:
        pipe.run(BATCHES)
    if kind is not NoOptimizer:  # told as it is made ready, before any batch
        assert re.search(r"layer 0 .*batch 0", caught.value.__notes__[0])


def test_an_optimizer_of_pytorch_is_as_good_as_one_opened() -> None:
    """Symptom: KeyError: 'initial_lr'."""

    class Plain(Own):
        def open(self) -> None:
            self.opt = torch.optim.SGD(self.parameters(), lr=0.5)

    layer = Plain()
    for factor in (0.5, 0.25):
        layer.scale_lr(factor)
    assert layer.opt.param_groups[0]["lr"] == 0.125


def test_an_optimizer_that_wraps_another_has_what_all_have() -> None:
    """Symptom: AttributeError: 'Wraps' object has no attribute 'state'."""

    class Wraps:
        def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
            self.within = torch.optim.SGD(groups, lr=lr)
            self.param_groups = self.within.param_groups

        def step(self) -> None:
            self.within.step()

        def zero_grad(self) -> None:
            self.within.zero_grad()

    with pytest.raises(ConfigError, match="optimizer Wraps has no state, state_dict, load_state_dict; expected what"):
        open_optimizer(cast(OptimizerFactory, Wraps), nn.Linear(2, 2), 0.1)


def test_an_optimizer_of_a_side_that_leaves_parameters_out_is_told() -> None:
    """Symptom: biases of AL layers never learned, in silence. Cause: only layers with one optimizer were asked."""

    def of_matrices(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for group in groups for each in group["params"] if each.dim() == 2], lr=lr)

    layer = AL(ENC(nn.Linear(6, 4), nn.Linear(4, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)), optimizer=of_matrices)
    with pytest.raises(
        LayerError, match=r"AL, has its parameters enc\.f\.bias, enc\.b\.bias, ae\.g\.bias, ae\.h\.bias"
    ):
        layer(torch.ones(2, 6), torch.ones(2, 4))


def test_a_frozen_part_needs_no_optimizer() -> None:
    layer = HalfAnOptimizer()
    layer.head.requires_grad_(False)
    with Pipeline(ALPackage([layer]), threads=1) as pipe:
        pipe.run(BATCHES)


def test_an_answer_that_is_no_tensor_is_told() -> None:
    """Symptom: AttributeError: 'tuple' object has no attribute 'device', after an epoch."""

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tree:
            return x, x > 0

    class NoTurn(Own):
        def blocks(self) -> dict[str, nn.Module]:
            return {UP: Nested()}

    with (
        Pipeline(ALPackage([NoTurn()]), threads=1) as pipe,
        pytest.raises(LayerError, match=r"class tuple; .* under TURN"),
    ):
        accuracy(pipe, BATCHES)


def made_by(monkeypatch: pytest.MonkeyPatch, losses: int, **options: Any) -> list[Any]:
    """The layers of a method of one's own with so many names of losses."""

    def make(network: Network, lr: Any, optimizer: Any, margin: float = 0.5, *, probe: float = 1.0) -> Iterator[Own]:
        layer = Own()
        layer.given = (margin, probe)  # type: ignore[assignment]
        yield layer

    module = ModuleType("pipeal.methods.own")
    module.make_layers = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = tuple(Loss(f"loss {number}") for number in range(losses))
    monkeypatch.setitem(METHODS, "own", Method("own", "Own", "own form", names))  # type: ignore[misc]
    network: Callable[..., Network] = Network
    nothing = network([], [], nn.Identity, None, nn.Identity, 3)  # type: ignore[arg-type]
    return [*make_layers("own", nothing, **options)]


def test_options_need_not_be_of_keywords_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: "own has no option 'margin'" of a make_layers that has it."""
    assert made_by(monkeypatch, 2, margin=0.1, probe=0.2)[0].given == (0.1, 0.2)
    with pytest.raises(ConfigError, match="unknown option of own 'margn'; did you mean 'margin'"):
        made_by(monkeypatch, 2, margn=0.1)
    with pytest.raises(ConfigError, match="optimizr"):
        made_by(monkeypatch, 2, optimizr=None)


def test_a_method_without_what_makes_its_layers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "own", Method("own", "Own", "own form", ()))  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"the method own has no module pipeal\.methods\.own; expected one with"):
        make_layers("own", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pipeal.methods.own", ModuleType("pipeal.methods.own"))
    with pytest.raises(ConfigError, match=r"pipeal\.methods\.own: found no make_layers\(\), which makes the layers of"):
        make_layers("own", None)  # type: ignore[arg-type]


def test_a_function_that_makes_no_layer_for_each_part_is_told() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)

    def taken(made: Callable[..., Any]) -> None:
        ALPackage.from_bp(net, x, 3, split=["2"], method=made, method_options={"a": 1})

    def alone(network: Network, lr: object, optimizer: object, **options: object) -> Iterator[Any]:
        yield from list(make_layers("greedy", network))[:1]

    def twice(network: Network, lr: object, optimizer: object, **options: object) -> Iterator[Any]:
        yield from 2 * list(make_layers("greedy", network))

    with pytest.raises(ConfigError, match=r"the method alone made 1 layers of 2 parts; expected one for each of"):
        taken(alone)
    with pytest.raises(ConfigError, match=r"the method twice made more layers of 2 parts; expected one for each of"):
        taken(twice)
    with pytest.raises(ConfigError, match=r"the method <lambda> returned .*; expected a layer for each of"):
        taken(lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"the method <lambda> made .*Linear.*; expected a layer that trains itself"):
        taken(lambda *_, **__: [nn.Linear(4, 4)])


def test_a_loss_without_a_name_is_told_at_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: ValueError of zip(), after the first epoch."""
    made_by(monkeypatch, 2)[0](*BATCHES[0])
    with pytest.raises(LayerError, match=r"2 losses, but .*METHODS has names for 1; name each"):
        made_by(monkeypatch, 1)[0](*BATCHES[0])


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your-own-method.md").read_text("utf-8")
DRAWN = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def make_layers" in block)
ENTRY = next(line for line in PAGE.splitlines() if line.startswith('Method("drawn"'))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the method of the documentation, which is in :data:`METHODS`, too."""
    module = ModuleType("pipeal.methods.drawn")
    vars(module).update(Method=Method, Loss=Loss)
    exec(compile(f"{DRAWN}\nENTRY = {ENTRY.rstrip(',')}", "your-own-method.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(METHODS, "drawn", module.ENTRY)  # type: ignore[misc]
    return module


def test_the_method_of_the_documentation_trains_alike_on_one_stage_and_on_two(drawn: ModuleType) -> None:
    """A page's program is run by tests/test_docs.py, too, but only trained here: of a text model, whose features are a
    nesting of tensors."""
    found = []
    for devices in ("cpu", "cpu*2"):
        torch.manual_seed(0)
        dims = TextDims(embedding=6, hidden=4)
        options = {"margin": 0.3}
        package = build_text("lstm", "drawn", vocab_size=11, classes=3, dims=dims, method_options=options)  # type: ignore[arg-type]
        batches = [(torch.arange(20).view(4, 5) % 11, torch.arange(4) % 3) for _ in range(3)]
        with Pipeline(package, devices, threads=1) as pipe:
            report = pipe.run(batches)
            assert pipe.predict(batches[0][0]).shape == (4, 3)
        assert all(losses.shape == (3, len(drawn.ENTRY.losses)) for losses in report.losses)
        found.append(package.state_dict())
    one, two = found
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_test_of_all_methods_skips_with_the_refusal_of_the_documentation(drawn: ModuleType) -> None:
    """Symptom: the page has a method refuse a network by a ConfigError, with which tests over ``METHODS`` failed."""
    with pytest.raises(pytest.skip.Exception, match="Drawn is for classes of whole samples"):
        built("charlm", "drawn")
    assert len(built("lstm", "drawn")) == 4


@pytest.mark.slow
def test_the_tests_of_all_methods_hold_for_the_method_of_the_documentation(tmp_path: Path) -> None:
    """Symptom: six failed for a reader who had copied it as it stood there."""
    for name in ("pipeal", "tests", "scripts", "configs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    config, section = PAGE.partition("```\n@dataclass")[2].partition("```")[0].split("# and in MethodsConfig, ")
    (tmp_path / "pipeal/methods/drawn.py").write_text(DRAWN, "utf-8")
    for path, before, text in (
        ("pipeal/core/methods.py", '        Method("greedy"', f"        {ENTRY}\n"),
        ("pipeal/config/methods.py", "@dataclass(frozen=True)\nclass MethodsConfig", f"@dataclass{config}\n\n"),
        ("pipeal/config/methods.py", "    auglocal: AugLocalConfig", section.partition("\n")[2]),
    ):
        whole = (tmp_path / path).read_text("utf-8")
        assert whole.count(before) == 1
        (tmp_path / path).write_text(whole.replace(before, text + before), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", "drawn", f"--basetemp={tmp_path / 'own'}"]
    command += ["tests/methods", "tests/cli/test_build.py"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
    assert "[charlm-drawn]" not in found.stdout
    assert "Drawn is for classes of whole samples" in found.stdout


@pytest.mark.parametrize("has_reset", [True, False])
def test_a_heads_own_parameter_is_filled_by_reset_parameters(has_reset: bool) -> None:
    """As the page says what a head needs, to be of a network on the meta device."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.fill()

        def fill(self) -> None:
            nn.init.ones_(self.scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    if has_reset:
        Scale.reset_parameters = Scale.fill  # type: ignore[attr-defined]

    def scaled(network: Network, lr: Any, optimizer: OptimizerFactory | None) -> Iterator[Greedy]:
        for part in network.parts():
            yield Greedy(part.f, nn.Sequential(part.linear_head(network.outputs), Scale()), lr=lr)

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def converted() -> ALPackage:
        return ALPackage.from_bp(net, BATCHES[0][0], 3, split=["2"], method=scaled)

    if has_reset:
        assert all(torch.equal(layer.head[1].scale, torch.ones(3)) for layer in converted().materialize())
    else:
        with pytest.raises(ConfigError, match=r"layer 0: nothing fills 'head\.1\.scale', .* a reset_parameters\(\)"):
            converted()


def test_what_an_optimizer_of_pytorch_has_learnt_is_loaded_again(tmp_path: Path) -> None:
    """Symptom: every file that was saved of such a layer, and every checkpoint, did not fit the layer it was of."""

    class Plain(Own):
        def open(self) -> None:
            self.opt = torch.optim.Adam(self.parameters(), lr=0.5)

    def built() -> ALPackage:
        torch.manual_seed(0)
        return ALPackage([Plain(), Plain()])

    whole, later = built(), built()
    with Pipeline(whole, threads=1) as pipe:
        pipe.run(BATCHES, lr_scale=lambda batch: 1 / (batch + 1))
    with Pipeline(built(), threads=1) as pipe:
        pipe.run(BATCHES[:1], lr_scale=lambda batch: 1 / (batch + 1))
        pipe.save(tmp_path / "it")
    with Pipeline.load(tmp_path / "it", later, threads=1) as pipe:
        pipe.run(BATCHES[1:], lr_scale=lambda batch: 1 / (batch + 1))
    torch.testing.assert_close(whole.state_dict(), later.state_dict(), rtol=0, atol=0)
