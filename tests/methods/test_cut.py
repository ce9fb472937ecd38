"""Cutting networks: whatever the forward does between submodules, the parts together do it too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet18

from pipeal import ConfigError
from pipeal.core.draws import may_draw
from pipeal.core.tree import map_tensors, tensors
from pipeal.methods.cutting.cut import cut, refuse_ties


class Net(nn.Module):
    """Four linear maps; subclasses put them together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


class Glue(Net):
    """A parameter, a buffer, a constant, shapes, checks, in-place operators and an argument nobody gives."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        rows, width = x.shape
        torch._assert(width == 4, f"found {width}")
        x = self.a(x).view(rows, width) + self.shift.expand(rows, -1)
        x = self.b(F.relu_(x)) * self.scale
        x += torch.arange(4.0)
        if double:
            x = 2 * x
        x = torch.cat([x, x], 1)[:, : x.size(1)]
        return self.d(self.c(x).mul_(0.5))


class Modes(Net):
    """Asks for its mode outside of submodules, as is the habit with ``F.dropout``."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.5, self.training)
        x = F.dropout(self.b(x), 0.5, training=not self.training)
        return self.d(F.relu(self.c(x)))


class Moded(nn.Module):
    """Takes the mode as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, training: bool, other: bool = False) -> Tensor:
        assert isinstance(training, bool)
        return self.linear(x) + (2 if training else 1) + 4 * other


class ModesAtTheCut(Net):
    """The very submodule that a layer begins at is told the mode; so is what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = Moded(), Moded()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x), self.training)
        x = self.c(x, not self.training, other=self.training)
        return F.dropout(self.d(x), 0.5, self.training)


class Nested(nn.Module):
    """Cut inside of children, one of which is called as an attribute of a fx module is."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Glue()
        self.meta = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        self.unused = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.meta(self.graph(x).tanh())


class Pairs(nn.Module):
    """A tuple crosses the cut, as one value."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), LastState()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.unsqueeze(1)))


