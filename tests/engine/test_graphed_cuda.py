"""CUDA graphs per layer, on a GPU; one is enough, several stages may share it.

Bits are compared: a graph holds the kernels of the layer as it is, in the same order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Dropout, LabelAE, Pipeline
from pipeal.al.classcodes import encode_each_class
from pipeal.engine import SCHEDULES
from pipeal.engine.graphed import WARM_UP, GraphWarning

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
WIDE, CODE, CLASSES, ROWS = 64, 16, 5, 32
PLACEMENTS = {
    "one stage": ["cuda:0"],
    "two stages on one GPU": ["cuda:0", "cuda:0"],
    "four stages on one GPU": ["cuda:0"] * 4,
    "cpu, cuda, cpu": ["cpu", "cuda:0", "cpu"],
    "cuda, cpu, cuda": ["cuda:0", "cpu", "cuda:0"],
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def package() -> ALPackage:
    torch.manual_seed(0)
    sides: list[AE] = [LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)]
    sides += [AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)) for _ in range(3)]

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.GELU(), nn.LayerNorm(WIDE), Dropout(0.3))

    return ALPackage([AL(ENC(block(), nn.Linear(WIDE, CODE)), side, 0.01) for side in sides])


def batches(rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(count, WIDE, generator=draw), torch.randint(CLASSES, (count,), generator=draw)) for count in rows
    ]


STEADY = [ROWS] * 10
MIXED = [ROWS, 8, ROWS, 8, ROWS, ROWS, 8, ROWS, 8, 8, ROWS, 8, 3]


def trained(
    devices: list[str],
    schedule: str,
    rows: list[int],
    *,
    updates: Callable[[int], bool] = lambda _: True,
    **options: Any,
) -> list[Tensor]:
    """Weights, buffers, optimizer states, losses and logits, all on the CPU."""
    model, data = package(), batches(rows)
    with warnings.catch_warnings(), Pipeline(model, devices, schedule, threads=1, **options) as pipe:
        warnings.simplefilter("error", GraphWarning)
        report = pipe.run(data, lambda batch: 1 / (1 + batch), updates=updates)
        graphs = [len(graphed._graphs) for stage in pipe.stages for graphed in stage._graphed.values()]
        logits = pipe.predict(data[0][0]).cpu()
    assert all(graphs)
    state = [value.cpu() for value in model.state_dict().values()]
    for layer in model:
        for optimizer in (layer.enc_opt, layer.ae_opt):
            state += [v.cpu() for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return [*state, *report.losses, logits]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("rows", [STEADY, MIXED], ids=["one shape", "several"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_bits_are_those_of_a_run_without_graphs(placement: str, rows: list[int]) -> None:
    devices = PLACEMENTS[placement]
    wanted = trained(devices, "sequential", rows)
    for schedule in SCHEDULES:
        for queue_depth in (1, 3):
            assert same(trained(devices, schedule, rows, queue_depth=queue_depth, cuda_graphs=True), wanted), schedule


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_casts_and_scaled_losses_are_part_of_the_graph(precision: str) -> None:
    wanted = trained(["cuda:0"] * 2, "sequential", STEADY, precision=precision)
    assert same(trained(["cuda:0"] * 2, "pipelined", STEADY, precision=precision, cuda_graphs=True), wanted)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_gradients_are_gathered_over_replays(every: int) -> None:
    """The graphs of one layer share their memory: each replay writes over the gradients of all of them."""

    def updates(batch: int) -> bool:
        return batch % every == every - 1 or batch == len(MIXED) - 1

    wanted = trained(["cuda:0"] * 2, "sequential", MIXED, updates=updates)
    assert same(trained(["cuda:0"] * 2, "pipelined", MIXED, updates=updates, cuda_graphs=True), wanted)


class Keeps(nn.Module):
    """Takes what comes, and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.append(x.clone())
        return x, y

    def backward(self) -> None:
        pass

    def update(self) -> None:
        pass

    def loss(self) -> None:
        return None

    def scale_lr(self, factor: float) -> None:
        pass

    def inference(self, x: Tensor, path: str) -> Tensor:
        return x


