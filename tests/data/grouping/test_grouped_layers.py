"""AL layers that run grouped: the same training as ungrouped, and the same under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import ALPackage, Pipeline
from pipeal.core.draws import may_draw
from pipeal.core.errors import ConfigError, DataError
from pipeal.data.grouping import Annotated, AnnotatedModule, DataCollection, Grouped, LengthThresholdGrouper, UniGrouper
from pipeal.engine import SCHEDULES
from pipeal.models import TextDims, build_text
from pipeal.models.features import TokenEmbedding
from pipeal.models.lstm import LSTMBlock
from pipeal.models.transformer import TransformerBlock

WORDS, CLASSES, THRESHOLDS = 40, 3, [2, 5]
Batches = list[tuple[Tensor, Tensor]]


def batches(count: int = 4) -> Batches:
    """Lengths differ within and between batches; one batch is padded beyond its longest text, one text is empty."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        x = torch.randint(2, WORDS, (7, 6 + number), generator=draw)
        lengths = torch.randint(1, 6 + number, (7, 1), generator=draw)
        lengths[number] = 0
        x[torch.arange(x.shape[1]) >= lengths] = 0
        made.append((x, torch.randint(CLASSES, (7,), generator=draw)))
    return made


def package(model: str, *, grouped: bool, dropout: float = 0.0) -> ALPackage:
    torch.manual_seed(0)
    dims = TextDims(embedding=8, hidden=6, code=5, heads=2, blocks=2, dropout=dropout)
    built = build_text(model, "al", vocab_size=WORDS, classes=CLASSES, dims=dims, lr=1e-2)  # type: ignore[arg-type]
    assert isinstance(built, ALPackage)
    if grouped:
        first, *others = built
        first.enc.f = Grouped(first.enc.f, THRESHOLDS, pad_index=0)
        for layer in others:
            layer.enc.f = Grouped(layer.enc.f, THRESHOLDS)
    return built


