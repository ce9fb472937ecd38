"""A layer's state is all of it: loaded into a new layer, the future is that of never having stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, DataError, LabelAE
from pipeal.engine import layer_state, load_layer_state
from pipeal.engine.state.layer_state import State
from pipeal.models import TextDims, VisionDims, build_text, build_vision

from .cases import Case, cases, cosine, outcome, train_by_hand

ROWS = 6


def written_and_read(state: State) -> State:
    """Through a file's bytes, as a checkpoint goes: without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def rebuilt(case: Case) -> ALPackage:
    """The same make with other weights."""
    package = case.build()
    with torch.no_grad():
        for parameter in package.parameters():
            parameter.add_(1.0)
    return package


@given(case=cases(), data=st.data())
def test_a_new_layer_goes_on_as_the_old_one_would_have(case: Case, data: st.DataObject) -> None:
    batches, stop = case.batches(), data.draw(st.integers(0, len(case.rows)), label="stop")
    whole = case.build()
    losses = train_by_hand(whole, batches, seed=case.seed)
    first = case.build()
    train_by_hand(first, batches[:stop], seed=case.seed)
    states = [written_and_read(layer_state(layer)) for layer in first]
    second = rebuilt(case)
    for layer, state in zip(second, states, strict=True):
        load_layer_state(layer, state)
    after = train_by_hand(second, batches[stop:], seed=case.seed, first_batch=stop)
    rest = [rows[stop:] for rows in losses] if stop < len(batches) else []
    assert outcome(second, after, []).differences(outcome(whole, rest, [])) == []


def text(name: str, mode: str) -> tuple[ALPackage, list[tuple[Tensor, Tensor]]]:
    dims = TextDims(embedding=12, hidden=10, code=8, heads=3, blocks=2, dropout=0.3)
    package = build_text(name, mode, vocab_size=30, classes=4, dims=dims)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 30, (ROWS, 5), generator=draw) for _ in range(4)]
    return package, [(x, torch.randint(4, (ROWS,), generator=draw)) for x in rows]


def vision(name: str, mode: str, layout: torch.memory_format) -> tuple[ALPackage, list[tuple[Tensor, Tensor]]]:
    package = build_vision(name, mode, classes=4, dims=VisionDims(size=32, width=0.05, hidden=8, code=8))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    images = [torch.randn(ROWS, 3, 32, 32, generator=draw).contiguous(memory_format=layout) for _ in range(4)]
    return package.to(memory_format=layout), [(x, torch.randint(4, (ROWS,), generator=draw)) for x in images]


MODELS: dict[str, Callable[[], tuple[ALPackage, list[tuple[Tensor, Tensor]]]]] = {
    f"{name} {mode}": partial(text, name, mode) for name in ("lstm", "transformer") for mode in ("al", "bp")
} | {
    f"{name} {mode} {str(layout).split('.')[1]}": partial(vision, name, mode, layout)
    for name in ("vgg", "resnet")
    for mode in ("al", "bp")
    for layout in (torch.contiguous_format, torch.channels_last)
}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_goes_on_as_it_would_have(model: str) -> None:
    """With the layout in memory: fused Adam walks through weights and moments side by side, and would mix them up."""
    torch.manual_seed(0)
    whole, batches = MODELS[model]()
    losses = train_by_hand(whole, batches[:2])
    states = [written_and_read(layer_state(layer)) for layer in whole]
    losses = train_by_hand(whole, batches[2:], first_batch=2)
    second, _ = MODELS[model]()
    for layer, state in zip(second, states, strict=True):
        load_layer_state(layer, state)
    found = train_by_hand(second, batches[2:], first_batch=2)
    assert states_differ(whole, second) == []
    assert all(map(torch.equal, found, losses))


def states_differ(one: ALPackage, two: ALPackage) -> list[str]:
    return [
        f"layer {number}: {key}"
        for number, layers in enumerate(zip(one, two, strict=True))
        for key, (a, b) in pairs(*map(layer_state, layers)).items()
        if not (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b)
    ]


