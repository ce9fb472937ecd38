"""The stream rules, on paper: no packet is read before it is there, none is freed while it is read, on any placement.

Real pipelines, with their threads, over GPUs that :mod:`tests.engine.paper` makes up. Broken rules are found whatever
the timing: at the end every rule is broken once, and is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pipeal.engine.inference.predictor
import pipeal.engine.pipeline
from pipeal import Pipeline
from pipeal.core.tree import tensors
from pipeal.engine import SCHEDULES
from pipeal.engine.devices import CudaDevice

from .paper import PaperEvent, PaperLayer, PaperStream, PaperTensor, World

PLACEMENTS = [
    ["cuda:0"],
    ["cuda:0", "cuda:0"],
    ["cuda:0", "cuda:1"],
    ["cuda:0", "cuda:0", "cuda:1", "cuda:0"],
    ["cpu", "cuda:0", "cpu"],
    ["cuda:1", "cpu", "cuda:0"],
]
SOURCES = ["cpu", "pinned", "cuda:0", "cuda:1"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(gpus=2)
    found.install(monkeypatch)
    return found


def made(world: World, source: str) -> Any:
    """A packet of features and mask, and its target, as a caller makes them on his own streams."""

    def tensor() -> Any:
        return world.make("cpu").pin_memory() if source == "pinned" else world.make(source)

    return (tensor(), {"mask": tensor()}), tensor()


def train(world: World, devices: list[str], schedule: str, source: str, batches: int = 6) -> None:
    layers = [PaperLayer(world) for _ in range(4)]
    with Pipeline(layers, devices, schedule, threads=1) as pipe:
        for number in range(batches):
            pipe.submit(*made(world, source))
            if number == 3:
                pipe.drain()
                rewrite(world, layers)
            elif number == 4:
                read(world, pipe.predict(made(world, source)[0]))
    rewrite(world, layers)


def rewrite(world: World, layers: Sequence[PaperLayer]) -> None:
    """As a caller does who looks at weights, and loads others."""
    for layer in layers:
        assert layer.weight is not None
        world.read(layer.weight)
        if layer.weight.is_cuda:
            world.write(layer.weight)


def predict(world: World, devices: list[str], source: str) -> None:
    """The answers are read on the caller's own streams, and let go."""
    pipe = Pipeline([PaperLayer(world) for _ in range(4)], devices, threads=1)
    for answer in [pipe.predict(made(world, source)[0]) for _ in range(2)]:
        read(world, answer)
    for exit_at in (None, 1):
        for answer in pipe.predict_each((made(world, source)[0] for _ in range(5)), exit_at):
            read(world, answer)
    for exits in pipe.predict_exits(made(world, source)[0] for _ in range(5)):
        read(world, exits)


def read(world: World, answer: Any) -> None:
    for tensor in tensors(answer):
        world.read(tensor)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("devices", PLACEMENTS, ids=" ".join)
def test_training_keeps_the_rules(world: World, devices: list[str], source: str) -> None:
    for schedule in SCHEDULES:
        train(world, devices, schedule, source)
    assert world.broken == []


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("devices", PLACEMENTS, ids=" ".join)
def test_predicting_keeps_the_rules(world: World, devices: list[str], source: str) -> None:
    predict(world, devices, source)
    assert world.broken == []