class LastState(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[1][0][-1] if x[0].sum() < 1e9 else x[0]  # control flow, inside a submodule


class States(Net):
    """What crosses beside the first value has its batch second, alone and in a tuple, over two cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = self.a(x).unsqueeze(1).expand(-1, 3, -1)
        out, state = self.lstm(words)
        out = self.d(self.c(out))
        return self.last(out, state)[0][:, -1] + state[0].sum(0) + words.transpose(0, 1).sum(0)


class Skip(Net):
    """What a layer hands on is needed by another one than the next."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.a(x)
        return self.d(self.c(self.b(early)) + early)


class Shapes(Net):
    """Asks for the shape of its input at the end, and makes a mask of shapes alone."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        mask = torch.tril(torch.ones(width, width)).to(x.dtype)
        x = self.b(self.a(x) @ mask)
        return self.d(self.c(x @ mask).reshape(rows * width)[: rows * x.size(1)].view(rows, -1))


class Shared(Net):
    """A value without a batch, from a weight: it is trained where it is made, and crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.places(torch.arange(x.shape[1]))
        return self.d(self.c(self.b(self.a(x)) @ bias) @ bias)


class Named(Net):
    """A submodule takes the features by their name, and something else before them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.both(x=self.b(first).relu_(), other=first))


class Both(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x - other


CASES = [
    (Skip, ["b", "c"]),
    (Skip, ["b", "c", "d"]),
    (Shapes, ["b", "c", "d"]),
    (Shared, ["a", "b", "c", "d"]),
    (Named, ["b", "both", "d"]),
    (Glue, ["a"]),
    (Glue, ["b"]),
    (Glue, ["b", "c", "d"]),
    (Glue, ["d"]),
    (Modes, ["b", "c"]),
    (Modes, ["a", "b", "c", "d"]),
    (ModesAtTheCut, ["b"]),
    (ModesAtTheCut, ["b", "c", "d"]),
    (ModesAtTheCut, ["a", "c"]),
    (Nested, ["graph", "meta"]),
    (Nested, ["graph.b", "graph.d", "meta.1"]),
    (Nested, ["meta.2.1"]),
    (Pairs, ["last"]),
    (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4))), ["0.1", "1"]),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("network", "split"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_the_parts_together_are_the_network(network: type[nn.Module], split: list[str], training: bool) -> None:
    torch.manual_seed(0)
    whole = network().train(training)
    parts = cut(whole, split)
    copies = copy.deepcopy(parts)
    assert [part.name for part in parts][-len(split) :] == split
    state = copy.deepcopy(whole.state_dict())
    expected = run([whole], training)
    whole.load_state_dict(state)
    assert run([part.module for part in parts], training) == expected
    assert run([part.module for part in copies], training) == expected
    for part in parts:  # and their modes are set like any module's
        part.module.train(not training)
    whole.load_state_dict(state)
    found = run([part.module for part in parts], not training)
    whole.load_state_dict(state)
    assert found == run([whole.train(not training)], not training)


def run(modules: list[nn.Module], training: bool) -> list[float]:
    torch.manual_seed(1)
    x: Any = torch.randn(3, 4)
    for module in modules:
        assert all(part.training == training for part in module.modules())
        x = module(x)
    return x.flatten().tolist()


@pytest.mark.parametrize(
    ("network", "split", "wanted"),
    [
        (Skip, ["c"], [((3, 4), (3, 4))]),  # what c takes, and the skip
        (Skip, ["b", "c", "d"], [((3, 4),), ((3, 4), (3, 4)), ((3, 4),)]),
        (Shapes, ["b", "d"], [((3, 4), (3, 4)), ((3, 4),)]),  # the input's shape, and no mask
        (Shared, ["b", "d"], [((3, 4), (3, 4, 4)), ((3, 4),)]),  # once for each sample
    ],
)
def test_what_is_handed_on(network: type[nn.Module], split: list[str], wanted: Any) -> None:
    x: Any = torch.randn(3, 4)
    parts = cut(network(), split, x)
    for part, shapes in zip(parts, wanted, strict=False):
        x = part.module(x)
        assert tuple(tuple(tensor.shape) for tensor in tensors(x)) == shapes
        assert [tensor.untyped_storage().nbytes() <= 64 for tensor in tensors(x)] == [True] * len(shapes)


def test_what_is_computed_again_fits_every_batch() -> None:
    """Symptom: a batch of another size is refused. Cause: sizes crossed as the numbers of the sample."""
    for network in (Shapes, Shared, Skip):
        whole = network()
        parts = cut(whole, ["b", "c", "d"], torch.randn(3, 4))
        x = wanted = torch.randn(7, 4)
        for part in parts:
            x = part.module(x)
        assert torch.equal(x, whole(wanted))


def test_the_rows_of_a_packet_can_be_chosen() -> None:
    """As early exits and batches that do not fit into memory do."""
    for network in (Shapes, Shared, Skip, States):
        net, x = network(), torch.randn(5, 4)
        first, *others = (part.module for part in cut(net, ["c", "d"], torch.randn(3, 4)))
        packet = first(x)
        assert {len(tensor) for tensor in tensors(packet)} == {5}
        whole, some = packet, map_tensors(lambda tensor: tensor[[0, 3]], packet)
        for part in others:
            whole, some = part(whole), part(some)
        torch.testing.assert_close(some, whole[[0, 3]])
        torch.testing.assert_close(whole, net(x))


def test_a_cut_inside_of_a_residual_block() -> None:
    whole = resnet18(num_classes=3).eval()
    x = wanted = torch.randn(2, 3, 16, 16)
    parts = cut(whole, ["layer1.0.conv2", "layer2.1.conv1"], x)
    for part in parts:
        x = part.module(x)
    assert torch.equal(x, whole(wanted))


def test_parts_hold_the_networks_own_modules_under_their_names() -> None:
    whole = Nested()
    parts = cut(whole, ["graph.b", "graph.d", "meta.1"])
    held = {name: tensor for part in parts for name, tensor in part.module.named_parameters()}
    own = dict(whole.named_parameters())
    # fx keeps two names for itself.
    assert {name.removeprefix("model.") for name in held} == {name for name in own if not name.startswith("unused")}
    assert all(own[name.removeprefix("model.")] is tensor for name, tensor in held.items())
    assert not hasattr(whole, "_tensor_constant0")


def test_a_mode_that_is_handed_back_belongs_to_the_last_part() -> None:
    class Tells(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, bool]:
            return self.b(self.a(x)), self.training

    first, second = (part.module for part in cut(Tells(), ["b"]))
    assert second(first(torch.ones(1, 4)))[1] is True
    assert second.eval()(first(torch.ones(1, 4)))[1] is False


def test_parts_stay_apart_when_modes_are_set() -> None:
    first, second = (part.module for part in cut(Modes(), ["b"]))
    second.eval()
    assert all(part.training for part in first.modules())


@given(children=st.integers(1, 6), data=st.data())
def test_sequentials_are_grouped_under_their_names(children: int, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(range(children)), unique=True, min_size=1).map(sorted))
    whole = nn.Sequential(*(nn.Linear(2, 2) for _ in range(children)))
    parts = cut(whole, [str(name) for name in names])
    assert [part.name for part in parts] == [str(name) for name in sorted({0, *names})]
    assert [name for part in parts for name, _ in part.module.named_children()] == [str(n) for n in range(children)]
    assert [child for part in parts for child in part.module.children()] == list(whole)


def test_lists_and_whole_modules() -> None:
    modules = [nn.Linear(2, 2), nn.ReLU()]
    for model in (modules, tuple(modules), nn.ModuleList(modules), nn.Sequential(*modules)):
        assert [part.module for part in cut(model)] == modules


def test_only_what_cannot_draw_is_trusted() -> None:
    class Draws(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.rand_like(self.a(x)))

    class Fractional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.fractional_max_pool2d(self.a(x), 1, output_size=1))

    class Method(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).bernoulli())

    harmless = cut(Glue(), ["b", "d"])
    assert [may_draw(part.module) for part in harmless] == [False] * 3
    assert [may_draw(part.module) for part in copy.deepcopy(harmless)] == [False] * 3
    assert [may_draw(part.module) for part in cut(Modes(), ["b", "c"])] == [True, True, False]
    for network in (Draws, Fractional, Method):
        assert [may_draw(part.module) for part in cut(network(), ["b"])] == [True, False]


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) if x.sum() > 0 else x)


class OtherInTraining(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) if self.training else x)


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.randn(4))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.b(self.a(x))))


class Alone(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(self.c(torch.ones(2, 4)))


class TwoInputs(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.a(x) + y)


@pytest.mark.parametrize(
    ("network", "split", "message"),
    [
        (resnet18, ["layr2"], r"unknown submodule 'layr2'; did you mean 'layer2'\? \(.* of ResNet: conv1, bn1"),
        (resnet18, ["layer1.7"], r"unknown submodule 'layer1.7'.* \(the submodules of layer1: layer1.0, layer1.1\)"),
        (resnet18, ["avgpool.x"], "'avgpool' has no submodules"),
        (resnet18, [""], "unknown submodule ''"),
        (resnet18, ["layer3", "layer2"], "split has layer3, layer2, but .* in another order; pass layer2, layer3"),
        (resnet18, ["layer2", "layer2"], "split names 'layer2' twice"),
        (resnet18, ["layer2", "layer2.0"], "split names 'layer2' and 'layer2.0', which lies within it"),
        (resnet18, None, r"a ResNet is cut where .* a number of .* split=\[...\] .*conv1, .*or pass a list of modules"),
        (Alone, ["c"], "'c' cannot begin a layer: nothing crosses the cut"),
        (Branches, ["c"], "forward of Branches cannot be .*: TraceError: .*control flow; .*pass a list of mod"),
        (OtherInTraining, ["c"], "one thing in training and another in evaluation.*pass a list of modules"),
        (Noisy, ["b"], "random numbers from outside a submodule.*pass a list of modules"),
        (TwoInputs, ["b"], "missing 1 required positional argument: 'y'"),
        (Twice, ["b"], "'b' is called 2 times in the forward"),
        (Twice, ["d"], "'d' is not called in the forward"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_told_in_one_line(network: Any, split: list[str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        cut(network(), split)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_sequentials_and_lists_are_refused_alike() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ConfigError, match=r"unknown submodule '2' \(the submodules of Sequential: 0, 1\)"):
        cut(whole, ["2"])
    with pytest.raises(ConfigError, match="split has 1, 0, but the forward calls them in another order; pass 0, 1"):
        cut(whole, ["1", "0"])
    with pytest.raises(ConfigError, match="split names submodules of one module, but the model is a list"):
        cut([whole], ["0"])
    with pytest.raises(ConfigError, match="item 1 of the model is a str"):
        cut([whole, "relu"])  # type: ignore[list-item]
    for nothing in ([], nn.Sequential()):
        with pytest.raises(ConfigError, match="the model is empty"):
            cut(nothing)


def hooked() -> nn.Sequential:
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    whole.register_forward_hook(lambda module, args, out: 2 * out)
    return whole


class Auxiliary(Net):
    aux_logits = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        return self.c(x) + self.d(x) if self.training else self.c(x)


@pytest.mark.parametrize(
    ("make", "split", "message"),
    [
        (lambda: len, None, "the model is a builtin_function_or_method; expected a torch.nn.Module, a list"),
        (lambda: nn.ReLU, None, "the model is a type; expected"),
        (lambda: None, ["a"], "the model is a NoneType; expected"),
        (lambda: {"a": nn.ReLU()}, None, "the model is a dict; expected"),
        (lambda: "net", None, "the model is a str; expected"),
        (lambda: nn.DataParallel(Net()), ["a"], "wrapped in a DataParallel; pass what it holds, model.module"),
        (lambda: torch.compile(Net()), ["a"], "wrapped in an OptimizedModule; pass what it holds, model._orig_mod"),
        (torch.jit.ScriptModule, ["0"], "the model is a ScriptModule: what is scripted cannot be cut"),
        (hooked, None, "a Sequential, has forward hooks, which its layers would lose"),
        (hooked, ["1"], "a Sequential, has forward hooks, which its layers would lose"),
        (Net, 1.0, "split is 1.0; expected a list of the names"),
        (Net, 0, "split is 0; expected a whole number, at least 1"),
        (Net, True, "split is True; expected a whole number, at least 1"),
        (Net, [1], r"split is \[1\]; expected a list of the names of submodules, as strings"),
        (Net, [], r"split is empty; name a submodule, or pass \[model\]"),
        (Auxiliary, ["b"], "build it with aux_logits=False"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2),
            ["layers.1"],
            r"pass list\(model.layers\)",
        ),
    ],
)
def test_other_kinds_of_models_and_names_are_told(make: Any, split: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        cut(make(), split)
    assert "\n" not in str(raised.value)


def test_of_many_names_the_first_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"0, 1, .*, 15 and 84 more\)"):
        cut(nn.Sequential(*(nn.ReLU() for _ in range(100))), ["x"])


def test_tied_parameters_may_not_be_torn() -> None:
    tied = Glue()
    tied.d.weight = tied.a.weight
    with pytest.raises(ConfigError, match=r"layers 0 and 2 would share a parameter \('a.weight' and 'd.weight'\)"):
        refuse_ties(cut(tied, ["b", "c"]))
    refuse_ties(cut(tied, ["a"]))
    normed = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ConfigError, match="would share a buffer"):
        refuse_ties(cut([normed, nn.ReLU(), normed]))
    relu = nn.ReLU()
    refuse_ties(cut([relu, nn.Linear(4, 4), relu]))
