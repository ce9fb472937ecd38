"""Law 1: schedules never change the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, PipealError, Pipeline
from pipeal.core.protocols import UP
from pipeal.core.tree import detach
from pipeal.engine import SCHEDULES, Schedule
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import open_optimizer

from .cases import FEATURES, ORDERS, Case, Layer, Outcome, cases, cosine, cuts, outcome, reference, train_by_hand

RICH = Case(
    (
        Layer("nn.Dropout", "AL", 8, 5),
        Layer("functional", "own ENC", 5, 4, "adamw"),
        Layer("pipeal.Dropout", "published AL", 9, 3, "sgd"),
        Layer("batch norm", "own AE", 4, 3),
    ),
    rows=(5, 5, 3, 5, 5, 2),
    seed=11,
)


def run(case: Case, schedule: str | Schedule, sizes: list[int], queue_depth: int = 2, **options: Any) -> Outcome:
    """What the engine leaves of a case, predictions along every exit included."""
    package, batches = case.build(), case.batches()
    pipe = Pipeline(
        package,
        ["cpu"] * len(sizes),
        schedule,
        sizes=sizes,
        queue_depth=queue_depth,
        seed=case.seed,
        threads=1,
        stall_timeout_s=120,
        **options,
    )
    with pipe:
        report = pipe.run(iter(batches), lr_scale=cosine)
        predictions = [pipe.predict(batches[0][0], depth + 1) for depth in range(len(package))]
    assert report.batches == len(batches)
    assert report.samples == sum(case.rows)
    return outcome(package, report.losses, predictions)


@given(case=cases(), data=st.data())
def test_every_schedule_leaves_what_training_layer_by_layer_leaves(case: Case, data: st.DataObject) -> None:
    wanted = reference(case)
    for name, schedule in ORDERS.items():
        stages = data.draw(st.integers(1, min(4, len(case.layers))), label=f"{name} stages")
        sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
        queue_depth = data.draw(st.integers(1, 4), label="queue depth")
        assert run(case, schedule, sizes, queue_depth).differences(wanted) == []


@pytest.mark.parametrize("depths", [(1, 2), pytest.param((3, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("schedule", ORDERS)
def test_any_placement_and_any_queue_depth(schedule: str, depths: tuple[int, ...]) -> None:
    wanted = reference(RICH)
    for stages, queue_depth in product(range(1, 5), depths):
        for sizes in cuts(4, stages):
            assert run(RICH, ORDERS[schedule], sizes, queue_depth).differences(wanted) == [], (sizes, queue_depth)


@pytest.fixture
def impatient_interpreter() -> Iterator[None]:
    """Threads lose their turn a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_interpreter")
