"""Losses scaled for fp16: by a factor of each layer's own, which learns, and which the host never asks for."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import getattr_static
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ConfigError, Pipeline
from pipeal.core.errors import DataError, NonFiniteError
from pipeal.core.modules import scaler_of
from pipeal.core.protocols import ScalesUpdates
from pipeal.core.tree import tensors
from pipeal.engine.runner import precision as settings
from pipeal.engine.runner.precision import make_ready
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.methods.al import TouchedAdam, touch_rows
from pipeal.methods.scaling import FIRST, FLOOR, INTERVAL
from pipeal.training.checkpoint.finite import not_finite_in

X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 20).view(4, 5)
SGD = partial(torch.optim.SGD, momentum=0.9, fused=True)


def al(optimizer: Any = None, kind: type[AL] = AL) -> AL:
    torch.manual_seed(0)
    return kind(ENC(nn.Linear(3, 6), nn.Linear(6, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)), 0.1, optimizer)


def bp(optimizer: Any = None) -> BP:
    torch.manual_seed(0)
    return BP(nn.Linear(3, 5), nn.MSELoss(), 0.1, optimizer)


def looking_up() -> AL:
    torch.manual_seed(0)
    f = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 6))
    layer = AL(ENC(f, nn.Linear(6, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)), 0.1, TouchedAdam)
    assert touch_rows(layer) == 1
    return layer


def step(layer: AL | BP, x: Tensor = X) -> None:
    layer(x, Y)
    layer.backward()
    layer.update()


@pytest.mark.parametrize("build", [al, bp])
@pytest.mark.parametrize("optimizer", [None, SGD, TouchedAdam])
def test_a_power_of_two_changes_no_bit_where_nothing_overflows(build: Callable[..., AL | BP], optimizer: Any) -> None:
    plain, scaled = build(optimizer), build(optimizer)
    scaled.scale_losses()
    for _ in range(3):
        step(plain)
        step(scaled)
        assert plain.loss() is not None
        assert all(map(torch.equal, plain.loss() or (), scaled.loss() or ()))  # told as they are
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))


def test_a_gradient_of_both_sides_is_unscaled_once() -> None:
    """Symptom: a module of both sides barely learned in fp16. Cause: its gradient was divided by the factor twice."""

    def shared() -> AL:
        torch.manual_seed(0)
        both = nn.Linear(4, 4)
        return AL(ENC(nn.Linear(3, 4), both), AE(nn.Linear(5, 4), nn.Sequential(both, nn.Linear(4, 5))), 0.1, SGD)

    plain, scaled = shared(), shared()
    scaled.scale_losses()
    step(plain)
    step(scaled)
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))


@pytest.mark.parametrize("build", [al, bp])
def test_an_update_that_overflowed_is_left_out_whole_and_halves_the_factor(build: Callable[..., AL | BP]) -> None:
    layer = build()
    layer.scale_losses()
    step(layer)
    before = [value.clone() for value in tensors(layer_state(layer))]
    layer(X, Y)
    layer.backward()
    next(layer.parameters()).grad[0] = torch.inf  # type: ignore[index]
    layer.update()
    changed = [not torch.equal(one, two) for one, two in zip(before, tensors(layer_state(layer)), strict=True)]
    assert sum(changed) == 3  # the factor, the count of good updates, and that of those left out
    assert layer.scaler is not None
    assert layer.scaler.scale == FIRST / 2
    assert layer.scaler.left_out == 1
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}, {"dampening": 0.5}])
def test_momentum_begins_at_zero_where_the_first_update_overflowed(
    options: Any, weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: weights of 1e9 after an overflow at the first update. Cause: PyTorch's fused SGD makes its buffers of
    memory as it is, and the kernel that would fill them is left out."""
    made = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: made(*args, **named).fill_(7.0))
    kept, fresh = (bp(partial(SGD, weight_decay=weight_decay, **options)) for _ in range(2))
    for one in (kept, fresh):
        one.scale_losses()
    kept(X, Y)
    kept.backward()
    next(kept.parameters()).grad[0] = torch.inf  # type: ignore[index]
    kept.update()
    assert all(not state["momentum_buffer"].any() for state in kept.opt.state.values())
    if "dampening" not in options:  # which PyTorch leaves out in the very first update alone
        for one in (kept, fresh) * 2:
            step(one)
        assert all(map(torch.equal, kept.parameters(), fresh.parameters()))


