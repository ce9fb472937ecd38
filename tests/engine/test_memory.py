"""Law 5: memory is bounded, whatever the number of batches."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.core.packet import Packet
from pipeal.engine import SCHEDULES
from pipeal.engine.runner.layer import Plain

from .cases import ORDERS
from .traps import Gate


class Census:
    """Weak references to tensors, and the most of them that lived at once."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Tensor]] = []
        self._lock = threading.Lock()
        self.most = 0

    def add(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._refs.append(weakref.ref(tensor))
            self.most = max(self.most, len(self._refs))
        return tensor

    def alive(self) -> int:
        with self._lock:
            return sum(ref() is not None for ref in self._refs)


class Counted(AL):
    """Counts the packets it hands on, and the activations (with their graph) that it makes."""

    def __init__(self, packets: Census, activations: Census) -> None:
        super().__init__(ENC(nn.Linear(8, 8), nn.Linear(8, 8)), AE(nn.Linear(8, 8), nn.Linear(8, 8)))
        self.packets, self.activations = packets, activations
        self.enc.f.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.activations.add(out)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out, code = super().forward(x, y)
        return self.packets.add(out), code


def rows(batches: int, inputs: Census | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(batches):
        x = torch.randn(4, 8)
        yield (inputs.add(x) if inputs else x), torch.randn(4, 8)


@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    stages=st.integers(1, 4),
    queue_depth=st.integers(1, 3),
    batches=st.sampled_from([8, 30, 60]),
    each=st.integers(1, 2),
)
@settings(max_examples=10)  # each looks through all objects of the process
def test_packets_and_activations_alive_do_not_grow_with_batches(
    schedule: str, stages: int, queue_depth: int, batches: int, each: int
) -> None:
    packets, inputs = Census(), Census()
    activations = [Census() for _ in range(stages * each)]
    package = ALPackage([Counted(packets, census) for census in activations])
    pipe = Pipeline(package, ["cpu"] * stages, schedule, sizes=[each] * stages, queue_depth=queue_depth, threads=1)
    with pipe:
        pipe.run(rows(batches, inputs))
        assert packets.most <= stages * (queue_depth + 2 + each - 1)
        assert inputs.most <= queue_depth + 3
        assert all(census.most <= 1 for census in activations)
        gc.collect()
        assert packets.alive() == inputs.alive() == 0
        assert all(census.alive() == 0 for census in activations)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("schedule", ORDERS)
def test_activations_alive_do_not_grow_with_depth(schedule: str, stages: int) -> None:
    """Law 5: where each layer of a stage ends before the next one begins, there is one graph per stage."""
    for each in (1, 2, 6):
        packets, activations = Census(), Census()
        package = ALPackage([Counted(packets, activations) for _ in range(each * stages)])
        with Pipeline(package, ["cpu"] * stages, ORDERS[schedule], threads=1) as pipe:
            pipe.run(rows(5))
        assert activations.most <= stages * (1 if ORDERS[schedule].by_layer else each)
        if stages == 1:
            assert activations.most == (1 if ORDERS[schedule].by_layer else each)


class Pass(nn.Module):
    """A layer whose forward does not need its input once it is over, and that stops where a test wants it to."""

    draws_from_default = False

    def __init__(self, gate: Gate | None = None) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        return x + 1, y

    def backward(self) -> None:
        if self.gate is not None:
            self.gate.stand_still_here()

    def update(self) -> None:
        pass

    def loss(self) -> None:
        return None

    def scale_lr(self, factor: float) -> None:
        pass

    def inference(self, x: Any, path: str) -> Any:
        return x


def test_a_stage_that_waits_for_space_does_not_hold_its_input() -> None:
    """The last stage stands still; the first has handed on all there is room for, and waits."""
    gate, inputs = Gate(), Census()
    with Pipeline([Pass(), Pass(gate)], queue_depth=1) as pipe:
        for x, y in rows(3, inputs):
            pipe.submit(x, y)
        del x, y
        assert gate.reached.wait(120)
        worker = pipe._executor.threads[0]  # type: ignore[union-attr]
        for _ in range(6000):  # it may pass through that state before it stays there
            gc.collect()
            if worker.doing[0] == "waiting for space" and not inputs.alive():
                break
            threading.Event().wait(0.01)
        assert (worker.doing[0], inputs.alive()) == ("waiting for space", 0)
        gate.open()
        pipe.drain()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_a_failure_nothing_is_kept_alive_by_the_engine(schedule: str) -> None:
    class Breaks(Counted):
        def update(self) -> None:
            raise ValueError("broken")

    packets, activations = Census(), Census()
    package = ALPackage([Counted(packets, activations), Breaks(packets, activations)])
    pipe = Pipeline(package, schedule=schedule, threads=1)
    with pytest.raises(ValueError, match="broken"), pipe:
        pipe.run(rows(10))
    for layer in package:
        layer._graph = None  # a layer keeps the graph of its last forward, as it does without an engine
    gc.collect()
    assert activations.alive() == 0
    assert packets.alive() == 0


class Careless(AL):
    """A user's layer that reports the losses themselves, graph and all."""

    def loss(self) -> tuple[Tensor, ...] | None:
        return self.kept

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = super().forward(x, y)
        assert self._graph is not None
        self.kept = self._graph
        return found


def test_losses_that_are_kept_are_all_that_their_storage_holds() -> None:
    """Symptom: memory grew with the number of batches and of layers. Cause: PyTorch's mean squared error of a batch
    lies in the storage of all its errors, and a thousand such losses wait for a report."""

    class Own(Pass):
        def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
            self.error = nn.functional.mse_loss(x, y)
            return super().forward(x, y)

        def loss(self) -> Any:
            return (self.error,)

    layer = AL(ENC(nn.Linear(8, 8), nn.Linear(8, 8)), AE(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert nn.functional.mse_loss(*next(rows(1))).untyped_storage().nbytes() > 4, "else there is nothing to see"
    for one in (layer, Own()):
        passed = Plain(one).forward(Packet(0, *next(rows(1))), *next(rows(1)))
        assert passed.losses is not None
        assert {loss.untyped_storage().nbytes() for loss in passed.losses} == {4}
    kept = layer.loss()
    assert kept is not None
    assert {loss.untyped_storage().nbytes() for loss in kept} == {4}


def test_reported_losses_hold_no_graph() -> None:
    """Thousands of reports wait for a drain: one that keeps its graph keeps every batch's nodes alive."""
    package = ALPackage([Careless(ENC(nn.Linear(8, 8), nn.Linear(8, 8)), AE(nn.Linear(8, 8), nn.Linear(8, 8)))])
    with Pipeline(package, threads=1) as pipe:
        report = pipe.run(rows(3))
    assert not report.losses[0].requires_grad
