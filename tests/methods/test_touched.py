"""Adam for the rows that a batch looked up: those as Adam would update them, the others not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ConfigError, Pipeline
from pipeal.core.tree import tensors
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.methods.al import TouchedAdam, touch_rows
from pipeal.methods.optimizers import open_optimizer, scale_rates
from pipeal.methods.touched import _by_row, _summed_everywhere

ROWS, WIDE = 11, 5


def table(*, sparse: bool) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDE, sparse=sparse)


def train(embedding: nn.Embedding, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]) -> None:
    draw = torch.Generator().manual_seed(1)
    for tokens in batches:
        wanted = torch.randn(*tokens.shape, WIDE, generator=draw)
        (embedding(tokens) - wanted).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_where_every_batch_looks_up_every_row_it_is_adam() -> None:
    batches = [torch.cat([torch.randperm(ROWS), torch.randint(ROWS, (7,))]) for _ in range(6)]
    one, two = table(sparse=True), table(sparse=False)
    mine, adam = TouchedAdam(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters(), lr=0.1, fused=True)
    train(one, mine, batches)
    train(two, adam, batches)
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-5, atol=1e-6)
    for name, value in adam.state[two.weight].items():
        torch.testing.assert_close(mine.state[one.weight][name], value, rtol=1e-5, atol=1e-6)


@given(st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9), min_size=1, max_size=6))
def test_rows_are_updated_as_pytorchs_own_sparse_adam_does(lookups: list[list[int]]) -> None:
    """With an eps too small to matter: SparseAdam adds it before the correction of the bias, and Adam after."""
    batches = [torch.tensor(tokens) for tokens in lookups]
    one, two = table(sparse=True), table(sparse=True)
    train(one, TouchedAdam(one.parameters(), lr=0.1, eps=1e-14), batches)
    train(two, torch.optim.SparseAdam(list(two.parameters()), lr=0.1, eps=1e-14), batches)
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-5, atol=1e-5)


def test_rows_follow_a_rate_that_is_scaled_as_dense_parameters_do() -> None:
    weights = []
    for rate, factor in ((0.1, 0.5), (0.05, 1.0)):
        embedding = table(sparse=True)
        optimizer = open_optimizer(TouchedAdam, embedding, rate)
        scale_rates((optimizer,), factor)
        train(embedding, optimizer, [torch.arange(ROWS), torch.tensor([3, 7])])
        weights.append(embedding.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("option", [{"weight_decay": 0.01}, {"amsgrad": True}, {"maximize": True}])
def test_what_no_row_would_have_is_refused(option: dict[str, Any]) -> None:
    """A group of Adam's may say so: dense parameters went by it, and tables did not."""
    embedding, dense = table(sparse=True), nn.Linear(WIDE, 2)
    groups: list[dict[str, Any]] = [{"params": list(part.parameters()), **option} for part in (embedding, dense)]
    optimizer = TouchedAdam(groups, lr=0.1)
    before = [one.detach().clone() for one in (*embedding.parameters(), *dense.parameters())]
    dense(embedding(torch.arange(3))).sum().backward()
    with pytest.raises(ConfigError, match=f"found {next(iter(option))} in a group with sparse gradients"):
        optimizer.step()
    assert all(map(torch.equal, before, (*embedding.parameters(), *dense.parameters())))
    TouchedAdam([groups[1], {"params": list(embedding.parameters())}], lr=0.1).step()
    assert not any(map(torch.equal, before, (*embedding.parameters(), *dense.parameters())))


def test_a_row_that_is_not_looked_up_keeps_its_bits_and_its_moments() -> None:
    embedding = table(sparse=True)
    optimizer = TouchedAdam(embedding.parameters(), lr=0.1)
    train(embedding, optimizer, [torch.arange(ROWS)])
    weight = embedding.weight.detach().clone()
    kept = {name: value.clone() for name, value in optimizer.state[embedding.weight].items()}
    train(embedding, optimizer, [torch.tensor([[3, 7], [3, 3]])])
    others = torch.tensor([row for row in range(ROWS) if row not in (3, 7)])
    assert torch.equal(embedding.weight[others], weight[others])
    assert not torch.equal(embedding.weight[3], weight[3])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[embedding.weight][name][others], kept[name][others])
    assert optimizer.state[embedding.weight]["step"] == 2