def test_the_masks_of_dropout_are_those_of_their_batches() -> None:
    """The words that they are made of are drawn before each replay, from the batch's key."""

    def masks(cuda_graphs: bool) -> list[Tensor]:
        torch.manual_seed(0)
        f = nn.Sequential(nn.Linear(WIDE, WIDE), Dropout(0.3), nn.Sigmoid(), Dropout(0.5))
        first = AL(ENC(f, nn.Linear(WIDE, CODE)), AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)))
        last = Keeps()
        data = [(torch.ones(ROWS, WIDE), torch.ones(ROWS, CODE)) for _ in range(8)]
        with Pipeline([first, last], ["cuda:0", "cpu"], threads=1, cuda_graphs=cuda_graphs) as pipe:
            pipe.run(data)
        return [kept == 0 for kept in last.kept]

    found = masks(True)
    assert same(found, masks(False))
    assert not any(torch.equal(one, other) for one, other in pairwise(found))


@pytest.fixture
def sync_debug_mode() -> Iterator[Any]:
    """Sets, and afterwards resets, what happens when an operator makes the host wait: for all threads."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", PLACEMENTS.values(), ids=PLACEMENTS)
def test_replays_do_not_wait_for_the_device(sync_debug_mode: Any, devices: list[str]) -> None:
    model, data = package(), batches([ROWS] * 14)
    with Pipeline(model, devices, cuda_graphs=True) as pipe:
        pipe.run(data[: WARM_UP + 2])
        sync_debug_mode("error")
        for x, y in data[WARM_UP + 2 :]:
            pipe.submit(x, y, 0.5)
        pipe._open().drain()
        sync_debug_mode("default")  # a report does wait: it reads the losses
        assert pipe.drain().batches == len(data) - WARM_UP - 2


def test_the_default_generators_stay_where_they_were() -> None:
    model = package()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    with Pipeline(model, ["cuda:0"] * 2, cuda_graphs=True) as pipe:
        pipe.run(batches(STEADY))
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_memory_does_not_grow_with_batches() -> None:
    def peak(count: int) -> int:
        model = package()
        one = batches([4096])[0]
        with Pipeline(model, ["cuda:0"] * 2, cuda_graphs=True) as pipe:
            pipe.run([one] * (WARM_UP + 3))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            pipe.run([one] * count)
        return torch.cuda.max_memory_allocated()

    few, many = peak(10), peak(80)
    assert many <= few * 1.25


def test_a_pipeline_can_be_opened_again_and_beside_another() -> None:
    """Each life drops its graphs, and with them the workspaces that CUDA's libraries kept in their memory."""
    data = batches(STEADY)

    def lives(cuda_graphs: bool) -> list[Tensor]:
        models = [package(), package()]
        pipes = [Pipeline(model, ["cuda:0"] * 2, threads=1, cuda_graphs=cuda_graphs) for model in models]
        for _ in range(3):
            with pipes[0], pipes[1]:
                for batch in data:
                    for pipe in pipes:
                        pipe.submit(*batch)
        return [value.cpu() for model in models for value in model.state_dict().values()]

    assert same(lives(True), lives(False))


