"""Activation checkpointing inside a layer: less is kept, and no bit is another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, Pipeline
from pipeal.core.options import EngineOptions
from pipeal.core.rng import keyed, random_words, replayed
from pipeal.engine.devices import open_device
from pipeal.engine.runner.recompute import _Met, parts_of
from pipeal.engine.runner.split import SplitWarning
from pipeal.models.transformer import EncoderLayer, TransformerBlock
from pipeal.planning.measure.layers import count_bytes

from .cases import BLOCKS, ORDERS, Case, Layer, cases, cosine, cuts, outcome, reference
from .test_exactness import RICH, run
from .test_failures import notes_of
from .test_out_of_memory import Tight

WIDE = 16


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.Tanh(), nn.Linear(4 * WIDE, WIDE), nn.Tanh())


@given(case=cases(), data=st.data())
def test_what_is_computed_again_leaves_every_bit(case: Case, data: st.DataObject) -> None:
    """Law 1, with dropout of all kinds, batch norm, draws by function, and losses of a user's own."""
    wanted = reference(case)
    name = data.draw(st.sampled_from(list(ORDERS)), label="schedule")
    stages = data.draw(st.integers(1, min(4, len(case.layers))), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    assert run(case, ORDERS[name], sizes, recompute="blocks").differences(wanted) == []


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_each_kind_of_block_in_a_row(name: str) -> None:
    """Several blocks of a layer: each draws again what it drew, wherever the generator stands by then."""

    def trained(recompute: str) -> list[Tensor]:
        torch.manual_seed(3)
        f = nn.Sequential(*(nn.Sequential(BLOCKS[name](8, 8), nn.Tanh()) for _ in range(3)))
        package = ALPackage([AL(ENC(f, nn.Linear(8, 4)), AE(nn.Linear(4, 4), nn.Linear(4, 4)), 0.01)])
        draw = torch.Generator().manual_seed(1)
        batches = [(torch.randn(5, 8, generator=draw), torch.randn(5, 4, generator=draw)) for _ in range(4)]
        options: dict[str, Any] = {"recompute": recompute}
        with Pipeline(package, None, "sequential", threads=1, seed=5, **options) as pipe:
            report = pipe.run(batches, cosine, updates=lambda batch: batch % 2 == 1)
        return [*outcome(package, report.losses, []).tensors.values()]

    assert all(map(torch.equal, trained("blocks"), trained("none")))


def test_batch_norm_counts_a_batch_once() -> None:
    case = Case((Layer("batch norm"),), rows=(5, 4, 3))
    package = case.build()
    with Pipeline(package, threads=1, recompute="blocks") as pipe:
        pipe.run(case.batches())
    assert package.state_dict()["0.enc.f.1.num_batches_tracked"] == 3


def kept_bytes(recompute: Any, blocks: int, kind: str = "AL") -> int:
    """The most bytes of activations that one batch keeps for the backward."""
    torch.manual_seed(0)
    f = nn.Sequential(*(block() for _ in range(blocks)))
    layer = (
        BP(f, nn.MSELoss())
        if kind == "BP"
        else AL(ENC(f, nn.Linear(WIDE, 4)), AE(nn.Linear(WIDE, 4), nn.Linear(4, WIDE)))
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    alive: dict[int, int] = {}
    most = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor = tensor
            self.counts = tensor.untyped_storage().data_ptr() not in weights
            if self.counts:
                alive[id(self)] = tensor.nbytes
                most = max(most, sum(alive.values()))

        def __del__(self) -> None:
            alive.pop(id(self), None)

    with (
        torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor),
        Pipeline([layer], None, "sequential", threads=1, recompute=recompute) as pipe,
    ):
        pipe.run([(torch.randn(64, WIDE), torch.randn(64, WIDE))] * 2)
    return most


@pytest.mark.parametrize("kind", ["AL", "BP"])
def test_of_each_block_its_input_is_kept(kind: str) -> None:
    one_input = 64 * WIDE * 4
    few, many = (kept_bytes("blocks", blocks, kind) for blocks in (2, 12))
    assert many - few <= 10 * one_input
    assert kept_bytes("none", 12, kind) - kept_bytes("none", 2, kind) >= 10 * 6 * one_input


@pytest.mark.parametrize("where", "FB")
def test_batches_in_parts_are_computed_again_part_by_part(where: str) -> None:
    def trained(recompute: Any) -> list[Tensor]:
        torch.manual_seed(0)
        tight = Tight(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.4)), 3, where)
        package = ALPackage([AL(ENC(tight, nn.Linear(WIDE, 4)), AE(nn.Linear(WIDE, 4), nn.Linear(4, WIDE)), 0.01)])
        draw = torch.Generator().manual_seed(1)
        batches = [(torch.randn(n, WIDE, generator=draw), torch.randn(n, WIDE, generator=draw)) for n in (7, 2, 8)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitWarning)
            with Pipeline(package, threads=1, on_oom="split", recompute=recompute) as pipe:
                report = pipe.run(batches)
        assert report.splits == [2]
        return [*package.state_dict().values(), *report.losses]

    assert all(map(torch.equal, trained("blocks"), trained("none")))