@pytest.mark.parametrize("schedule", ["backward-overlap", "al-fm", "pipelined"])
def test_whoever_comes_late(schedule: str) -> None:
    wanted = reference(RICH)
    shaken = Case(RICH.layers, RICH.rows, seed=RICH.seed, late_s=0.004)
    for queue_depth in (1, 2, 4):
        assert run(shaken, schedule, [1, 1, 1, 1], queue_depth).differences(wanted) == []


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_the_order_of_layers_changes_no_bit_in_half_precision(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeal.engine.runner.precision._cpu_has_fp16", lambda: True)
    case = Case(tuple(Layer("linear", width=4 + number) for number in range(4)), seed=7)  # scales its losses in fp16
    wanted = run(case, ORDERS["sequential/stage"], [4], **options)
    assert run(case, ORDERS["sequential/stage"], [4]).differences(wanted) != []
    for name, sizes in (("sequential", [4]), ("pipelined", [4]), ("pipelined", [2, 2]), ("pipelined/stage", [1, 3])):
        assert run(case, ORDERS[name], sizes, **options).differences(wanted) == [], (name, sizes)


def test_the_reference_notices_what_it_should() -> None:
    """A test that cannot fail is worse than none: another seed, rate or order of batches is seen."""
    wanted = reference(RICH)
    package, batches = RICH.build(), RICH.batches()
    losses = train_by_hand(package, batches, seed=RICH.seed + 1)
    assert outcome(package, losses, []).differences(wanted)
    package = RICH.build()
    losses = train_by_hand(package, batches, lambda batch: cosine(batch) + 1e-6, seed=RICH.seed)
    assert any(name.startswith("weights") for name in outcome(package, losses, []).differences(wanted))
    package = RICH.build()
    losses = train_by_hand(package, batches, seed=RICH.seed)
    assert outcome(package, losses, []).differences(wanted) == [f"prediction/{exit_}" for exit_ in range(4)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_pipelines_of_ten_batches_equal_one_of_twenty(schedule: str) -> None:
    case = Case(RICH.layers, rows=(4,) * 20, seed=3)
    wanted = reference(case)
    package, batches, losses = case.build(), case.batches(), []
    for first, devices in ((0, ["cpu"] * 2), (10, ["cpu"] * 4)):
        with Pipeline(package, devices, schedule, seed=3, threads=1, first_batch=first) as pipe:
            losses.append(pipe.run(batches[first : first + 10], cosine).losses)
    both = [torch.cat(rows) for rows in zip(*losses, strict=True)]
    found = outcome(package, both, [])
    assert [name for name in found.differences(wanted) if not name.startswith("prediction")] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reports_and_predictions_between_batches_change_nothing(schedule: str) -> None:
    wanted = reference(RICH)
    package, batches = RICH.build(), RICH.batches()
    losses: list[list[Tensor]] = []
    with Pipeline(package, None, schedule, seed=RICH.seed, threads=1) as pipe:
        for start in range(0, len(batches), 2):
            losses.append(pipe.run(batches[start : start + 2], cosine).losses)
            pipe.predict(batches[0][0])
    found = outcome(package, [torch.cat(rows) for rows in zip(*losses, strict=True)], [])
    assert [name for name in found.differences(wanted) if not name.startswith("prediction")] == []


def weights_by_schedule(
    build: Callable[[], ALPackage], batches: list[Any], around: Callable[[], Any] | None = None
) -> dict[str, list[float]]:
    """The weights that each schedule leaves, as numbers; the default generator stands elsewhere for each."""
    found = {}
    for number, schedule in enumerate(SCHEDULES):
        torch.manual_seed(5)
        package = build()
        torch.manual_seed(number)
        with Pipeline(package, None, schedule, threads=1, queue_depth=1) as pipe:
            if around is None:
                pipe.run(batches)
            else:
                with around():
                    pipe.run(batches)
        found[schedule] = torch.cat([value.flatten() for value in package.parameters()]).tolist()
    return found


def data(rows: int, batches: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 16, generator=draw), torch.randn(rows, 16, generator=draw)) for _ in range(batches)]


def square(enc: Callable[..., ENC] = ENC, ae: Callable[..., AE] = AE, **options: Any) -> AL:
    return AL(enc(nn.Linear(16, 16), nn.Linear(16, 16)), ae(nn.Linear(16, 16), nn.Linear(16, 16)), **options)


class UndeclaredENC(ENC):
    """A user's subclass that knows nothing of ``draws_from_default``."""

    def forward(self, x: Any, code: Tensor) -> tuple[Tensor, Any]:
        out = F.dropout(self.f(x), 0.5, self.training)
        return self.cri(self.b(out), code), out


class UndeclaredAE(AE):
    """The same on the label side."""

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        code = self.g(y + torch.randn_like(y))
        return self.cri(self.h(code), y), code