def test_a_packet_crosses_once_between_two_gpus_and_never_within_one(world: World) -> None:
    layers = [PaperLayer(world) for _ in range(4)]
    with Pipeline(layers, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"], threads=1) as pipe:
        pipe.run(made(world, "cuda:0") for _ in range(6))
    assert world.copies == [("cuda:0", "cuda:1")] * 3 * 6  # three tensors in each of six packets


def write_weights_and_train(world: World) -> None:
    layers = [PaperLayer(world) for _ in range(2)]
    with Pipeline(layers, ["cuda:0", "cuda:1"], threads=1) as pipe:
        rewrite(world, layers)
        pipe.submit(*made(world, "cpu"))


def test_layers_wait_for_weights_that_the_caller_wrote(world: World) -> None:
    """A caller who loads weights between two runs does so on a stream of his own."""
    write_weights_and_train(world)
    assert world.broken == []


class Failing(PaperLayer):
    def backward(self) -> None:
        super().backward()
        raise ValueError("broken")


def test_what_a_failed_run_leaves_under_way_is_over_before_the_caller_goes_on(world: World) -> None:
    """Symptom: after an exception, a new model learns garbage. Cause: the old one's weights, which came from the
    caller's stream, were freed while updates were still to be written to them by the stages' streams."""
    layers = [PaperLayer(world), Failing(world)]
    for schedule in ("sequential", "pipelined"):
        with (
            pytest.raises(ValueError, match="broken"),
            Pipeline(layers, ["cuda:0", "cuda:1"], schedule, threads=1) as pipe,
        ):
            pipe.run(made(world, "cpu") for _ in range(3))
        rewrite(world, layers)
        for layer in layers:
            layer.weight = None
    assert world.broken == []


def test_a_gpu_that_an_error_has_broken_does_not_hide_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3: after a CUDA error every call fails, also those that clean up."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(CudaDevice, "lead_caller", fail)
    with pytest.raises(ValueError, match="broken") as caught, Pipeline([Failing(world)], ["cuda:0"], threads=1) as pipe:
        pipe.run([made(world, "cpu")])
    assert "device cuda:0 takes no more work: CUDA error: device-side assert triggered" in caught.value.__notes__


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        (["cuda:0"], [3]),
        (["cuda:0", "cuda:1"], [3, 3]),
        (["cuda:0", "cuda:1", "cuda:0"], [2, 3, 2]),
        (["cuda:0", "cuda:0", "cpu", "cuda:0"], [2, 2, 3, 2]),
        (["cuda:0"] * 4, [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_stages_that_share_a_gpu_run_less_far_ahead_of_it(world: World, devices: list[str], wanted: list[int]) -> None:
    """Prediction 15 of the GPU reading: four stages, three batches ahead each, fill the GPU's queue of launches. Who
    comes next waits with the lock of the context. But with 1 a host would wait for its own last batch to end."""
    pipe = Pipeline([PaperLayer(world) for _ in devices], devices, threads=1)
    assert [stage.device.run_ahead for stage in pipe.stages] == wanted


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_host_waits_for_the_batch_that_is_so_many_behind(world: World, ahead: int) -> None:
    device = CudaDevice(torch.device("cuda:0"))
    device.run_ahead = ahead
    waited = []
    for _ in range(5):
        before = len(device._ends)
        device.limit_run_ahead()
        waited.append(len(device._ends) < before)
        assert len(device._ends) < ahead
        device.end_batch()
    assert waited == [batch >= ahead for batch in range(5)]


def does_nothing(*_: Any) -> None:
    """In the place of what keeps a rule."""


BREAKS: dict[str, tuple[Any, str, Any, str]] = {
    "a packet has no event": (CudaDevice, "mark_ready", does_nothing, "is read on stream"),
    "a caller's packet has no event": (pipeal.engine.pipeline, "ready_now", does_nothing, "is read on stream"),
    "nobody waits for an event": (PaperStream, "wait_event", does_nothing, "is read on stream"),
    "memory is not recorded": (PaperTensor, "record_stream", does_nothing, "is freed while stream"),
    "the host does not wait for a copy": (PaperEvent, "synchronize", does_nothing, "the host reads"),
    "a report does not wait": (CudaDevice, "synchronize", does_nothing, "is written on stream"),
    "the caller is not followed": (CudaDevice, "follow_caller", does_nothing, "is read on stream"),
    "answers are not taken over": (
        pipeal.engine.inference.predictor,
        "take_over",
        lambda tree, _: tree,
        "is read on stream",
    ),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_found(world: World, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    owner, name, instead, words = BREAKS[rule]
    monkeypatch.setattr(owner, name, instead)
    train(world, ["cuda:0", "cuda:0", "cuda:1"], "pipelined", "cuda:0")
    predict(world, ["cuda:0", "cuda:0", "cuda:1"], "cuda:0")
    train(world, ["cuda:0", "cpu"], "pipelined", "cuda:0")
    write_weights_and_train(world)
    assert any(words in one for one in world.broken), world.broken[:3]
