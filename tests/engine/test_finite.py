"""Losses that are not finite: who sees them when, and what a batch that is left out leaves behind (nothing)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, PipealError, Pipeline, ScheduleError
from pipeal.core.errors import NonFiniteError
from pipeal.core.rng import keyed
from pipeal.engine import SCHEDULES
from pipeal.engine.devices import Device

from .cases import ORDERS, Case, Layer, cases, cosine, cuts, outcome

WIDE = 4


def square(**options: Any) -> AL:
    return AL(
        ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), **options
    )


def package(layers: int = 3, dropout: float = 0.0, **options: Any) -> ALPackage:
    torch.manual_seed(0)
    made = ALPackage([square(**options) for _ in range(layers)])
    if dropout:
        for layer in made:
            layer.enc.f = nn.Sequential(layer.enc.f, nn.Dropout(dropout))
    return made


def data(batches: int, poisoned: Sequence[int] = (), value: float = nan) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    found = [(torch.randn(3, WIDE, generator=draw), torch.randn(3, WIDE, generator=draw)) for _ in range(batches)]
    for batch in poisoned:
        found[batch][0][1, 2] = value
    return found


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def run(model: ALPackage, batches: list[Any], schedule: str, **options: Any) -> Any:
    with Pipeline(model, None, schedule, threads=1, stall_timeout_s=120, **options) as pipe:
        return pipe.run(batches, cosine)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e30], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_ends_the_run_before_the_layer_is_updated(schedule: str, value: float) -> None:
    model, wanted = package(), package()
    run(wanted, data(5), "sequential")
    with pytest.raises(NonFiniteError) as caught:
        run(model, data(9, [5], value), schedule)
    error = caught.value
    assert isinstance(error, PipealError)
    assert (error.layer, error.batch) == (0, 5)
    assert not torch.tensor(error.losses).isfinite().all()
    assert list(map(torch.equal, weights(model[0]), weights(wanted[0]))).count(False) == 0
    notes = "\n".join(error.__notes__)
    assert "in the forward of stage 0, layer 0 (AL), batch 5, device cpu; input (3, 4) float32" in notes


def test_the_message_is_one_paragraph_that_says_what_and_where_from() -> None:
    with pytest.raises(NonFiniteError) as caught:
        run(package(), data(2, [1]), "pipelined")
    text = str(caught.value)
    assert text.startswith("layer 0 has a loss that is not finite on batch 1: nan, 0.")
    assert "Its input was not finite already. The layer was not updated on this batch." in text
    assert "on_non_finite='skip'" in text
    assert "\n" not in text


class Diverges(nn.Module):
    """Multiplies by a number of its own; more than it can bear on one batch, counted by itself."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.seen = batch, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1e38 if self.seen == self.batch + 1 else 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_layer_is_named_whose_own_loss_it_is(schedule: str) -> None:
    model = package()
    model[1].enc.b = nn.Sequential(model[1].enc.b, Diverges(2))
    with pytest.raises(NonFiniteError, match="Its input and its weights were finite") as caught:
        run(model, data(4), schedule, first_batch=50)
    assert (caught.value.layer, caught.value.batch) == (1, 52)


def test_weights_and_targets_are_named_where_it_comes_from_them() -> None:
    model = package()
    with torch.no_grad():
        model[1].enc.f.weight[0, 0] = inf
    with pytest.raises(NonFiniteError, match=r"layer 1 .*Its weights were not finite already"):
        run(model, data(1), "sequential")
    x, y = data(1)[0]
    with pytest.raises(NonFiniteError, match="Its target was not finite already"):
        run(package(), [(x, y.fill_(nan))], "sequential")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ignored_it_is_in_the_report_and_in_the_weights(schedule: str) -> None:
    model = package()
    report = run(model, data(4, [1]), schedule, on_non_finite="ignore")
    assert report.non_finite == [3, 3, 3]
    assert isnan(float(model[0].enc.f.weight.detach().sum()))


def test_an_unknown_policy_is_one_line() -> None:
    with pytest.raises(PipealError, match="unknown on_non_finite 'skipp'; did you mean 'skip'"):
        Pipeline(package(), on_non_finite="skipp")  # type: ignore[arg-type]