class Speaks(nn.Module):
    """Looks at its result."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > -1e9 else -x


class Adjacent(nn.Module):
    """Has a sparse buffer, which lies at no one address."""

    draws_from_default = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("near", torch.eye(WIDE).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sparse.mm(self.near, x.t()).t()  # type: ignore[arg-type]


class Inverts(nn.Module):
    """Has the host look whether it has worked."""

    draws_from_default = False

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linalg.inv(x.t() @ x + torch.eye(WIDE, device=x.device))[:1]


def compiled() -> nn.Module:
    block = nn.Linear(WIDE, WIDE)
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Speaks, r"the host waits for what aten\."),
        (Inverts, r"the host waits for what aten\.linalg_inv"),
        (Adjacent, r"one of its parameters or buffers is sparse"),
        (compiled, r"a module of it was given to torch\.compile"),
    ],
)
def test_a_layer_that_waits_runs_as_it_is_beside_others(block: Callable[[], nn.Module], why: str) -> None:
    def run(cuda_graphs: bool) -> list[Tensor]:
        model = package()
        model[1].enc.f = nn.Sequential(nn.Linear(WIDE, WIDE), block())
        model = ALPackage([model[0], AL(model[1].enc, model[1].ae), *model[2:]])
        with Pipeline(model, ["cuda:0"] * 2, threads=1, cuda_graphs=cuda_graphs) as pipe:
            pipe.run(batches(STEADY))
        return [value.cpu() for value in model.state_dict().values()]

    with pytest.warns(GraphWarning, match=rf"layer 1 \(AL\) runs without CUDA graphs: {why}"):
        found = run(True)
    assert same(found, run(False))


def by_class() -> ALPackage:
    """Label sides that work once for each class, and hand the codes on to every sample in one memory."""
    model = package()
    encode_each_class(model)
    return model


def test_labels_by_class_are_captured() -> None:
    def run(cuda_graphs: bool) -> list[Tensor]:
        model = by_class()
        with warnings.catch_warnings(), Pipeline(model, ["cuda:0"] * 2, threads=1, cuda_graphs=cuda_graphs) as pipe:
            warnings.simplefilter("error", GraphWarning)
            losses = pipe.run(batches(STEADY)).losses
            graphs = [len(graphed._graphs) for stage in pipe.stages for graphed in stage._graphed.values()]
        assert graphs == ([1] * len(model) if cuda_graphs else [])
        return [*losses, *(value.cpu() for value in model.state_dict().values())]

    assert same(run(True), run(False))


_FAILS = """
import sys

import pytest
import torch

from pipeal import Pipeline
from tests.engine.test_graphed_cuda import batches, package


def left(cuda_graphs):
    model, data = package(), batches([65536] * 12)
    # By a serial schedule the caller gives the work, so that it fails after the same batch of every layer.
    with pytest.raises(ValueError, match="by the way"):
        with Pipeline(model, ["cuda:0"], "sequential", threads=1, cuda_graphs=cuda_graphs) as pipe:
            for batch in data:
                pipe.submit(*batch)
            raise ValueError("by the way")
    spoil()
    torch.cuda.synchronize()
    found = [value.cpu() for value in model.state_dict().values()]
    with pipe:
        pipe.run(batches([32] * 6))
    return [*found, *(value.cpu() for value in model.state_dict().values())]


def spoil():
    # Where no more is to be had, the allocator hands out what nobody owns: here, on a stream that waits for nobody.
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.full((kept // 16,), torch.nan, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


found, wanted = left(True), left(False)
sys.exit(0 if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) else "other weights than without")
"""


def test_a_failure_drops_graphs_whose_replays_have_ended() -> None:
    """Many are on their way when it comes; their memory must not go to anyone meanwhile.

    Where PyTorch lets segments grow in place it gives memory back without a wait for the whole GPU, which would hide
    that; so it is set, for a process.
    """
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _FAILS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_pipeline_can_be_made_while_another_captures() -> None:
    """Making one waits for the whole GPU, which no capture stands."""
    wanted = trained(["cuda:0"] * 2, "pipelined", MIXED)
    model, made = package(), []

    def make(batch: int) -> None:
        if batch % 2:
            made.append(Pipeline(package(), ["cuda:0"], threads=1, cuda_graphs=True))

    with Pipeline(model, ["cuda:0"] * 2, threads=1, cuda_graphs=True) as pipe:
        pipe.run(batches(MIXED), lambda batch: 1 / (1 + batch), on_batch=make)
    state = [value.cpu() for value in model.state_dict().values()]
    assert same(state, wanted[: len(state)])
    streams = [one._new_recorder.args[0] for each in made for one in each.stages[0]._graphed.values()]
    assert len({stream.cuda_stream for stream in streams}) == len(made)


@two_gpus
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0", "cuda:0", "cuda:1"]], ids=" ".join)
def test_on_two_gpus(devices: list[str]) -> None:
    wanted = trained(devices, "sequential", MIXED)
    for schedule in SCHEDULES:
        assert same(trained(devices, schedule, MIXED, cuda_graphs=True), wanted), schedule
