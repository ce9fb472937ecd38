"""What is measured of real layers: bytes are exact, seconds are those of the layers, and no layer is changed."""

from __future__ import annotations

import gc
from copy import deepcopy
from threading import Event, Thread, current_thread

import pytest
import torch
from bench.virtual import VirtualLayer
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE, PlacementError, StallError
from pipeal.core.errors import OutOfMemoryError
from pipeal.core.options import EngineOptions
from pipeal.planning.measure import contention
from pipeal.planning.measure.contention import contention_of, crowds, measure_contention
from pipeal.planning.measure.layers import WARM_UP, layer_costs, measure, measure_in_turns, uncollected
from pipeal.planning.planner import fit, place


def package() -> ALPackage:
    """Of 20 inputs, 64 features and 8 codes, and 4 classes."""
    torch.manual_seed(0)
    first = AL(ENC(nn.Linear(20, 64), nn.Linear(64, 8)), LabelAE(nn.Linear(4, 8), nn.Linear(8, 4), 4))
    second = AL(
        ENC(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 8)), AE(nn.Linear(8, 8), nn.Linear(8, 8))
    )
    return ALPackage([first, second])


BATCHES = [(torch.randn(rows, 20), torch.randint(4, (rows,))) for rows in (4, 8, 16, 8)]


def test_bytes_are_those_of_weights_states_packets_and_graphs() -> None:
    costs = measure(package(), BATCHES, rounds=1)
    for layer, cost in zip(package(), costs, strict=True):
        weights = sum(parameter.numel() for parameter in layer.parameters())
        assert cost.parameter_bytes == 4 * weights
        # Adam keeps two numbers for each weight, and counts the steps of each parameter.
        assert cost.optimizer_bytes == 8 * weights + 4 * len(list(layer.parameters()))
        assert cost.out_bytes == 4 * 16 * (64 + 8)  # of the largest batch
        assert cost.mean_out_bytes == 4 * (16 + 8) // 2 * (64 + 8)  # in the mean of those that count
        assert cost.forward_s > 0
        assert cost.backward_s > 0
        assert cost.update_s > 0
    # The input, the features, and what the two losses and the label side need.
    assert 4 * 16 * (20 + 64) <= costs[0].activation_bytes <= 4 * 16 * 2 * (20 + 64 + 8 + 8 + 4 + 4 + 8)
    assert costs[1].activation_bytes > costs[0].activation_bytes - 4 * 16 * 20


def test_on_one_core_alone_what_the_layers_do_not_work_is_not_theirs() -> None:
    """As on a busy machine, where others have the core meanwhile: a forecast was of them, too."""
    waits = [VirtualLayer(0.05, 0.05)]
    (passed,) = layer_costs(waits, [(None, None)] * 3)
    (own,) = layer_costs(waits, [(None, None)] * 3, alone=True)
    assert sum(passed.values()) >= 0.1
    assert sum(own.values()) < 0.05
    (works,) = layer_costs(package()[:1], BATCHES, alone=True)
    assert min(works.values()) > 0


def test_models_take_turns_each_with_its_own_batches() -> None:
    trained = package()
    parts = [(x[:2], y[:2]) for x, y in BATCHES]
    whole, part, other = measure_in_turns([(trained, BATCHES), (trained, parts), (package(), parts)], rounds=2)
    assert [cost.out_bytes for cost in whole] == [4 * 16 * (64 + 8)] * 2
    assert [cost.out_bytes for cost in part] == [cost.out_bytes for cost in other] == [4 * 2 * (64 + 8)] * 2


