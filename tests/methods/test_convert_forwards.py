"""What forwards do between the cuts beside computing: masks, buffers, modes, random numbers, types."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, ConfigError, DataError, Pipeline
from pipeal.methods.cutting.cut import cut
from tests.messages import messages

IDS = torch.arange(24).reshape(4, 6) % 19 + 1


class Texts(nn.Module):
    """An encoder of PyTorch's own layers, whose mask is true on padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=src_key_padding_mask)
        return x


class ByName(Texts):
    """The same, with arguments that have to be named."""

    def forward(self, *, ids: Tensor, key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, key_padding_mask)


@pytest.mark.parametrize("task", ["classification", "per-place"])
@pytest.mark.parametrize("network", [Texts, ByName])
def test_padding_changes_no_answer_under_a_mask_that_is_true_on_padding(network: type[Texts], task: Any) -> None:
    torch.manual_seed(0)
    ids, padding = torch.randint(1, 20, (4, 6)), torch.zeros(4, 6, dtype=torch.bool)
    padding[:2, 4:] = True

    def given(ids: Tensor, padding: Tensor) -> Any:
        return (ids, padding) if network is Texts else {"ids": ids, "key_padding_mask": padding}

    split = ["layers.0", "layers.1"]
    package = ALPackage.from_bp(network(), given(ids, padding), 3, split=split, task=task, code=8).eval()
    other = torch.where(padding, 7, ids)
    for exit_at in (1, 2, 3):
        wanted, found = (package.infer(given(one, padding), exit_at) for one in (ids, other))
        words = ~padding if task == "per-place" else slice(None)
        torch.testing.assert_close(found[words], wanted[words])
    if task == "per-place":
        losses = []
        for targets in (torch.zeros_like(ids), torch.zeros_like(ids).masked_fill(padding, 1)):
            package[0](given(ids, padding), targets)
            losses.append(package[0].loss())
        assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("network", "wrong", "told"),
    [
        (Texts, {"ids": IDS}, "is a dict of ids; expected .* a tuple"),
        (ByName, (IDS, IDS), "is a tuple, .* expected .* a dict of ids, key_padding_mask"),
        (ByName, {"ids": IDS}, "is a dict of ids; expected .* a dict of ids, key_padding_mask"),
        (Texts, IDS, r"is a Tensor, \(4, 6\) int64; expected what the sample of from_bp was, a tuple, \(4, 6\) int64"),
        (ByName, IDS, "is a Tensor, .* expected .* a dict of ids, key_padding_mask"),
        (nn.Sequential, (IDS, IDS), "is a tuple, .* expected .* a Tensor"),
    ],
)
def test_a_batch_that_lacks_what_the_sample_had_is_told(network: type[nn.Module], wrong: Any, told: str) -> None:
    """Symptom: a loader that gave no masks ended in a traceback of generated code."""
    mask = torch.zeros(4, 6, dtype=torch.bool)
    if network is nn.Sequential:
        net: nn.Module = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
        sample: Any = IDS
    else:
        net, sample = network(), (IDS, mask) if network is Texts else {"ids": IDS, "key_padding_mask": mask}
    package = ALPackage.from_bp(net, sample, 3, split=1 if network is nn.Sequential else ["layers.1"])
    targets = torch.arange(4) % 3
    with Pipeline(package, threads=1) as pipe:
        pipe.run([(sample, targets)])
        with pytest.raises(DataError, match=told):
            pipe.submit(wrong, targets)
        pipe.run([(sample, targets)])


