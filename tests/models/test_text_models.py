"""Laws of the text models: padding never matters, gradients stay home, sizes are the published ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal.core.draws import may_draw
from pipeal.core.errors import ConfigError, PlacementError
from pipeal.core.names import TEXT
from pipeal.core.rng import keyed
from pipeal.data import Grouped
from pipeal.methods.al import ALPackage, set_device
from pipeal.models import (
    LSTM,
    LSTMAL,
    TEXT_MODELS,
    TextDims,
    TokenEmbedding,
    Transformer,
    TransformerAL,
    build_text,
    group_layers,
)
from pipeal.models.lstm import LSTMBlock

VOCAB, CLASSES = 50, 4
SMALL = TextDims(embedding=12, hidden=10, code=8, heads=3, dropout=0.3)
BOTH_MODES = pytest.mark.parametrize("mode", ["al", "bp"])
EVERY_MODEL = pytest.mark.parametrize("name", TEXT_MODELS)


pytestmark = pytest.mark.usefixtures("one_thread")


def small(name: str, mode: str, **changes: object) -> ALPackage:
    torch.manual_seed(0)
    return build_text(name, mode, vocab_size=VOCAB, classes=CLASSES, dims=SMALL, **changes)


def batch(lengths: list[int], width: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(len(lengths), max(lengths) if width is None else width, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, VOCAB, (length,), generator=generator)
    return tokens, torch.randint(0, CLASSES, (len(lengths),), generator=generator)


def climb(package: ALPackage, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The features and mask after each block."""
    blocks = [layer.enc.f for layer in package] if len(package) > 1 else list(package[0].model)[:-1]
    seen, x = [], tokens
    for block in blocks:
        x = block(x)
        seen.append(x)
    return seen


@EVERY_MODEL
@BOTH_MODES
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), extra=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_padding_never_changes_an_answer(name: str, mode: str, lengths: list[int], extra: int) -> None:
    package = small(name, mode).eval()
    tokens, _ = batch(lengths, max(lengths) + extra)
    with torch.no_grad():
        together, together_logits = climb(package, tokens), package.infer(tokens)
        for row, length in enumerate(lengths):
            alone = tokens[row : row + 1, :length]
            for (features, mask), (own, own_mask) in zip(together, climb(package, alone), strict=True):
                torch.testing.assert_close(features[row, :length], own[0], atol=1e-5, rtol=1e-5)
                assert mask[row].sum() == own_mask.sum() == length
            torch.testing.assert_close(together_logits[row], package.infer(alone)[0], atol=1e-5, rtol=1e-5)


@BOTH_MODES
def test_padding_before_a_word_takes_nothing_from_other_texts(mode: str) -> None:
    """Symptom: an answer of ``lstm`` that changed with the batch's other texts. Cause: each text was turned round as
    if its words came first."""
    package = small("lstm", mode).eval()
    odd, (others, _) = torch.tensor([[5, 0, 6, 7]]), batch([4, 3])
    with torch.no_grad():
        alone = package.infer(odd)
        torch.testing.assert_close(package.infer(torch.cat((others, odd)))[2:], alone, atol=1e-5, rtol=1e-5)
        assert package.infer(torch.tensor([[0, 0, 6, 7]])).isfinite().all()


@EVERY_MODEL
@BOTH_MODES
def test_padding_changes_no_gradient_either(name: str, mode: str) -> None:
    grads = []
    for extra in (0, 4):
        package = small(name, mode).eval()
        tokens, y = batch([3, 5], 5 + extra)
        package(tokens, y)
        package.backward()
        grads.append([p.grad.clone() for p in package.parameters()])
    for tight, padded in zip(*grads, strict=True):
        torch.testing.assert_close(tight, padded, atol=1e-5, rtol=1e-4)


@EVERY_MODEL
def test_an_lstm_or_encoder_sees_both_neighbours(name: str) -> None:
    package = small(name, "al").eval()
    tokens, _ = batch([6, 4])
    changed = tokens.clone()
    for at, reader in ((0, 3), (3, 0)):
        changed = tokens.clone()
        changed[1, at] = tokens[1, at] % (VOCAB - 1) + 1
        before, after = climb(package, tokens)[1][0], climb(package, changed)[1][0]
        assert not torch.allclose(before[1, reader], after[1, reader])
        assert torch.equal(before[0], after[0])


def test_an_lstm_block_reads_each_text_from_both_ends_as_pytorchs_own_does() -> None:
    """What either direction says of a word stands, and learns, at that word."""
    torch.manual_seed(0)
    block, lengths = LSTMBlock(3, 4), (6, 4, 1)
    both = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    back = {f"{name}_reverse": value for name, value in block.back.state_dict().items()}
    both.load_state_dict({**block.onward.state_dict(), **back})
    x = torch.randn(3, 6, 3, requires_grad=True)
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
    found, _ = block((x, mask))
    (found * mask.unsqueeze(-1)).square().sum().backward()
    for row, length in enumerate(lengths):
        alone = x[row : row + 1, :length].detach().requires_grad_()
        wanted, _ = both(alone)
        torch.testing.assert_close(found[row : row + 1, :length], wanted)
        wanted.square().sum().backward()
        torch.testing.assert_close(x.grad[row : row + 1, :length], alone.grad)  # type: ignore[index]


