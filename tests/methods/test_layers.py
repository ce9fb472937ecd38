"""One AL layer: two local losses that stay at home, two optimizers, and a state that travels with it."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import AE, AL, BP, ENC, ALPackage, ConfigError, LayerError, ScheduleError
from pipeal.methods.greedy import Greedy

X, Y = torch.ones(4, 3), torch.ones(4, 5)


def layer(**options: Any) -> AL:
    torch.manual_seed(0)
    return AL(ENC(nn.Linear(3, 6), nn.Linear(6, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)), **options)


def rates(al: AL) -> tuple[float, float]:
    return al.enc_opt.param_groups[0]["lr"], al.ae_opt.param_groups[0]["lr"]


def test_a_forward_returns_f_and_g_detached() -> None:
    al = layer()
    out, code = al(X, Y)
    assert torch.equal(out, al.enc.f(X))
    assert torch.equal(code, al.ae.g(Y))
    assert not out.requires_grad
    assert not code.requires_grad


def test_the_losses_are_those_of_the_paper() -> None:
    al = layer()
    assert al.loss() is None
    al(X, Y)
    with torch.no_grad():
        associated = nn.functional.mse_loss(al.enc.b(al.enc.f(X)), al.ae.g(Y))
        autoencoder = nn.functional.mse_loss(al.ae.h(al.ae.g(Y)), Y)
    found = al.loss()
    assert found is not None
    assert [value.item() for value in found] == [associated.item(), autoencoder.item()]
    assert not any(value.requires_grad for value in found)


def test_the_associated_loss_does_not_reach_the_label_side() -> None:
    """The code is a target for the bridge: its gradient must not move ``g``."""
    al = layer()
    x = X.clone().requires_grad_()
    al.ae(Y)[0].backward()
    alone = [parameter.grad.clone() for parameter in al.ae.parameters() if parameter.grad is not None]
    al.zero_grad()
    al(x, Y)
    al.backward()
    together = [parameter.grad for parameter in al.ae.parameters()]
    assert all(torch.equal(one, two) for one, two in zip(alone, together, strict=True) if two is not None)
    assert all(parameter.grad is not None for parameter in al.parameters())


def test_no_gradient_leaves_a_layer() -> None:
    layers = [AL(ENC(nn.Linear(3, 3), nn.Linear(3, 2)), AE(nn.Linear(2, 2), nn.Linear(2, 2))) for _ in range(3)]
    x, y = X, torch.ones(4, 2)
    for al in layers:
        x, y = al(x, y)
    for middle in (layers[1], layers[2], layers[0]):
        middle.backward()
        for other in layers:
            assert all((parameter.grad is None) is (other is not middle) for parameter in other.parameters())
        middle.zero_grad()


@given(depth=st.integers(0, 3), as_dict=st.booleans())
def test_what_is_handed_on_is_cut_whatever_its_shape(depth: int, as_dict: bool) -> None:
    class Nested(nn.Linear):
        def forward(self, x: Any) -> Any:
            found: Any = super().forward(x)
            for _ in range(depth):
                found = {"next": found, "n": 1} if as_dict else (found, [found], None)
            return found

    def first(tree: Any) -> Tensor:
        while not isinstance(tree, Tensor):
            tree = tree["next"] if isinstance(tree, dict) else tree[0]
        return tree

    class Bridge(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            return super().forward(first(x))

    al = AL(ENC(Nested(3, 6), Bridge(6, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)))
    out, _ = al(X, Y)
    assert not first(out).requires_grad
    al.backward_and_update()


def test_an_update_clears_the_gradients() -> None:
    al = layer()
    before = [parameter.detach().clone() for parameter in al.parameters()]
    al(X, Y)
    al.backward_and_update()
    assert all(parameter.grad is None for parameter in al.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, al.parameters(), strict=True))


@pytest.mark.parametrize("al", [layer(), BP(nn.Linear(3, 5), nn.MSELoss())], ids=["AL", "BP"])
def test_backward_needs_a_forward_of_its_own(al: AL | BP) -> None:
    with pytest.raises(ScheduleError, match=r"backward\(\) without a forward\(\) that kept losses"):
        al.backward()
    al(X, Y)
    al.backward()
    with pytest.raises(ScheduleError, match="without a forward"):
        al.backward()


def test_a_forward_without_gradients_is_no_forward_to_go_back_through() -> None:
    """Otherwise a whole run under ``no_grad`` would train nothing, in silence."""
    al = layer()
    with torch.no_grad():
        al(X, Y)
    with pytest.raises(ScheduleError, match="with gradients enabled"):
        al.backward()


def test_sides_without_parameters_are_fine() -> None:
    al = AL(ENC(nn.Linear(3, 5), nn.Identity()), AE(nn.Identity(), nn.Identity()))
    al(X, Y)
    al.backward_and_update()
    assert al.ae_opt.param_groups[0]["params"] == []


def test_inference_goes_through_one_block() -> None:
    al = layer()
    assert torch.equal(al.inference(X, "f"), al.enc.f(X))
    assert torch.equal(al.inference(torch.ones(1, 6), "b"), al.enc.b(torch.ones(1, 6)))
    assert torch.equal(al.inference(torch.ones(1, 2), "h"), al.ae.h(torch.ones(1, 2)))
    for path in ("g", "", "F"):
        with pytest.raises(ConfigError, match=f"unknown inference path '{path}'"):
            al.inference(X, path)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, partial(torch.optim.AdamW, weight_decay=0.1)])
def test_learning_rates_are_a_number_or_a_mapping(optimizer: Any) -> None:
    assert rates(layer(optimizer=optimizer)) == (1e-3, 1e-3)
    assert rates(layer(lr=0.5, optimizer=optimizer)) == (0.5, 0.5)
    assert rates(layer(lr={"ae": 0.1, "enc": 0.2}, optimizer=optimizer)) == (0.2, 0.1)


@pytest.mark.parametrize("lr", [{}, {"enc": 0.1}, {"enc": 0.1, "ae": 0.1, "h": 0.1}, {"encoder": 0.1, "ae": 0.1}])
def test_a_mapping_names_both_sides_and_no_other(lr: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected a number, or a mapping with 'enc' and 'ae'"):
        layer(lr=lr)


def test_set_lr_and_scale_lr() -> None:
    al = layer(lr=0.1)
    al.set_lr("enc", 0.4)
    assert rates(al) == (0.4, 0.1)
    al.scale_lr(0.5)
    assert rates(al) == (0.2, 0.05)
    al.scale_lr(0.5)
    assert rates(al) == (0.2, 0.05), "a factor is on the base value, not on the last one"
    al.set_lr(["enc", "ae"], 1.0)
    al.scale_lr(0.25)
    assert rates(al) == (0.25, 0.25)
    for which in ("f", "encoder", ["enc", "x"]):
        with pytest.raises(ConfigError, match="expected 'enc' or 'ae'"):
            al.set_lr(which, 0.1)


def test_parameters_are_counted_as_effective_or_affiliated() -> None:
    al = layer()
    f, b, g, h = 3 * 6 + 6, 6 * 2 + 2, 5 * 2 + 2, 2 * 5 + 5
    assert al.block_parameters() == {"f": f, "b": b, "g": g, "h": h}
    assert (al.effective_parameters(), al.affiliated_parameters()) == (f + h, b + g)
    assert (al.effective_parameters(last=True), al.affiliated_parameters(last=True)) == (f + h + b, g)


def trained(al: AL, batches: int) -> AL:
    draw = torch.Generator().manual_seed(batches)
    dtype = next(al.parameters()).dtype
    for _ in range(batches):
        al(torch.randn(4, 3, generator=draw).to(dtype), torch.randn(4, 5, generator=draw).to(dtype))
        al.backward_and_update()
    return al


def everything(al: AL) -> list[Tensor]:
    found = [parameter.detach().clone() for parameter in al.parameters()]
    for optimizer in (al.enc_opt, al.ae_opt):
        for state in optimizer.state_dict()["state"].values():
            found += [value.clone() for value in state.values()]
    return found


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_deep_copy_trains_on_alone() -> None:
    al = trained(layer(), 3)
    twin = copy.deepcopy(al)
    own = {id(parameter) for parameter in twin.parameters()}
    held = {id(p) for o in (twin.enc_opt, twin.ae_opt) for group in o.param_groups for p in group["params"]}
    assert own == held
    before = everything(al)
    trained(twin, 4)
    assert same(everything(al), before)
    assert same(everything(trained(al, 4)), everything(twin))


def test_a_saved_layer_trains_on_as_if_never_stopped() -> None:
    al = trained(layer(), 3)
    file = io.BytesIO()
    torch.save([al.state_dict(), al.enc_opt.state_dict(), al.ae_opt.state_dict()], file)
    file.seek(0)
    weights, enc, ae = torch.load(file)
    twin = AL(ENC(nn.Linear(3, 6), nn.Linear(6, 2)), AE(nn.Linear(5, 2), nn.Linear(2, 5)))
    twin.load_state_dict(weights)
    twin.enc_opt.load_state_dict(enc)
    twin.ae_opt.load_state_dict(ae)
    assert same(everything(trained(twin, 4)), everything(trained(al, 4)))


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
def test_to_takes_the_optimizers_state_along(optimizer: Any) -> None:
    al = trained(layer(optimizer=optimizer), 2)
    wanted = [value.double() for value in everything(al)]
    al.to(torch.float64)
    found = everything(al)
    assert all(torch.equal(one, two.double()) for one, two in zip(wanted, found, strict=True))
    states = [s for o in (al.enc_opt, al.ae_opt) for s in o.state_dict()["state"].values()]
    assert states
    for state in states:
        assert all(
            value.dtype is torch.float64 for name, value in state.items() if name != "step" and value is not None
        )
    trained(al, 2)


def test_to_where_it_already_is_changes_nothing() -> None:
    al, twin = trained(layer(), 2), trained(layer(), 2)
    al.to("cpu").to(torch.float32).cpu()
    assert same(everything(trained(al, 3)), everything(trained(twin, 3)))


def test_bp_is_plain_backpropagation() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
    bp, plain = BP(copy.deepcopy(net), lr=0.01), net
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, fused=True)
    y = torch.tensor([0, 1, 4, 2])
    for _ in range(3):
        out, target = bp(X, y)
        assert torch.equal(out, plain(X))
        assert not out.requires_grad
        assert target is y
        bp.backward()
        bp.update()
        loss = nn.functional.cross_entropy(plain(X), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bp.loss() == (loss.detach(),)
    assert all(torch.equal(one, two) for one, two in zip(bp.model.parameters(), plain.parameters(), strict=True))
    assert torch.equal(bp.inference(bp.inference(bp.inference(X, "f"), "b"), "h"), plain(X))
    assert bp.effective_parameters() == sum(p.numel() for p in plain.parameters())
    assert bp.affiliated_parameters() == 0
    bp.scale_lr(0.5)
    assert bp.opt.param_groups[0]["lr"] == 0.005
    with pytest.raises(ConfigError, match="unknown inference path"):
        bp.inference(X, "g")  # type: ignore[arg-type]


def test_a_single_loss_that_reaches_no_weight_is_an_error() -> None:
    """Symptom: a criterion that detached its input trained nothing, without a word."""
    bp = BP(nn.Linear(3, 5), lambda found, wanted: nn.functional.mse_loss(found.detach(), wanted))  # type: ignore[arg-type]
    bp(X, Y)
    with pytest.raises(RuntimeError, match="does not require grad"):
        bp.backward()
    al = layer()
    al.ae.requires_grad_(False)  # of several, the others learn
    al(X, Y)
    al.backward()
    assert all(parameter.grad is not None for parameter in al.enc.parameters())


def test_several_losses_that_reach_no_weight_are_an_error_unless_all_are_frozen() -> None:
    """Symptom: AL trained nothing in inference mode, without a word, where a single loss is refused by PyTorch."""
    al = layer()
    with torch.inference_mode(), torch.enable_grad():
        al(X, Y)
    with pytest.raises(LayerError, match=r"no loss of the layer, AL, has a gradient, .* enc\.f\..* would never learn"):
        al.backward()
    al.requires_grad_(False)
    al(X, Y)
    al.backward()


@pytest.mark.parametrize("per_place", [False, True])
def test_a_bridge_that_writes_into_what_the_next_layer_gets_is_refused(per_place: bool) -> None:
    """Symptom: exits beyond that layer, which go without its bridge, answered from something else than was learnt."""
    x, bridge = torch.randn(4, 5, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4))
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    if per_place:
        blocks = {0: {"b": bridge}}
        al = ALPackage.from_bp(net, x, 3, split=["1"], task="per-place", code=4, blocks=blocks)[0]
        y = torch.zeros(4, 5, dtype=torch.long)
    else:
        al = AL(ENC(net, bridge), AE(nn.Identity(), nn.Identity()))
        y = torch.zeros(4, 5, 4)
    with pytest.raises(LayerError, match=r"b changed what f gives in place.*inplace=False"):
        al(x, y)
    bridge[0].inplace = False
    al(x, y)


def test_a_decoder_that_writes_into_the_next_layers_target_is_refused() -> None:
    ae = AE(nn.Linear(5, 2), nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(2, 5)))
    with pytest.raises(LayerError, match=r"h changed what g gives in place.*at the beginning of h"):
        ae(Y)


def test_a_head_that_writes_into_what_the_next_layer_gets_is_refused() -> None:
    greedy = Greedy(nn.Linear(3, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)))
    with pytest.raises(LayerError, match=r"head changed what f gives in place.*at the beginning of head"):
        greedy(X, torch.zeros(4, dtype=torch.long))
