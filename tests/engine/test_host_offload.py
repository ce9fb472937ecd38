"""Layers in the memory of the host: the same bits, a few slots, and nothing reads or writes too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AL, ALPackage, ConfigError, Pipeline, PlacementError, Window
from pipeal.core.materialize import is_on_meta
from pipeal.core.options import EngineOptions
from pipeal.engine.schedule import Action
from pipeal.engine.state import host_offload
from pipeal.engine.state.host_offload import HostOffload
from pipeal.engine.trace import Way

from .cases import ORDERS, Case, Layer, cases, cosine, cuts, outcome, reference
from .late import Late, LateDevice, LateLane
from .test_exactness import RICH, run
from .test_failures import notes_of
from .test_offload import WIDE, Odd, batches, kept, layer

DEEP = Case(
    tuple(Layer("batch norm" if n % 2 else "pipeal.Dropout", "AL", 5 + n, 3) for n in range(6)), (4, 3, 4), seed=3
)
BY_LAYER = [name for name, schedule in ORDERS.items() if schedule.by_layer]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    found = Late()
    found.install(monkeypatch)
    return found


def home_of(pipe: Pipeline, stage: int = 0) -> HostOffload:
    found = pipe.stages[stage].offloaded
    assert isinstance(found, HostOffload)
    return found


@settings(max_examples=8)
@given(case=cases(), data=st.data())
def test_layers_at_home_learn_what_layers_on_the_device_learn(case: Case, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(case.layers)), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    schedule = ORDERS[data.draw(st.sampled_from(BY_LAYER), label="schedule")]
    with pytest.MonkeyPatch.context() as patch:
        late = Late()
        late.install(patch)
        found = run(case, schedule, sizes, offload="host")
    assert found.differences(reference(case)) == []
    assert late.broken == []


@pytest.mark.parametrize("name", BY_LAYER)
def test_on_every_placement(late: Late, name: str) -> None:
    wanted = reference(RICH)
    for sizes in ([4], [1, 3], [2, 2], [1, 1, 1, 1]):
        assert run(RICH, ORDERS[name], sizes, offload="host").differences(wanted) == [], sizes
    assert late.broken == []


@pytest.mark.parametrize(
    "options",
    [{"on_non_finite": "skip"}, {"on_oom": "split"}, {"precision": "bf16"}, {"recompute": "blocks"}],
    ids=str,
)
def test_with_what_else_is_around_a_layer(late: Late, options: dict[str, Any]) -> None:
    """And with gradients that wait for the update of a later batch: they travel as well."""

    def trained(**more: Any) -> Any:
        package = RICH.build()
        with Pipeline(package, "cpu*2", seed=RICH.seed, threads=1, **options, **more) as pipe:
            report = pipe.run(RICH.batches(), cosine, updates=lambda batch: batch % 3 == 2)
        return outcome(package, report.losses, [])

    assert trained(offload="host").differences(trained()) == []
    assert late.broken == []


def test_a_batch_that_is_left_out_ends_the_visit(late: Late) -> None:
    def trained(**more: Any) -> ALPackage:
        package = ALPackage([layer(number) for number in range(5)])
        data = batches(6)
        data[2][0][0, 0] = torch.inf
        with Pipeline(package, "cpu", threads=1, on_non_finite="skip", **more) as pipe:
            pipe.run(data)
        return package

    assert all(map(torch.equal, kept(trained(offload="host")), kept(trained())))
    assert late.broken == []


def test_gradients_that_wait_for_a_later_update_lie_at_home(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(5)])
    with Pipeline(package, "cpu", threads=1, offload="host") as pipe:
        for number, batch in enumerate(batches(6)):
            pipe.submit(*batch, updates=number % 2 == 1)
            if number == 4:
                pipe.drain()
                gradients = [parameter.grad for parameter in package.parameters()]
                assert all(gradient is not None and late.of(gradient) is not None for gradient in gradients)
                assert {one.kind for gradient in gradients if (one := late.of(gradient))} == {"home"}  # type: ignore[arg-type]
        pipe.drain()
        assert all(parameter.grad is None for parameter in package.parameters())
        assert all(one.home.size >= 4 * one.plan.weights_size for one in home_of(pipe)._layers.values())


def test_of_a_deep_stage_three_layers_are_on_the_device(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(7)])
    with Pipeline(package, "cpu", threads=1, offload="host") as pipe:
        pipe.run(batches(3))
        home = home_of(pipe)
        largest = max(one.plan.size for one in home._layers.values())
        assert [slot.size for slot in home._slots] == [largest] * host_offload.SLOTS
        assert largest <= home._layers[0].home.size
    assert [slot.size for slot in home._slots] == [0] * host_offload.SLOTS
    assert {one.kind for tensor in kept(package) if (one := late.of(tensor))} == {"home"}
    for tensor in kept(package):
        late.read_on_host(tensor)
    assert late.broken == []


def test_slots_grow_with_one_layer_while_others_leave_them(late: Late) -> None:
    """Of a layer whose optimizer keeps nothing, the first visit is like any other."""
    others = [layer(number) for number in range(1, 6)]
    layers = [layer(0), *(AL(one.enc, one.ae, 0.01, torch.optim.SGD) for one in others)]
    with Pipeline(layers, "cpu", threads=1, offload="host") as pipe:
        pipe.run(batches(2))
    assert late.broken == []


def test_a_layer_is_brought_once_per_batch_in_one_piece_while_the_one_before_is_at_work(late: Late) -> None:
    depth = 5
    package = ALPackage([layer(number) for number in range(depth)])
    with Pipeline(package, "cpu", threads=1, offload="host", trace=Window(0, 99)) as pipe:
        pipe.run(batches(1))
        late.copies.clear()
        pipe.run(batches(3))
        spans, copies = pipe.spans(), pipe.copies()
        sizes = [one.plan.size for one in home_of(pipe)._layers.values()]
    moved = [size for source, _, size in late.copies if source == "home"]
    assert sorted(moved) == sorted(sizes * 3 + sizes[:1])  # and the first one for a batch that never came
    assert sorted(size for source, _, size in late.copies if source == "slot") == sorted(sizes * 3)
    for batch in range(1, 4):
        begins = {span.layer: span.begin for span in spans if span.batch == batch and span.action is Action.FORWARD}
        ends = {span.layer: span.end for span in spans if span.batch == batch and span.action is Action.UPDATE}
        brought = {copy.layer: copy for copy in copies if copy.batch == batch and copy.way is Way.BRING}
        sent = {copy.layer: copy for copy in copies if copy.batch == batch and copy.way is Way.SEND}
        for index in range(depth - 1):
            assert brought[index + 1].end < begins[index] < ends[index] < sent[index].begin < begins[index + 1]
        assert sent[depth - 1].begin > ends[depth - 1]


def test_an_inference_brings_weights_alone_and_sends_nothing_but_buffers(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(6)])
    with Pipeline(package, "cpu", threads=1, offload="host") as pipe:
        pipe.run(batches(2))
        home = home_of(pipe)
        weights = [one.plan.weights_size for one in home._layers.values()]
        buffers = [one.plan.buffers_size for one in home._layers.values()]
        late.copies.clear()
        found = pipe.predict(batches(1)[0][0])
        brought = [size for source, _, size in late.copies if source == "home"]
        # Up, and down again: three layers are still there at the turn.
        assert sorted(brought) == sorted(weights + weights[:3])
        assert sum(size for source, _, size in late.copies if source == "slot") == 2 * sum(buffers) + buffers[-1]
        assert all(weight < one.plan.size for weight, one in zip(weights, home._layers.values(), strict=True))
    assert torch.equal(found, package.eval().infer(batches(1)[0][0]))
    assert late.broken == []


def test_weights_may_be_changed_right_after_a_prediction(late: Late) -> None:
    """What a prediction has asked for and not used must not be used, or written home, afterwards."""
    x = batches(1)[0][0]

    def predicted(**more: Any) -> list[Tensor]:
        package, found = ALPackage([layer(number) for number in range(5)]), []
        pipe = Pipeline(package, "cpu", threads=1, **more)
        for factor in (0.9, 0.8, 0.7):
            found += [pipe.predict(x), *pipe.predict_each([x, x])]
            with torch.no_grad():
                for tensor in (*package.parameters(), *package.buffers()):
                    tensor.copy_(tensor * factor)
        return [*found, *package.state_dict().values()]

    assert all(map(torch.equal, predicted(offload="host"), predicted()))
    assert late.broken == []


class Counts(nn.Module):
    """Changes a buffer and a parameter in every inference, and makes a buffer in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)
        self.register_buffer("seen", torch.zeros(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen.data += 1  # type: ignore[operator, union-attr]
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            if not hasattr(self, "made"):
                self.register_buffer("made", torch.ones(WIDE))
        return self.linear(x)


def test_what_an_inference_changes_is_kept(late: Late) -> None:
    def used(**more: Any) -> list[Tensor]:
        package = ALPackage([layer(number) for number in range(5)])
        torch.manual_seed(0)
        package[1].enc.f = Counts()
        package[1].enc_opt.add_param_group({"params": list(package[1].enc.f.parameters()), "initial_lr": 0.01})
        with Pipeline(package, "cpu", threads=1, **more) as pipe:
            for _ in range(2):
                pipe.run(batches(2))
                list(pipe.predict_each([x for x, _ in batches(3)]))
        return [*kept(package), *package.state_dict().values()]

    assert all(map(torch.equal, used(offload="host"), used()))
    assert late.broken == []


def test_predictions_along_every_exit_over_stages(late: Late) -> None:
    package = DEEP.build()
    with Pipeline(package, "cpu*2", threads=1, seed=3, offload="host") as pipe:
        pipe.run(DEEP.batches())
        found = [list(pipe.predict_each([x for x, _ in DEEP.batches()], depth)) for depth in range(1, 7)]
        exits = list(pipe.predict_exits([x for x, _ in DEEP.batches()]))
    for depth in range(1, 7):
        for number, (x, _) in enumerate(DEEP.batches()):
            wanted = package.eval().infer(x, depth)
            assert torch.equal(found[depth - 1][number], wanted)
            assert torch.equal(exits[number][depth - 1], wanted)
    assert late.broken == []


def test_snapshots_are_of_their_moment_and_training_goes_on(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(5)])
    with Pipeline(package, "cpu", threads=1, offload="host") as pipe:
        pipe.run(batches())
        wanted = {name: value.clone() for name, value in package.state_dict().items()}
        pipe.submit(*batches()[0])
        first = pipe.snapshot()
        pipe.run(batches())
        first.wait(60)
    again = ALPackage([layer(number) for number in range(5)])
    with Pipeline(again, "cpu", threads=1) as pipe:
        pipe.run([*batches(), batches()[0]])
    for index in range(5):
        for name, value in first.wait(60)[index].state["module"].items():
            assert torch.equal(value, again.state_dict()[f"{index}.{name}"])
            assert value.untyped_storage().nbytes() == value.nbytes
    assert not torch.equal(again.state_dict()["0.enc.f.0.weight"], wanted["0.enc.f.0.weight"])
    assert late.broken == []


def test_a_snapshot_between_two_predictions(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(6)])
    with Pipeline(package, "cpu*2", threads=1, offload="host") as pipe:
        pipe.run(batches())
        wanted = {name: value.clone() for name, value in package.state_dict().items()}
        for _ in pipe.predict_each([x for x, _ in batches(6)]):
            found = pipe.snapshot().wait(60)
            for index, layer_state in found.items():
                for name, value in layer_state.state["module"].items():
                    assert torch.equal(value, wanted[f"{index}.{name}"])