def test_a_text_without_words_counts_as_one_token_that_pads() -> None:
    _, mask = TokenEmbedding(VOCAB, 3)(torch.tensor([[4, 7, 0], [0, 0, 0]]))
    assert mask.tolist() == [[True, True, False], [True, False, False]]


@EVERY_MODEL
@BOTH_MODES
def test_a_text_without_words_has_a_finite_answer(name: str, mode: str) -> None:
    package = small(name, mode).eval()
    tokens, _ = batch([3, 0])
    assert package.infer(tokens).isfinite().all()
    torch.testing.assert_close(package.infer(tokens)[1:], package.infer(tokens[1:, :1]), atol=1e-5, rtol=1e-5)


@EVERY_MODEL
def test_every_exit_gives_logits(name: str) -> None:
    package = small(name, "al")
    tokens, _ = batch([3, 5])
    assert [package.infer(tokens, exit_at=k).shape for k in (1, 2, 3, 4)] == [(2, CLASSES)] * 4
    with pytest.raises(PlacementError, match="exit 5 does not exist"):
        package.infer(tokens, exit_at=5)


@EVERY_MODEL
def test_a_layers_losses_reach_no_other_layer(name: str) -> None:
    package = small(name, "al")
    for trained in range(len(package)):
        package(*batch([3, 5]))
        package[trained].backward()
        for number, layer in enumerate(package):
            has_gradient = [p.grad is not None for p in layer.parameters()]
            assert all(has_gradient) if number == trained else not any(has_gradient)
        package.zero_grad()


@EVERY_MODEL
@BOTH_MODES
def test_the_key_decides_all_randomness(name: str, mode: str) -> None:
    assert not may_draw(small(name, mode))
    first, again, other = (trained(small(name, mode), seed, noise) for seed, noise in ((7, 1), (7, 2), (8, 1)))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def trained(package: ALPackage, seed: int, noise: int) -> list[Tensor]:
    """The weights after three batches; ``noise`` seeds PyTorch's own generator, which must not matter."""
    torch.manual_seed(noise)
    for step in range(3):
        with keyed(seed, 0, step):
            package(*batch([3, 5, 4], seed=step))
        package.backward()
        package.update()
    return list(package.parameters())


@pytest.mark.slow
@EVERY_MODEL
@BOTH_MODES
def test_it_learns_under_autocast(name: str, mode: str) -> None:
    package = small(name, mode, lr=1e-2)
    y = torch.arange(16) % CLASSES
    tokens = (y + 1).unsqueeze(1).expand(16, 5).contiguous()
    for step in range(100):
        with keyed(0, 0, step), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            package(tokens, y)
        package.backward()
        package.update()
    assert all(loss.dtype == torch.float32 for layer in package for loss in layer.loss())
    package.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(package.infer(tokens).argmax(-1), y)


