"""The pipeline's front: how it is opened and left, what it refuses, reports and predicts."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bench.virtual import VirtualLayer
from hypothesis import given
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, Pipeline, PlacementError, ScheduleError
from pipeal.core.messages import tell_once
from pipeal.core.packet import HandedOver, Packet
from pipeal.engine import SCHEDULES, Action, parse_device
from pipeal.engine.delivery import Delivery
from pipeal.engine.runner.layer import Plain

from .cases import Case, Layer, cases, cosine, predictions_by_hand, reference
from .traps import Trap, nothing, quick

SMALL = Case((Layer("nn.Dropout"), Layer("batch norm"), Layer("pipeal.Dropout")), rows=(4, 4, 3))

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")


def test_unopened_it_does_not_train() -> None:
    pipe = Pipeline(quick(2))
    for use in (lambda: pipe.submit(None, None), pipe.drain, lambda: pipe.run(nothing(1))):
        with pytest.raises(ScheduleError, match="not open"):
            use()
    assert threading.active_count() == len(threading.enumerate())


def test_open_it_cannot_be_opened_again() -> None:
    with Pipeline(quick(2)) as pipe:
        with pytest.raises(ScheduleError, match="already open"), pipe:
            pytest.fail("opened twice")
        assert pipe.run(nothing(2)).batches == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_it_can_be_opened_again_and_trains_on(schedule: str) -> None:
    """Symptom: the second run stalled. Cause: its tasks went on counting, its record of what had ended did not."""
    package, batches = SMALL.build(), SMALL.batches()
    pipe = Pipeline(package, None, schedule, threads=1, stall_timeout_s=120)
    losses = []
    for batch in batches:
        with pipe:
            losses.append(pipe.run([batch], cosine).losses)
    wanted = [value for name, value in reference(SMALL).tensors.items() if name.startswith("losses")]
    for rows, row in zip(zip(*losses, strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(rows), row)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_a_failure_it_can_be_opened_again(schedule: str) -> None:
    """And the next report has a row of losses for each of its batches, none for what the failed run left."""
    package, batches = SMALL.build(), SMALL.batches()
    bad = (torch.ones(4, 6), torch.full((4,), 99))  # a class that does not exist
    pipe = Pipeline(package, None, schedule, threads=1, stall_timeout_s=120)
    with pytest.raises((IndexError, RuntimeError)), pipe:
        pipe.run([batches[0], bad])
    with pipe:
        report = pipe.run(batches)
    assert [len(rows) for rows in report.losses] == [report.batches] * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_drain_with_nothing_submitted_reports_nothing(schedule: str) -> None:
    with Pipeline(quick(2), schedule=schedule) as pipe:
        for report in (pipe.drain(), pipe.run([]), pipe.run(iter(()))):
            assert (report.batches, report.samples, report.seconds, report.losses) == (0, 0, 0.0, [])
            assert report.busy_share == [0.0, 0.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_fewer_batches_than_stages(schedule: str, batches: int) -> None:
    with Pipeline(quick(6), schedule=schedule, queue_depth=4) as pipe:
        assert pipe.run(nothing(batches)).batches == batches


def test_every_report_starts_anew() -> None:
    package, batches = SMALL.build(), SMALL.batches()
    with Pipeline(package, threads=1) as pipe:
        first, second = pipe.run(batches[:2]), pipe.run(batches[2:])
    assert (first.batches, first.samples, second.batches, second.samples) == (2, 8, 1, 3)
    assert [rows.shape for rows in first.losses] == [(2, 2)] * 3
    assert [rows.shape for rows in second.losses] == [(1, 2)] * 3
    assert not any(rows.requires_grad for rows in first.losses)


@dataclass
class Batch:
    x: Tensor
    y: Tensor


def test_batches_may_be_objects() -> None:
    package = SMALL.build()
    with Pipeline(package, threads=1) as pipe:
        report = pipe.run(Batch(x, y) for x, y in SMALL.batches())
    assert report.samples == sum(SMALL.rows)


@pytest.mark.parametrize("of_batch", [0, 1])
@pytest.mark.parametrize("tensor", ["x", "y"])
def test_a_batch_that_is_filled_again_while_layers_still_need_it_is_refused(of_batch: int, tensor: str) -> None:
    """Symptom: with one buffer for all batches, layers learnt from those to come, and said nothing."""
    package, begun, written = SMALL.build(), threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        begun.set()
        assert written.wait(60.0)

    package[0].enc.f.register_forward_pre_hook(wait)
    batches = [dict(zip("xy", batch, strict=True)) for batch in SMALL.batches()]

    def refilled() -> None:
        with Pipeline(package, threads=1) as pipe:
            for batch in batches:
                pipe.submit(**batch)
            assert begun.wait(60.0)
            batches[of_batch][tensor].mul_(1)  # class numbers stay some
            written.set()
            pipe.drain()

    if of_batch:
        with pytest.raises(DataError, match="tensors of batch 1 were written to after"):
            refilled()
    else:  # in the midst of the forward
        with pytest.raises(ScheduleError, match=r"changed its input in place.* filled its tensors again"):
            refilled()


def test_a_batch_that_is_filled_again_after_its_forward_is_refused() -> None:
    """With recomputation a backward reads it once more."""
    x, y = next(iter(SMALL.batches()))
    runner, packet = Plain(SMALL.build()[0]), Packet(0, x, y, handed_over=HandedOver((x, y)))
    runner.forward(packet, x, y)
    x.add_(1)
    with pytest.raises(DataError, match="tensors of batch 0 were written to after"):
        runner.backward(packet)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 3), torch.arange(4), nn.Parameter(torch.zeros(4)), torch.zeros(2, 2).to_sparse()],
    ids=["floats", "numbers", "parameter", "sparse"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_writes_to_what_was_handed_over_are_seen_and_it_is_not_kept(tensor: Tensor, *, inference: bool) -> None:
    """Symptom: on PyTorch 2.6, "cannot call get_autograd_meta() on undefined tensor" in a backward: a weak reference
    brought a tensor that the stage before was letting go of."""
    given = tensor.detach().clone()
    with torch.inference_mode(inference):
        handed_over = HandedOver([given])
    assert not any(kept.numel() for kept, *_ in handed_over._seen)
    handed_over.require_unchanged(0)
    given.mul_(1)
    with pytest.raises(DataError, match="tensors of batch 0 were written to after"):
        handed_over.require_unchanged(0)


def test_a_tensor_without_an_empty_one_of_its_kind_is_watched_as_well(caplog: pytest.LogCaptureFixture) -> None:
    tell_once.cache_clear()
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    handed_over = HandedOver([nested])
    handed_over.require_unchanged(0)
    assert not caplog.messages
    nested.mul_(1)
    handed_over.require_unchanged(0)
    assert [message[:20] for message in caplog.messages] == ["a batch is a slice o"]  # as one of its values


def test_of_a_slice_it_is_told_once_that_something_was_written_to(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of a data set that is still being filled are as they were; PyTorch counts writes to all of it alike."""
    tell_once.cache_clear()
    rows = torch.zeros(4, 3)
    handed_over = HandedOver((rows[:2], rows[2:]))
    handed_over.require_unchanged(0)
    assert not caplog.messages
    kept = rows[:2]
    handed_over = HandedOver(kept)
    rows[3] = 1.0
    for batch in range(2):
        handed_over.require_unchanged(batch)
    assert [message[:40] for message in caplog.messages] == ["a batch is a slice of a tensor that was "]