@pytest.mark.parametrize("place", ["a row that is looked up", "elsewhere"])
@pytest.mark.parametrize("first", [True, False])
def test_an_update_that_overflowed_leaves_the_rows_of_a_table_and_their_moments(place: str, first: bool) -> None:
    """Whose gradient is sparse, and whose update is not PyTorch's own."""
    layer, before = (looking_up() for _ in range(2))
    tokens = torch.tensor([[1, 2], [2, 5], [6, 1], [4, 4]])
    for one in (layer, before):
        one.scale_losses()
        if not first:
            step(one, tokens)
    layer(tokens, Y)
    layer.backward()
    table = layer.enc.f[0].weight  # type: ignore[index, union-attr]
    gradient = table.grad
    assert gradient.is_sparse
    (gradient._values() if place == "a row that is looked up" else layer.enc.b.weight.grad)[0, 0] = torch.inf  # type: ignore[index, union-attr]
    layer.update()
    assert all(map(torch.equal, layer.parameters(), before.parameters()))
    kept = layer.enc_opt.state[table]
    assert kept["step"] == (not first)
    for name in ("exp_avg", "exp_avg_sq"):
        known = before.enc_opt.state.get(before.enc.f[0].weight, {})  # type: ignore[index, union-attr]
        assert torch.equal(kept[name], known.get(name, torch.zeros_like(table)))
    assert layer.scaler is not None
    assert (layer.scaler.scale, layer.scaler.left_out) == (FIRST / 2, 1)
    for one in (layer, before):
        step(one, tokens)
    assert all(map(torch.equal, layer.parameters(), before.parameters())), "as if there had been no such batch"


@pytest.mark.parametrize("build", [al, bp])
def test_the_engine_knows_a_scaler_in_every_version_of_python(build: Callable[..., AL | BP]) -> None:
    """From 3.12 on ``isinstance`` looks a protocol's names up statically, and there saw no buffer: nobody was told."""
    layer = build()
    layer.scale_losses()
    assert scaler_of(layer) is layer.scaler is not None
    for name in ("overflows", "at_first", "gave_up"):
        assert callable(getattr_static(layer.scaler, name))
    assert {name for name in vars(ScalesUpdates) if not name.startswith("_")} == {"overflows", "at_first", "gave_up"}


def test_the_factor_doubles_after_many_good_updates() -> None:
    layer = al()
    layer.scale_losses()
    assert layer.scaler is not None
    layer.scaler.good.fill_(INTERVAL - 1)
    step(layer)
    assert (layer.scaler.scale, layer.scaler.good) == (2 * FIRST, 0)


def test_layers_have_factors_of_their_own_and_keep_them_when_asked_again() -> None:
    layers = [al(), bp()]
    make_ready(layers, "fp16")
    first, second = (layer.scaler for layer in layers)
    make_ready(layers, "fp16")
    assert [layer.scaler for layer in layers] == [first, second]
    assert first is not second


@pytest.mark.usefixtures("fp16")
def test_a_layer_that_was_trained_in_fp16_is_itself_again_in_another_precision() -> None:
    """It went on to scale for ever, and in fp32 left out the updates whose gradients were not finite."""
    layer, plain = al(), al()
    with Pipeline([layer], threads=1, precision="fp16"):
        assert layer.scaler is not None
    for found in (layer, plain):
        with Pipeline([found], threads=1) as pipe:
            pipe.submit(X, Y)
    assert layer.scaler is None
    assert all(map(torch.equal, tensors(layer_state(layer)), tensors(layer_state(plain))))


@pytest.mark.usefixtures("fp16")
def test_a_look_in_another_precision_leaves_the_factor_that_was_learnt() -> None:
    """Whoever made a pipeline for predictions in fp32 took it away, also from one that was open."""
    layer = al()
    Pipeline([layer], precision="fp16")
    assert layer.scaler is None
    training = Pipeline([layer], threads=1, precision="fp16")
    with training:
        assert layer.scaler is not None
        kept, _ = layer.scaler, layer.scaler.scale.fill_(8.0)
        Pipeline([layer], threads=1).predict(X)
        training.submit(X, Y)
    Pipeline([layer], threads=1, precision="bf16").predict(X)
    with training:
        training.submit(X, Y)
    assert layer.scaler is kept
    assert (kept.scale, kept.good) == (8.0, 2)


@pytest.mark.usefixtures("fp16")
@pytest.mark.parametrize(("open_in", "other"), [("fp16", "fp32"), ("bf16", "fp16")])
def test_no_layer_is_taken_from_a_pipeline_that_is_open(open_in: Any, other: Any) -> None:
    layers = [al()]
    with Pipeline(layers, threads=1, precision=open_in) as pipe:
        scaler = layers[0].scaler
        match = rf"layer 0 \(AL\) is wanted in {other}, but an open pipeline trains it in {open_in}"
        with pytest.raises(ConfigError, match=match), Pipeline(layers, threads=1, precision=other):
            pass
        with pytest.raises(ConfigError, match=match):
            make_ready(layers, other)
        with Pipeline(layers, threads=1, precision=open_in):
            pass
        with pytest.raises(ConfigError, match=match):  # still open
            make_ready(layers, other)
        assert layers[0].scaler is scaler
        pipe.submit(X, Y)
    with Pipeline(layers, threads=1, precision=other):
        assert (layers[0].scaler is None) == (other != "fp16")