def test_saved_loaded_and_changed_while_at_home(late: Late, tmp_path: Any) -> None:
    """A state brings optimizers other tensors; a user writes to weights, or puts others in their place."""

    def change(package: ALPackage) -> None:
        with torch.no_grad():
            package[2].enc.b.weight.mul_(1.5)
        package[3].ae.h.bias.data = torch.full((WIDE,), 0.25)
        package[1].enc.f.register_buffer("more", torch.ones(WIDE), persistent=False)

    def course(**more: Any) -> list[Tensor]:
        package = ALPackage([layer(number) for number in range(5)])
        with Pipeline(package, "cpu", threads=1, **more) as pipe:
            pipe.run(batches())
            pipe.save(tmp_path / "half")
            pipe.run(batches())
            pipe.load(tmp_path / "half")
            pipe.run(batches(2))
            change(package)
            pipe.run(batches(2))
        pipe.load(tmp_path / "half")
        change(package)
        with pipe:
            pipe.run(batches(3))
        other = ALPackage([layer(number + 7) for number in range(5)])
        with Pipeline.load(tmp_path / "half", other, "cpu*2", threads=1, **more) as pipe:
            pipe.run(batches())
        return [*kept(package), *kept(other)]

    assert all(map(torch.equal, course(offload="host"), course()))
    assert late.broken == []


