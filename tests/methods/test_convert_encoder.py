"""Encoders of the Hugging Face kind, by their three parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeal import ALPackage, ConfigError, Encoder, Pipeline
from pipeal.engine import SCHEDULES

WIDTH = 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, WIDTH), nn.Embedding(20, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1]))))


class Block(nn.Module):
    """As BERT's: an additive mask, and a tuple that begins with the features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(features).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        weights = (scores if mask is None else scores + mask[:, 0]).softmax(-1)
        return self.norm(features + self.out(weights @ v)), weights


class First(nn.Module):
    """A head: the first word's features."""

    def forward(self, features: Tensor) -> Tensor:
        return features[:, 0]


def encoder(blocks: int = 4, **options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(Embedding(), [Block() for _ in range(blocks)], **options)


def texts(rows: int = 4, longest: int = 7, padding: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 30, (rows, longest + padding), generator=random)
    lengths = torch.randint(1, longest + 1, (rows, 1), generator=random)
    return ids, torch.arange(longest + padding) < lengths


@pytest.mark.parametrize(("per_layer", "sizes"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (3, [3, 1]), (9, [4])])
def test_blocks_share_layers(per_layer: int, sizes: list[int]) -> None:
    package = ALPackage.from_bp(encoder(per_layer=per_layer), texts(), 3, code=6)
    found = [len(layer.enc.f.blocks) for layer in package[1:]]  # type: ignore[union-attr, arg-type]
    assert found == sizes


@pytest.mark.parametrize("head", [None, First()])
def test_the_layers_together_are_the_encoder(head: nn.Module | None) -> None:
    parts = encoder(head=head, per_layer=2)
    ids, mask = texts()
    x: Any = (ids, mask.long())  # 0 and 1, as tokenizers give it
    with torch.no_grad():
        package = ALPackage.from_bp(parts, x, 3, code=6).eval()
        wanted = parts.embedding.eval()(ids)
        for block in parts.blocks:
            wanted, _ = block(wanted, (1.0 - mask.float())[:, None, None] * torch.finfo(torch.float32).min)
        for layer in package:
            x = layer.inference(x, "f")
    if head is None:
        found, travelled = x
        assert torch.equal(travelled, mask)
    else:
        found, wanted = x, wanted[:, 0]
    torch.testing.assert_close(found, wanted)


@given(padding=st.integers(0, 6), per_layer=st.integers(1, 4), exit_at=st.integers(1, 2))
def test_padding_never_changes_an_answer(padding: int, per_layer: int, exit_at: int) -> None:
    package = ALPackage.from_bp(encoder(per_layer=per_layer), texts(), 3, code=6).eval()
    ids, mask = texts()
    more = torch.cat([ids, torch.randint(1, 30, (4, padding))], 1)
    wanted = package.infer((ids, mask), exit_at)
    found = package.infer((more, torch.cat([mask, torch.zeros(4, padding, dtype=torch.bool)], 1)), exit_at)
    torch.testing.assert_close(found, wanted)


def test_ids_alone_and_masks_of_other_kinds() -> None:
    ids, mask = texts()
    alone = ALPackage.from_bp(encoder(), ids, 3, code=6).eval()
    whole = torch.ones_like(mask)
    torch.testing.assert_close(alone.infer(ids), alone.infer((ids, whole)))

    def square(mask: Tensor, features: Tensor) -> Tensor:
        return torch.where(mask, 0.0, -1e9)[:, None, None, :].expand(-1, -1, mask.shape[1], -1)

    own = ALPackage.from_bp(encoder(mask_as=square), (ids, mask), 3, code=6).eval()
    torch.manual_seed(0)
    copied = ALPackage.from_bp(encoder(), (ids, mask), 3, code=6).eval()
    copied.load_state_dict(own.state_dict())
    torch.testing.assert_close(own.infer((ids, mask)), copied.infer((ids, mask)))


def test_every_schedule_trains_it_alike() -> None:
    package = ALPackage.from_bp(encoder(per_layer=2), texts(), 3, code=6, lr=1e-2)
    batches = [(texts(rows), torch.arange(rows) % 3) for rows in (5, 4, 2)]
    found = []
    for schedule in SCHEDULES:
        mine = copy.deepcopy(package)
        with Pipeline(mine, ["cpu"] * 3, schedule, seed=3, threads=1) as pipe:
            pipe.run(batches)
        found.append(torch.cat([parameter.flatten() for parameter in mine.parameters()]).tolist())
    assert found[0] != torch.cat([parameter.flatten() for parameter in package.parameters()]).tolist()
    assert all(weights == found[0] for weights in found)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="the encoder has no blocks"):
        encoder(blocks=0)
    with pytest.raises(ConfigError, match="per_layer is 0"):
        encoder(per_layer=0)
    with pytest.raises(ConfigError, match="an Encoder is cut by its per_layer; leave split out"):
        ALPackage.from_bp(encoder(), texts(), 3, split=["blocks.1"])
    shared = Block()
    with pytest.raises(ConfigError, match="layers 1 and 2 would share a parameter"):
        ALPackage.from_bp(Encoder(Embedding(), [shared, shared]), texts(), 3)


@pytest.mark.slow
def test_a_bert_from_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=20,
    )  # fmt: skip
    bert = transformers.BertModel(config).eval()
    ids, mask = texts()
    with torch.no_grad():
        wanted = bert(ids, attention_mask=mask.long())
        whole = Encoder(bert.embeddings, bert.encoder.layer, per_layer=2)
        package = ALPackage.from_bp(whole, (ids, mask), 3, code=12, lr=3e-3)
        x: Any = (ids, mask)
        for layer in package:
            x = layer.inference(x, "f")
        torch.testing.assert_close(x[0], wanted.last_hidden_state)
        pooled = ALPackage.from_bp(Encoder(bert.embeddings, bert.encoder.layer, bert.pooler), (ids, mask), 3)
        x = (ids, mask)
        for layer in pooled:
            x = layer.inference(x, "f")
        torch.testing.assert_close(x, wanted.pooler_output)
    with Pipeline(package.train(), ["cpu"] * 3, threads=1) as pipe:
        losses = pipe.run([((ids, mask), torch.tensor([0, 1, 2, 0]))] * 40).losses
        assert all(rows[-5:].mean() < 0.7 * rows[:5].mean() for rows in losses)
    plain = package.to_bp()
    exported = torch.export.export(plain, ((ids, mask),)).module()
    torch.testing.assert_close(exported((ids, mask)), package.eval().infer((ids, mask)))
