"""Backpropagation over several devices: naive model parallelism, with the bits of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import BP, ALPackage, ConfigError, Dropout, Pipeline, PlacementError, Window
from pipeal.engine import Action
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.models import CharDims, TextDims, VisionDims, build_language, build_text, build_vision

TEXT = TextDims(embedding=12, hidden=8, code=8, heads=2, dropout=0.3)
VISION = VisionDims(size=16, width=0.05)
Batches = list[tuple[Tensor, Tensor]]


def texts(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(2, 50, (4, 7), generator=draw), torch.randint(3, (4,), generator=draw)


def images(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 16, 16, generator=draw), torch.randint(3, (4,), generator=draw)


def characters(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(20, (4, 8), generator=draw), torch.randint(20, (4, 8), generator=draw)


def plain() -> ALPackage:
    """Of operators that draw from default generators, change in place, and hold running means."""
    blocks = [
        nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.BatchNorm1d(16)),
        nn.ReLU(inplace=True),
        nn.Dropout(0.4),
        nn.Sequential(nn.Linear(16, 16), Dropout(0.3), nn.Linear(16, 3)),
    ]
    return ALPackage([BP(nn.Sequential(*blocks), lr=0.01)])


CASES: dict[str, tuple[Callable[[], ALPackage], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    **{
        name: (lambda name=name: build_text(name, "bp", vocab_size=50, classes=3, dims=TEXT), texts)  # type: ignore[misc]
        for name in ("lstm", "transformer")
    },
    **{
        name: (lambda name=name: build_vision(name, "bp", classes=3, dims=VISION), images)  # type: ignore[misc]
        for name in ("vgg", "resnet")
    },
    "charlm": (lambda: build_language("charlm", "bp", characters=20, dims=CharDims(width=12, block=8)), characters),
    "plain": (plain, images),
}


def of(case: str, count: int = 4) -> tuple[ALPackage, Batches]:
    make, batch = CASES[case]
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    return make(), [batch(draw) for _ in range(count)]


def trained(case: str, devices: list[str], **options: Any) -> tuple[dict[str, Any], list[Tensor], Tensor]:
    package, batches = of(case)
    updates = options.pop("updates", True)
    with Pipeline(package, devices, options.pop("schedule", "sequential"), threads=1, seed=3, **options) as pipe:
        report = pipe.run(batches, lambda batch: 1 / (1 + batch), updates=updates)
        logits = pipe.predict(batches[0][0])
    return layer_state(package[0]), report.losses, logits


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("case", CASES)
def test_two_devices_leave_what_one_leaves(case: str) -> None:
    """Weights, buffers, optimizer states, losses, answers: bit for bit, with dropout and batch norm."""
    one, two = trained(case, ["cpu"]), trained(case, ["cpu", "cpu"])
    assert same(one, two)


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": [1, 2, 1]},
        {"sizes": [2, 1, 1], "schedule": "pipelined"},
        {"sizes": [2, 1, 1], "precision": "bf16"},
        {"sizes": [1, 1, 2], "updates": lambda batch: batch % 2 == 1},
        {"sizes": [3, 1], "on_oom": "split", "on_non_finite": "skip"},
    ],
)
def test_however_it_is_cut_and_run(options: dict[str, Any]) -> None:
    alone = {key: value for key, value in options.items() if key not in ("sizes", "schedule")}
    assert same(trained("plain", ["cpu"], **alone), trained("plain", ["cpu"] * len(options["sizes"]), **options))


@pytest.mark.parametrize("case", ["transformer", "resnet"])
def test_states_go_from_one_device_to_two_and_back(case: str) -> None:
    package, batches = of(case, 6)
    with Pipeline(package, ["cpu"], "sequential", threads=1) as pipe:
        pipe.run(batches)
    moved, _ = of(case)
    for number, (part, devices) in enumerate(zip((batches[:2], batches[2:4], batches[4:]), (1, 2, 1), strict=True)):
        if number:
            fresh, _ = of(case)
            load_layer_state(fresh[0], layer_state(moved[0]))
            moved = fresh
        with Pipeline(moved, ["cpu"] * devices, "sequential", threads=1, first_batch=2 * number) as pipe:
            pipe.run(part)
            assert pipe.snapshot().wait().keys() == {0}
    assert same(layer_state(package[0]), layer_state(moved[0]))


def test_each_device_has_its_times_and_its_row_in_a_timeline() -> None:
    package, batches = of("transformer")
    with Pipeline(package, ["cpu"] * 3, "sequential", threads=1, sizes=[1, 3, 1], trace=Window(0, 9)) as pipe:
        report = pipe.run(batches)
        spans, names = pipe.spans(), pipe.device_names
    assert names == ["cpu"] * 3
    assert len(report.stages) == len(report.busy_share) == 3
    assert sum(report.busy_share) <= 1
    first = [(span.stage, span.action) for span in spans if span.batch == 0]
    up = [(stage, Action.FORWARD) for stage in range(3)]
    down = [(stage, Action.BACKWARD) for stage in reversed(range(3))]
    assert first == [*up, *down, *((stage, Action.UPDATE) for stage in range(3))]
    assert all(one.end <= two.begin + 1e-6 for one, two in pairwise(spans))  # they take turns


def test_what_does_not_fit_is_refused_in_words() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlacementError, match="3 stages for 2 layers"):
        Pipeline([BP(network)], ["cpu"] * 3)
    with pytest.raises(PlacementError, match="sizes"):
        Pipeline([BP(network)], ["cpu"] * 2, sizes=[2, 1])
    with pytest.raises(ConfigError, match="compile='static' needs a layer on one device"):
        Pipeline([BP(network)], ["cpu"] * 2, compile="static")
    with pytest.raises(PlacementError, match="2 stages for 1 layers"):
        Pipeline([BP(nn.Linear(4, 4))], ["cpu"] * 2)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="share 'weight'"):
        Pipeline([BP(tied)], ["cpu"] * 2)


def test_a_block_that_is_called_twice_stays_on_one_device() -> None:
    """Symptom: a bare ValueError of zip(). Cause: the block was counted twice, and found among the children once."""
    torch.manual_seed(0)
    tied = nn.Linear(4, 4)
    network = nn.Sequential(tied, tied, nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"blocks on devices 0 and 1 share 'weight'.* together"):
        Pipeline([BP(network)], ["cpu"] * 2, sizes=[1, 2])
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    losses = []
    for sizes in ([2, 1], [3]):
        layer = BP(copy.deepcopy(network))
        with Pipeline([layer], ["cpu"] * len(sizes), sizes=sizes if len(sizes) > 1 else None, threads=1) as pipe:
            losses.append(pipe.run([(x, y)] * 3).losses[0].tolist())
    assert losses[0] == losses[1]
    assert BP(network).spread([torch.device("cpu")] * 2, [2, 1]) == [20, 15]


class Twice(nn.Sequential):
    """No row: its forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def test_a_network_is_a_row_only_where_its_forward_says_nothing_else() -> None:
    hooked = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked.register_forward_hook(lambda *_: None)
    counts = [BP(net).block_count() for net in (Twice(nn.Linear(4, 4), nn.Linear(4, 4)), hooked, nn.Linear(4, 4))]
    assert counts == [1, 1, 1]


