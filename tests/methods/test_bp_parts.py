"""Parts of a network for backpropagation: together they do the work of the whole, and learn nothing of sense."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pipeal import BP, ConfigError, Pipeline, ScheduleError
from pipeal.methods.bp_parts import bp_parts
from pipeal.methods.touched import TouchedAdam, touch_rows
from pipeal.models import build_text


def test_the_blocks_of_a_model_pass_on_what_the_model_computes() -> None:
    torch.manual_seed(0)
    package = build_text("transformer", "bp", vocab_size=50, classes=3).eval()
    parts = bp_parts(list(package))
    tokens, classes = torch.randint(2, 50, (4, 7)), torch.randint(3, (4,))
    x = tokens
    for part in parts:
        x, y = part.eval()(x, classes)
    assert len(parts) == 5
    assert torch.equal(x, package[0].inference(tokens, "f"))
    assert torch.equal(y, classes)


def test_they_run_through_the_engine_and_every_weight_gets_a_gradient() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 4))
    before = [parameter.clone() for parameter in network.parameters()]
    with Pipeline(bp_parts([BP(network)]), schedule="sequential") as pipe:
        pipe.run([(torch.randn(5, 3), torch.randint(4, (5,)))] * 2)
    assert not any(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))


def test_each_part_has_an_optimizer_as_the_whole_network_has() -> None:
    """Parts were updated, and priced, with fused Adam whatever the network's optimizer was; its sparse gradients ended
    that in a traceback."""
    network = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 3))
    touch_rows(network)
    whole = BP(network, optimizer=partial(TouchedAdam, betas=(0.5, 0.9)))
    before = network[0].weight.detach().clone()
    parts = bp_parts([whole])
    assert [type(part.opt) for part in parts] == [TouchedAdam] * 4
    assert all(part.opt.param_groups[0]["betas"] == (0.5, 0.9) for part in parts)
    with Pipeline(parts, schedule="sequential") as pipe:
        pipe.run([(torch.tensor([[1, 2], [1, 3]]), torch.tensor([0, 2]))] * 2)
    changed = (network[0].weight != before).any(dim=1)
    assert changed.tolist() == [False, True, True, True, *[False] * 5]
    assert not whole.opt.state  # theirs alone
    assert [set(part.opt.state) for part in parts] == [set(part.block.parameters()) for part in parts]


def test_a_block_that_is_called_twice_is_two_parts() -> None:
    tied = nn.Linear(4, 4)
    parts = bp_parts([BP(nn.Sequential(tied, tied, tied))])
    assert [part.leads for part in parts] == [True, False, False]
    assert [part.cri is None for part in parts] == [True, True, False]


def test_what_is_no_sequence_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a model in BP form"):
        bp_parts([BP(nn.Linear(2, 2))])


def test_a_backward_needs_a_forward() -> None:
    with pytest.raises(ScheduleError, match="without a forward"):
        bp_parts([BP(nn.Sequential(nn.Linear(2, 2)))])[0].backward()


def test_no_gradient_is_computed_for_the_input_of_the_network_but_for_those_of_all_later_blocks() -> None:
    """Backpropagation was charged for a gradient of its images, which nobody takes."""
    first, then = bp_parts([BP(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), nn.CrossEntropyLoss())])
    asked = []
    for part in (first, then):
        part.block.register_forward_pre_hook(lambda _, args: asked.append(args[0].requires_grad))
    features, y = first(torch.randn(5, 3), torch.randint(2, (5,)))
    then(features, y)
    assert asked == [False, True]