@pytest.mark.parametrize("last", [lambda: al(torch.optim.SGD), lambda: Foreign(2, 2)])
def test_where_one_layer_is_refused_the_others_are_as_they_were(last: Callable[[], Any]) -> None:
    scaled, plain = al(), bp()
    scaled.scale_losses()
    kept = scaled.scaler
    with pytest.raises(ConfigError):
        make_ready([scaled, plain, last()], "fp16")
    assert (scaled.scaler, plain.scaler) == (kept, None)


@pytest.mark.parametrize("build", [al, bp])
def test_a_state_of_another_precision_is_taken_up(build: Callable[..., AL | BP]) -> None:
    """Either refused the other: a run could not go on in fp32 after fp16 had failed."""
    plain, scaled, target = build(), build(), build()
    scaled.scale_losses()
    step(plain)
    step(scaled)
    load_layer_state(target, layer_state(scaled))
    make_ready([target], "fp32")
    assert target.scaler is None
    assert all(map(torch.equal, tensors(layer_state(target)), tensors(layer_state(plain))))
    target.scale_losses()
    assert target.scaler is not None
    target.scaler.scale.fill_(torch.nan)
    load_layer_state(target, layer_state(plain))
    assert (float(target.scaler.scale), int(target.scaler.good)) == (FIRST, 0)


def test_a_layer_that_is_saved_goes_on_with_its_factor() -> None:
    one, other = al(), al()
    make_ready([one, other], "fp16")
    assert one.scaler is not None
    one.scaler.scale.fill_(8.0)
    step(one)
    load_layer_state(other, layer_state(one))
    for layer in (one, other):
        step(layer)
    assert all(map(torch.equal, tensors(layer_state(one)), tensors(layer_state(other))))
    assert other.scaler is not None
    assert other.scaler.scale == 8.0


@pytest.mark.usefixtures("fp16")
@pytest.mark.parametrize("build", [al, bp])
def test_a_state_of_fp16_brings_its_factor_along(build: Callable[..., AL | BP]) -> None:
    """It was lost, without a word, in a layer that no pipeline had been opened for yet."""
    one, other = build(), build()
    one.scale_losses()
    assert one.scaler is not None
    one.scaler.scale.fill_(8.0)
    step(one)
    load_layer_state(other, layer_state(one))
    with Pipeline([other], threads=1, precision="fp16"):
        assert other.scaler is not None
        assert (float(other.scaler.scale), int(other.scaler.good)) == (8.0, 1)


def test_a_layer_that_is_being_trained_in_fp32_gets_no_factor() -> None:
    layer, source = al(), al()
    source.scale_losses()
    with Pipeline([layer], threads=1) as pipe:
        load_layer_state(layer, layer_state(source))
        assert layer.scaler is None
        pipe.submit(X, Y)


@pytest.mark.parametrize("change", ["another shape", "a scaler of its own", "an optimizer without"])
def test_a_state_that_does_not_fit_leaves_no_factor_behind(change: str) -> None:
    """What a user's layer keeps as ``scaler`` was dropped without a word where the layer had none."""
    layer, source = al(torch.optim.SGD if change == "an optimizer without" else None), al()
    if change == "a scaler of its own":
        source.scaler = nn.BatchNorm1d(2)  # type: ignore[assignment]
    else:
        source.scale_losses()
    state = layer_state(source)
    if change == "another shape":
        state["module"]["enc.f.weight"] = torch.zeros(1)
    match = {
        "another shape": "enc.f.weight",
        "a scaler of its own": "scaler.weight.* in the state and missing in the layer",
        "an optimizer without": r"the state is of fp16, in which the layer cannot be trained.*found SGD; use its fused",
    }
    with pytest.raises(DataError, match=match[change]):
        load_layer_state(layer, state)
    assert layer.scaler is None


def test_an_optimizer_that_would_ask_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found SGD; use its fused form \(fused=True\)"):
        al(torch.optim.SGD).scale_losses()


@pytest.mark.parametrize("optimizer", [None, SGD, TouchedAdam])
def test_a_copy_of_a_layer_is_trained_in_fp16_as_it_is(optimizer: Any) -> None:
    """Symptom: devices=auto and a plan, which train copies, refused every model in fp16."""
    layers = [al(optimizer), deepcopy(al(optimizer))]
    for layer in layers:
        layer.scale_losses()
        step(layer)
        step(layer, X * 1e30)  # overflows, and is left out
    layer, copied = layers
    assert all(map(torch.equal, layer.parameters(), copied.parameters()))
    assert all(parameter.isfinite().all() for parameter in copied.parameters())