class MaskedOrNot(nn.Module):
    """It asks whether there is a mask, as many a forward of texts does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor | None, scale: Tensor) -> Tensor:
        x = self.hidden(self.embedding(ids)).relu()
        if mask is not None:
            x = x * mask[..., None]
        return self.head(x.mean(1) * scale)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("method", ["al", "greedy", "bp"])
def test_an_argument_that_is_none_stays_so(by_name: bool, method: str) -> None:
    """Symptom: a mask that was None ended in a TypeError of ``Tensor * NoneType``, or in an AttributeError where it
    went into a submodule. Cause: within the forward it was a symbol, which is not None."""

    def given(ids: Tensor, mask: Tensor | None) -> Any:
        scale = torch.ones(len(ids), 1)
        return {"ids": ids, "mask": mask, "scale": scale} if by_name else (ids, mask, scale)

    torch.manual_seed(0)
    network, sample, targets = MaskedOrNot(), given(IDS, None), torch.arange(4) % 3
    wanted = network(IDS, None, torch.ones(4, 1))
    if method != "bp":
        network.head = nn.Identity()  # type: ignore[assignment]
    package = ALPackage.from_bp(network, sample, 3, split=["hidden"], method=method)
    if method == "bp":
        torch.testing.assert_close(package.infer(sample), wanted)
    plain = package.to_bp()
    torch.testing.assert_close(plain(sample), package.eval().infer(sample))
    for answer in (plain(ids=IDS, scale=torch.ones(4, 1)), plain(IDS, scale=torch.ones(4, 1))):
        torch.testing.assert_close(answer, package.infer(sample))
    with Pipeline(package.train(), threads=1) as pipe:
        pipe.run([(given(IDS[:3], None), targets[:3])])
        with pytest.raises(DataError, match=rf"item {'.mask.' if by_name else 1} of the input is given, and was None"):
            pipe.submit(given(IDS, torch.ones(4, 6)), targets)


def test_a_first_argument_that_is_none_is_given_by_place_as_well() -> None:
    """Symptom: "the input is missing" of ``plain(None, x)``, though a second argument was there."""

    class MaskFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, mask: Tensor | None, x: Tensor) -> Tensor:
            return self.head(self.hidden(x if mask is None else x * mask).relu())

    x = torch.randn(4, 6)
    package = ALPackage.from_bp(MaskFirst(), (None, x), 3, split=["hidden"], method="bp").eval()
    plain, wanted = package.to_bp(), package.infer((None, x))
    for answer in (plain((None, x)), plain(None, x), plain(mask=None, x=x)):
        torch.testing.assert_close(answer, wanted)


def test_too_few_of_any_number_of_arguments_are_told() -> None:
    """Symptom: "tuple index out of range", where a forward names the first of its arguments alone."""

    class AnyNumber(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return self.head(self.hidden(sum(more, x)).relu())

    x = torch.randn(4, 6)
    package = ALPackage.from_bp(AnyNumber(), (x, x, x), 3, split=["hidden"], method="bp").eval()
    plain = package.to_bp()
    torch.testing.assert_close(plain(x, x, x), package.infer((x, x, x)))
    with pytest.raises(DataError, match="the input is given as arguments, 1 by place and 0 by name"):
        plain(x)


class Shifted(nn.Module):
    """Its first argument is called as that of the plain module is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return self.second(self.first(x + by).relu())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("method", ["al", "greedy", "bp"])
def test_a_plain_module_takes_the_arguments_that_the_network_took(by_name: bool, method: str) -> None:
    """Symptom: TypeError of ``to_bp()(ids, mask)``. Cause: it took the input of a batch alone, one tuple or dict."""
    x, by = torch.randn(4, 6), torch.randn(4, 6)
    sample: Any = {"x": x, "by": by} if by_name else (x, by)
    package = ALPackage.from_bp(Shifted(), sample, 3, split=["second"], method=method).eval()
    plain, wanted = package.to_bp(), package.infer(sample)
    for args, named in (((sample,), {}), ((x, by), {}), ((x,), {"by": by}), ((), {"by": by, "x": x})):
        torch.testing.assert_close(plain(*args, **named), wanted)
        exported = torch.export.export(plain, args, named).module()
        torch.testing.assert_close(exported(*args, **named), wanted)
    for args, named in (((x, by), {"by": by}), ((), {"x": x, "of": by}), ((x, by, x), {}), ((x,), {}), ((), {})):
        with pytest.raises(DataError, match=r"expected what the sample of from_bp was, a (dict|tuple)"):
            plain(*args, **named)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_plain_module_takes_arguments_whatever_they_are_called(by_name: bool) -> None:
    class Called(Shifted):
        """Its second argument is called as the first of the plain module is."""

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            return super().forward(ids, x)

    ids, x = torch.randn(4, 6), torch.randn(4, 6)
    sample: Any = {"ids": ids, "x": x} if by_name else (ids, x)
    package = ALPackage.from_bp(Called(), sample, 3, split=["second"]).eval()
    plain, wanted = package.to_bp(), package.infer(sample)
    for answer in (plain(sample), plain(ids, x), plain(ids=ids, x=x)):
        torch.testing.assert_close(answer, wanted)
    with pytest.raises(DataError, match="expected what the sample of from_bp was"):
        plain(ids=ids)


@pytest.mark.parametrize("sample", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["tensor", "tuple", "dict"])
def test_a_plain_module_takes_one_argument(sample: Any) -> None:
    """Symptom: of a sample that is a tuple of one, the first row was taken for the input."""

    class Network(nn.Sequential):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x if scale is None else x * scale)

    x = torch.randn(4, 6)
    package = ALPackage.from_bp(Network(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), sample(x), 3, split=["2"]).eval()
    plain, wanted = package.to_bp(), package.infer(sample(x))
    for answer in (plain(sample(x)), plain(x), plain(x=x)):
        torch.testing.assert_close(answer, wanted)
    with pytest.raises(DataError, match="expected what the sample of from_bp was"):
        plain(x, x)