def test_on_batch_hears_every_number_in_order() -> None:
    heard: list[int] = []
    rates: list[int] = []

    def rate(number: int) -> float:
        rates.append(number)
        return 1.0

    with Pipeline(quick(2), first_batch=40) as pipe:
        pipe.run(nothing(3), rate, heard.append)
        pipe.run(nothing(2), rate, heard.append)
        assert pipe.next_batch == 45
    assert heard == rates == [40, 41, 42, 43, 44]


def test_the_time_of_a_stage_fits_into_the_time_of_the_run() -> None:
    """Symptom: more seconds waited than passed. Cause: a wait that began before the run counted into it."""
    with Pipeline([VirtualLayer(0.01, 0.02), VirtualLayer(0.02, 0.02)]) as pipe:
        time.sleep(1.0)
        first = pipe.run(nothing(4))
        time.sleep(1.0)
        second = pipe.run(nothing(4))
    for report in (first, second):
        for stage in report.stages:
            assert stage.busy_s + sum(stage.waiting.values()) <= report.seconds + 0.5


def test_busy_is_what_the_actions_took() -> None:
    with Pipeline([VirtualLayer(0.01, 0.02, 0.005), VirtualLayer(0.005, 0.005)], ["cpu"] * 2) as pipe:
        report = pipe.run(nothing(5))
    first, second = report.stages
    for action, each in ((Action.FORWARD, 0.01), (Action.BACKWARD, 0.02), (Action.UPDATE, 0.005)):
        assert 5 * each <= first.busy[action] < report.seconds
    assert second.waiting["input"] > 0
    assert report.busy_share == [pytest.approx(one.busy_s / report.seconds) for one in (first, second)]
    assert all(0 < share <= 1 for share in report.busy_share)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(case=cases())
