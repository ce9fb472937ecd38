"""Randomness that follows from its key: whoever else draws, on whatever thread, in whatever order."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeal import AE, AL, BP, ENC, ALPackage, Dropout, LabelAE
from pipeal.core.draws import may_draw, updates_may_draw
from pipeal.core.errors import ScheduleError
from pipeal.core.rng import KeyedDefault, generator, key_seed, keyed

X = torch.linspace(0.1, 1, 48).view(6, 8)
MASK = torch.ones(6, 8)


def attention() -> Tensor:
    q = X.view(1, 2, 3, 8)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def fixed(module: nn.Module) -> nn.Module:
    """The same weights in every process, and none of them zero."""
    for number, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, 0.1 + 0.01 * number)
    return module


LSTM = fixed(nn.LSTM(8, 4, num_layers=3, dropout=0.5))
ATTENTION = fixed(nn.MultiheadAttention(8, 2, dropout=0.5))
ENCODER = fixed(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5))

DRAWS: dict[str, Callable[[], Tensor]] = {
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout_": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "dropout1d": lambda: F.dropout1d(X, 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli_": lambda: X.clone().bernoulli_(0.5),
    "rand": lambda: torch.rand(8),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(8),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(1 << 30, (8,)),
    "randint_like": lambda: torch.randint_like(X, 1 << 20),
    "randperm": lambda: torch.randperm(40),
    "normal_": lambda: torch.empty(8).normal_(),
    "normal": lambda: torch.normal(X, X),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "random_": lambda: torch.empty(8, dtype=torch.int64).random_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "multinomial": lambda: torch.multinomial(X, 7),
    "poisson": lambda: torch.poisson(X * 50),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "nn.RReLU": lambda: nn.RReLU()(-X),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.randn(2, 9, 9), 2, output_size=(4, 4)),
    "attention": attention,
    "nn.MultiheadAttention": lambda: ATTENTION(X, X, X)[0],
    "nn.LSTM": lambda: LSTM(X)[0],
    "nn.TransformerEncoderLayer": lambda: ENCODER(X),
    "init": lambda: nn.Linear(8, 8).weight.detach(),
    "pipeal.Dropout": lambda: Dropout(0.5)(X),
}


def draw(name: str, *key: int, times: int = 1) -> list[Tensor]:
    with keyed(*key, whole_default=True):
        return [DRAWS[name]() for _ in range(times)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", DRAWS)
def test_an_operator_draws_from_the_key_and_from_nothing_else(name: str) -> None:
    torch.manual_seed(1)
    first = draw(name, 3, 1, 4, times=2)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = draw(name, 3, 1, 4, times=2)
    assert torch.equal(torch.get_rng_state(), before), "the default generator was touched"
    assert same(first, second)
    assert not same(first, draw(name, 3, 1, 5, times=2)), "another key gives other numbers"
    assert not torch.equal(first[0], first[1]), "a second draw differs from the first"


@pytest.mark.parametrize("name", DRAWS)
def test_an_operator_with_a_generator_of_its_own_keeps_it(name: str) -> None:
    """And, outside a key, everything is as PyTorch has it."""
    torch.manual_seed(1)
    plain = DRAWS[name]()
    torch.manual_seed(1)
    with KeyedDefault():
        assert torch.equal(DRAWS[name](), plain)


def test_an_explicit_generator_is_respected() -> None:
    wanted = torch.rand(5, generator=torch.Generator().manual_seed(9))
    with keyed(1, whole_default=True):
        assert torch.equal(torch.rand(5, generator=torch.Generator().manual_seed(9)), wanted)


@pytest.mark.parametrize("name", ["native_dropout", "dropout", "attention", "nn.LSTM", "randn", "pipeal.Dropout"])
def test_threads_with_keys_do_not_disturb_each_other(name: str) -> None:
    wanted = {key: draw(name, key, times=3) for key in range(8)}
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(offset: int) -> None:
        start.wait()
        for turn in range(24):
            key = (turn + offset) % 8
            if not same(draw(name, key, times=3), wanted[key]):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(2 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_without_a_key_does_not_disturb_a_borrowed_generator() -> None:
    """Symptom: rare wrong masks while the caller augments data. Cause: the default generator is lent out for an
    operator without a ``generator`` argument, under a lock that PyTorch's own draws do not take."""
    done, some = threading.Event(), torch.ones(1000)

    def bystander() -> None:
        while not done.is_set():
            torch.rand(64)

    def mask(key: int) -> Tensor:
        with keyed(key, whole_default=True):
            return torch.native_dropout(some, 0.5, True)[1]

    wanted = [mask(key) for key in range(10)]
    thread = threading.Thread(target=bystander)
    thread.start()
    try:  # some draws in a thousand went wrong
        wrong = sum(not torch.equal(mask(key), wanted[key]) for _ in range(300) for key in range(10))
    finally:
        done.set()
        thread.join()
    assert wrong == 0