def test_blocks_of_backpropagation_over_devices() -> None:
    def trained(recompute: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer = BP(nn.Sequential(*(nn.Sequential(block(), nn.Dropout(0.2)) for _ in range(4))), nn.MSELoss())
        draw = torch.Generator().manual_seed(1)
        batches = [(torch.randn(6, WIDE, generator=draw), torch.randn(6, WIDE, generator=draw)) for _ in range(3)]
        with Pipeline([layer], "cpu*2", threads=1, recompute=recompute) as pipe:
            pipe.run(batches)
        return list(layer.state_dict().values())

    assert all(map(torch.equal, trained("blocks"), trained("none")))


def test_the_parts_are_the_repeated_blocks_or_the_whole_way_up() -> None:
    def parts(f: nn.Module) -> list[nn.Module]:
        return parts_of(AL(ENC(f, nn.Linear(1, 1)), AE(nn.Linear(1, 1), nn.Linear(1, 1))), open_device("cpu"))

    transformer = TransformerBlock(8, 16, 2, layers=3)
    assert parts(transformer) == list(transformer.layers)
    assert [type(part) for part in parts(transformer)] == [EncoderLayer] * 3
    assert parts(row := nn.Sequential(block(), nn.ReLU(), block())) == [row[0], row[2]]
    assert parts(flat := block()) == [flat]
    assert parts(nn.Identity()) == []
    assert parts(row := nn.Sequential(Prenorm(), Prenorm())) == list(row)  # not the row that each of them has within


class Prenorm(nn.Module):
    """A block with a row of single modules within, as a GPT's feed-forward."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.wide = nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WIDE))
        self.register_buffer("mask", torch.ones(1, WIDE))

    def forward(self, x: Tensor, scale: float = 1.0, *, debug: bool = False) -> Tensor:
        return x + self.wide(self.norm(x)) * self.mask * (2 * scale if debug else scale)


def weights_of(build: Callable[[], nn.Module], recompute: Any, make: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    layer = make(build())
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, WIDE, generator=draw), torch.randn(6, WIDE, generator=draw)) for _ in range(3)]
    with Pipeline([layer], "cpu", threads=1, recompute=recompute) as pipe:
        pipe.run(batches)
    return [value for value in layer.state_dict().values() if isinstance(value, Tensor)]


def in_bp(f: nn.Module) -> nn.Module:
    return BP(f, nn.MSELoss(), 0.01)


class Counts(nn.Module):
    """A user's own layer, whose forward counts, and keeps a loss for its backward."""

    draws_from_default = False

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f, self.step = f, 0
        self.opt = torch.optim.SGD(f.parameters(), 0.01)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.step += 1
        out = self.f(x)
        self.kept = (out - y).square().mean() * self.step
        return out.detach(), y

    def backward(self) -> None:
        self.kept.backward()

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    def loss(self) -> tuple[Tensor, ...]:
        return (self.kept.detach(),)

    def scale_lr(self, factor: float) -> None:
        pass

    def inference(self, x: Tensor, path: str) -> Tensor:
        return self.f(x) if path == "f" else x


class OtherWeights(nn.Module):
    """Calls its block with other weights than it has."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        for one in self.row:
            x = functional_call(one, {name: 2 * value for name, value in one.named_parameters()}, (x,))
        return x


class Named(nn.Module):
    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList([Prenorm(), Prenorm()])

    def forward(self, x: Tensor) -> Tensor:
        for one in self.row:
            x = one(x, scale=0.5, debug=True)
        return x


class TwoLosses(BP):
    """Goes back through one graph twice."""

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        out = self.model(x)
        self.first, self.second = (out - y).square().mean(), out.abs().mean()
        self.keep(self.first)
        return out.detach(), y

    def backward(self) -> None:
        self._taken_graph()
        self.first.backward(retain_graph=True)
        self.second.backward()


class WrittenPast(nn.Module):
    """Writes its buffer past what counts its versions, as published codebooks do."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.register_buffer("book", torch.ones(2, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.book[0]
        self.book.data.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return out


class Carries(nn.Module):
    """Goes on from the batch before: its forward assigns to a buffer, which is ``first`` before the first batch."""

    draws_from_default = False
    state: Tensor | None

    def __init__(self, first: Tensor | None) -> None:
        super().__init__()
        self.into, self.over = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.register_buffer("state", first)

    def forward(self, x: Tensor) -> Tensor:
        before = x.new_zeros(WIDE) if self.state is None else self.state
        out = torch.tanh(self.into(x) + self.over(before))
        self.state = out.detach().mean(0)
        return out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))


USERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "a layer that counts its forwards": (lambda: nn.Linear(WIDE, WIDE), Counts),
    "other weights for a call": (OtherWeights, in_bp),
    "in place on what a block gives": (
        lambda: nn.Sequential(normed(), nn.ReLU(inplace=True), normed(), nn.ReLU(inplace=True)),
        in_bp,
    ),
    "two backwards through one graph": (
        lambda: nn.Sequential(normed(), block()),
        lambda f: TwoLosses(f, nn.MSELoss(), 0.01),
    ),
    "names of arguments that checkpoint has, too": (Named, in_bp),
    "buffers written past their versions": (lambda: nn.Sequential(nn.Sequential(WrittenPast()), block()), in_bp),
    "buffers that are replaced": (
        lambda: nn.Sequential(nn.Sequential(Carries(torch.zeros(WIDE))), nn.Sequential(Carries(None)), block()),
        in_bp,
    ),
    "buffers that stay as they are": (lambda: nn.Sequential(Prenorm(), Prenorm()), in_bp),
}


@pytest.mark.parametrize("what", USERS)
def test_blocks_of_users_learn_the_same(what: str) -> None:
    build, make = USERS[what]
    with_all, again = (weights_of(build, recompute, make) for recompute in ("none", "blocks"))
    assert all(map(torch.equal, with_all, again))


def test_copies_of_buffers_that_a_forward_left_alone_are_let_go() -> None:
    one = Prenorm()
    met = _Met(one)
    one(torch.randn(2, WIDE))
    met.keep_what_changed()
    assert [buffer.copy for buffer in met._buffers] == [None]
    with met:
        assert one._buffers["mask"] is met._buffers[0].tensor


def test_lazy_modules_are_computed_again_too() -> None:
    """The first batch gives them their shape."""

    def lazy() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(WIDE, WIDE), nn.LazyBatchNorm1d()), block())

    with_all, again = (weights_of(lazy, recompute, in_bp) for recompute in ("none", "blocks"))
    assert all(map(torch.equal, with_all, again))