def test_predict_equals_inference_block_by_block_at_every_exit(schedule: str, case: Case) -> None:
    package, batches = case.build(), case.batches()
    x = batches[0][0]
    with Pipeline(package, schedule=schedule, threads=1) as pipe:
        for batch in batches:  # pending when the prediction is asked for
            pipe.submit(*batch)
        found = [pipe.predict(x, exit_at) for exit_at in range(1, len(package) + 1)]
        full = pipe.predict(x)
    wanted = predictions_by_hand(package, x)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert torch.equal(full, wanted[-1])
    with torch.no_grad():
        package.eval()
        assert torch.equal(full, package.infer(x))
        assert all(torch.equal(one, package.infer(x, exit_at)) for exit_at, one in enumerate(found, 1))
    assert not full.requires_grad


def test_predict_needs_no_open_pipeline() -> None:
    package = SMALL.build()
    pipe = Pipeline(package, ["cpu"] * 2)
    assert torch.equal(pipe.predict(SMALL.batches()[0][0]), predictions_by_hand(package, SMALL.batches()[0][0])[-1])


def test_a_prediction_while_another_thread_leaves_the_pipeline() -> None:
    """Symptom: "'NoneType' object has no attribute 'drain'", where that happened between two looks at the executor."""
    with Pipeline(quick(1)) as pipe:
        executor = pipe._executor
        with patch.object(Delivery, "__enter__", lambda _: setattr(pipe, "_executor", None)):
            assert pipe.predict(None) is None
        pipe._executor = executor


@pytest.mark.parametrize("exit_at", [0, -1, 4])
def test_an_exit_that_does_not_exist(exit_at: int) -> None:
    with Pipeline(SMALL.build()) as pipe, pytest.raises(PlacementError, match=f"exit {exit_at} does not exist"):
        pipe.predict(SMALL.batches()[0][0], exit_at)


def test_a_prediction_between_batches_leaves_training_mode_to_the_next_batch() -> None:
    """Symptom: after a prediction, batches given by ``submit`` trained without dropout and froze batch norm."""
    package, batches = SMALL.build(), SMALL.batches()
    with Pipeline(package, threads=1) as pipe:
        for number, batch in enumerate(batches):
            pipe.submit(*batch, cosine(number))
            pipe.predict(batch[0])
    wanted = reference(SMALL).tensors
    assert all(torch.equal(value, wanted[f"weights/{name}"]) for name, value in package.state_dict().items())


def test_a_layer_that_the_user_froze_stays_frozen_after_a_prediction() -> None:
    """A batch norm put in evaluation mode by hand must not come back to life because someone asked for a logit."""
    package = SMALL.build()
    norm = next(module for module in package.modules() if isinstance(module, nn.BatchNorm1d))
    norm.eval()
    with Pipeline(package, threads=1) as pipe:
        pipe.run(SMALL.batches())
        assert not norm.training
        pipe.predict(SMALL.batches()[0][0])
        pipe.run(SMALL.batches())
    assert norm.num_batches_tracked == 0


def test_a_module_that_only_has_children_is_a_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = SMALL.build()

    model = Model()
    with Pipeline(model, threads=1) as pipe:
        assert pipe.sizes == [1, 1, 1]
        pipe.run(SMALL.batches(), cosine)
    wanted = reference(SMALL).tensors
    found = ALPackage(list(model.children())).state_dict()
    assert all(torch.equal(value, wanted[f"weights/{name}"]) for name, value in found.items())


@pytest.mark.parametrize("queue_depth", [0, -1])
def test_a_queue_needs_room(queue_depth: int) -> None:
    with pytest.raises(PlacementError, match=f"queue_depth is {queue_depth}; expected at least 1"):
        Pipeline(quick(2), queue_depth=queue_depth)


BAD_DEVICES = {
    "xpu": "device 'xpu' is not supported",
    "foo": "'foo' is not a device",
    "": "'' is not a device",
    "cuda:-3": "is not a device",
    "meta": "device 'meta' is not supported",
}


@pytest.mark.parametrize("name", BAD_DEVICES)
def test_a_device_that_cannot_be(name: str) -> None:
    with pytest.raises(PlacementError, match=BAD_DEVICES[name]):
        Pipeline(quick(2), ["cpu", name])


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_that_does_not_exist(name: str) -> None:
    with pytest.raises(PlacementError, match="does not exist; this machine has no CUDA device; use 'cpu'"):
        parse_device(name)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("number", [127, 128, 255, 256, 257, 999])
