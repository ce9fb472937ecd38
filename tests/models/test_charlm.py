"""Laws of the language model: nobody sees the future, gradients stay home, and an exit says what it was trained to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

from pipeal.core.draws import may_draw
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.names import LANGUAGE
from pipeal.engine.runner.parts import cut, samples_in
from pipeal.methods.al import ALPackage
from pipeal.models import (
    UNLABELLED,
    CausalAttention,
    CharDims,
    CharLMAL,
    TokenCrossEntropy,
    build_language,
    generate,
    generate_each,
    generation,
)
from pipeal.models.causal import _attend_by_products, _attend_fused

CHARACTERS = 11
SMALL = CharDims(block=8, width=12, heads=2, layers=3, dropout=0.3)
STYLES = pytest.mark.parametrize("labels", ["codes", "one-hot", "published"])
FORMS = pytest.mark.parametrize("mode", ["al", "bp"])


pytestmark = pytest.mark.usefixtures("one_thread")


def model(mode: str = "al", **changes: object) -> ALPackage:
    torch.manual_seed(0)
    dims = CharDims(**{name: getattr(SMALL, name) for name in SMALL.__slots__} | changes)  # type: ignore[arg-type]
    return build_language("charlm", mode, characters=CHARACTERS, dims=dims, lr=1e-2)  # type: ignore[arg-type]


def batch(rows: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    text = torch.randint(CHARACTERS, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def trained(package: ALPackage, steps: int = 3) -> ALPackage:
    for step in range(steps):
        package(*batch(seed=step))
        package.backward()
        package.update()
    return package


# -- attention ----------------------------------------------------------------------------------------------------


@FORMS
def test_no_place_sees_what_comes_after_it(mode: str) -> None:
    package = trained(model(mode)).eval()
    x, _ = batch(2)
    exits = range(1, len(package) + 1)
    before = [package.infer(x, depth) for depth in exits]
    for place in range(1, 8):
        other = x.clone()
        other[:, place:] = (other[:, place:] + 1) % CHARACTERS
        for depth in exits:
            after = package.infer(other, depth)
            torch.testing.assert_close(after[:, :place], before[depth - 1][:, :place])
            assert not torch.allclose(after[:, place], before[depth - 1][:, place])


@FORMS
def test_a_short_text_is_answered_as_the_beginning_of_a_long_one(mode: str) -> None:
    package = trained(model(mode)).eval()
    x, _ = batch(2)
    for length in (1, 5):
        torch.testing.assert_close(package.infer(x[:, :length]), package.infer(x)[:, :length])


def test_both_ways_to_attend_give_the_same() -> None:
    q, k, v = (torch.randn(3, 2, 7, 11, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(_attend_by_products(q, k, v).float(), _attend_fused(q, k, v).float())


def test_three_heads_of_32_features_lose_none() -> None:
    attention = CausalAttention(32, 3)
    assert attention.qkv.out_features == 3 * 33
    x = torch.randn(1, 4, 32, requires_grad=True)
    attention(x).sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum((0, 1)) > 0).all()
    assert all((parameter.grad != 0).any() for parameter in (attention.out.weight, attention.qkv.weight))
    assert (attention.out.weight.grad.abs().sum(0) > 0).all(), "every feature of every head is heard"  # type: ignore[union-attr]


@FORMS
def test_a_batch_of_no_texts_has_no_answers(mode: str) -> None:
    assert len(model(mode).eval().infer(batch()[0][:0])) == 0


def test_a_text_longer_than_the_block_is_one_line() -> None:
    with pytest.raises(DataError, match="a text of 9 characters; the model has places for 8"):
        model().infer(torch.zeros(1, 9, dtype=torch.long))


# -- the AL form --------------------------------------------------------------------------------------------------


@STYLES
@pytest.mark.parametrize("bridges", ["linear", "block"])
def test_no_gradient_leaves_a_layer(labels: str, bridges: str) -> None:
    package = trained(model(labels=labels, bridges=bridges))
    for number, layer in enumerate(package):
        x, y = batch()
        package(x, y)
        layer.backward()
        for other, neighbour in enumerate(package):
            grads = [parameter.grad for parameter in neighbour.parameters()]
            if other == number:
                assert all(grad is not None for grad in grads)
            assert all(grad is None or not grad.any() for grad in grads) or other == number
        package.zero_grad()


def test_what_is_handed_on_is_detached() -> None:
    x, (y, codes) = model()(*batch())
    assert not x.requires_grad
    assert not codes.requires_grad
    assert torch.equal(y, batch()[1])


@pytest.mark.parametrize("code", [5, 12, 20])
@pytest.mark.parametrize("per_layer", [1, 2])
def test_an_exit_answers_with_the_loss_that_its_layer_was_trained_on(code: int, per_layer: int) -> None:
    """The way b, h … h1 of an inference is the transpose of the way g1 … g of the codes, whatever both have learnt."""
    package = trained(model(code=code, per_layer=per_layer), steps=5).eval()
    x, y = batch()
    package(x, y)
    for depth, (associated, _) in enumerate(package.losses(), start=1):
        assert TokenCrossEntropy()(package.infer(x, depth), y).item() == pytest.approx(associated, abs=1e-5)


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _ends_otherwise(bridge: nn.Sequential, kind: str) -> nn.Module:
    last = bridge[-1]
    assert isinstance(last, nn.Linear)
    if kind == "pruned":
        l1_unstructured(last, "weight", amount=0.5)
    elif kind == "hook on the map":
        last.register_forward_hook(lambda _, __, answer: answer.tanh())
    elif kind == "hook on the bridge":
        bridge.register_forward_hook(lambda _, __, answer: answer.tanh())
    elif kind == "wrapped":
        return nn.Sequential(nn.Identity(), bridge)
    elif kind == "activation":
        bridge.append(nn.Tanh())
    elif kind == "without bias":
        last.bias = None
    elif kind == "own kind":
        bridge[-1] = doubled = _Doubled(last.in_features, last.out_features)
        doubled.load_state_dict(last.state_dict())
    elif kind == "one map":
        return last
    return bridge


@pytest.mark.parametrize(
    "kind",
    [
        *("as it is", "pruned", "hook on the map", "hook on the bridge", "wrapped", "activation", "without bias"),
        *("own kind", "one map"),
    ],
)
def test_codes_are_folded_into_a_bridge_as_if_it_answered(kind: str) -> None:
    """Gradients, too; and a bridge that cannot be folded does answer."""
    layer = trained(model(code=12))[1]
    layer.enc.b = _ends_otherwise(layer.enc.b, kind)
    layer.enc.eval().double()
    x = torch.randn(4, 8, SMALL.width, dtype=torch.float64)
    y, codes = batch()[1], torch.randn(CHARACTERS, 12, dtype=torch.float64)
    parameters = list(layer.enc.parameters())
    loss, out = layer.enc(x, (y, codes.expand(4, -1, -1)))
    found = torch.autograd.grad(loss, parameters)
    logits = layer.enc.b(layer.enc.f(x)) @ codes.t() / 12**0.5
    wanted = TokenCrossEntropy()(logits, y)
    torch.testing.assert_close((loss, out), (wanted, layer.enc.f(x)))
    torch.testing.assert_close(found, torch.autograd.grad(wanted, parameters), atol=1e-6, rtol=1e-5)


@STYLES
def test_places_without_a_label_count_for_nothing(labels: str) -> None:
    package = trained(model(labels=labels)).eval()
    x, y = batch()
    masked = y.clone()
    masked[:, 4:] = UNLABELLED
    masked[:, 6:] = -100  # as torch has it
    package(x, masked)
    expected = package.losses()
    package(x[:, :4], y[:, :4])
    for found, wanted in zip(package.losses(), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    package(x, torch.full_like(y, UNLABELLED))
    assert all(associated == 0 for associated, _ in package.losses())


def test_label_sides_work_once_per_character_and_keep_codes_apart() -> None:
    package = trained(model(code=12), steps=10)
    _, (_, first) = package[:1](*batch())
    _, (_, last) = package(*batch())
    assert last.shape == (4, CHARACTERS, 12)
    torch.testing.assert_close(torch.cdist(last[0], last[0]), torch.cdist(first[0], first[0]), rtol=0.05, atol=0)


@STYLES
def test_a_layer_learns_the_same_from_a_batch_in_parts(labels: str) -> None:
    """What a batch that does not fit into memory is given to (``engine.on_oom: split``)."""
    package = model(labels=labels, dropout=0.0)
    x, y = batch()
    for layer in package:
        onward = layer(x, y)
        layer.backward()
        expected = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
        assert samples_in((x, y)) == 4
        for rows in (range(1), range(1, 4)):
            layer(*cut((x, y), rows))
            gradients = [loss * (len(rows) / 4) for loss in layer._graph]
            torch.autograd.backward(gradients)
        for parameter, wanted in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
        layer.zero_grad()
        x, y = onward


def test_published_codes_lose_nothing_under_autocast() -> None:
    """They are sigmoids near 0.5, where bfloat16 has steps of 0.002, and differ by less: most of what a late layer was
    to learn from was rounding, and the published form was measured with it."""
    package, (x, y) = model(labels="published", code=40, layers=4, dropout=0.0), batch()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        _, (_, codes) = package(x, y)
        halved = package.losses()
        answers = package.eval().infer(x)
    _, (_, wanted) = package.train()(x, y)
    assert torch.equal(codes, wanted)
    assert len({tuple(code) for code in codes.flatten(0, 1).tolist()}) == len(y.unique())
    assert answers.dtype == torch.float32
    assert len(answers.flatten(0, 1).unique(dim=0)) > 1
    for (associated, autoencoder), (exactly, same) in zip(halved, package.losses(), strict=True):
        assert autoencoder == same
        assert associated == pytest.approx(exactly, rel=0.02)


def test_only_bridges_that_an_inference_of_the_full_depth_leaves_out_are_deep() -> None:
    deep, plain = model(bridges="block"), model()
    assert deep.effective_parameters() == plain.effective_parameters()
    assert deep.affiliated_parameters() > plain.affiliated_parameters()


@pytest.mark.parametrize(("per_layer", "layers"), [(1, 3), (2, 2), (3, 1), (9, 1)])
def test_blocks_share_layers_as_asked(per_layer: int, layers: int) -> None:
    package = model(per_layer=per_layer)
    assert len(package) == layers
    blocks = [part for layer in package for part in layer.enc.f.children() if "CausalBlock" in type(part).__name__]
    assert len(blocks) == 3


@pytest.mark.slow
@FORMS
@STYLES
def test_a_model_learns_a_text_of_two_letters(mode: str, labels: str) -> None:
    package = model(mode, labels=labels, dropout=0.0)
    text = torch.arange(9) % 2
    for _ in range(150):
        package(text[None, :-1], text[None, 1:])
        package.backward()
        package.update()
    package.eval()
    for depth in range(1, len(package) + 1):
        assert torch.equal(package.infer(text[None, :-1], depth)[0].argmax(-1), text[1:])


@FORMS
@STYLES
def test_it_draws_from_keyed_generators_alone(mode: str, labels: str) -> None:
    assert not may_draw(model(mode, labels=labels))


@FORMS
def test_it_becomes_a_plain_module(mode: str) -> None:
    package = trained(model(mode)).eval()
    x, _ = batch()
    for depth in range(1, len(package) + 1):
        torch.testing.assert_close(package.to_bp(depth)(x), package.infer(x, depth))


def test_weights_are_counted_saved_and_learnt_once() -> None:
    package = model()
    counted = package.effective_parameters() + package.affiliated_parameters()
    assert counted == sum(parameter.numel() for parameter in package.parameters())
    again = model()
    again.load_state_dict(trained(package).state_dict())
    x, _ = batch()
    assert torch.equal(again.eval().infer(x), package.eval().infer(x))


def test_a_target_per_text_is_one_line() -> None:
    x, y = batch()
    for mode in ("al", "bp"):
        with pytest.raises(DataError, match="expected a class, as a whole number, for each place"):
            model(mode)(x, y[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"code": 0}, "code is 0"),
        ({"dropout": 1.0}, "dropout is 1"),
        ({"labels": "code"}, "did you mean 'codes'"),
        ({"labels": "one-hot", "code": 12}, "code is 12, and one-hot; expected 11, as there are 11 classes"),
        ({"bridges": "deep"}, "style of bridge"),
    ],
)
def test_sizes_and_styles_out_of_range_are_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**changes)


def test_names() -> None:
    assert LANGUAGE.model("CharLMAL") == ("charlm", "al")
    with pytest.raises(ConfigError, match="unknown model 'gpt'"):
        LANGUAGE.model("gpt")


# -- writing ------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """After each character, mostly the next one; the one after that is less likely."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(*x.shape, CHARACTERS)
        for ahead, logit in ((1, 4.0), (2, 3.0)):
            logits.scatter_(2, ((x + ahead) % CHARACTERS).unsqueeze(2), logit)
        return logits