class Either(Texts):
    """The name says in some libraries what words are, and in others what padding is."""

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        return super().forward(ids, ~padding_mask)


def test_of_a_padding_mask_that_may_be_either_it_is_told_how_it_is_read() -> None:
    ids, words = torch.randint(1, 20, (4, 6)), torch.arange(6) < torch.tensor([[4], [4], [6], [6]])
    with messages() as said:
        package = ALPackage.from_bp(Either(), (ids, words), 3, split=["layers.0", "layers.1"], code=8).eval()
    assert ["'padding_mask' is taken for a mask that is true on words" in line for line in said] == [True]
    for exit_at in (1, 2, 3):
        wanted, found = (package.infer((one, words), exit_at) for one in (ids, torch.where(words, ids, 7)))
        torch.testing.assert_close(found, wanted)


class Net(nn.Module):
    """Three linear maps; subclasses put them together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen: Tensor = self.seen + 1
        return self.c(self.b(self.a(x)))


class Remembers(Net):
    """Makes a ramp once, and notes what it has computed."""

    ramp: Tensor | None = None
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ramp is None:
            self.ramp = torch.arange(x.shape[1])[None, :, None]
        self.last = self.a(x)
        return self.c(self.b(self.last) + self.ramp) * self.ramp


def test_a_buffer_that_would_be_assigned_in_vain_is_told_and_stays() -> None:
    """A symbol was left in its place, at which the network's own next forward stumbled."""
    network = Counts()
    of_2_6 = r"cannot assign .* as buffer 'seen'"
    told = rf"assigns to 'seen', which would be lost .*\(self.seen.add_\(1\)|{of_2_6}"
    with pytest.raises(ConfigError, match=told):
        cut(network, ["b", "c"], torch.rand(2, 3, 4))
    assert network.seen.item() == 0
    network(torch.rand(2, 3, 4))
    assert network.seen.item() == 1


def test_what_is_made_once_is_made_for_every_size() -> None:
    network = Remembers()
    parts = [part.module for part in cut(network, ["b", "c"], torch.rand(2, 3, 4))]
    assert not {"ramp", "last"} & set(vars(network))
    x = torch.rand(5, 7, 4)
    torch.testing.assert_close(nn.Sequential(*parts)(x), network(x))


class Constant(Net):
    """Makes a table once, of no size of the input, in an attribute or a buffer."""

    table: Tensor | None

    def __init__(self, *, is_buffer: bool = False) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("table", None, persistent=False)
        else:
            self.table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 4)
        return self.c(self.b(self.a(x)) * self.table)


def test_a_table_of_constants_that_is_made_once_is_no_difference_between_modes() -> None:
    with pytest.raises(ConfigError, match=r"assigns to 'table', which would be lost"):
        cut(Constant(is_buffer=True), ["b", "c"], torch.rand(2, 4))
    network, x = Constant(), torch.rand(2, 4)
    parts = [part.module for part in cut(network, ["b", "c"], x)]
    assert network.table is None
    torch.testing.assert_close(nn.Sequential(*parts)(x), network(x))


class Nearest(Net):
    """Chooses a code by its distance, and takes that itself: no gradient is lost where a number is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.rand(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with torch.no_grad():
            nearest, is_far = torch.cdist(x, self.codes).argmin(-1), x.norm(dim=-1, keepdim=True) > 0.1
        code = self.codes[nearest] * is_far
        return self.c(self.b(x + code))


class Off(Net):
    """Turns gradients off where weights are used, and where a mask is made."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
            large = x > 0
        return self.c(self.b(x) * large)