def test_activations_are_not_counted_too_low() -> None:
    """Of what is computed again only inputs are seen to be kept, while one block is there as a whole in its turn."""
    batch = torch.randn(6, WIDE), torch.randn(6, WIDE)
    (whole,), (again,) = (
        count_bytes([in_bp(block())], batch, EngineOptions(recompute=recompute)) for recompute in ("none", "blocks")
    )
    assert again.activation_bytes == whole.activation_bytes > 0


def test_a_user_s_own_patch_of_a_block_stays() -> None:
    f = block()
    forward = f.forward
    f.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    patched = f.forward
    package = ALPackage([AL(ENC(f, nn.Linear(WIDE, 4)), AE(nn.Linear(WIDE, 4), nn.Linear(4, WIDE)))])
    with Pipeline(package, threads=1, recompute="blocks") as pipe:
        pipe.run([(torch.randn(3, WIDE), torch.randn(3, WIDE))])
    assert vars(f)["forward"] is patched


def test_what_fails_in_the_second_computation_says_where() -> None:
    class Once(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise LookupError("again")
            return super().forward(x)

    f = Once(nn.Linear(WIDE, WIDE), nn.Tanh())
    package = ALPackage([AL(ENC(f, nn.Linear(WIDE, 4)), AE(nn.Linear(WIDE, 4), nn.Linear(4, WIDE)))])
    with pytest.raises(LookupError, match="again") as caught, Pipeline(package, threads=1, recompute="blocks") as pipe:
        pipe.run([(torch.randn(3, WIDE), torch.randn(3, WIDE))])
    assert any("backward of stage 0, layer 0 (AL), batch 0" in note for note in notes_of(caught.value).splitlines())


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), Doubles(WIDE, WIDE)])
def test_a_block_that_changes_its_input_is_told(first: nn.Module) -> None:
    """It was an error of PyTorch's backward, which names an operator: what is computed again began with what the block
    had made of its input."""
    row = nn.Sequential(block(), nn.Sequential(first, nn.Linear(WIDE, WIDE)))
    match = (
        rf"the block Sequential\({type(first).__name__}, Linear\) changed its own in place; use operators that do not"
    )
    with pytest.raises(ConfigError, match=match), Pipeline([in_bp(row)], threads=1, recompute="blocks") as pipe:
        pipe.submit(torch.randn(3, WIDE), torch.randn(3, WIDE))


def test_a_frozen_block_may_change_its_input_in_place() -> None:
    """Without gradients it is never computed again."""
    frozen = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDE, WIDE)))
    frozen.requires_grad_(False)
    row = nn.Sequential(*frozen, nn.Linear(WIDE, WIDE))
    with Pipeline([in_bp(row)], threads=1, recompute="blocks") as pipe:
        pipe.submit(torch.randn(3, WIDE), torch.randn(3, WIDE))


def test_draws_are_replayed_from_where_they_were() -> None:
    cpu = torch.device("cpu")
    with keyed(1, 2, 3):
        random_words(2, cpu)
        again = replayed()
        wanted = random_words(3, cpu)
        random_words(5, cpu)
    with keyed(7):
        for _ in range(2):
            with again:
                assert torch.equal(random_words(3, cpu), wanted)
        assert not torch.equal(random_words(3, cpu), wanted)


def test_half_precision_is_the_same_again() -> None:
    wanted = run(RICH, "sequential", [4], precision="bf16")
    for name in ("sequential", "pipelined/stage"):
        assert run(RICH, ORDERS[name], [4], precision="bf16", recompute="blocks").differences(wanted) == []


def test_what_does_not_go_together_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"recompute='blocks' does not go with compile='static'.*use 'none' for one"):
        Pipeline([BP(block())], recompute="blocks", compile="static")
    with pytest.raises(ConfigError, match="unknown recompute 'block'; did you mean 'blocks'"):
        Pipeline([BP(block())], recompute="block")  # type: ignore[arg-type]