class UndeclaredAL(AL):
    """The same in the layer itself."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(F.dropout(x, 0.5, self.training), y)


class UndeclaredMethod(LocalLayer):
    """A method's layer whose file is where the documentation has it put, among pipeal's own."""

    __module__ = "pipeal.methods.of_ones_own"

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)
        self.opt = open_optimizer(None, self, 1e-2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = F.dropout(self.f(x), 0.5, self.training)
        self.keep(F.mse_loss(out, y))
        return out.detach(), y

    def blocks(self) -> dict[str, nn.Module]:
        return {UP: self.f}


UNDECLARED: dict[str, Callable[[], LocalLayer]] = {
    "ENC": lambda: square(enc=UndeclaredENC),
    "AE": lambda: square(ae=UndeclaredAE),
    "method": UndeclaredMethod,
    "AL": lambda: UndeclaredAL(ENC(nn.Linear(16, 16), nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16))),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_a_subclass_that_draws_by_function_is_keyed_without_saying_so(name: str) -> None:
    """Symptom: weights differed from run to run. Cause: a subclass inherits ``draws_from_default = False``."""
    found = weights_by_schedule(lambda: ALPackage([UNDECLARED[name]() for _ in range(3)]), data(4, 6))
    assert all(weights == found["sequential"] for weights in found.values())


class HandsOnItsOwn(LocalLayer):
    """Hands on, with the target, what it has learnt so far, and reports a weight as a loss."""

    draws_from_default = False
    mean: Tensor

    def __init__(self, pick: Callable[[HandsOnItsOwn], Tensor]) -> None:
        super().__init__()
        self.f, self.table, self.pick = nn.Linear(16, 16), nn.Parameter(torch.randn(3, 16)), pick
        self.log_var = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2, 16))
        self.opt = open_optimizer(None, self, 0.1)

    def forward(self, x: Tensor, y: Any) -> tuple[Tensor, Any]:
        y, above = y if isinstance(y, tuple) else (y, torch.zeros(()))
        out = self.f(x) + self.table.mean(0) + above.mean()
        self.keep(F.mse_loss(out, y) * torch.exp(-self.log_var), self.log_var)
        return out.detach(), (y, self.pick(self))

    def update(self) -> None:
        super().update()
        self.mean.lerp_(self.f.bias.detach(), 0.5)

    def blocks(self) -> dict[str, nn.Module]:
        return {UP: self.f}


OWN: dict[str, Callable[[HandsOnItsOwn], Tensor]] = {
    "a weight": lambda layer: layer.table.detach(),
    "a view": lambda layer: detach(layer.table[1:]),
    "an expanded view": lambda layer: layer.table[1].expand(4, 16).detach(),
    "a buffer": lambda layer: layer.mean[1],
}


@pytest.mark.parametrize("name", OWN)
def test_an_update_does_not_change_what_was_handed_on(name: str) -> None:
    """Symptom: weights differed from run to run. Cause: the next layer was still to read what an update wrote into."""

    def trained(schedule: str, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [HandsOnItsOwn(OWN[name]) for _ in range(3)]
        with Pipeline(layers, "cpu", schedule, threads=1, **options) as pipe:
            losses = pipe.run(data(4, 3)).losses
        return [*losses, *(parameter for layer in layers for parameter in layer.parameters())]

    wanted = trained("sequential")
    assert all(map(torch.equal, trained("pipelined", within_stage="layer"), wanted))
    assert all(map(torch.equal, trained("pipelined", within_stage="stage"), wanted))
    assert [losses[0, 1].item() for losses in wanted[:3]] == [0, 0, 0]


def test_by_hand_an_update_does_not_change_a_view_that_was_handed_on() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    handed_on = detach({"whole": weight, "view": weight[1:], "wide": weight[0].expand(5, 2), "computed": weight * 2})
    with torch.no_grad():
        weight.zero_()
    assert [value.unique().tolist() for value in handed_on.values()] == [[1], [1], [1], [2]]
    assert handed_on["wide"].untyped_storage().nbytes() == 8


class Langevin(torch.optim.SGD):
    """An optimizer that draws."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Dithered(torch.autograd.Function):
    """A block that draws on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.1 * torch.randn_like(grad)


class Dither(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Dithered.apply(x)


def test_randomness_in_updates_is_keyed() -> None:
    """Law 1 wants every random number from a generator keyed on (seed, layer, batch), in U as in F."""
    noisy = partial(square, optimizer=Langevin)
    found = weights_by_schedule(lambda: ALPackage([noisy() for _ in range(3)]), data(4, 6))
    assert all(weights == found["sequential"] for weights in found.values())


class Noisy:
    """A criterion that is neither a module nor a function."""

    def __call__(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(found, 0.5), wanted)


def with_hooks(register: Callable[[AL], object]) -> AL:
    layer = square()
    register(layer)
    return layer


def noisy_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    gradient = optimizer.param_groups[0]["params"][0].grad
    gradient.add_(torch.randn_like(gradient))


def noisy_activation() -> AL:
    block = nn.TransformerEncoderLayer(16, 2, 16, 0.0, activation=partial(F.dropout, p=0.5))
    return AL(ENC(block, nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))


BESIDE: dict[str, Callable[[], AL]] = {
    "a partial function": lambda: square(ae=partial(AE, cri=partial(Noisy.__call__, Noisy()))),
    "an object that is called": lambda: square(ae=partial(AE, cri=Noisy())),
    "an activation": noisy_activation,
    "a hook of a weight": lambda: with_hooks(
        lambda layer: layer.enc.f.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    ),
    "a hook of a backward": lambda: with_hooks(
        lambda layer: layer.enc.b.register_full_backward_hook(lambda _, to, __: tuple(g + torch.rand(1) for g in to))
    ),
    "a hook of an optimizer": lambda: with_hooks(lambda layer: layer.enc_opt.register_step_pre_hook(noisy_step)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_code_that_draws_in_known_modules_and_optimizers_is_keyed(name: str) -> None:
    """Symptom: weights differed from run to run. Cause: modules of known classes were asked for functions alone."""
    found = weights_by_schedule(lambda: ALPackage([BESIDE[name]() for _ in range(3)]), data(4, 6))
    assert all(weights == found["sequential"] for weights in found.values())


@pytest.mark.parametrize(("of", "name"), [("dropout1", "p"), ("self_attn", "dropout")])
def test_a_dropout_that_is_raised_later_is_keyed(of: str, name: str) -> None:
    """Symptom: weights differed from run to run. Cause: a dropout of zero was looked at when the pipeline was made."""

    def trained(elsewhere: int) -> Tensor:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(16, 2, 16, 0.0)
        layer = AL(ENC(block, nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))
        torch.manual_seed(elsewhere)
        with Pipeline([layer], "cpu", threads=1) as pipe:
            pipe.run(data(4, 1))
            setattr(getattr(block, of), name, 0.5)
            pipe.run(data(4, 3))
        return torch.cat([value.flatten() for value in layer.parameters()])

    assert torch.equal(trained(1), trained(2))


def test_randomness_in_backwards_is_keyed() -> None:
    def build() -> ALPackage:
        dithered = [square() for _ in range(3)]
        for layer in dithered:
            layer.enc.f = nn.Sequential(layer.enc.f, Dither())
        return ALPackage(dithered)

    found = weights_by_schedule(build, data(4, 6))
    assert all(weights == found["sequential"] for weights in found.values())


def test_the_callers_autocast_does_not_reach_one_schedule_and_miss_another() -> None:
    """Autocast is local to a thread: the inline executor saw the caller's, the workers did not."""

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    found = weights_by_schedule(lambda: ALPackage([square() for _ in range(2)]), data(4, 3), autocast)
    assert all(weights == found["sequential"] for weights in found.values())