def trained(layers: ALPackage, schedule: str, stages: int = 1) -> list[Tensor]:
    """Weights, losses and predictions."""
    data = batches()
    with Pipeline(layers, ["cpu"] * stages, schedule, seed=3, threads=1) as pipe:  # type: ignore[arg-type]
        losses = pipe.run(data).losses
        predictions = [pipe.predict(x) for x, _ in data]
    return [*layers.state_dict().values(), *losses, *predictions]


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_every_schedule_leaves_what_sequential_leaves(model: str) -> None:
    """Law 1 holds with dropout, whose masks a grouped layer draws group by group."""
    wanted = trained(package(model, grouped=True, dropout=0.3), "sequential")
    for schedule in SCHEDULES:
        for stages in (1, 3):
            found = trained(package(model, grouped=True, dropout=0.3), schedule, stages)
            assert all(map(torch.equal, found, wanted)), (schedule, stages)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_a_grouped_layer_has_the_gradients_and_answers_of_the_ungrouped(model: str) -> None:
    plain, grouped = package(model, grouped=False), package(model, grouped=True)
    data = batches()
    for x, y in data:
        inputs: tuple[Any, Any] = (x, y)
        for layer, other in zip(plain, grouped, strict=True):
            after = layer(*inputs)
            same = other(*inputs)
            mask = after[0][1]
            assert torch.equal(same[0][1], mask)
            assert same[0][0].shape == after[0][0].shape
            torch.testing.assert_close(same[0][0][mask], after[0][0][mask], rtol=1e-5, atol=1e-5)
            layer.backward()
            other.backward()
            for one, two in zip(layer.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(two.grad, one.grad, rtol=1e-5, atol=1e-5)
            for each in (layer, other):
                each.zero_grad()
            inputs = after
        torch.testing.assert_close(grouped.infer(x), plain.infer(x), rtol=1e-5, atol=1e-5)


BLOCKS = {"lstm": lambda: LSTMBlock(6, 4), "transformer": lambda: TransformerBlock(6, 8, 2)}


def features(lengths: list[int], beyond: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    size = max(1, *lengths) + beyond
    mask = torch.arange(size) < torch.tensor(lengths).clamp(min=1).unsqueeze(1)  # an empty text is one padding token
    return torch.randn(len(lengths), size, 6, generator=torch.Generator().manual_seed(0)).to(dtype), mask


@pytest.mark.parametrize("block", BLOCKS)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    beyond=st.integers(0, 2),
    thresholds=st.sets(st.integers(1, 8), min_size=1, max_size=3).map(sorted),
)
def test_a_grouped_block_is_the_block(block: str, lengths: list[int], beyond: int, thresholds: list[int]) -> None:
    """All lengths above the last threshold, one sample, one group, columns that no text reaches."""
    torch.manual_seed(0)
    module = BLOCKS[block]()
    gradients = []
    for each in (module, Grouped(module, thresholds)):
        x, mask = features(lengths, beyond)
        out, out_mask = each((x.requires_grad_(), mask))
        assert torch.equal(out_mask, mask)
        real = torch.where(mask.unsqueeze(-1), out, 0)
        module.zero_grad()
        (real * torch.linspace(-1, 1, real.numel()).view(real.shape)).sum().backward()
        gradients.append([real, x.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_grouped_block_in_other_types_and_without_gradients(block: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = BLOCKS[block]().to(dtype)
    x, mask = features([6, 3, 1, 1], 1, dtype)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            wanted, found = (each((x, mask))[0] for each in (module, Grouped(module, THRESHOLDS)))
        assert found.dtype == dtype
        # Products of fewer rows may add in another order, and halves then differ by a last place: of numbers up to 1
        # some 1e-3 in fp16, and 4e-3 in bf16 (seen on a CPU that emulates it).
        near = {torch.float16: {"rtol": 1e-3, "atol": 1e-3}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 4e-3}}
        torch.testing.assert_close(found[mask], wanted[mask], **near.get(dtype, {}))
    with torch.autocast("cpu", torch.bfloat16):
        plain = module.float()
        wanted, found = (each((x.float(), mask))[0] for each in (plain, Grouped(plain, THRESHOLDS)))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found[mask], wanted[mask], rtol=2e-2, atol=2e-2)


class ReadsTokens(nn.Module):
    """An embedding, then a block: what it gives for a word depends on which other tokens it takes for words."""

    def __init__(self, pad_index: int) -> None:
        super().__init__()
        self.embedding, self.block = TokenEmbedding(WORDS, 6, pad_index=pad_index), BLOCKS["transformer"]()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(self.embedding(tokens))


@pytest.mark.parametrize("pad_index", [0, 5])
def test_cut_tokens_are_padded_with_the_token_that_pads(pad_index: int) -> None:
    """Symptom: with a padding token other than 0, answers of texts shorter than their group's longest were wrong.

    Cause: groups were padded with zeros, and token 0 was a word. Now they are padded with ``pad_index``.
    """
    torch.manual_seed(0)
    module = ReadsTokens(pad_index)
    tokens = torch.randint(6, WORDS, (5, 7))
    tokens[torch.arange(7) >= torch.tensor([[6], [3], [5], [0], [1]])] = pad_index
    wanted, mask = module(tokens)
    written_out = Annotated(module, "(b, l_t)", ("(b, l_t, m_d)", "(b, l_t)"))
    for each in (module, written_out):
        found, found_mask = Grouped(each, THRESHOLDS, pad_index=pad_index)(tokens)
        assert torch.equal(found_mask, mask)
        torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-5, atol=1e-5)


class Both(AnnotatedModule):
    """Takes tokens together with their mask, and gives what it got, for the test to look at."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, mask = x
        assert torch.equal(mask, tokens != 1)
        return x

    def get_input_annot(self) -> Any:
        return ("(b, l_t)", "(b, l_t)")

    def get_output_annot(self) -> Any:
        return ("(b, l_t)", "(b, l_t)")


def test_the_padding_token_is_for_tokens_only() -> None:
    """A mask beside them, in which token 1 would read as True, is padded with False."""
    tokens = torch.tensor([[4, 4, 4], [4, 1, 1], [4, 4, 1]])
    Grouped(Both(), [1], pad_index=1)((tokens, tokens != 1))


def test_a_batch_without_columns_stays_one() -> None:
    x, mask = torch.zeros(2, 0, 6), torch.zeros(2, 0, dtype=torch.bool)
    found, found_mask = Grouped(BLOCKS["transformer"](), [1])((x, mask))
    assert (found.shape, found_mask.shape) == (x.shape, mask.shape)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_checkpoints_move_between_grouped_and_not(model: str) -> None:
    """Symptom: a model trained grouped could not be loaded without grouping, its keys having ``module.module.``."""
    plain, grouped = package(model, grouped=False), package(model, grouped=True)
    with torch.no_grad():
        for parameter in grouped.parameters():
            parameter.add_(0.01)
    assert list(grouped.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(grouped.state_dict())
    x, _ = batches()[0]
    torch.testing.assert_close(plain.infer(x), grouped.infer(x), rtol=1e-5, atol=1e-5)
    again = package(model, grouped=True)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again.infer(x), grouped.infer(x))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Grouped(nn.Linear(1, 1), [1]).load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1), "no": x})


class UsersBlock(AnnotatedModule):
    """A user's own grouped forward block: written out, with dropout by function, declaring nothing."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return nn.functional.dropout(self.inside(x)[0], 0.3, self.training), x[1]

    def get_input_annot(self) -> Any:
        return ("(b, l_t, m_d)", "(b, l_t)")

    def get_output_annot(self) -> Any:
        return ("(b, l_t, m_e)", "(b, l_t)")


class ByHand(nn.Module):
    """What the documents show, in the place of ``f``."""

    def __init__(self, block: AnnotatedModule) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: tuple[Tensor, Tensor]) -> Any:
        lengths = x[1].sum(1).tolist()
        batch = DataCollection(("(B, L_t, M_d)", "(B, L_t)"), data_groups=[x], length_info={"t": [lengths]})
        batch.regroup(LengthThresholdGrouper("t", THRESHOLDS))
        out = batch.apply(self.block)
        out.regroup(UniGrouper(), padded_to={"t": x[1].shape[1]})
        return out.data_groups[0].value


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: ByHand(UsersBlock(f)), lambda f: Grouped(UsersBlock(f), THRESHOLDS)])
def test_a_users_annotated_module_in_the_place_of_f_is_exact(wrap: Any) -> None:
    def build() -> ALPackage:
        built = package("lstm", grouped=False, dropout=0.2)
        for layer in list(built)[1:]:
            layer.enc.f = wrap(layer.enc.f)
            assert may_draw(layer)
        return built

    wanted = trained(build(), "sequential")
    for schedule in SCHEDULES:
        assert all(map(torch.equal, trained(build(), schedule, 3), wanted)), schedule


def test_only_what_is_inside_says_whether_a_grouped_block_draws() -> None:
    assert not may_draw(package("transformer", grouped=True, dropout=0.3))  # pipeal's own dropout, keyed
    assert not may_draw(Grouped(nn.Identity(), [1]))
    assert may_draw(Grouped(nn.Dropout(0.1), [1]))
    assert may_draw(Grouped(UsersBlock(nn.Identity()), [1]))


def test_an_input_without_ends_is_named() -> None:
    features = torch.ones(2, 3, 4)
    with pytest.raises(DataError, match=r"no bool mask \(B, L_word\)"):
        Grouped(nn.Identity(), [1])((features, torch.ones(2, 3)))
    with pytest.raises(DataError, match="no tuple but a Tensor"):
        Grouped(nn.Identity(), [1])(features)
    with pytest.raises(ConfigError, match="takes no lengths"):
        Grouped(Annotated(nn.Identity(), "(b, m_x)", "(b, m_x)"), [1])
    with pytest.raises(ConfigError, match="'words'"):
        Grouped(nn.Identity(), [1], by="words")