def skipping_by_hand(model: ALPackage, batches: list[Any], seed: int) -> tuple[list[Tensor], list[int]]:
    """Layer by layer; one that has a loss that is not finite is put back as it was."""
    rows: list[list[Tensor]] = [[] for _ in model]
    model.train()
    for batch, (x, y) in enumerate(batches):
        for number, layer in enumerate(model):
            before = copy.deepcopy(layer.state_dict())
            with keyed(seed, number, batch, whole_default=True):
                x, y = layer(x, y)
            losses = torch.stack(layer.loss() or ())
            rows[number].append(losses.float())
            if losses.isfinite().all():
                layer.backward()
                layer.scale_lr(cosine(batch))
                layer.update()
            else:
                layer.load_state_dict(before)
    return [torch.stack(row) for row in rows], [
        sum(not bool(losses.isfinite().all()) for losses in row) for row in rows
    ]


@given(
    case=cases().filter(lambda case: all(layer.kind != "silent AL" for layer in case.layers)),
    data=st.data(),
    value=st.sampled_from([nan, inf, 3e38]),
)
def test_skipped_it_is_as_if_the_batch_had_never_been(case: Case, data: st.DataObject, value: float) -> None:
    """Law 1 with ``skip``: weights, buffers, optimizer states (steps included), rates and losses, bit for bit."""
    batches = case.batches()
    poisoned = data.draw(st.sets(st.integers(0, len(batches) - 1), min_size=1), label="poisoned")
    for batch in poisoned:
        x = batches[batch][0]
        (x[0] if isinstance(x, tuple) else x)[-1, 0] = value
    model = case.build()
    losses, skipped = skipping_by_hand(model, batches, case.seed)
    # An infinite input that tanh makes a one has a finite loss, and a gradient that is not: only losses are looked at.
    assume(all(weight.isfinite().all() for weight in model.parameters()))
    wanted = outcome(model, losses, [])
    for name, schedule in ORDERS.items():
        stages = data.draw(st.integers(1, min(4, len(case.layers))), label=f"{name} stages")
        sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
        queue_depth = data.draw(st.integers(1, 4), label="queue depth")
        model = case.build()
        pipe = Pipeline(
            model,
            ["cpu"] * stages,
            schedule,
            sizes=sizes,
            queue_depth=queue_depth,
            seed=case.seed,
            threads=1,
            on_non_finite="skip",
        )
        with pipe:
            report = pipe.run(batches, cosine)
        assert outcome(model, report.losses, []).differences(wanted) == []
        assert report.non_finite == skipped


POISONED = Case((Layer("batch norm", "AL", 8, 5), Layer("nn.Dropout", "AL", 4, 3, "sgd")), rows=(5, 5, 3, 5, 2), seed=3)


def test_batch_norm_would_remember_a_batch_that_was_left_out() -> None:
    """A test that cannot fail is worse than none: without the buffers put back it does."""
    batches = POISONED.batches()
    batches[1][0][0, 0] = nan
    model = POISONED.build()
    with Pipeline(model, threads=1, seed=3, on_non_finite="skip") as pipe:
        assert pipe.run(batches).non_finite == [1, 1]
    buffers = dict(model.named_buffers())
    assert buffers
    assert all(buffer.isfinite().all() for buffer in buffers.values())
    assert [int(value) for name, value in buffers.items() if name.endswith("num_batches_tracked")] == [4]


class Carries(nn.Linear):
    """Goes on from the batch before; there is nothing to go on from before the first."""

    state: Tensor | None

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)
        self.register_buffer("state", None)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if self.state is None else x + self.state)
        self.state = out.detach().mean(0)
        return out


def test_a_buffer_that_a_first_batch_would_have_filled_is_empty_again() -> None:
    """It kept the NaN of a batch that was left out, and every later batch was left out for it."""
    made = package(1)
    made[0].enc.f = Carries().requires_grad_(False)  # no optimizer has its weights
    report = run(made, data(3, poisoned=[0]), "sequential", on_non_finite="skip")
    assert report.losses[0].isfinite().all(1).tolist() == [False, True, True]
    assert made[0].enc.f.state.isfinite().all()