def test_without_temperature_the_likeliest_is_written() -> None:
    written = generate(Counting(), torch.tensor([3]), length=12, block=4, temperature=0)
    assert written.tolist() == [(3 + n) % CHARACTERS for n in range(13)]


def test_what_is_drawn_follows_from_the_seed_and_is_of_the_likeliest_k() -> None:
    def write(seed: int, **options: object) -> list[int]:
        return generate(Counting(), torch.tensor([0]), length=200, block=4, seed=seed, **options).tolist()  # type: ignore[arg-type]

    assert write(1) == write(1) != write(2)
    assert write(1, top_k=CHARACTERS) == write(1)
    assert write(1, top_k=1) == [n % CHARACTERS for n in range(201)]
    assert {(after - before) % CHARACTERS for before, after in pairwise(write(3, top_k=2))} == {1, 2}
    assert len({*write(3, temperature=100.0)}) == CHARACTERS
    assert write(3, temperature=1e-6) == write(1, top_k=1)


def test_of_equals_too_only_k_are_drawn_from() -> None:
    written = generate(lambda x: torch.zeros(*x.shape, 9), torch.tensor([0]), length=300, block=4, top_k=3)
    assert len({*written[1:].tolist()}) == 3


def test_the_model_looks_back_on_a_block_at_most_and_always_sees_a_whole_one() -> None:
    """Over processes, where a text that grew was a shape for each length, ``engine.compile: static`` made a graph for
    each, for minutes after the last epoch."""
    seen: list[list[int]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x[0].tolist())
        return Counting()(x)

    generate(look, torch.arange(3), length=4, block=4, temperature=0)
    assert seen == [[0, 1, 2, 0], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    seen.clear()
    generate(look, torch.arange(7), length=1, block=4)
    assert seen == [[3, 4, 5, 6]]


@FORMS
def test_what_a_block_is_filled_up_with_changes_nothing_that_is_written(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = trained(model(mode)).eval()
    text = generate(package.infer, torch.tensor([1, 2]), length=12, block=8)
    monkeypatch.setattr(generation, "_FILLING", CHARACTERS - 1)
    assert torch.equal(generate(package.infer, torch.tensor([1, 2]), length=12, block=8), text)


def test_each_character_is_there_before_the_next_one_is_computed() -> None:
    """``pipeal generate`` said nothing until a million were written."""
    asked: list[int] = []

    def look(x: Tensor) -> Tensor:
        asked.append(len(asked))
        return Counting()(x)

    written = generate_each(look, torch.tensor([3]), length=1_000_000, block=4, temperature=0)
    assert asked == []
    assert [next(written) for _ in range(3)] == [4, 5, 6]
    assert asked == [0, 1, 2]
    assert torch.is_grad_enabled(), "what is done between two of them is the caller's affair"


@given(st.sampled_from(["al", "bp"]), st.integers(1, 3))
def test_every_exit_writes(mode: str, depth: int) -> None:
    package = model(mode).eval()
    exit_at = min(depth, len(package))
    written = generate(lambda x: package.infer(x, exit_at), torch.tensor([1, 2]), length=12, block=8)
    assert written.shape == (14,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"length": 0}, "length is 0"),
        ({"prompt": torch.zeros(0, dtype=torch.long)}, "the prompt is empty"),
    ],
)
def test_a_wish_out_of_range_is_one_line(options: dict[str, object], message: str) -> None:
    for write in (generate, generate_each):
        with pytest.raises(ConfigError, match=message):
            write(Counting(), **{"prompt": torch.tensor([0]), "length": 2, "block": 4} | options)  # type: ignore[operator]