def test_the_default_sizes_are_the_published_ones() -> None:
    d, hidden, code, classes = 300, 256, 128, 4
    attention = 4 * (d * d + d)
    feed_forward = (d * hidden + hidden) + (hidden * d + d)
    encoder = attention + feed_forward + 3 * 2 * d
    lstm = [2 * 4 * hidden * (width + hidden + 2) for width in (d, 2 * hidden, 2 * hidden)]
    words = 30_000 * d

    def head(width: int) -> int:
        return width * classes + classes

    def sides(width: int, label: int) -> int:
        return (width * code + code) + (label * code + code) + (code * label + label)

    def count(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert count(Transformer(30_000, classes)) == words + 3 * encoder + head(d)
    assert count(LSTM(30_000, classes)) == words + sum(lstm) + head(2 * hidden)
    first = words + sides(d, classes)
    assert [count(layer) for layer in TransformerAL(30_000, classes)] == [first] + 3 * [encoder + sides(d, code)]
    assert [count(layer) for layer in LSTMAL(30_000, classes)] == [first] + [
        weights + sides(2 * hidden, code) for weights in lstm
    ]


@pytest.mark.parametrize(("form", "parts"), [(LSTM, 5), (LSTMAL, 4), (Transformer, 5), (TransformerAL, 4)])
def test_devices_are_counted_as_the_seed_does(form: type[nn.Module], parts: int) -> None:
    model = form(VOCAB, CLASSES, dims=SMALL)
    set_device(model, ["cpu"] * parts)
    with pytest.raises(PlacementError, match=f"{parts + 1} devices for {parts} layers"):
        set_device(model, ["cpu"] * (parts + 1))


def test_more_blocks_and_encoder_layers_can_be_asked_for() -> None:
    dims = TextDims(embedding=12, hidden=10, code=8, heads=3, blocks=5, encoder_layers=2)
    package = build_text("transformer", "al", vocab_size=VOCAB, classes=CLASSES, dims=dims)
    assert len(package) == 6
    assert package.infer(batch([3, 2])[0]).shape == (2, CLASSES)


def test_pretrained_vectors_are_copied_and_trained() -> None:
    vectors = np.random.default_rng(0).normal(size=(VOCAB, 12)).astype(np.float32)
    package = small("transformer", "al", pretrained=vectors)
    every = torch.arange(VOCAB).unsqueeze(0)

    def handed_on() -> Tensor:
        package.eval()
        out = package[0].inference(every, "f")[0][0].detach()
        package.train()
        return out

    torch.testing.assert_close(handed_on()[1:], torch.from_numpy(vectors)[1:])
    assert not handed_on()[0].any(), "padding has no vector"
    package(*batch([3, 5]))
    package.backward()
    package.update()
    assert not torch.allclose(handed_on()[1:], torch.from_numpy(vectors)[1:])
    assert not handed_on()[0].any()
    with pytest.raises(ConfigError, match=r"shape \(50, 11\); .* \(50, 12\)"):
        TokenEmbedding(VOCAB, 12, pretrained=torch.zeros(VOCAB, 11))


def test_an_optimizer_and_rates_per_side_pass_through() -> None:
    package = small("lstm", "al", lr={"enc": 0.1, "ae": 0.2}, optimizer=torch.optim.SGD)
    assert isinstance(package[2].enc_opt, torch.optim.SGD)
    assert (package[2].enc_opt.param_groups[0]["lr"], package[2].ae_opt.param_groups[0]["lr"]) == (0.1, 0.2)
    assert isinstance(small("lstm", "bp", optimizer=torch.optim.SGD)[0].opt, torch.optim.SGD)


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("lstm", ("lstm", None)),
        ("LSTM", ("lstm", "bp")),
        ("LSTMAL", ("lstm", "al")),
        ("Transformer", ("transformer", "bp")),
        ("TRANSFORMER", ("transformer", None)),
        ("TransformerAL", ("transformer", "al")),
    ],
)
def test_the_seeds_spellings_are_known(spelling: str, meant: tuple[str, str | None]) -> None:
    assert TEXT.model(spelling) == meant
    assert len(build_text(spelling, vocab_size=9, classes=2, dims=SMALL)) == (1 if meant[1] == "bp" else 4)


@pytest.mark.parametrize(
    ("name", "mode", "changes", "line"),
    [
        ("transfomer", "al", {}, "did you mean 'transformer'"),
        ("al", "al", {}, "unknown model 'al'"),
        ("lstm", "pb", {}, "unknown mode 'pb'; did you mean 'bp'"),
        ("LSTMAL", "bp", {}, "'LSTMAL' is the AL form, but the mode is 'bp'"),
        ("lstm", "bp", {"lr": {"enc": 1e-3, "ae": 1e-3}}, "one learning rate"),
        ("transformer", "al", {"dims": TextDims(embedding=50)}, "6 heads do not divide 50 features"),
    ],
)
def test_a_wrong_wish_gets_one_clear_line(name: str, mode: str, changes: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        build_text(name, mode, **{"vocab_size": 9, "classes": 2, **changes})


@pytest.mark.parametrize("changes", [{"embedding": 0}, {"blocks": 0}, {"dropout": 1.0}])
def test_impossible_sizes_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is .*; expected"):
        TextDims(**changes)


@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize("layers", [None, [1, 2, 3], [2]])
def test_grouped_layers_have_the_gradients_and_answers_of_plain_ones(name, form, layers):
    dims = TextDims(embedding=12, hidden=8, code=6, heads=2, blocks=2, dropout=0.0)
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(1, 20, (24,), generator=draw)
    x = torch.randint(1, 50, (24, 20), generator=draw) * (torch.arange(20) < ends[:, None])
    y = torch.randint(4, (24,), generator=draw)
    packages = []
    for grouped in (False, True):
        torch.manual_seed(1)
        package = build_text(name, form, vocab_size=50, classes=4, dims=dims)
        if grouped:
            group_layers(package, [2, 9], layers)
            assert sum(isinstance(module, Grouped) for module in package.modules()) == len(layers or [2, 3])
        package(x, y)
        package.backward()
        packages.append(package)
    plain, grouped = packages
    for one, other in zip(plain.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.eval().infer(x), grouped.eval().infer(x), rtol=0, atol=1e-5)


def test_a_layer_that_there_is_not_cannot_be_grouped():
    package = build_text("lstm", vocab_size=9, classes=2, dims=TextDims(4, 4, 4, heads=1, blocks=1))
    with pytest.raises(ConfigError, match="no layer 3 to group; wanted layers from 1 to 2"):
        group_layers(package, [2], [2, 3])
    assert not any(isinstance(module, Grouped) for module in package.modules()), "a refused package stays as it was"