class Published(AL):
    """Goes back in its own way, which knows of no factor: updates would divide by one that was never there."""

    def backward(self) -> None:
        super().backward()


def test_a_layer_that_goes_back_in_its_own_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Published has a backward\(\) of its own"):
        al(kind=Published).scale_losses()


class Foreign(nn.Linear):
    """A layer that is no AL."""


def test_a_layer_that_cannot_scale_is_named() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 \(Foreign\) has no scale_losses"):
        make_ready([al(), Foreign(2, 2)], "fp16")  # type: ignore[list-item]


def test_fp16_on_a_cpu_without_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_cpu_has_fp16", lambda: False)
    with pytest.raises(ConfigError, match="this CPU has no arithmetic of such numbers; use 'bf16' or 'fp32'"):
        Pipeline([al()], precision="fp16")


def overflowing(layer: AL) -> AL:
    """Its losses are finite, and its gradients never are."""
    layer.enc.f.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))  # type: ignore[operator, union-attr]
    return layer


def test_a_layer_whose_gradients_never_fit_gives_up_with_the_weights_it_had() -> None:
    """The factor went down to 0, whose reciprocal made the weights NaN; until then nobody was told of 200 updates."""
    layer, before = overflowing(al()), al()
    layer.scale_losses()
    assert layer.scaler is not None
    for _ in range(30):
        step(layer)
    assert layer.scaler.scale == FLOOR
    assert not layer.scaler.gave_up()
    for _ in range(300):
        step(layer)
    assert layer.scaler.gave_up()
    assert layer.scaler.left_out == 330
    assert all(map(torch.equal, layer.parameters(), before.parameters()))
    assert not_finite_in(layer_state(layer)) == "scaler.scale"  # and so no checkpoint


def test_what_has_given_up_learns_from_gradients_of_nothing_no_more() -> None:
    """Which stay zero where they were cut off, whatever the factor."""
    layer, before = al(), al()
    layer.scale_losses()
    assert layer.scaler is not None
    layer.scaler.scale.fill_(torch.nan)
    for parameter in layer.parameters():
        parameter.register_hook(torch.zeros_like)
    step(layer)
    assert all(map(torch.equal, layer.parameters(), before.parameters()))


@pytest.fixture
def fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs compute in it, if slowly."""
    monkeypatch.setattr(settings, "_cpu_has_fp16", lambda: True)


@pytest.mark.usefixtures("fp16")
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_a_report_tells_of_updates_that_overflowed_and_of_layers_that_gave_up(schedule: str) -> None:
    first = AL(ENC(nn.Linear(3, 3), nn.Linear(3, 5)), AE(nn.Linear(5, 5), nn.Linear(5, 5)))
    pipe = Pipeline([first, overflowing(al())], ["cpu"] * 2, schedule, threads=1, precision="fp16")
    with pipe:
        assert pipe.run([(X, Y)] * 3).overflows == [0, 3]
        assert pipe.run([(X, Y)] * 2).overflows == [0, 5]
    match = r"layer 1 overflow in fp16 .*: 33 updates were left out by batch 32.*train in bf16"
    with pytest.raises(NonFiniteError, match=match) as caught, pipe:
        pipe.run([(X, Y)] * 28)
    assert (caught.value.layer, caught.value.batch, caught.value.is_to_blame) == (1, 32, False)


@pytest.mark.usefixtures("fp16")
def test_a_layer_that_gave_up_is_not_told_once_more_at_the_end() -> None:
    """Symptom: caught within the ``with``, the error was raised again at its end, where it was looked for once more."""
    with (
        Pipeline([overflowing(al())], threads=1, precision="fp16") as pipe,
        pytest.raises(NonFiniteError, match="33 updates were left out"),
    ):
        pipe.run([(X, Y)] * 33)


@pytest.mark.usefixtures("fp16")
def test_who_ignores_what_is_not_finite_is_only_told_how_often() -> None:
    with Pipeline([overflowing(al())], threads=1, precision="fp16", on_non_finite="ignore") as pipe:
        assert pipe.run([(X, Y)] * 40).overflows == [40]


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", ["sequential", "pipelined"])
def test_on_a_gpu_nobody_waits_for_the_factor(schedule: str) -> None:
    layers = [al().cuda()]
    with Pipeline(layers, ["cuda:0"], schedule, precision="fp16") as pipe:
        x, y = X.cuda(), Y.cuda()
        pipe.run([(x, y)] * 2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                pipe.submit(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert layers[0].scaler is not None
    assert layers[0].scaler.scale.device.type == "cuda"