def test_answers_that_are_not_finite_are_one_line() -> None:
    with pytest.raises(DataError, match="not finite: it has diverged"):
        generate(lambda x: torch.full((*x.shape, 9), torch.nan), torch.tensor([0]), length=1, block=4)
    masked = torch.tensor([0.0, -torch.inf, 0.0])
    assert 1 not in generate(lambda x: masked.expand(*x.shape, 3), torch.tensor([0]), length=50, block=4)


@pytest.mark.parametrize(("characters", "width", "code"), [(65, 32, 260), (3000, 32, 512), (3000, 400, 1600)])
def test_codes_of_a_large_alphabet_stay_small(characters: int, width: int, code: int) -> None:
    """Symptom: with 6,000 characters, a layer had 576 million weights between its codes."""
    package = CharLMAL(characters, dims=CharDims(width=width, heads=2))
    assert package[0].enc.b[-1].out_features == code


@pytest.mark.cuda
@FORMS
def test_a_gpu_answers_as_a_cpu(mode: str) -> None:
    package = trained(model(mode)).eval()
    x, _ = batch()
    expected = [package.infer(x, depth) for depth in range(1, len(package) + 1)]
    package.cuda()
    for depth, wanted in enumerate(expected, start=1):
        torch.testing.assert_close(package.infer(x, depth).cpu(), wanted, rtol=1e-3, atol=1e-3)
        assert generate(package.to_bp(depth), x[0, :2], length=9, block=8, top_k=3).device.type == "cpu"
    trained(package.train())
    assert all(loss == loss for losses in package.losses() for loss in losses)