def test_what_is_finite_goes_on_learning() -> None:
    """Only the loss of the first layer's bridge overflows: the next layer gets a sound packet, and learns."""
    model, wanted = package(), package()
    model[0].enc.b = nn.Sequential(model[0].enc.b, Diverges(1))
    wanted[0].enc.b = nn.Sequential(wanted[0].enc.b, Diverges(99))
    report = run(model, data(4), "pipelined", on_non_finite="skip")
    assert report.non_finite == [1, 0, 0]
    steps = [int(layer.enc_opt.state_dict()["state"][0]["step"]) for layer in model]
    assert steps == [3, 4, 4]


class EverySecond(AL):
    """Learns from two batches at a time: its gradients outlive a batch."""

    def __init__(self) -> None:
        super().__init__(
            ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
        )
        self.seen = 0

    def update(self) -> None:
        self.seen += 1
        if self.seen % 2 == 0:
            super().update()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_wait_for_a_later_update_outlive_a_batch_that_was_left_out(schedule: str) -> None:
    def trained(batches: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = ALPackage([EverySecond()])
        with Pipeline(model, None, schedule, threads=1, on_non_finite="skip") as pipe:
            pipe.run(batches)
        return weights(model)

    sound = data(5)
    wanted = trained([sound[0], *sound[2:]])
    assert all(map(torch.equal, trained(data(5, [1])), wanted))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_broken_weights_end_the_run_even_when_skipping(schedule: str) -> None:
    """Symptom it prevents: an hour in which every batch is left out."""
    model = package()
    with torch.no_grad():
        model[1].ae.g.weight[0, 0] = nan
    with pytest.raises(NonFiniteError, match="the weights of layer 1 are not finite before batch 0") as caught:
        run(model, data(3), schedule, on_non_finite="skip")
    assert (caught.value.layer, caught.value.batch) == (1, 0)


class Waves(nn.Module):
    """A layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDE, WIDE, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.complex(x, x) @ self.w
        self.kept = out.abs().mean()
        return out.detach().real, y

    def backward(self) -> None:
        self.kept.backward()

    def update(self) -> None:
        self.w.grad = None

    def loss(self) -> tuple[Tensor, ...]:
        return (self.kept,)

    def scale_lr(self, factor: float) -> None:
        pass

    def inference(self, x: Tensor, path: str) -> Tensor:
        return x


def test_complex_weights_that_are_not_finite_are_found() -> None:
    """Symptom: every batch was left out and nothing said, and the error was said not to come from the weights."""
    layer = Waves()
    with torch.no_grad():
        layer.w[0, 0] = nan
    with pytest.raises(NonFiniteError, match="the weights of layer 0 are not finite before batch 0"):
        run([layer], data(3), "sequential", on_non_finite="skip")  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="Its weights were not finite already"):
        run([layer], data(3), "sequential")  # type: ignore[arg-type]


class Event:
    """A mark that has passed once the test says so, or someone waits for it."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class LateDevice(Device):
    """A CPU that behaves as a GPU does: what it was given is there only later."""

    lags = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.marks: list[Event] = []

    def mark(self) -> Any:
        self.marks.append(Event())
        return self.marks[-1]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_late(name: str | torch.device) -> Device:
        return LateDevice(torch.device(name))

    monkeypatch.setattr("pipeal.engine.pipeline.open_device", open_late)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_a_device_that_lags_it_is_seen_at_the_drain_and_nobody_waits_before(schedule: str) -> None:
    pipe = Pipeline(package(), None, schedule, threads=1)
    with pipe:
        for x, y in data(100, [5]):
            pipe.submit(x, y)
        pipe._executor.drain()  # type: ignore[union-attr]
        assert [len(stage.device.marks) for stage in pipe.stages] == [3, 3, 3]  # one for 32 batches
        with pytest.raises(NonFiniteError, match=r"layer 0 .* on batch 5: nan.*go on from a checkpoint") as caught:
            pipe.drain()
        with pytest.raises(ScheduleError, match="since NonFiniteError: layer 0 ") as again:
            pipe.drain()
    assert again.value.__cause__ is caught.value
    assert (caught.value.layer, caught.value.batch) == (0, 5)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_a_device_that_lags_it_ends_the_run_as_soon_as_the_losses_have_arrived(schedule: str) -> None:
    pipe = Pipeline(package(), None, schedule, threads=1)
    submitted = 0
    with pytest.raises(NonFiniteError, match=r"layer 0 .* on batch 5: nan"), pipe:  # noqa: PT012
        for x, y in data(400, [5]):
            pipe.submit(x, y)
            submitted += 1
            for mark in pipe.stages[0].device.marks:
                mark.passed = True
    assert submitted < 50


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_fence_never_keeps_weights_that_learnt_from_it(schedule: str) -> None:
    """Nobody waits for the losses at the snapshot itself: whoever waits for it learns of them."""
    pipe = Pipeline(package(), None, schedule, threads=1)
    with pytest.raises(NonFiniteError, match=r"layer 0 .* on batch 2: nan.*go on from a checkpoint"), pipe:  # noqa: PT012
        for x, y in data(4, [2]):
            pipe.submit(x, y)
        snapshot = pipe.snapshot()
        for x, y in data(4):
            pipe.submit(x, y)
        pipe._executor.drain()  # type: ignore[union-attr]
        marks = [mark for stage in pipe.stages for mark in stage.device.marks]
        assert not any(mark.passed for mark in marks)
        for mark in marks:
            mark.passed = True
        with pytest.raises(NonFiniteError, match=r"layer 0 .* on batch 2: nan") as caught:
            snapshot.wait(120)
        assert caught.value.batch == 2


@pytest.mark.usefixtures("late")
def test_a_fence_before_the_batch_is_sound() -> None:
    with pytest.raises(NonFiniteError), Pipeline(package(), threads=1) as pipe:  # noqa: PT012
        for x, y in data(2):
            pipe.submit(x, y)
        snapshot = pipe.snapshot()
        for x, y in data(3, [1]):
            pipe.submit(x, y)
        pipe._executor.drain()  # type: ignore[union-attr]
        for stage in pipe.stages:
            for mark in stage.device.marks:
                mark.passed = True
        assert list(snapshot.wait(120)) == [0, 1, 2]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_a_device_that_lags_a_batch_is_left_out_as_well(schedule: str) -> None:
    batches = POISONED.batches()
    batches[1][0][0, 0] = nan
    model = POISONED.build()
    losses, _ = skipping_by_hand(model, batches, 3)
    wanted = outcome(model, losses, [])
    model = POISONED.build()
    with Pipeline(model, None, schedule, threads=1, seed=3, on_non_finite="skip") as pipe:
        found = pipe.run(batches, cosine).losses
    assert outcome(model, found, []).differences(wanted) == []


def test_losses_as_plain_numbers_are_seen_too() -> None:
    class Plain(AL):
        def loss(self) -> Any:
            return [nan]

    layer = Plain(ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))
    with pytest.raises(NonFiniteError, match="batch 0: nan"):
        run(ALPackage([layer]), data(1), "sequential")