def pairs(one: Any, two: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """The leaves of two trees, side by side."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {
            key: value
            for name in one.keys() | two.keys()
            for key, value in pairs(one.get(name), two.get(name), f"{path}/{name}").items()
        }
    return {path: (one, two)}


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_changes_nothing_but_its_state(model: str) -> None:
    """What a module keeps in an attribute of its own would be lost; only the graph and losses of a batch are."""
    torch.manual_seed(0)
    package, batches = MODELS[model]()

    def attributes() -> dict[str, Any]:
        return {
            f"{path}.{name}": value if isinstance(value, int | float | str | bool) else id(value)
            for path, part in package.named_modules()
            for name, value in vars(part).items()
        }

    before = attributes()
    train_by_hand(package, batches)
    after = attributes()
    changed = {name.rpartition(".")[2] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"_graph", "_losses"}


def layer(width: int = 4, optimizer: Any = None, kind: type[AL] = AL, **options: Any) -> AL:
    torch.manual_seed(0)
    enc = ENC(nn.Sequential(nn.Linear(3, width), nn.Tanh()), nn.Linear(width, 2))
    return kind(enc, LabelAE(nn.Linear(2, 2), nn.Linear(2, 2), 2), 0.1, optimizer, **options)


def steps(module: Any, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(number)
        module(torch.randn(4, 3, generator=draw), torch.randint(2, (4,), generator=draw))
        module.backward()
        module.update()


def test_the_state_is_a_copy_and_so_is_what_is_loaded() -> None:
    """Optimizers take the very tensors they are given: two layers loaded from one state would share their moments."""
    old = layer()
    steps(old, 2)
    state = layer_state(old)
    kept = written_and_read(state)
    steps(old, 3, first=2)
    for _ in range(2):
        new = layer()
        load_layer_state(new, state)
        steps(new, 3, first=2)
        assert states_differ(ALPackage([old]), ALPackage([new])) == []
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs(state, kept).values())


def test_gradients_that_wait_for_an_update_come_back_and_stale_ones_go() -> None:
    """Else an update of several batches would forget those before the state, or learn from another training's."""
    old, new, without = layer(), layer(), layer_state(layer())
    old(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    old.backward()
    waiting = [one.grad.clone() for one in old.parameters() if one.grad is not None]
    assert waiting
    load_layer_state(new, written_and_read(layer_state(old)))
    assert all(map(torch.equal, waiting, [one.grad for one in new.parameters() if one.grad is not None]))
    old.update()
    new.update()
    assert states_differ(ALPackage([old]), ALPackage([new])) == []
    old(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    old.backward()
    load_layer_state(old, without)
    assert all(one.grad is None for one in old.parameters())


def test_rates_set_on_the_way_come_back() -> None:
    old, new = layer(), layer()
    old.set_lr("enc", 0.5)
    old.scale_lr(0.25)
    load_layer_state(new, written_and_read(layer_state(old)))
    assert [new.enc_opt.param_groups[0][name] for name in ("lr", "initial_lr")] == [0.125, 0.5]
    new.scale_lr(1.0)
    assert [new.enc_opt.param_groups[0]["lr"], new.ae_opt.param_groups[0]["lr"]] == [0.5, 0.1]


def test_tied_parameters_are_kept_once_and_stay_tied() -> None:
    def tied() -> AL:
        made = layer()
        made.ae.h.weight = made.ae.g.weight
        made.ae_opt = torch.optim.Adam(made.ae.parameters(), fused=True)
        return made

    old, new = tied(), tied()
    for group in (old.ae_opt.param_groups[0], new.ae_opt.param_groups[0]):
        group["initial_lr"] = group["lr"]
    steps(old, 3)
    weights = written_and_read(layer_state(old))["module"]
    assert weights["ae.g.weight"].data_ptr() == weights["ae.h.weight"].data_ptr()
    load_layer_state(new, layer_state(old))
    steps(old, 2, first=3)
    steps(new, 2, first=3)
    assert new.ae.h.weight is new.ae.g.weight
    assert states_differ(ALPackage([old]), ALPackage([new])) == []


class Rich(AL):
    """A user's layer with much to lose: a buffer and a counter of its own, gradients that wait, and a scheduler."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.noise = torch.Generator().manual_seed(7)
        self.waited = 0
        self.schedulers = [torch.optim.lr_scheduler.StepLR(opt, 2) for opt in (self.enc_opt, self.ae_opt)]

    def forward(self, x: Any, y: Any) -> Any:
        self.seen += 1
        return super().forward(x + torch.randn(x.shape, generator=self.noise), y)

    def update(self) -> None:
        self.waited += 1
        if self.waited % 3 == 0:
            super().update()
            for scheduler in self.schedulers:
                scheduler.step()

    def get_extra_state(self) -> Any:
        return {"waited": self.waited, "of": [1.5, ("a", None)]}

    def set_extra_state(self, state: Any) -> None:
        self.waited = state["waited"]


@pytest.mark.parametrize("stop", range(8))
def test_what_else_a_layer_holds_is_kept(stop: int) -> None:
    old, new = layer(kind=Rich), layer(kind=Rich)
    steps(old, stop)
    steps(new, 2)  # gradients that must go
    state = written_and_read(layer_state(old))
    assert bool(state["gradients"]) == bool(stop % 3)
    load_layer_state(new, state)
    steps(old, 7, first=stop)
    steps(new, 7, first=stop)
    assert states_differ(ALPackage([old]), ALPackage([new])) == []


class InDouble(torch.optim.Optimizer):
    """Keeps sums of another type and an entry that belongs to no parameter."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = {"taken": self.state["steps"].get("taken", 0) + 1}
        for group in self.param_groups:
            for parameter in group["params"]:
                total = self.state[parameter].setdefault("total", torch.zeros_like(parameter, dtype=torch.double))
                total += parameter.grad.double() / 3
                parameter.data.sub_((group["lr"] * total).float())


def test_an_optimizers_types_are_not_those_of_the_weights() -> None:
    """``Optimizer.load_state_dict`` casts what it loads to the parameter's type, and so rounds it."""
    old, new = layer(optimizer=InDouble), layer(optimizer=InDouble)
    steps(old, 3)
    load_layer_state(new, written_and_read(layer_state(old)))
    steps(old, 3, first=3)
    steps(new, 3, first=3)
    assert states_differ(ALPackage([old]), ALPackage([new])) == []
    assert new.enc_opt.state["steps"] == {"taken": 6}


def test_a_lazy_layer_takes_a_state_but_has_none() -> None:
    def lazy() -> AL:
        torch.manual_seed(0)
        return AL(ENC(nn.LazyLinear(4), nn.Linear(4, 2)), LabelAE(nn.Linear(2, 2), nn.Linear(2, 2), 2))

    old, new = lazy(), lazy()
    with pytest.raises(ConfigError, match=r"lazy parameter has no shape yet \(module, 'enc.f.weight'\); train a batch"):
        layer_state(old)
    steps(old, 2)
    load_layer_state(new, layer_state(old))
    steps(old, 2, first=2)
    steps(new, 2, first=2)
    assert states_differ(ALPackage([old]), ALPackage([new])) == []


def adam_backwards(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Adam over the parameters in another order."""
    return torch.optim.Adam([{"params": groups[0]["params"][::-1]}], lr=lr, fused=True)


sgd = partial(torch.optim.SGD, momentum=0.9)
MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "width": (
        partial(layer, 5),
        r"'enc.f.0.weight' is \(5, 3\) float32 in the state and \(4, 3\) float32 in the layer \(and \d+ more differ\)",
    ),
    "type": (lambda: layer().double(), r"'enc.f.0.weight' is \(4, 3\) float64 in the state and \(4, 3\) float32 in"),
    "optimizer": (partial(layer, optimizer=sgd), "optimizer 'enc_opt' is SGD in the state and Adam in the layer"),
    "order": (
        partial(layer, optimizer=adam_backwards),
        "parameter 0 of group 0 of optimizer 'enc_opt' is 'enc.b.bias' in the state and 'enc.f.0.weight' in the",
    ),
    "more": (partial(layer, kind=Rich), r"'seen' is \(\) int64 in the state and missing in the layer"),
    "kind": (lambda: BP(nn.Linear(3, 2)), "'enc.f.0.weight' is missing in the state and"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_of_another_make_is_refused_in_one_line_and_changes_nothing(name: str) -> None:
    build, message = MISFITS[name]
    other, own = build(), layer()
    steps(other, 2) if name != "type" else None
    steps(own, 1)
    before = layer_state(own)
    with pytest.raises(DataError, match=message) as caught:
        load_layer_state(own, layer_state(other))
    assert "\n" not in str(caught.value)
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs(before, layer_state(own)).values()
    )


def altered(change: Callable[[State], object]) -> State:
    old = layer()
    steps(old, 1)
    state = layer_state(old)
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["optimizers"].pop("ae_opt"), "optimizer 'ae_opt' is missing in the state and Adam in the layer"),
        (
            lambda s: s["optimizers"]["ae_opt"]["state"]["state"].update({9: {}}),
            "entry 9 of optimizer 'ae_opt' is known",
        ),
        (lambda s: s["optimizers"]["enc_opt"]["state"]["param_groups"][0].pop("eps"), "option 'eps' of group 0 of"),
        (
            # A fused optimizer wrote behind its end.
            lambda s: s["optimizers"]["enc_opt"]["state"]["state"][0].update(exp_avg=torch.tensor(1.0)),
            r"'exp_avg' of 'enc.f.0.weight' in optimizer 'enc_opt' is \(\) in the state and \(\d+, \d+\) in the layer",
        ),
        (lambda s: s["gradients"].update(gone=torch.ones(2)), r"the gradient of 'gone' is \(2,\) float32 in the state"),
        (lambda s: s["module"].pop("ae.h.bias"), r"'ae.h.bias' is missing in the state and \(2,\) float32 in"),
        (lambda s: s.pop("versions"), "expected the state of a layer, with"),
    ],
)
def test_nothing_is_dropped_in_silence(change: Callable[[State], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_layer_state(layer(), altered(change))


def test_what_would_be_lost_is_refused() -> None:
    loose = layer()
    loose.enc_opt.add_param_group({"params": [torch.ones(3, requires_grad=True)]})
    with pytest.raises(ConfigError, match=r"optimizer 'enc_opt' trains \(3,\) float32, which is no parameter"):
        layer_state(loose)
    hidden = layer()
    made = []  # and kept, so that each is at another place in memory

    def optimizers() -> tuple[torch.optim.Optimizer, ...]:
        made.append(torch.optim.SGD(hidden.ae.parameters()))
        return hidden.enc_opt, made[-1]

    hidden.optimizers = optimizers  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="an optimizer of AL, SGD, is not kept where it is looked for"):
        layer_state(hidden)
    for other in ({"enc": 1}, lambda: None):  # names something else in a layer that is of no method
        hidden.optimizers = other  # type: ignore[assignment]
        layer_state(hidden)
    odd = layer(kind=Rich)
    odd.get_extra_state = lambda: {"when": {1, 2}}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"holds a set \(module, '_extra_state', 'when'\), which no checkpoint keeps"):
        layer_state(odd)


def test_every_optimizer_of_torch_goes_on_as_it_would_have() -> None:
    for kind in (torch.optim.Adagrad, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
                 torch.optim.Rprop, torch.optim.Adadelta, torch.optim.Adafactor,
                 partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
                 partial(torch.optim.Adam, capturable=False, foreach=True),
                 partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True)):  # fmt: skip
        old, new = layer(optimizer=kind), layer(optimizer=kind)
        steps(old, 3)
        load_layer_state(new, written_and_read(layer_state(old)))
        steps(old, 3, first=3)
        steps(new, 3, first=3)
        assert states_differ(ALPackage([old]), ALPackage([new])) == [], kind


def test_the_losses_of_a_rate_that_changes_are_those_of_never_having_stopped() -> None:
    """``scale_lr`` goes back to ``initial_lr``, which must come back with the rest of the options."""
    case = Case(rows=(4, 4, 4, 4), layers=cases_of_two(), seed=5)
    whole = case.build()
    losses = train_by_hand(whole, case.batches(), cosine, seed=5)
    first, second = case.build(), rebuilt(case)
    train_by_hand(first, case.batches()[:2], cosine, seed=5)
    for old, new in zip(first, second, strict=True):
        for optimizer in (new.enc_opt, new.ae_opt):
            optimizer.param_groups[0]["initial_lr"] = 77.0
        load_layer_state(new, layer_state(old))
    found = train_by_hand(second, case.batches()[2:], cosine, seed=5, first_batch=2)
    assert all(torch.equal(a, b[2:]) for a, b in zip(found, losses, strict=True))


def cases_of_two() -> Any:
    from .cases import Layer

    return (Layer("pipeal.Dropout"), Layer("batch norm", optimizer="sgd"))


def test_the_side_of_labels_of_a_later_layer_has_a_state_of_its_own() -> None:
    later = AL(ENC(nn.Linear(3, 3), nn.Linear(3, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2)))
    state = layer_state(later)
    assert sorted(state["optimizers"]) == ["ae_opt", "enc_opt"]
    assert state["optimizers"]["ae_opt"]["parameters"] == [["ae.g.weight", "ae.g.bias", "ae.h.weight", "ae.h.bias"]]


def test_optimizer_states_follow_weights_into_another_layout() -> None:
    """Moved to ``channels_last`` after a batch, a layer's fused optimizer went on with states of the old layout, which
    it walks through beside the weights: each weight got the step of another."""

    def trained(layout: torch.memory_format, after: int) -> nn.Module:
        torch.manual_seed(0)
        package = build_vision("resnet", "al", classes=4, dims=VisionDims(size=32, width=0.05, hidden=8, code=8))
        layer = package[1]
        draw = torch.Generator().manual_seed(1)
        for batch in range(3):
            if batch == after:
                package.to(memory_format=layout)
            x = torch.randn(ROWS, 3, 32, 32, generator=draw)
            y: Any = torch.randint(4, (ROWS,), generator=draw)
            for each in package:
                x, y = each(x, y)
                each.backward()
                each.update()
        for parameter, values in layer.enc_opt.state.items():
            assert values["exp_avg"].stride() == parameter.stride()
        return package

    wanted = trained(torch.contiguous_format, 0).state_dict()
    for name, value in trained(torch.channels_last, 1).state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_buffer_that_is_no_longer_saved_is_left_out_of_an_older_state() -> None:
    """Parts of cut networks had saved the buffers that their networks do not."""

    def layer() -> BP:
        net = nn.Sequential(nn.Linear(4, 4))
        net[0].register_buffer("ramp", torch.arange(4.0), persistent=False)
        return BP(net)

    first, second = layer(), layer()
    state = layer_state(first)
    (weight,) = (name for name in state["module"] if name.endswith("weight"))
    older = {**state, "module": {**state["module"], weight.replace("weight", "ramp"): torch.zeros(4)}}
    load_layer_state(second, older)
    for name, value in layer_state(second)["module"].items():
        assert torch.equal(value, state["module"][name])
    with pytest.raises(DataError, match=r"other"):
        load_layer_state(second, {**state, "module": {**state["module"], "other": torch.zeros(4)}})
