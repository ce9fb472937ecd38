"""Thin packets: rounded between all layers alike, so that law 1 holds for each format; and what they cost."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, Pipeline
from pipeal.core.errors import NonFiniteError
from pipeal.core.options import EngineOptions, PacketFormat
from pipeal.core.thin import Thin
from pipeal.core.tree import tensors
from pipeal.engine import Action, Window, violations
from pipeal.engine.inference.exit_policy import ExitPolicy
from pipeal.engine.runner.split import SplitWarning
from pipeal.engine.stage import Stage
from pipeal.planning.measure.layers import layer_costs, measure_in_turns
from pipeal.planning.measure.memory import measure_blocks

from .cases import ORDERS, Case, cases, cosine, cuts, predictions_by_hand, reference
from .test_exactness import RICH, run
from .test_failures import notes_of
from .test_out_of_memory import Tight
from .traps import Trap, throw

KINDS: list[Any] = [kind for kind in get_args(PacketFormat) if kind != "as_is"]
WIDE = 16


@given(case=cases(), data=st.data())
def test_every_schedule_and_layout_leaves_what_training_layer_by_layer_leaves(case: Case, data: st.DataObject) -> None:
    """Law 1 for each format, predictions along every exit included."""
    kind = data.draw(st.sampled_from(KINDS), label="packet")
    wanted = reference(case, kind)
    for name, schedule in ORDERS.items():
        stages = data.draw(st.integers(1, min(4, len(case.layers))), label=f"{name} stages")
        sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
        queue_depth = data.draw(st.integers(1, 4), label="queue depth")
        assert run(case, schedule, sizes, queue_depth, packet=kind).differences(wanted) == []


@pytest.mark.parametrize("kind", KINDS)
def test_another_format_is_another_training(kind: PacketFormat) -> None:
    wanted = reference(RICH)
    assert run(RICH, "pipelined", [2, 2], packet=kind).differences(wanted)
    for other in KINDS:
        if other != kind:
            assert reference(RICH, kind).differences(reference(RICH, other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"recompute": "blocks"}, {"on_non_finite": "skip"}, {"on_oom": "split"}], ids=str)
def test_other_options_leave_every_bit(kind: PacketFormat, options: dict[str, Any]) -> None:
    assert run(RICH, "pipelined", [1, 3], packet=kind, **options).differences(reference(RICH, kind)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sequential", "pipelined", "al-fm/layer"])
def test_offloaded_layers_leave_every_bit(
    name: str, kind: PacketFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeal.engine.state.mapped_file._SMALL", 1)
    found = run(RICH, ORDERS[name], [3, 1], packet=kind, offload="disk", offload_folder=tmp_path)
    assert found.differences(reference(RICH, kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_too_layouts_leave_the_same(kind: PacketFormat) -> None:
    wanted = run(RICH, "sequential", [4], packet=kind, precision="bf16")
    for sizes in ([1, 3], [1, 1, 1, 1]):
        assert run(RICH, "pipelined", sizes, packet=kind, precision="bf16").differences(wanted) == []


def package(layers: int = 3, wide: int = WIDE, tight: Tight | None = None) -> ALPackage:
    torch.manual_seed(0)

    def square() -> nn.Linear:
        return nn.Linear(wide, wide)

    made = [AL(ENC(nn.Sequential(square(), nn.Tanh()), square()), AE(square(), square()), 0.01) for _ in range(layers)]
    if tight is not None:
        made[1].enc.f = tight
        made[1].enc_opt.add_param_group({"params": list(tight.parameters()), "lr": 0.0})
    return ALPackage(made)


def batches(count: int = 4, rows: int = 6, wide: int = WIDE) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, wide, generator=draw), torch.randn(rows, wide, generator=draw)) for _ in range(count)]


@pytest.mark.parametrize("where", ["F", "B"])
@pytest.mark.parametrize("kind", ["int8", "int8-stochastic"])
def test_a_batch_learnt_from_in_parts_is_rounded_as_a_whole_one(kind: PacketFormat, where: str) -> None:
    """What is drawn belongs to the batch, not to its parts: the layer behind gets what it gets of a whole one, up
    to how products round."""

    def arrived(most: int) -> list[Tensor]:
        torch.manual_seed(5)
        tight = Tight(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()), most, where)
        trained, seen = package(tight=tight), list[Tensor]()
        trained[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitWarning)
            with Pipeline(trained, "cpu*2", threads=1, packet=kind, on_oom="split") as pipe:
                report = pipe.run(batches(1))
        assert (sum(report.splits) > 0) == (most < 6)
        return seen

    (whole,), (parts,) = arrived(6), arrived(4)
    step = whole.abs().amax(-1, keepdim=True) / 127
    # One value in thousands may lie so near to a step's edge that it falls to the other side.
    assert int(((whole - parts).abs() > 0.01 * step).sum()) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_not_finite_is_seen_behind_it(kind: PacketFormat, stages: int) -> None:
    """A layer without losses hands on a NaN or an infinity; the next one's losses must tell."""
    for value in (nan, inf, -inf):

        class Silent(nn.Module):
            def forward(self, x: Tensor, y: Tensor, value: float = value) -> tuple[Tensor, Tensor]:
                out = x.clone()
                out[1, 2] = value
                return out, y

            def backward(self) -> None: ...
            def update(self) -> None: ...
            def loss(self) -> None: ...
            def scale_lr(self, factor: float) -> None: ...
            def inference(self, x: Tensor, path: str) -> Tensor: ...  # type: ignore[empty-body]

        layers = [Silent(), *package(2)]
        layers[1].enc.f[1] = nn.Identity()  # the tangent of an infinity is a number
        with (
            pytest.raises(NonFiniteError, match="Its input was not finite already") as caught,
            Pipeline(layers, ["cpu"] * stages, threads=1, packet=kind) as pipe,
        ):
            pipe.run(batches(1))
        assert caught.value.layer == 1