def test_a_layer_may_say_of_a_batch_that_it_has_no_losses() -> None:
    class Silent(AL):
        def loss(self) -> tuple[Tensor, ...]:
            return ()

    layer = Silent(ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)))
    assert run(ALPackage([layer]), data(2), "sequential").losses == []


def test_a_pipeline_is_sound_again_after_it_was_left() -> None:
    pipe = Pipeline(package(), threads=1)
    with pytest.raises(NonFiniteError), pipe:
        pipe.run(data(2, [1]))
    with pipe:
        assert pipe.run(data(2)).non_finite == [0, 0, 0]


def test_the_batches_after_one_that_was_passed_over_keep_their_numbers() -> None:
    """What a batch draws and learns does not depend on whether those before it came."""
    model, wanted = package(dropout=0.5), package(dropout=0.5)
    batches = data(4)
    with Pipeline(model, threads=1) as pipe:
        pipe.run(batches[:2], cosine)
        pipe.skip()
        assert pipe.run(batches[3:], cosine).batches == 1
        assert pipe.snapshot().batch == 4
    with Pipeline(wanted, threads=1) as pipe:
        pipe.run(batches[:2], cosine)
    with Pipeline(wanted, threads=1, first_batch=3) as pipe:
        pipe.run(batches[3:], cosine)
    assert all(map(torch.equal, weights(model), weights(wanted)))
    with pytest.raises(ValueError, match="cannot skip -1 batches"):
        pipe.skip(-1)