class Cast(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(x)
        return self.c(x.float())


def test_modes_that_parts_would_lose_are_told() -> None:
    """A part trained weights that the forward leaves alone, and computed without autocast."""
    with pytest.raises(ConfigError, match=r"turns gradients off \(torch.no_grad, set_grad_enabled\)"):
        cut(Off(), ["b", "c"], torch.rand(2, 4))
    frozen = Off()
    frozen.a.requires_grad_(False)
    assert len(cut(frozen, ["b", "c"], torch.rand(2, 4))) == 3
    assert len(cut(Nearest(), ["b", "c"], torch.rand(2, 4))) == 3
    with pytest.raises(ConfigError, match=r"begins or ends torch\.autocast"):
        cut(Cast(), ["b", "c"], torch.rand(2, 4))


class Aliased(Net):
    """Reads a buffer early, and then writes into it by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("view", self.whole.view(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        early = self.whole * 1.0
        x = self.a(x)
        self.view.add_(1)
        return self.c(self.b(x) + early)


def test_a_step_on_buffers_is_taken_where_it_stands() -> None:
    network, x = Aliased(), torch.rand(2, 4)
    parts = [part.module for part in cut(copy.deepcopy(network), ["b", "c"], x)]
    for _ in range(2):
        torch.testing.assert_close(nn.Sequential(*parts)(x), network(x))


class Reverse(torch.autograd.Function):
    """Turns gradients around, as domains are made alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * grad, None


class Reversed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(Reverse.apply(self.b(Reverse.apply(self.a(x), 2.0)), 0.5))


def test_a_function_of_ones_own_keeps_its_backward_between_the_cuts() -> None:
    """It was refused as a forward that turns gradients off: PyTorch runs its forward so."""
    network, x, before = Reversed(), torch.rand(2, 4), torch.autograd.Function.apply
    twin = copy.deepcopy(network)
    parts = [part.module for part in copy.deepcopy(cut(network, ["c"], x))]
    for one in (nn.Sequential(*parts), twin):
        one(x).square().sum().backward()
    gradients = dict(nn.ModuleList(parts).named_parameters())
    assert all(torch.equal(gradients[f"{int(n[0] == 'c')}.{n}"].grad, w.grad) for n, w in twin.named_parameters())
    assert torch.autograd.Function.apply == before


class Sliced(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x[:, :4])))


def test_a_forward_may_slice_its_input() -> None:
    """Before Python 3.12 a slice has no hash: ``TypeError: unhashable type: 'slice'``."""
    x = torch.rand(2, 6)
    network = Sliced()
    parts = [part.module for part in cut(network, ["b"], x)]
    torch.testing.assert_close(nn.Sequential(*parts)(x), network(x))


class Late(Net):
    """Uses late what it computes early: of a weight, of a weight and sizes, and of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.token = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(1, 4))
        self.beside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale, token, beside = self.scale.exp(), self.token.expand(x.shape[0], -1), self.beside(x)
        x = self.b(self.a(x).relu())
        return self.c(x * scale + token + beside)


def test_a_step_on_weights_alone_is_taken_where_it_trains_and_other_weights_are_told() -> None:
    """What crosses a cut beside the first value is detached: these weights stayed as they were, without a word."""
    torch.manual_seed(0)
    network, x = Late(), torch.randn(8, 4)
    with messages() as said:
        package = ALPackage.from_bp(network, x, 3, split=["b", "c"], code=8)
    assert ["beside.weight, beside.bias" in line for line in said if "will not train" in line] == [True]
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    for _ in range(2):
        package(x, torch.arange(8) % 3)
        package.backward()
        package.update()
    still = [name for name, weight in network.named_parameters() if torch.equal(weight, before[name])]
    assert still == ["beside.weight", "beside.bias"]


class LayerDrop(Net):
    """Leaves layers out at random, as ``transformers`` do it: the number is drawn also where none is left out."""

    def __init__(self, probability: float, draw: Callable[[], Any] = lambda: torch.rand([])) -> None:
        super().__init__()
        self.probability, self.draw = probability, draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            dropped = self.draw() < self.probability
            if not (self.training and dropped):
                x = layer(x)
        return x


def test_a_forward_that_decides_by_random_numbers_is_told() -> None:
    """What it had once decided stayed so: no layer was ever dropped."""
    x = torch.rand(2, 4)
    assert len(cut(LayerDrop(0.0), ["b", "c"], x)) == 3
    for network in (LayerDrop(1e-6), LayerDrop(1e-6, random.random), LayerDrop(1e-6, lambda: torch.randint(9, ()))):
        with pytest.raises(ConfigError, match="draws random numbers from outside"):
            cut(network, ["b", "c"], x)


def test_parts_of_two_types_are_told() -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).double()).float())

    network = Mixed()
    network.b.double()
    with pytest.raises(ConfigError, match=r"gives torch.float32, and the layer before has codes of torch.float64"):
        ALPackage.from_bp(network, torch.rand(2, 4), 3, split=["b", "c"])
    ALPackage.from_bp(network, torch.rand(2, 4), 3, split=["b", "c"], method="greedy")


def test_complex_weights_train() -> None:
    class Fourier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter, n=4)
            return self.c(self.b(x))

    network = Fourier()
    package = ALPackage.from_bp(network, torch.rand(2, 4), 3, split=["b", "c"], code=8)
    before = network.filter.clone()
    package(torch.rand(2, 4), torch.tensor([0, 1]))
    package.backward()
    package.update()
    assert not torch.equal(network.filter, before)


class Fields(nn.Module):
    """A block that gives a dict, none of whose fields is called as an answer is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"left": self.linear(x), "right": x}


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, fields: dict[str, Tensor]) -> Tensor:
        return self.linear(fields["left"] + fields["right"])