@given(outer=st.lists(st.integers(0, 9), max_size=3), inner=st.lists(st.integers(0, 9), max_size=3))
def test_nested_keys_restore_the_one_around(outer: list[int], inner: list[int]) -> None:
    with keyed(*outer, whole_default=True):
        straight = [torch.rand(3), torch.rand(3)]
    with keyed(*outer, whole_default=True):
        first = torch.rand(3)
        with keyed(*inner):  # the mode around it goes on, with this key
            within = torch.rand(3)
        second = torch.rand(3)
    with keyed(*inner, whole_default=True):
        assert torch.equal(within, torch.rand(3))
    assert same([first, second], straight)
    assert generator(torch.device("cpu")) is None


def test_an_exception_restores_too() -> None:
    with pytest.raises(ValueError, match="out"), keyed(1, whole_default=True):
        raise ValueError("out")
    assert generator(torch.device("cpu")) is None
    torch.manual_seed(0)
    plain = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), plain)


def test_a_failed_draw_leaves_the_default_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), keyed(1, whole_default=True):
        torch.native_dropout(X, 1.5, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_key_has_one_generator_per_device_however_the_device_is_spelt() -> None:
    """``cpu`` and ``cpu:0`` (``cuda`` and ``cuda:0``) are one device: two generators would repeat each other."""
    with keyed(1, whole_default=True):
        assert not torch.equal(torch.rand(5), torch.rand(5, device="cpu:0"))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("drop", [Dropout(0.5), nn.Dropout(0.5)], ids=["ours", "PyTorch's"])
def test_what_is_computed_again_in_a_backward_draws_nothing(drop: nn.Module, reentrant: bool) -> None:
    """A backward has a key of its own: the mask that it drew was not that of the forward, and no one was told."""
    x = torch.ones(64, requires_grad=True)
    with keyed(1, whole_default=True):
        out = checkpoint(drop, x, use_reentrant=reentrant)
    with keyed(1, 1, whole_default=True), pytest.raises(ScheduleError, match="leave what draws out of that part"):
        out.sum().backward()


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_what_could_draw_but_does_not_may_be_computed_again(chance: float) -> None:
    """PyTorch tags attention as random, with or without dropout; so is a dropout that is off."""
    x = torch.randn(1, 2, 8, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=chance), 0.0)

    with keyed(1, whole_default=True):
        out = checkpoint(block, x, use_reentrant=False)
        wanted = torch.autograd.grad(block(x).sum(), x)[0] if not chance else None
    with keyed(1, 1, whole_default=True):
        if wanted is None:
            with pytest.raises(ScheduleError, match="leave what draws out of that part"):
                out.sum().backward()
        else:
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


class Noisy(torch.autograd.Function):
    """A backward of somebody's own that draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + torch.rand_like(grad)


def test_a_backward_of_ones_own_may_draw() -> None:
    def gradient() -> Tensor:
        x = torch.ones(5, requires_grad=True)
        out = Noisy.apply(x).sum()
        with keyed(1, 1, whole_default=True):
            return torch.autograd.grad(out, x)[0]

    assert torch.equal(gradient(), gradient())


def test_outside_a_key_masks_are_computed_again() -> None:
    """From PyTorch's default generator, whose state its checkpoints keep."""
    x = torch.ones(64, requires_grad=True)
    out = checkpoint(Dropout(0.5), x, use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out)