def test_dense_parameters_beside_a_table_are_updated_as_by_fused_adam() -> None:
    def trained(optimizer: type[torch.optim.Optimizer], **options: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        adam = optimizer(net.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        for _ in range(3):
            net(torch.ones(2, 3)).square().sum().backward()
            adam.step()
            adam.zero_grad()
        return list(net.parameters())

    assert all(map(torch.equal, trained(TouchedAdam), trained(torch.optim.Adam, fused=True)))


@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20))
def test_what_a_gpu_computes_without_counting_rows_is_the_same(lookups: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    places, values = torch.tensor(lookups), torch.randn(len(lookups), WIDE, generator=draw)
    rows, summed = _by_row(torch.sparse_coo_tensor(places[None], values, (ROWS, WIDE), check_invariants=True))
    everywhere = _summed_everywhere(places, values, ROWS)
    assert torch.equal(everywhere, summed[torch.searchsorted(rows, places)])


def layer() -> AL:
    torch.manual_seed(0)
    f = nn.Sequential(nn.Embedding(ROWS, WIDE), nn.Flatten(), nn.Linear(3 * WIDE, 4))
    made = AL(ENC(f, nn.Linear(4, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)), lr=0.1, optimizer=TouchedAdam)
    assert touch_rows(made) == 1
    return made


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randint(ROWS, (4, 3), generator=draw), torch.randn(4, 5, generator=draw)) for _ in range(count)]


def test_a_layer_that_is_saved_and_taken_up_goes_on_bit_by_bit() -> None:
    whole, first, second = layer(), layer(), layer()
    for part, data in ((whole, batches(8)), (first, batches(8)[:3])):
        with Pipeline([part], schedule="sequential", threads=1) as pipe:
            pipe.run(data)
    load_layer_state(second, layer_state(first))
    with Pipeline([second], schedule="sequential", threads=1, first_batch=3) as pipe:
        pipe.run(batches(8)[3:])
    assert all(map(torch.equal, tensors(layer_state(whole)), tensors(layer_state(second))))


def test_a_batch_in_parts_comes_to_the_same_rows() -> None:
    """What the engine does for a batch that does not fit: it scales and adds up the parts' gradients."""
    whole, parted = table(sparse=True), table(sparse=True)
    tokens = torch.tensor([[1, 2], [2, 5], [9, 1], [4, 4]])
    for embedding, cut in ((whole, [tokens]), (parted, [tokens[:2], tokens[2:]])):
        optimizer, gathered = TouchedAdam(embedding.parameters(), lr=0.1), None
        for part in cut:
            embedding(part).square().mean().backward()
            share = embedding.weight.grad.mul_(len(part) / len(tokens))
            gathered = share if gathered is None else gathered.add_(share)
            embedding.weight.grad = None
        embedding.weight.grad = gathered
        optimizer.step()
    torch.testing.assert_close(whole.weight, parted.weight)


def test_an_embedding_whose_options_do_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        touch_rows(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))


@pytest.mark.cuda
def test_on_a_gpu_nobody_waits_and_the_rows_are_those_of_a_cpu() -> None:
    on_gpu, on_cpu = table(sparse=True).cuda(), table(sparse=True)
    lookups = [torch.randint(ROWS, (6,)) for _ in range(4)]
    mine, wanted = TouchedAdam(on_gpu.parameters(), lr=0.1), TouchedAdam(on_cpu.parameters(), lr=0.1)
    for number, tokens in enumerate(lookups):
        on_cpu(tokens).square().sum().backward()
        there = tokens.cuda()
        torch.cuda.synchronize()
        if number:  # the first update makes the states
            torch.cuda.set_sync_debug_mode("error")
        try:
            on_gpu(there).square().sum().backward()
            mine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted.step()
        mine.zero_grad()
        wanted.zero_grad()
    torch.testing.assert_close(on_gpu.weight.cpu(), on_cpu.weight)