def test_a_layer_that_hangs_among_others_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a plan for stages that share cores never ended. Cause: a pool of threads, which waits for all of its."""
    monkeypatch.setattr(contention, "PATIENCE_S", 0.5)
    model, released = package(), Event()

    def hang(*_: object) -> None:
        if current_thread().name == "pipeal-crowd":
            released.wait(600)

    model[0].register_forward_pre_hook(hang)
    try:
        with pytest.raises(StallError, match=r"did not end|not all"):
            measure_contention(model, BATCHES, [2])
    finally:
        released.set()


def test_an_expanded_tensor_is_sent_once() -> None:
    """A label that all samples share was once counted for each of them, and made links look busy."""

    class Shares(VirtualLayer):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.zeros(1, 100).expand(len(x), 100)

    (cost,) = measure([Shares(0.0, 0.0)], BATCHES, rounds=1)
    assert cost.out_bytes == 4 * 16 * 20 + 4 * 100


def test_the_layers_are_left_as_they_were() -> None:
    trained = package()
    before = deepcopy(trained.state_dict())
    measure(trained, BATCHES, rounds=1)
    measure_contention(trained, BATCHES, [2], rounds=1)
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in trained.modules())


@pytest.mark.usefixtures("counted_clock")
def test_a_model_that_is_only_time_has_no_bytes() -> None:
    slow, fast = measure([VirtualLayer(0.3, 0.2, 0.1), VirtualLayer(0.001, 0.001)], [(None, None)] * 4, rounds=1)
    assert (slow.seconds, fast.seconds) == (pytest.approx(0.6), pytest.approx(0.002))
    assert (slow.parameter_bytes, slow.out_bytes, slow.activation_bytes) == (0, 0, 0)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(PlacementError, match=f"{WARM_UP} batches"):
        measure(package(), BATCHES[:WARM_UP])
    for few in (BATCHES[:WARM_UP], []):  # a crowd once said of them that batches come again and again
        with pytest.raises(PlacementError, match=f"{len(few)} batches to measure with; expected at least 3"):
            measure_contention(package(), few, [2])


@pytest.mark.filterwarnings("ignore:.*learnt from in parts")
def test_what_does_not_fit_at_once_is_measured_in_parts() -> None:
    """The bytes were once counted without the policy that their layers train under, and a measurement ended there."""
    most = 8

    def refuse(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    tight = package()
    tight[0].enc.f.register_forward_pre_hook(refuse)
    whole, split = (measure(layers, BATCHES, EngineOptions(on_oom="split"), rounds=1) for layers in (package(), tight))
    x, y = BATCHES[2]
    parts = measure(package(), [(x[:most], y[:most])] * 3, rounds=1)  # which keep the memory of all of x, too
    assert [cost.out_bytes for cost in split] == [cost.out_bytes for cost in whole] == [4 * 16 * (64 + 8)] * 2
    # The tight layer has the graph of a part at a time, the other one that of the whole batch.
    assert [cost.activation_bytes for cost in split] == [parts[0].activation_bytes, whole[1].activation_bytes]
    with pytest.raises(OutOfMemoryError):
        measure(tight, BATCHES, rounds=1)


def test_a_loss_that_is_not_finite_ends_no_measurement() -> None:
    broken = [(torch.full_like(x, float("nan")), y) for x, y in BATCHES]
    assert measure(package(), broken, rounds=1)[0].out_bytes == 4 * 16 * (64 + 8)
    assert measure_contention(package(), broken, [2], rounds=1)[2] > 0


@pytest.mark.usefixtures("counted_clock")
def test_stages_are_balanced_by_what_layers_cost() -> None:
    layers = [VirtualLayer(0.0, 0.0), VirtualLayer(0.0, 0.0), VirtualLayer(0.1, 0.2), VirtualLayer(0.1, 0.2)]
    assert fit(layers, [(None, None)] * 4, "pipelined", ["cpu"] * 2, EngineOptions(threads=1)).sizes == [3, 1]


def test_layers_that_only_wait_do_not_crowd_each_other() -> None:
    layers = [VirtualLayer(0.002, 0.004) for _ in range(4)]
    # A busy machine wakes sleepers late: one quiet moment of it is enough.
    assert any(measure_contention(layers, [(None, None)] * 8, [4], rounds=1)[4] < 2 for _ in range(50))


def test_threads_born_after_a_crowd_have_the_intra_op_threads_they_would_have_had() -> None:
    torch.set_num_threads(2)
    measure_contention([VirtualLayer(0.0, 0.0) for _ in range(3)], [(None, None)] * 4, [3], rounds=1)
    found: list[int] = []
    thread = Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [torch.get_num_threads()] == [2]


def test_a_failure_in_a_crowd_reaches_the_caller() -> None:
    class Broken(VirtualLayer):
        def backward(self) -> None:
            raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError, match="broken"):
        measure_contention([VirtualLayer(0.001, 0.001), Broken(0.001, 0.001)], [(None, None)] * 4, [2], rounds=1)


def test_more_at_once_than_layers_is_refused() -> None:
    with pytest.raises(PlacementError, match="2 stages for 1 layers"):
        measure_contention([VirtualLayer(0.001, 0.001)], [(None, None)] * 4, [2])
    with pytest.raises(PlacementError, match="3 stages at once of 2 parts"):
        measure_contention([VirtualLayer(0.001, 0.001)] * 3, [(None, None)] * 4, [3], sizes=[2, 1])


def test_every_crowd_of_some_stages_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 cores 2, 3 and 4 at once: what 3 take is no mean of what 2 and 4 do."""
    monkeypatch.setattr("pipeal.planning.measure.contention.cores", lambda: 2)
    assert (crowds(9), crowds(3), crowds(1)) == ([2, 3, 4], [2, 3], [])
    found = measure_contention([VirtualLayer(0.002, 0.004) for _ in range(4)], [(None, None)] * 6, crowds(4), rounds=1)
    assert set(found) == {2, 3, 4}
    assert all(times > 0 for times in found.values())
    monkeypatch.setattr("pipeal.planning.measure.contention.cores", lambda: 24)
    assert crowds(200) == [2, 3, 4, 8, 16, 24, 32, 48]


def test_stages_of_given_sizes_crowd_each_other() -> None:
    layers = [VirtualLayer(0.001, 0.002) for _ in range(5)]
    assert set(measure_contention(layers, [(None, None)] * 5, [2], sizes=[3, 1, 1], rounds=2)) == {2}


def test_what_was_not_measured_lies_between_and_beyond() -> None:
    crowd = contention_of({2: 1.2, 4: 2.6})
    assert [crowd(number) for number in (1, 2, 4)] == [1.0, 1.2, 2.6]
    assert crowd(3) == pytest.approx(1.9)
    assert crowd(8) == pytest.approx(5.2)
    assert contention_of({})(3) == 3


@pytest.mark.cuda
def test_bytes_are_the_same_on_a_gpu() -> None:
    here, there = (measure(package(), BATCHES, device=device, rounds=1) for device in ("cpu", "cuda:0"))
    for one, other in zip(here, there, strict=True):
        assert one.parameter_bytes == other.parameter_bytes
        assert one.out_bytes == other.out_bytes
        assert other.seconds > 0


def test_no_garbage_is_collected_on_the_clock() -> None:
    """Symptom: a compiled layer of 10 ms seemed to take 60. Cause: one look through what the compiler had left."""
    collecting = []
    layers = list(package())
    layers[0].register_forward_pre_hook(lambda *_: collecting.append(gc.isenabled()))
    assert gc.isenabled()
    layer_costs(layers, BATCHES)
    place(layers, BATCHES, "pipelined", devices=["cpu"])
    assert gc.isenabled()
    assert collecting
    assert not any(collecting)
    gc.disable()
    try:
        with pytest.raises(KeyError), uncollected():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()