def test_other_threads_have_no_key() -> None:
    found: list[Any] = []
    with keyed(1):
        thread = threading.Thread(target=lambda: found.append(generator(torch.device("cpu"))))
        thread.start()
        thread.join()
        assert generator(torch.device("cpu")) is not None
    assert found == [None]


@given(parts=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_seeds_are_63_bits_and_tell_keys_apart(parts: list[int]) -> None:
    seed = key_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == key_seed(*parts)
    assert seed != key_seed(*parts, 0)
    if parts and parts != parts[::-1]:
        assert seed != key_seed(*parts[::-1])


ROWS, IMAGE, VOLUME = torch.ones(5, 2, 8), torch.ones(2, 4, 8, 8), torch.ones(1, 4, 8, 8, 8)
WORDS = torch.ones(2, 3, dtype=torch.long)
Build = Callable[[], nn.Module]


def with_dropout(p: float) -> list[tuple[Build, tuple[Tensor, ...]]]:
    """The modules of torch.nn that take a probability, and what they take as input."""
    return [
        (lambda: nn.Dropout(p), (ROWS,)),
        (lambda: nn.Dropout1d(p), (ROWS,)),
        (lambda: nn.Dropout2d(p), (IMAGE,)),
        (lambda: nn.Dropout3d(p), (VOLUME,)),
        (lambda: nn.AlphaDropout(p), (ROWS,)),
        (lambda: nn.FeatureAlphaDropout(p), (IMAGE,)),
        (lambda: nn.LSTM(8, 4, 2, dropout=p), (ROWS,)),
        (lambda: nn.GRU(8, 4, 2, dropout=p, bidirectional=True), (ROWS,)),
        (lambda: nn.RNN(8, 4, 2, dropout=p), (ROWS,)),
        (lambda: nn.MultiheadAttention(8, 2, dropout=p), (ROWS, ROWS, ROWS)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 8, p), (ROWS,)),
        (lambda: nn.TransformerDecoderLayer(8, 2, 8, p), (ROWS, ROWS)),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, p), 2, enable_nested_tensor=False), (ROWS,)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Dropout(p)])[0]), (ROWS,)),
    ]


OTHERS: list[tuple[Build, tuple[Tensor, ...]]] = [
    (nn.RReLU, (-ROWS,)),
    (lambda: nn.FractionalMaxPool2d(2, output_size=3), (IMAGE,)),
    (lambda: nn.FractionalMaxPool3d(2, output_size=3), (VOLUME,)),
    (lambda: nn.LazyLinear(3), (ROWS,)),  # draws its weights in its first forward
    (lambda: nn.BatchNorm2d(4), (IMAGE,)),
    (lambda: nn.GroupNorm(2, 4), (IMAGE,)),
    (lambda: nn.Conv2d(4, 3, 3), (IMAGE,)),
    (lambda: nn.ConvTranspose2d(4, 3, 3), (IMAGE,)),
    (lambda: nn.PReLU(), (ROWS,)),
    (lambda: nn.LSTM(8, 4), (ROWS,)),
    (lambda: nn.LSTMCell(8, 4), (ROWS[0],)),
    (lambda: nn.Bilinear(8, 8, 2), (ROWS, ROWS)),
    (lambda: nn.Embedding(9, 4, max_norm=1.0), (WORDS,)),
    (lambda: nn.EmbeddingBag(9, 4, max_norm=1.0), (WORDS,)),
    (lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4]), (ROWS[0], torch.tensor([1, 9]))),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (ROWS,)),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (ROWS,)),
]