def test_a_pool_takes_a_dict_of_any_fields() -> None:
    x = torch.rand(2, 4)
    package = ALPackage.from_bp([Fields(), Joins()], x, 3, code=8, pool={0: lambda fields: fields["left"]})
    package(x, torch.tensor([0, 1]))
    package.backward()
    package.update()
    assert package.infer(x, 1).shape == (2, 3)
    with pytest.raises(ConfigError, match="the model returns a dict with left, right"):
        ALPackage.from_bp([Fields(), Joins()], x, 3)


class Answers(NamedTuple):
    aux: Tensor | None
    logits: Tensor


class Named(Net):
    def forward(self, x: Tensor) -> Any:
        return Answers(self.a(x), self.c(self.b(self.a(x))))


class Unnamed(Net):
    """Takes whatever arguments there are."""

    def forward(self, *several: Tensor, **by_name: Tensor) -> Tensor:
        x, y = several or (by_name["x"], by_name["y"])
        return self.c(self.b(self.a(x) + y))


@pytest.mark.parametrize("method", ["al", "bp"])
def test_named_tuples_and_arguments_without_names(method: str) -> None:
    """The former, which torchvision's networks give, had no answer; of the latter, a batch went in as one."""
    x, y = torch.rand(2, 4), torch.rand(2, 4)
    split = None if method == "bp" else ["b"]
    for network, sample in ((Named(), x), (Unnamed(), (x, y)), (Unnamed(), {"x": x, "y": y})):
        package = ALPackage.from_bp(network if split else [network], sample, 4, split=split, method=method)
        package(sample, torch.tensor([0, 1]))
        package.backward()
        package.update()
        assert package.infer(sample).shape == (2, 4)
    one = ALPackage.from_bp([Kept()], {"x": x}, 4)  # whose one argument is a dict
    assert one.infer({"x": x}).shape == (2, 4)


class Kept(Net):
    def forward(self, batch: dict[str, Tensor], **options: Any) -> Tensor:
        return self.a(batch["x"]) * options.get("factor", 1)


def test_a_buffer_that_is_not_saved_stays_so() -> None:
    class Ramp(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ramp", torch.arange(4.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x) * self.ramp) * self.seen)

    parts = [part.module for part in cut(Ramp(), ["b", "c"], torch.rand(2, 4))]
    for modules in (parts, copy.deepcopy(parts)):
        assert not any(name == "ramp" for part in modules for name in part.state_dict())
        assert "ramp" in dict(modules[0].named_buffers())


class Meanwhile(Net):
    """Has something else happen in its forward, as another thread may at any time."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self.happens = happens

    def forward(self, x: Tensor) -> Tensor:
        between = self.b(self.a(x))
        self.happens()
        return self.c(between)


def test_other_threads_train_while_a_network_is_cut() -> None:
    """Symptom: "module is not installed as a submodule" in the stages of a pipeline that was training. Cause: what
    torch.fx puts into ``nn.Module`` to follow one network, every thread meets."""
    x = torch.rand(2, 4)
    other, found = Remembers(), list[Tensor]()
    wanted = other(x[None])
    with ThreadPoolExecutor(1) as pool:
        network = Meanwhile(lambda: found.append(pool.submit(other, x[None]).result(10)))
        parts = [part.module for part in cut(network, ["b", "c"], x)]
    assert len(found) > 1
    assert all(torch.equal(one, wanted) for one in found)
    torch.testing.assert_close(nn.Sequential(*parts)(x), network.c(network.b(network.a(x))))


def test_one_network_is_cut_after_the_other() -> None:
    """Each trace puts back what it found in ``nn.Module``: of two that overlapped, one stayed there for good."""
    x, before = torch.rand(2, 4), (nn.Module.__call__, nn.Module.__getattr__)
    entered, waited, done = threading.Event(), list[bool](), list[Future[object]]()
    second = Meanwhile(entered.set)
    with ThreadPoolExecutor(1) as pool:

        def start() -> None:
            if not done:
                done.append(pool.submit(cut, second, ["b", "c"], x))
                waited.append(not entered.wait(0.1))

        cut(Meanwhile(start), ["b", "c"], x)
    assert done[0].result(0)
    assert waited == [True]
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