def test_a_device_whose_number_has_more_than_eight_bits_does_not_exist(number: int, count: int) -> None:
    """Symptom: 'cuda:999' was a RuntimeError from within torch, and 'cuda:256' the first GPU: torch keeps eight bits,
    with a sign."""
    with patch.object(torch.cuda, "device_count", lambda: count):
        with pytest.raises(PlacementError, match=f"^device 'cuda:{number}' does not exist; this machine has "):
            parse_device(f"cuda:{number}")
        with pytest.raises(PlacementError, match="does not exist; this machine has "):
            parse_device(torch.device("cuda:999"))


def test_devices_and_layers_that_do_not_fit() -> None:
    with pytest.raises(PlacementError, match="3 stages for 2 layers"):
        Pipeline(quick(2), ["cpu"] * 3)
    with pytest.raises(PlacementError, match="0 stages for 2 layers"):
        Pipeline(quick(2), [])
    with pytest.raises(PlacementError, match="found 0 layers"):
        Pipeline([])
    with pytest.raises(PlacementError, match="cover 3 layers, but the package has 2"):
        Pipeline(quick(2), ["cpu"] * 2, sizes=[1, 2])
    with pytest.raises(PlacementError, match="1 sizes"):
        Pipeline(quick(2), ["cpu"] * 2, sizes=[2])


def test_what_no_layer_can_learn_from_is_refused_at_once() -> None:
    """Symptom: of a scale that is no number all weights were none, and a batch without samples had a loss that was not
    finite, for which a lower learning rate was advised."""
    package = ALPackage([AL(ENC(nn.Linear(3, 3), nn.Linear(3, 3)), AE(nn.Identity(), nn.Identity()))])
    x = torch.randn(2, 3)
    with Pipeline(package, "cpu", threads=1) as pipe:
        pipe.submit(x, x)
        with pytest.raises(ConfigError, match="lr_scale is nan for batch 1; expected a finite number"):
            pipe.submit(x, x, float("nan"))
        for wrong in (None, "1", torch.ones(2), 10**400, -0.1):
            with pytest.raises(ConfigError, match=r"lr_scale is .* for batch 1; expected a finite number"):
                pipe.submit(x, x, wrong)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"batch 1 has no samples \(\(0, 3\) float32\); expected one at least"):
            pipe.submit(x[:0], x[:0])
        pipe.submit(x, x, torch.tensor(0.5))  # type: ignore[arg-type]
        assert pipe.drain().batches == 2


def test_a_graph_may_be_without_edges() -> None:
    with Pipeline([VirtualLayer(0, 0)], "cpu", threads=1) as pipe:
        assert pipe.run([((torch.zeros(0, 2, dtype=torch.long), torch.randn(4, 3)), None)]).batches == 1


def test_an_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match="unknown schedule 'pipelining'; did you mean 'pipelined'"):
        Pipeline(quick(1), schedule="pipelining")


def test_what_is_no_layer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a layer .* found str"):
        Pipeline(["layer"])  # type: ignore[list-item]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_callers_intra_op_threads_are_as_before(schedule: str) -> None:
    torch.set_num_threads(2)
    with Pipeline(quick(2), schedule=schedule, threads=1) as pipe:
        pipe.run(nothing(2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_born_later_have_the_intra_op_threads_they_would_have_had(schedule: str) -> None:
    """``torch.set_num_threads`` in a worker also sets what every later thread of the process begins with."""
    torch.set_num_threads(2)
    with Pipeline(quick(2), schedule=schedule, threads=1) as pipe:
        pipe.run(nothing(2))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]


def test_a_worker_keeps_its_number_of_intra_op_threads_whatever_another_sets_before_its_first_operator() -> None:
    """Symptom: a run that went on after an epoch differed in rounding from the untouched one. Cause: it evaluated
    before its workers' first operator, and there each took over the number that the process had been given back."""
    found: list[int] = []
    trap = Trap("F", 1, lambda: found.append(torch.get_num_threads()))
    with Pipeline([trap, *quick(1)], schedule="pipelined", threads=1) as pipe:
        pipe.run(nothing(1))
        torch.set_num_threads(2)
        pipe.run(nothing(1))
    assert found == [1]


def test_layers_that_share_a_buffer_are_refused() -> None:
    """Symptom: runs that differed from each other. Cause: two stages wrote the same running statistics."""
    norm = nn.BatchNorm1d(4, affine=False)

    def layer() -> AL:
        enc = ENC(nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 2))
        return AL(enc, AE(nn.Linear(2, 2), nn.Linear(2, 2)))

    with pytest.raises(PlacementError, match="share the buffer"):
        Pipeline([layer(), layer()])


@pytest.mark.parametrize(
    ("setting", "words"), [({"precision": "fp8"}, "precision 'fp8'"), ({"seed": -1}, "seed is -1")]
)
def test_settings_that_mean_nothing_are_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pipeline([VirtualLayer(0, 0)], **setting)