def test_between_stages_packets_wait_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []
    forward = Stage._forward

    def spied(self: Stage, *arguments: Any) -> Any:
        packet = forward(self, *arguments)
        handed.append((self.number, packet.x, packet.y))
        return packet

    monkeypatch.setattr(Stage, "_forward", spied)
    with Pipeline(package(), "cpu*3", "sequential", threads=1, packet="int8") as pipe:
        pipe.run(batches(1))
    assert [isinstance(x, Thin) and isinstance(y, Thin) for _, x, y in handed] == [True, True, False]
    sent = sum(tensor.nbytes for tensor in tensors(handed[0][1:]))
    assert sent == 2 * 6 * (WIDE + 4)


def test_what_goes_wrong_behind_it_is_told_with_what_the_layer_got() -> None:
    layers = [*package(2), Trap("F", 0, throw(ValueError("broken")))]
    with (
        pytest.raises(ValueError, match="broken") as caught,
        Pipeline(layers, "cpu*3", threads=1, packet="int8") as pipe,
    ):
        pipe.run(batches(1))
    assert f"input (6, {WIDE}) float32, (6, {WIDE}) float32" in notes_of(caught.value)


@given(case=cases(), data=st.data())
def test_predictions_round_on_the_way_up(case: Case, data: st.DataObject) -> None:
    """In a stream, at every exit, and where samples leave early: always to the nearest, whatever the layout."""
    kind = data.draw(st.sampled_from(KINDS), label="packet")
    stages = data.draw(st.integers(1, min(4, len(case.layers))), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    trained, inputs = case.build(), [x for x, _ in case.batches()]
    pipe = Pipeline(trained, ["cpu"] * stages, sizes=sizes, threads=1, packet=kind)
    wanted = [predictions_by_hand(trained, x, kind) for x in inputs]
    for by_exit, found in zip(wanted, pipe.predict_exits(inputs), strict=True):
        assert all(map(torch.equal, by_exit, found))
    for by_exit, one in zip(wanted, pipe.predict_each(inputs), strict=True):
        assert torch.equal(by_exit[-1], one)
    count = len(trained)
    all_climb = ExitPolicy((*[0.9999] * (count - 1), 0.0), (1.0,) * count)
    for by_exit, answer in zip(wanted, pipe.predict_each(inputs, policy=all_climb), strict=True):
        for row, taken in enumerate(answer.exits.tolist()):
            torch.testing.assert_close(answer.logits[row], by_exit[taken - 1][row], atol=1e-5, rtol=1e-5)


def test_padding_does_not_change_what_a_place_is_rounded_to() -> None:
    """Law 6: a row is one place of one sample."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, WIDE, generator=draw)
    padded = torch.cat([x, 100 * torch.ones(2, 3, WIDE)], 1)
    pipe = Pipeline(package(), threads=1, packet="int8")
    torch.testing.assert_close(pipe.predict(padded)[:, :5], pipe.predict(x))


def test_saved_and_loaded_it_goes_on_with_the_same_draws(tmp_path: Path) -> None:
    """Law 4: what is drawn follows from the batch's number."""

    def weights(stop: int) -> list[Tensor]:
        trained, data = package(), batches(6)
        with Pipeline(trained, "cpu*2", threads=1, seed=9, packet="int8-stochastic") as pipe:
            pipe.run(data[:stop], cosine)
            pipe.save(tmp_path / "model.pipeal")
        trained = package()
        with Pipeline.load(tmp_path / "model.pipeal", trained, "cpu*3", threads=1, packet="int8-stochastic") as pipe:
            pipe.run(data[stop:], cosine)
        return [*trained.parameters()]

    assert all(map(torch.equal, weights(2), weights(6)))


def test_costs_count_what_travels() -> None:
    data = batches(4)
    options = EngineOptions(packet="int8-stochastic")
    thin, whole = measure_in_turns(
        [(package(), data), (package(), data)], [options, replace(options, packet="as_is")], rounds=1
    )
    assert [cost.out_bytes for cost in thin] == [2 * 6 * (WIDE + 4)] * 3
    assert [cost.out_bytes for cost in whole] == [2 * 6 * 4 * WIDE] * 3
    assert thin[0].mean_out_bytes == thin[0].out_bytes


def test_rounding_is_timed_as_part_of_forwards(counted_clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(tree: Any, kind: PacketFormat) -> Any:
        counted_clock[0] += 0.5
        return tree

    monkeypatch.setattr("pipeal.engine.runner.thinned.thin", slow)
    first, last = layer_costs(package(2), batches(4), EngineOptions(packet="bf16"))
    forwards = [next(seconds for action, seconds in row.items() if str(action) == "F") for row in (first, last)]
    assert forwards == [1.0, 0.0]  # its input and its target; the last layer sends nothing


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_a_recorded_run_still_keeps_to_its_schedule(name: str) -> None:
    """A forward has further spans, of what came and what goes."""
    with Pipeline(package(), "cpu*2", ORDERS[name], threads=1, trace=Window(0, 4), packet="int8") as pipe:
        pipe.run(batches(4))
        spans = pipe.spans()
    assert violations(ORDERS[name], 2, spans) == []
    forwards = [span.layer for span in spans if span.action is Action.FORWARD and span.batch == 0]
    assert sorted(forwards) == [0, 0, 1, 1, 1, 2, 2]


def test_memory_counts_copies_of_what_was_rounded() -> None:
    """A layer's graph cannot share its input with the graph before it."""
    data = batches(1, rows=64)
    for kind, shared in (("as_is", True), ("int8", False)):
        (blocks,) = measure_blocks(package(), data, EngineOptions(packet=kind))  # type: ignore[arg-type]
        assert (blocks[0].goes_kept > 0) == shared
        assert blocks[0].goes == blocks[1].comes == 2 * 64 * WIDE * 4