@pytest.mark.parametrize(
    ("build", "inputs"),
    [*with_dropout(0.0), *with_dropout(0.4), *OTHERS],
    ids=lambda value: "" if isinstance(value, tuple) else type(value()).__name__,
)
def test_what_is_said_of_a_module_of_torch_nn_is_true(build: Build, inputs: tuple[Tensor, ...]) -> None:
    module = build().train()
    said = may_draw(module)
    before = torch.get_rng_state()
    module(*inputs)
    assert said is not torch.equal(torch.get_rng_state(), before)


def easily_built() -> list[str]:
    """The modules of torch.nn that need no argument."""
    found = []
    for name in sorted(nn.modules.__all__):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = getattr(nn, name)()
        except TypeError:
            continue
        if isinstance(module, nn.Module):
            found.append(name)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", easily_built())
def test_what_is_not_said_to_draw_does_not(name: str) -> None:
    module = getattr(nn, name)()
    said = may_draw(module)
    before = torch.get_rng_state()
    for arguments in ((IMAGE,), (IMAGE, IMAGE), (IMAGE, IMAGE, IMAGE)):
        with suppress(TypeError, RuntimeError, NotImplementedError, ValueError, IndexError):
            module(*arguments)
    assert said or torch.equal(torch.get_rng_state(), before)


class Mine(nn.Module):
    """A class of which nothing is known."""


class Declared(nn.Module):
    draws_from_default = False


class Heir(Declared):
    """Inherits the word of a class whose forward it may have replaced."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class HeirENC(ENC):
    def forward(self, x: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(F.dropout(x), code)


def sides() -> tuple[ENC, AE]:
    return ENC(nn.Linear(2, 2), nn.Linear(2, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2))


def test_only_a_class_that_says_so_itself_is_trusted() -> None:
    assert may_draw(Mine())
    assert may_draw(nn.Sequential(nn.Linear(2, 2), Mine()))
    assert not may_draw(Declared())
    assert may_draw(Heir())
    assert may_draw(HeirENC(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_pipeals_own_modules_are_trusted() -> None:
    enc, ae = sides()
    label = LabelAE(nn.Linear(2, 2), nn.Linear(2, 2), 2)
    for module in (enc, ae, label, AL(enc, ae), ALPackage([AL(*sides())]), BP(nn.Linear(2, 2)), Dropout(0.5)):
        assert not may_draw(module)
    assert may_draw(AL(ENC(nn.Dropout(0.1), nn.Linear(2, 2)), ae))
    assert not may_draw(AL(ENC(nn.Dropout(0.0), nn.Linear(2, 2)), ae))
    for chance in (np.float32(0.1), torch.tensor(0.1)):
        assert may_draw(nn.Dropout(chance)), "a number of another library"
        assert may_draw(nn.MultiheadAttention(2, 1, dropout=chance))
    assert may_draw(AL(ENC(nn.Linear(2, 2), nn.Linear(2, 2), cri=Mine()), ae))


class NoisySGD(torch.optim.SGD):
    """Says nothing of what it draws."""


class Wrapper(torch.optim.Optimizer):
    """As optimizers that wrap another one are often written."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups


@pytest.mark.parametrize(
    "place", [lambda one: one, lambda one: [one], lambda one: {"all": one}], ids=["attribute", "list", "dict"]
)
def test_an_optimizer_that_may_draw_is_found_wherever_it_is_kept(place: Callable[[Any], Any]) -> None:
    layer = Declared()
    weights = [nn.Parameter(torch.ones(2))]
    for optimizer, draws in (
        (torch.optim.SGD(weights), False),
        (NoisySGD(weights), True),
        (Wrapper(NoisySGD(weights)), True),
    ):
        layer.kept = place(optimizer)
        assert updates_may_draw(layer) == draws


def test_keyed_numbers_look_random() -> None:
    values = []
    for batch in range(2000):
        with keyed(0, 1, batch, whole_default=True):
            values.append(torch.rand(1, dtype=torch.float64).item())
    numbers = torch.tensor(values)
    assert abs(numbers.mean().item() - 0.5) < 5 / math.sqrt(12 * len(values))
    lag = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1].item()
    assert abs(lag) < 5 / math.sqrt(len(values))