def test_it_can_be_copied_and_moved_as_a_whole_afterwards() -> None:
    package, batches = of("transformer")
    with Pipeline(package, ["cpu", "cpu"], "sequential", threads=1) as pipe:
        pipe.run(batches)
    twin = copy.deepcopy(package).to("meta")
    assert {parameter.device.type for parameter in twin.parameters()} == {"meta"}
    assert twin[0]._places == ()


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_on_gpus(case: str, row: list[str]) -> None:
    """As on one GPU: generators go on from one to the next, and copies wait for what they copy."""
    if "cuda:1" in row and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    one, two = trained(case, ["cuda:0"]), trained(case, row)
    if "cpu" in row:  # other kernels, and other random numbers
        assert [losses.shape for losses in one[1]] == [losses.shape for losses in two[1]]
        assert all(losses.isfinite().all() for losses in two[1])
    elif case != "lstm":  # cuDNN's sums are in no order
        torch.testing.assert_close(two[1], one[1], rtol=1e-4, atol=1e-5)
    package, _ = of(case)
    with Pipeline(package, row, "sequential", sizes=None) as pipe:
        states = layer_state(package[0], Tensor.detach)["optimizers"]
        assert pipe.device_names == row
    assert states.keys() == {"opt"}


@pytest.mark.cuda
def test_fp16_scales_over_devices() -> None:
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0", "cuda:0"]
    _, losses, _ = trained("plain", devices, precision="fp16")
    assert losses[0].isfinite().all()
