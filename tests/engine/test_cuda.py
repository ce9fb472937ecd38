"""The laws on a GPU; one is enough, several stages may share it.

Bits are compared, since a stage runs the same kernels in the same order whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Dropout, LabelAE, Pipeline, PlacementError, Window, set_device
from pipeal.engine import SCHEDULES, Schedule, parse_device, violations

from .cases import ORDERS

pytestmark = pytest.mark.cuda

WIDE, CODE, CLASSES, ROWS = 64, 16, 5, 32
PLACEMENTS = {
    "one stage": ["cuda:0"],
    "two stages on one GPU": ["cuda:0", "cuda:0"],
    "four stages on one GPU": ["cuda:0"] * 4,
    "cpu, cuda, cpu": ["cpu", "cuda:0", "cpu"],
    "cuda, cpu, cuda": ["cuda:0", "cpu", "cuda:0"],
}


def package(drop: float = 0.3) -> ALPackage:
    torch.manual_seed(0)
    sides: list[AE] = [LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)]
    sides += [AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)) for _ in range(3)]

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(drop), nn.GELU(), nn.LayerNorm(WIDE), Dropout(drop))

    return ALPackage([AL(ENC(block(), nn.Linear(WIDE, CODE)), side, 0.01) for side in sides])


def batches(count: int, device: str = "cpu", rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(rows, WIDE, generator=draw), torch.randint(CLASSES, (rows,), generator=draw)) for _ in range(count)
    ]
    return [(x.to(device), y.to(device)) for x, y in made]


def trained(
    devices: list[str], schedule: str | Schedule, drop: float = 0.3, count: int = 12, **options: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Weights and optimizer states, losses, and logits, all on the CPU."""
    model, data = package(drop), batches(count)
    with Pipeline(model, devices, schedule, threads=1, **options) as pipe:
        report = pipe.run(data, lambda batch: 1 / (1 + batch))
        logits = pipe.predict(data[0][0]).cpu()
    state = [value.cpu() for value in model.state_dict().values()]
    for layer in model:
        for optimizer in (layer.enc_opt, layer.ae_opt):
            state += [v.cpu() for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return state, report.losses, logits


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_schedules_never_change_the_result(placement: str) -> None:
    devices = PLACEMENTS[placement]
    wanted = trained(devices, "sequential")
    for name, schedule in ORDERS.items():
        for queue_depth in (1, 3):
            state, losses, logits = trained(devices, schedule, queue_depth=queue_depth)
            assert same(state, wanted[0]), name
            assert same(losses, wanted[1]), name
            assert torch.equal(logits, wanted[2]), name


def test_what_is_computed_again_draws_the_same_on_a_gpu() -> None:
    wanted = trained(["cuda:0"], "sequential")
    for name in ("sequential", "pipelined", "pipelined/stage"):
        found = trained(["cuda:0"] * 2, ORDERS[name], recompute="blocks")
        assert same(found[0], wanted[0]), name
        assert same(found[1], wanted[1]), name


@pytest.mark.parametrize("kind", ["bf16", "int8", "int8-stochastic"])
def test_thin_packets_are_the_same_whatever_the_stages(kind: str) -> None:
    wanted = trained(["cuda:0"], "sequential", packet=kind)
    for stages in (2, 4):
        found = trained(["cuda:0"] * stages, "pipelined", packet=kind)
        assert same(found[0], wanted[0]), stages
        assert same(found[1], wanted[1]), stages
        assert torch.equal(found[2], wanted[2]), stages


def activations_of(depth: int, order: str, **options: Any) -> int:
    """The most bytes that training takes beside weights and optimizer states, which are there after a first batch."""
    torch.manual_seed(0)

    def layer() -> AL:
        block = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE), nn.GELU())
        return AL(ENC(block, nn.Linear(WIDE, CODE)), AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)))

    def pair() -> tuple[Tensor, Tensor]:
        return torch.randn(4096, WIDE, device="cuda"), torch.randn(4096, CODE, device="cuda")

    with Pipeline([layer() for _ in range(depth)], ["cuda:0"], "sequential", within_stage=order, **options) as pipe:
        pipe.run([pair()])
        batches = [pair() for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipe.run(batches)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def test_activations_on_a_gpu_do_not_grow_with_depth() -> None:
    shallow, deep = (activations_of(depth, "layer") for depth in (2, 32))
    assert deep <= 1.2 * shallow
    assert activations_of(32, "stage") >= 8 * deep


def test_computed_again_a_layer_takes_less_of_a_gpu() -> None:
    assert activations_of(8, "stage", recompute="blocks") <= 0.7 * activations_of(8, "stage")


def test_the_number_of_stages_on_a_gpu_does_not_matter() -> None:
    wanted = trained(["cuda:0"], "sequential")
    for stages in (2, 3, 4):
        found = trained(["cuda:0"] * stages, "pipelined")
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_gpu_learns_what_the_cpu_learns(placement: str) -> None:
    """Other kernels round otherwise, and draw otherwise: without dropout, after few batches, close."""
    wanted = trained(["cpu"], "sequential", drop=0.0, count=3)
    found = trained(PLACEMENTS[placement], "pipelined", drop=0.0, count=3)
    for one, two in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_layers_on_several_devices_become_one_plain_module() -> None:
    model, data = package(), batches(1)
    with Pipeline(model, ["cpu", "cuda:0"], threads=1) as pipe:
        pipe.run(data)
        wanted = pipe.predict(data[0][0]).cpu()
    for device in ("cpu", "cuda:0"):
        plain = model.to_bp(device=device)
        torch.testing.assert_close(plain(data[0][0].to(device)).cpu(), wanted, rtol=1e-3, atol=1e-3)


def test_the_default_generators_stay_where_they_were() -> None:
    model, data = package(), batches(4)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        pipe.run(data)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.fixture
def sync_debug_mode() -> Iterator[Any]:
    """Sets, and afterwards resets, what happens when an operator makes the host wait: for all threads."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", PLACEMENTS.values(), ids=PLACEMENTS)
def test_the_hot_path_does_not_wait_for_the_device(sync_debug_mode: Any, devices: list[str]) -> None:
    """Where a packet goes back to the CPU, that stage waits for the event of the copy, and nobody else."""
    model, data = package(), batches(10)
    with Pipeline(model, devices, trace=Window(0, 10)) as pipe:
        pipe.run(data[:2])  # the first updates make the optimizers' states
        sync_debug_mode("error")
        for x, y in data[2:]:
            pipe.submit(x, y, 0.5)
        pipe._open().drain()
        sync_debug_mode("default")  # a report does wait: it reads the losses
        assert pipe.drain().batches == 8


def test_attention_with_dropout_borrows_the_default_generator_and_nobody_waits(sync_debug_mode: Any) -> None:
    """Its operator takes no generator: the default one is set to the key's state, and put back, on the host."""

    def layer(side: AE) -> AL:
        f = nn.TransformerEncoderLayer(WIDE, 4, WIDE, dropout=0.2, batch_first=True)
        return AL(ENC(f, nn.Sequential(nn.Flatten(), nn.Linear(3 * WIDE, CODE))), side, 0.01)

    first = LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)
    model = ALPackage([layer(first), layer(AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)))])
    data = [(torch.randn(8, 3, WIDE), torch.randint(CLASSES, (8,))) for _ in range(10)]
    before = torch.cuda.get_rng_state()
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        pipe.run(data[:2])
        sync_debug_mode("error")
        for batch in data[2:]:
            pipe.submit(*batch)
        pipe._open().drain()
        sync_debug_mode("default")
        assert all(rows.isfinite().all() for rows in pipe.drain().losses)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def drop_workspaces() -> None:
    """Prediction 7 of the GPU reading: cuBLAS keeps one for each handle and stream, on Hopper of 32 MiB, so that the
    second of two pipelines begins with those of the first."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]  # private, as PyTorch's own tests call it


@pytest.mark.parametrize("devices", [["cuda:0"] * 2, ["cuda:0"] * 4, ["cpu", "cuda:0"]], ids=str)
def test_memory_does_not_grow_with_batches(devices: list[str]) -> None:
    def peak(count: int) -> int:
        drop_workspaces()
        model = package()
        one = batches(1, rows=4096)[0]
        with Pipeline(model, devices, queue_depth=2) as pipe:
            pipe.run([one] * 4)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            pipe.run([one] * count)
        return torch.cuda.max_memory_allocated()

    few, many = peak(10), peak(80)
    assert many <= few * 1.25


def test_after_a_run_nothing_of_it_is_left() -> None:
    model = package()
    one = batches(1, rows=4096)[0]
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        pipe.run([one] * 3)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        pipe.run([one] * 20)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < one[0].numel() * 4


def busy(cycles: int = 50_000_000) -> None:
    """Keeps the current stream at work for some tens of milliseconds."""
    torch.cuda._sleep(cycles)


def test_batches_made_on_the_gpu_are_waited_for() -> None:
    """Symptom: garbage in training. Cause: a stage's stream does not wait for the caller's by itself, and a
    submitted packet carried no event."""
    wanted = package(0.0)
    data = batches(6)
    with Pipeline(wanted, ["cuda:0"], "sequential") as pipe:
        pipe.run(data)
    model = package(0.0)
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        pipe.run(data[:0])
        for x, y in data:
            late_x, late_y = torch.zeros(x.shape, device="cuda"), torch.zeros(y.shape, dtype=y.dtype, device="cuda")
            source_x, source_y = x.cuda(), y.cuda()
            busy()
            late_x.copy_(source_x)
            late_y.copy_(source_y)
            pipe.submit(late_x, late_y)
            del late_x, late_y
        pipe.drain()
    assert same([v.cpu() for v in model.state_dict().values()], [v.cpu() for v in wanted.state_dict().values()])


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_with_gaps_are_copied_whole_and_nobody_waits(sync_debug_mode: Any, pinned: bool) -> None:
    """Every other column of a wider table: a copy of it would go by way of memory that is not pinned."""
    data = batches(6)
    gapped = []
    for x, y in data:
        wide = torch.zeros(len(x), 2 * WIDE)
        wide = wide.pin_memory() if pinned else wide
        wide[:, ::2] = x
        gapped.append((wide[:, ::2], y))
    left = []
    for given in (data, gapped):
        model = package(0.0)
        with Pipeline(model, ["cuda:0"] * 2) as pipe:
            pipe.run(given[:2])
            sync_debug_mode("error")
            for batch in given[2:]:
                pipe.submit(*batch)
            pipe._open().drain()
            sync_debug_mode("default")
        left.append([value.cpu() for value in model.state_dict().values()])
    assert same(*left)


def test_a_prediction_waits_for_an_input_made_on_the_gpu() -> None:
    model = package(0.0)
    x = batches(1)[0][0]
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        wanted = pipe.predict(x).clone()
        late, source = torch.zeros(x.shape, device="cuda"), x.cuda()
        torch.cuda.synchronize()
        busy()
        late.copy_(source)
        assert torch.equal(pipe.predict(late), wanted)


def test_weights_read_right_after_the_pipeline_are_the_last() -> None:
    """Leaving the block must wait for the devices: the caller reads on another stream."""
    wanted = trained(["cuda:0"], "sequential", count=8)[0]
    model, data = package(), batches(8)
    with Pipeline(model, ["cuda:0"] * 2) as pipe:
        for batch, (x, y) in enumerate(data):
            if batch == 7:
                with pipe.stages[1].device.active():
                    busy()
            pipe.submit(x, y, 1 / (1 + batch))
    found = [value.clone() for value in model.state_dict().values()]
    torch.cuda.synchronize()
    assert same([value.cpu() for value in found], wanted[: len(found)])


def test_weights_after_a_failure_are_read_when_the_gpu_is_done_with_them() -> None:
    """Symptom: after an exception, a new model learns garbage, since late updates of the old one wrote to memory that
    was no longer its own. The caller's stream did not wait for the stages' streams."""
    model = package()

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), Pipeline(model, ["cuda:0"] * 2) as pipe:  # noqa: PT012
        pipe.run(batches(3))
        model[3].forward = broken  # type: ignore[method-assign]
        with pipe.stages[0].device.active():
            busy(500_000_000)
        pipe.run(batches(3))
    early = [value.clone() for value in model.state_dict().values()]
    torch.cuda.synchronize()
    assert same(early, list(model.state_dict().values()))


def test_predict_at_every_exit_equals_inference() -> None:
    model, x = package(), batches(1)[0][0]
    with Pipeline(model, ["cuda:0", "cpu", "cuda:0"]) as pipe:
        pipe.run(batches(3))
        found = [pipe.predict(x, exit_at) for exit_at in range(1, 5)]
    model.eval()
    with torch.no_grad():
        for exit_at, logits in enumerate(found, 1):
            assert logits.device == torch.device("cuda:0")
            assert torch.equal(logits, model.infer(x, exit_at))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recorded_run_keeps_its_schedule(schedule: str) -> None:
    """Both stages are on one GPU: their events share a clock but for what two first events differ by."""
    model = package()
    with Pipeline(model, ["cuda:0"] * 2, schedule, trace=Window(0, 6)) as pipe:
        report = pipe.run(batches(6))
        spans = pipe.spans()
    assert len(spans) == 3 * 4 * 6
    assert violations(SCHEDULES[schedule], 2, spans, slack_s=1e-3) == []
    assert all(0 < share <= 1.01 for share in report.busy_share)


@pytest.mark.parametrize("action", ["forward", "backward", "update"])
def test_an_exception_names_the_device(action: str) -> None:
    model = package()

    def broken(*args: Any) -> Any:
        raise ValueError("broken")

    setattr(model[2], action, broken)
    with pytest.raises(ValueError, match="broken") as caught, Pipeline(model, ["cpu", "cuda:0"]) as pipe:
        pipe.run(batches(5))
    assert f"in the {action} of stage 1, layer 2 (AL), batch 0, device cuda:0" in "".join(caught.value.__notes__)


def test_bf16_trains() -> None:
    one, two = (trained(["cuda:0"] * 2, schedule, precision="bf16") for schedule in ("sequential", "pipelined"))
    assert same(one[0], two[0])
    assert all(torch.isfinite(rows).all() for rows in one[1])


def test_set_device_takes_the_optimizers_state_along() -> None:
    model, data = package(), batches(4)
    with Pipeline(model, ["cpu"]) as pipe:
        pipe.run(data)
    set_device(model, ["cuda:0"] * 4)
    with Pipeline(model) as pipe:
        assert {stage.device.device for stage in pipe.stages} == {torch.device("cuda:0")}
        pipe.run(data)
    moments = [s["exp_avg"] for layer in model for s in layer.enc_opt.state.values()]
    assert all(moment.device == torch.device("cuda:0") for moment in moments)


def test_devices_by_name() -> None:
    count = torch.cuda.device_count()
    assert parse_device("cuda") == parse_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(PlacementError, match=f"this machine has {count} CUDA device"):
        parse_device(f"cuda:{count}")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ACROSS = {
    "one each": ["cuda:0", "cuda:1"],
    "to and fro": ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
    "two streams on one": ["cuda:1", "cuda:0", "cuda:0"],
    "by way of the CPU": ["cuda:0", "cpu", "cuda:1"],
}


@two_gpus
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("placement", ["one each", "to and fro", "two streams on one"])
def test_two_gpus_learn_what_one_learns(placement: str, schedule: str) -> None:
    wanted = trained(["cuda:0"] * 2, "sequential")
    found = trained(ACROSS[placement], schedule)
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    assert torch.equal(found[2], wanted[2])


@two_gpus
@pytest.mark.parametrize("placement", ACROSS)
def test_two_gpus_find_the_same_under_every_schedule(placement: str) -> None:
    wanted = trained(ACROSS[placement], "sequential")
    for schedule in SCHEDULES:
        state, losses, logits = trained(ACROSS[placement], schedule, queue_depth=3)
        assert same(state, wanted[0]), schedule
        assert same(losses, wanted[1]), schedule
        assert torch.equal(logits, wanted[2]), schedule


@two_gpus
def test_a_packet_from_a_gpu_that_is_behind_is_waited_for() -> None:
    """The first GPU is busy for long when its host hands the packet on; the second must not copy before."""
    wanted, data = package(0.0), batches(6)
    with Pipeline(wanted, ["cuda:0", "cuda:1"], "sequential") as pipe:
        pipe.run(data)
    model = package(0.0)
    with Pipeline(model, ["cuda:0", "cuda:1"]) as pipe:
        for batch in data:
            with pipe.stages[0].device.active():
                busy()
            pipe.submit(*batch)
        pipe.drain()
    assert same([v.cpu() for v in model.state_dict().values()], [v.cpu() for v in wanted.state_dict().values()])


@two_gpus
def test_memory_of_two_gpus_does_not_grow_with_batches() -> None:
    """What is on its way between them is bounded by the queue and by how far a host runs ahead."""

    def peaks(count: int) -> list[int]:
        drop_workspaces()
        model, one = package(), batches(1, rows=4096)[0]
        with Pipeline(model, ["cuda:0", "cuda:1"], queue_depth=2) as pipe:
            pipe.run([one] * 4)
            for device in range(2):
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            pipe.run([one] * count)
        return [torch.cuda.max_memory_allocated(device) for device in range(2)]

    assert all(many <= few * 1.25 for few, many in zip(peaks(10), peaks(80), strict=True))


@two_gpus
def test_a_batch_on_two_gpus_is_refused() -> None:
    x, y = batches(1)[0]
    with pytest.raises(PlacementError, match="lies on several devices"), Pipeline(package(), ["cuda:0"]) as pipe:
        pipe.submit(x.to("cuda:0"), y.to("cuda:1"))