@pytest.mark.parametrize("kind", ["plain", "shared", "sparse"])
def test_what_shares_memory_or_is_replaced_learns_the_same(late: Late, kind: str) -> None:
    found = []
    for options in ({}, {"offload": "host"}):
        layers = [Odd(kind), *(layer(number) for number in range(4))]
        with Pipeline(layers, "cpu", threads=1, **options) as pipe:
            pipe.run(batches(8))
        found.append([value.to_dense() for one in layers for value in one.state_dict().values()])
    assert all(map(torch.equal, *found))
    assert late.broken == []


class LetsGo(Odd):
    """Keeps its mean of each batch where the pipeline does not see it."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.past: list[tuple[Tensor, Tensor]] = []

    def update(self) -> None:
        super().update()
        self.past.append((self.mean, self.mean.clone()))


def test_a_tensor_that_a_layer_lets_go_of_keeps_its_numbers(late: Late) -> None:
    one = LetsGo()
    with Pipeline([one, *(layer(number) for number in range(4))], "cpu", threads=1, offload="host") as pipe:
        pipe.run(batches(8))
    assert len(one.past) == 8
    assert all(torch.equal(tensor, copy) for tensor, copy in one.past)


class Replaces(Odd):
    """Has other parameters after each update."""

    def update(self) -> None:
        super().update()
        bias = self.enc.b.bias
        self.enc.b.bias = nn.Parameter(0.9 * bias.detach())
        self.enc_opt.param_groups[0]["params"][-1] = self.enc.b.bias
        self.enc_opt.state[self.enc.b.bias] = self.enc_opt.state.pop(bias)


def test_parameters_that_take_the_place_of_others_learn_the_same(late: Late) -> None:
    found = []
    for options in ({}, {"offload": "host"}):
        layers = [Replaces("plain"), *(layer(number) for number in range(4))]
        assert layers[0].enc_opt.param_groups[0]["params"][-1] is layers[0].enc.b.bias
        with Pipeline(layers, "cpu", threads=1, **options) as pipe:
            pipe.run(batches(6))
        found.append([value for one in layers for value in one.state_dict().values()])
    assert all(map(torch.equal, *found))
    assert late.broken == []


class Fails(Exception):
    """Its own."""


@pytest.mark.parametrize("action", ["forward", "backward", "update"])
def test_after_a_failure_all_layers_are_at_home(late: Late, action: str) -> None:
    package = ALPackage([layer(number) for number in range(6)])

    def fail(*_: Any) -> Any:
        raise Fails

    pipe = Pipeline(package, "cpu*2", threads=1, offload="host")
    with pytest.raises(Fails) as caught, pipe:  # noqa: PT012
        pipe.run(batches())
        setattr(package[4], action, fail)
        pipe.run(batches())
    assert f"in the {action} of stage 1, layer 4 (AL)" in notes_of(caught.value)
    assert {one.kind for tensor in kept(package) if (one := late.of(tensor))} == {"home"}
    for tensor in kept(package):
        late.read_on_host(tensor)
    delattr(package[4], action)
    with pipe:
        pipe.run(batches())
    assert all(tensor.isfinite().all() for tensor in kept(package))
    assert late.broken == []


def test_a_host_that_refuses_memory_is_told_in_one_line_and_nothing_is_lost(late: Late) -> None:
    package = ALPackage([layer(number) for number in range(5)])
    before = [tensor.clone() for tensor in package.state_dict().values()]
    late.limit = 3 * 20_000
    with pytest.raises(PlacementError, match="layer 2: no more locked memory"):
        Pipeline(package, "cpu", threads=1, offload="host")
    assert all(map(torch.equal, package.state_dict().values(), before))
    late.limit = None
    pipe = Pipeline(package, "cpu", threads=1, offload="host")
    late.limit = 0  # what the optimizers make finds no place
    with pytest.raises(PlacementError, match="layer 0: no more locked memory"), pipe:
        pipe.run(batches())
    late.limit = None
    assert all(map(torch.equal, list(package.state_dict().values())[20:], before[20:]))
    with pipe:
        pipe.run(batches())
    assert late.broken == []


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="not for stages on cpu; use 'disk', or stages on cuda alone"):
        Pipeline([layer()], "cpu", offload="host")
    with pytest.raises(ConfigError, match="needs layers that end one before the next"):
        Pipeline([layer()], None, "al-fm", offload="host")
    with pytest.raises(ConfigError, match="not over processes; use 'none'"):
        EngineOptions(offload="host").check_layout(processes=True)
    EngineOptions(offload="host").check_layout(kinds=["cuda"])


def test_so_few_layers_that_all_would_be_on_the_device_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late()
    late.install(monkeypatch, slots=host_offload.SLOTS)
    pipe = Pipeline([layer(number) for number in range(7)], "cpu*2", sizes=[3, 4], threads=1, offload="host")
    assert [stage.offloaded is not None for stage in pipe.stages] == [False, True]


def does_nothing(*_: Any) -> None:
    """In the place of what keeps a rule."""


BREAKS: dict[str, tuple[Any, str, Any, str]] = {
    "work does not wait for what is brought": (LateDevice, "wait_for", does_nothing, "is written on stream"),
    "copies wait for nothing": (LateLane, "wait_for", does_nothing, "while stream"),
    "the host does not wait": (LateLane, "synchronize", does_nothing, "the host reads"),
    "memory goes while it is copied": (LateLane, "synchronize", does_nothing, "may be gone"),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_found(late: Late, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    owner, name, instead, words = BREAKS[rule]
    monkeypatch.setattr(owner, name, instead)
    package = ALPackage([layer(number) for number in range(5)])
    with Pipeline(package, "cpu", threads=1, offload="host", on_non_finite="ignore") as pipe:
        pipe.run(batches(3))
        pipe.snapshot().wait(60)
    assert any(words in one for one in late.broken), late.broken[:3]


def test_a_model_on_the_meta_device_goes_home_layer_by_layer(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer gets its place on the host, those after it do not exist yet."""
    real: list[int] = []
    locked = LateDevice.locked

    def course(**more: Any) -> list[Tensor]:
        with torch.device("meta"):
            package = ALPackage([layer(number) for number in range(5)])

        def seen(device: LateDevice, size: int) -> Tensor:
            real.append(sum(not is_on_meta(one) for one in package))
            return locked(device, size)

        monkeypatch.setattr(LateDevice, "locked", seen)
        with Pipeline(package, "cpu", threads=1, seed=7, **more) as pipe:
            pipe.run(batches())
        return kept(package)

    assert all(map(torch.equal, course(offload="host"), course()))
    assert real == [1, 2, 3, 4, 5] + [5] * 5  # and once more for what the optimizers make
    assert late.broken == []