class Summed(AL):
    """Adds its losses up on the way back, and has graphs in its update, as optimizers that look ahead do."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ae_loss, code = self.ae(y)
        enc_loss, out = self.enc(x, code.detach())
        self.parts = enc_loss, ae_loss
        return out.detach(), code.detach()

    def backward(self) -> None:
        torch.stack(self.parts).sum().backward()

    def update(self) -> None:
        super().update()
        assert self.enc.b(torch.zeros(1, 16)).requires_grad

    def loss(self) -> tuple[Tensor, ...]:
        return tuple(part.detach() for part in self.parts)


@pytest.mark.parametrize("kind", [AL, Summed])
def test_the_callers_grad_mode_does_not_matter(kind: type[AL]) -> None:
    """Symptom: under ``sequential`` a backward that added its losses up had no graph to go back through."""

    def package() -> ALPackage:
        sides = [
            (ENC(nn.Linear(16, 16), nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16))) for _ in range(2)
        ]
        return ALPackage([kind(enc, ae) for enc, ae in sides])

    found = weights_by_schedule(package, data(4, 3), torch.no_grad)
    torch.manual_seed(5)
    untrained = package()
    start = torch.cat([value.flatten() for value in untrained.parameters()]).tolist()
    assert all(weights == found["sequential"] != start for weights in found.values())


def test_the_callers_default_device_does_not_matter() -> None:
    """Symptom: under ``sequential`` losses went there, after ``torch.set_default_device``, which is of a thread."""
    found = weights_by_schedule(
        lambda: ALPackage([square() for _ in range(2)]), data(4, 3), lambda: torch.device("meta")
    )
    assert all(weights == found["sequential"] for weights in found.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("made_there", [False, True])
def test_inference_mode_of_the_caller_does_not_matter(schedule: str, *, made_there: bool) -> None:
    """Symptom: under ``sequential`` losses were reported and nothing learnt; of batches made in that mode, too, and the
    other schedules failed on those."""

    def weights(mode: bool) -> list[float]:
        torch.manual_seed(5)
        package, batches = ALPackage([square() for _ in range(2)]), data(4, 4)
        with Pipeline(package, None, schedule, threads=1) as pipe:
            with torch.inference_mode(mode):
                pipe.run([tuple(one.clone() for one in batch) if made_there else batch for batch in batches[:2]])
            pipe.run(batches[2:])  # with states of the optimizers that may be changed here, too
        return torch.cat([value.flatten() for value in package.parameters()]).tolist()

    assert weights(True) == weights(False)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_forward_computes_in_the_precision_that_is_asked_for(precision: Any, dtype: torch.dtype) -> None:
    """All schedules are alike in any precision, also in one that nobody asked for."""
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append((self.training, out.dtype))
            return out

    package = ALPackage([AL(ENC(Watched(16, 16), nn.Linear(16, 16)), AE(nn.Linear(16, 16), nn.Linear(16, 16)))])
    (batch,) = data(4, 1)
    with Pipeline(package, threads=1, precision=precision) as pipe:
        pipe.run([batch])
        pipe.predict(batch[0])
    assert seen == [(True, dtype), (False, dtype)]


def test_bf16_is_exact_too() -> None:
    outcomes = [run(RICH, schedule, [1, 1, 2], precision="bf16") for schedule in SCHEDULES]
    assert all(found.differences(outcomes[0]) == [] for found in outcomes)
    assert outcomes[0].differences(reference(RICH))


def test_a_shared_generator_in_the_data_does_not_disturb() -> None:
    """The caller draws from the default generator, as data augmentation does, while workers compute."""

    def noisy() -> Iterator[tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        for _ in range(12):
            yield torch.randn(64, FEATURES), torch.randint(3, (64,))

    results = []
    for schedule in ("sequential", "pipelined"):
        package = RICH.build()
        with Pipeline(package, None, schedule, threads=1, queue_depth=4) as pipe:
            report = pipe.run(noisy(), cosine)
        results.append(outcome(package, report.losses, []))
    assert results[0].differences(results[1]) == []


def test_layers_that_share_a_parameter_are_refused() -> None:
    """Two layers that update one weight have no answer of their own: threads even crash in the fused optimizer."""
    shared = nn.Linear(16, 16)
    layers = [AL(ENC(nn.Linear(16, 16), nn.Linear(16, 16)), AE(shared, nn.Linear(16, 16))) for _ in range(2)]
    with pytest.raises(PipealError, match="share"):
        Pipeline(ALPackage(layers))
