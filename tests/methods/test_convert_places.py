"""A target for each place: what a user writes for language models, tagging and segmentation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from pipeal import AE, ALPackage, ConfigError, DataError, Encoder, Pipeline
from pipeal.core.tree import Tree
from pipeal.engine import SCHEDULES
from pipeal.methods.al.place_codes import Resample
from pipeal.methods.cutting.graph import cut_graph
from pipeal.models import generate_each

CLASSES, BLOCK = 11, 8


class Head(nn.Module):
    def __init__(self, width: int, size: int, dropout: float) -> None:
        super().__init__()
        self.k, self.q, self.v = (nn.Linear(width, size) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        _, length, _ = x.shape
        k, q = self.k(x), self.q(x)
        att = k @ q.transpose(-2, -1) / k.shape[-1] ** 0.5
        mask = torch.tril(torch.ones(length, length))
        att = F.softmax(att.masked_fill(mask == 0, float("-inf")), dim=-1)
        return self.dropout(att) @ self.v(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(width, width // heads, dropout) for _ in range(heads)])
        self.proj = nn.Linear(width // heads * heads, width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.layernorm1, self.layernorm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layernorm1(x)
        x = x + self.proj(torch.cat([head(x) for head in self.heads], -1))
        x = self.layernorm2(x)
        return x + self.net(x)


class Lesson(nn.Module):
    """The lesson's language model: its forward takes targets, without a default, and returns ``(logits, loss)``."""

    def __init__(self, blocks: int = 2, width: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token_emb, self.position_emb = nn.Embedding(CLASSES, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList([*(Block(width, 2, dropout) for _ in range(blocks)), nn.LayerNorm(width)])
        self.out = nn.Linear(width, CLASSES)

    def forward(self, idx: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows, length = idx.shape
        x = self.token_emb(idx) + self.position_emb(torch.arange(length))
        for block in self.blocks:
            x = block(x)
        logits = self.out(x)
        if target is None:
            return logits, None
        logits = logits.view(rows * length, -1)
        return logits.view(rows, length, -1), F.cross_entropy(logits, target.view(-1))


class WithDefault(Lesson):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(idx, targets)


class LogitsAlone(Lesson):
    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(idx, None)[0]


class MaskOutside(Lesson):
    """Makes its causal mask once, for all blocks, and flattens by the shape of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Masked(12) for _ in range(2)])

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        rows, length = idx.shape
        x = self.token_emb(idx) + self.position_emb(torch.arange(length, device=idx.device))
        mask = torch.tril(torch.ones(length, length)) == 0
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x.view(rows * length, -1)).view(rows, length, -1)


class Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


def texts(rows: int = 6, length: int = BLOCK, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What comes next is what came, and one more."""
    ids = torch.randint(CLASSES, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, (ids + 1) % CLASSES


def trained(package: ALPackage, batches: list[tuple[Tree, Tensor]], stages: int = 2, **options: Any) -> Any:
    with Pipeline(package, ["cpu"] * stages, threads=1, **options) as pipe:
        return pipe.run(batches).losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("model", [Lesson, WithDefault, LogitsAlone, MaskOutside])
def test_the_lessons_language_model_trains_generates_and_is_exported(model: Callable[[], nn.Module]) -> None:
    ids, targets = texts()
    package = ALPackage.from_bp(model(), ids, CLASSES, task="per-place", split=2, lr=3e-2)
    assert len(package) == 2
    again = copy.deepcopy(package)
    losses = trained(package, [(ids, targets)] * 12)
    assert all(rows[-3:, 0].mean() < 0.8 * rows[:3, 0].mean() for rows in losses)
    trained(again, [(ids, targets)] * 12, stages=1, schedule="sequential")
    assert equal(package, again)
    for exit_at in (1, 2):
        plain = package.to_bp(exit_at)
        written = list(generate_each(plain, torch.tensor([3]), length=5, block=BLOCK, temperature=0))
        text = [3]
        with torch.no_grad():
            for _ in written:
                text.append(int(package.eval().infer(torch.tensor([text]), exit_at)[0, -1].argmax()))
        assert [3, *written] == text
        with torch.no_grad():
            torch.testing.assert_close(plain(ids), package.eval().infer(ids, exit_at))
    assert plain(ids).shape == (6, BLOCK, CLASSES)
    assert "(B, 44)" in str(package.summary())
    if model in (Lesson, MaskOutside):
        exported = torch.export.export(plain, (ids,)).module()
        torch.testing.assert_close(exported(ids), plain(ids))


@pytest.mark.parametrize("model", [Lesson, LogitsAlone])
def test_a_pretrained_network_says_the_same_once_it_is_converted(model: Callable[[], nn.Module]) -> None:
    """The last bridge begins as what takes the network's own answers to codes."""
    whole = model().eval()
    ids, _ = texts()
    out = whole(ids, None)[0] if model is Lesson else whole(ids)
    package = ALPackage.from_bp(whole, ids, CLASSES, task="per-place", split=["blocks.1"]).eval()
    torch.testing.assert_close(package.infer(ids), out, atol=1e-4, rtol=1e-4)


class UNet(nn.Module):
    """Skips from each level of the way down to that of the way up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down1, self.down2, self.middle = level(1, width), level(width, 2 * width), level(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = level(4 * width, 2 * width), level(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        return self.out(self.join1(torch.cat([self.up1(x), first], 1)))


def level(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def pictures(rows: int = 4, side: int = 12) -> tuple[Tensor, Tensor]:
    """Bright, dark and between, and a border without labels."""
    coarse = torch.randn(rows, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    x = F.interpolate(coarse, (side, side), mode="bilinear")
    y = (x[:, 0] > 0.3).long() + (x[:, 0] > -0.3).long()
    y[:, 0] = 255
    return x, y


@pytest.mark.parametrize("split", [["middle"], ["down2", "middle", "up2", "up1"], 2, 3])
def test_a_u_net_trains_on_two_stages(split: Any) -> None:
    x, y = pictures()
    package = ALPackage.from_bp(UNet(), x, 3, task="per-place", split=split, ignore_index=255, lr=1e-2)
    again = copy.deepcopy(package)
    losses = trained(package, [(x, y)] * 20)
    assert all(rows[-3:, 0].mean() < 0.9 * rows[:3, 0].mean() for rows in losses)
    trained(again, [(x, y)] * 20, schedule="sequential", stages=1)
    assert equal(package, again)
    package.eval()
    for exit_at in range(1, len(package) + 1):
        assert package.infer(x, exit_at).shape == (4, 3, 12, 12)
    larger = torch.randn(2, 1, 20, 16)
    assert package.infer(larger, 1).shape == package.infer(larger).shape == (2, 3, 20, 16)
    torch.testing.assert_close(torch.export.export(package.to_bp(), (x,)).module()(x), package.infer(x))


def test_no_schedule_changes_what_a_u_net_learns() -> None:
    x, y = pictures()
    package = ALPackage.from_bp(UNet(), x, 3, task="per-place", split=["down2", "middle", "up1"], ignore_index=255)
    found = []
    for schedule in SCHEDULES:
        for stages in (2, 4):
            mine = copy.deepcopy(package)
            trained(mine, [(x, y), (x[:3], y[:3]), (x[1:], y[1:])], stages, schedule=schedule)
            found.append(mine)
    assert all(equal(found[0], other) for other in found)
    assert not equal(found[0], package)


def test_gradients_stay_inside_a_layer() -> None:
    x, y = pictures()
    package = ALPackage.from_bp(UNet(), x, 3, task="per-place", split=["middle"], ignore_index=255)
    handed_on, codes = package[0](x, y)
    assert not any(tensor.requires_grad for tensor in handed_on)
    package[1](handed_on, codes)
    package[1].backward()
    assert all(parameter.grad is None for parameter in package[0].parameters())
    assert any(parameter.grad is not None for parameter in package[1].parameters())


class Tagger(nn.Module):
    """Convolves over words, and halves them on the way: features as ``(B, D, T)`` between, answers ``(B, T, C)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(CLASSES, 6)
        self.wide, self.halve, self.back = nn.Conv1d(6, 6, 3, padding=1), nn.Conv1d(6, 6, 2, 2), nn.Linear(6, 12)
        self.tags = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.relu(self.wide(self.words(ids).transpose(1, 2)))
        x = self.halve(x).transpose(1, 2)
        return self.tags(F.relu(self.back(x)).reshape(ids.shape[0], ids.shape[1], 6))


def test_a_tagger_with_fewer_places_inside() -> None:
    ids, _ = texts(8)
    tags = (ids[:, ::2] % 4).repeat_interleave(2, 1)
    tags[0, 4:] = -100
    package = ALPackage.from_bp(Tagger(), ids, 4, task="per-place", split=["halve", "back", "tags"], lr=1e-2)
    assert [any(isinstance(part, Resample) for part in layer.enc.b.modules()) for layer in package] == [
        False, True, False, False,
    ]  # fmt: skip
    losses = trained(package, [(ids, tags)] * 80)
    assert all(rows[-3:, 0].mean() < 0.8 * rows[:3, 0].mean() for rows in losses)
    answer = package.eval().infer(ids)
    assert answer.shape == (8, BLOCK, 4)
    assert (answer.argmax(-1) == tags)[tags >= 0].float().mean() > 0.8


def test_sequences_are_resampled_without_a_look_ahead() -> None:
    answers = torch.arange(3.0).view(1, 3, 1)
    assert Resample((3,), (6,))(answers).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    image = torch.arange(4.0).view(1, 2, 2, 1)
    assert Resample((2, 2), (4, 4))(image).shape == (1, 4, 4, 1)
    assert Resample((2, 2), (4, 4))(image.expand(1, 2, 2, 5)).unique().numel() > 4


def test_images_are_resampled_as_heads_of_segmentation_do() -> None:
    """Places are areas: those at the edges keep their answers, half an area further in they begin to mix."""
    image = torch.arange(4.0).view(1, 2, 2, 1)
    assert Resample((2, 2), (4, 4))(image)[0, 0, :, 0].tolist() == [0, 0.25, 0.75, 1]
    assert Resample((2, 2), (4, 4))(image)[0, :, 0, 0].tolist() == [0, 0.5, 1.5, 2]


@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_places_without_a_label_teach_nothing(ignored: int) -> None:
    """Whatever stands there as input's label, and whatever number says so."""
    ids, targets = texts()
    package = ALPackage.from_bp(
        LogitsAlone(), ids, CLASSES, task="per-place", split=["blocks.1"], ignore_index=ignored
    ).eval()  # without dropout
    kept = targets.clone()
    kept[:, 4:] = ignored
    package(ids, kept)
    found = package.losses()
    cut_off = ALPackage.from_bp(LogitsAlone(), ids, CLASSES, task="per-place", split=["blocks.1"]).eval()
    cut_off.load_state_dict(package.state_dict())
    labels = targets[:, :4].masked_fill(targets[:, :4] == ignored, -100)
    cut_off(ids[:, :4], labels)
    assert [loss for losses in found for loss in losses] == pytest.approx(
        [loss for losses in cut_off.losses() for loss in losses], rel=1e-4
    )


def test_labels_of_a_type_without_negative_numbers() -> None:
    """Symptom: an IndexError for pictures with uint8 labels, 255 where there is none. Cause: -100 was 156 in them."""
    x, targets = pictures()
    package = ALPackage.from_bp(UNet(), x, 3, task="per-place", split=["middle"], ignore_index=255).eval()
    targets[:, 0] = 255
    package(x, targets)
    found = package.losses()
    package(x, targets.to(torch.uint8))
    assert package.losses() == found


@pytest.mark.parametrize("ignored", [None, 255])
def test_padding_has_no_label_of_such_a_type_either(ignored: int | None) -> None:
    ids, targets = texts()
    mask = torch.arange(BLOCK) < torch.tensor([[8], [3], [5], [8], [1], [2]])
    whole = Encoder(nn.Embedding(CLASSES, 8), [Words(), Words()])
    package = ALPackage.from_bp(whole, (ids, mask), CLASSES, task="per-place", ignore_index=ignored)
    package((ids, mask), targets)
    found = package.losses()
    package((ids, mask), targets.to(torch.uint8))
    assert package.losses() == found


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.lift(x)


def test_padding_has_no_label_where_a_mask_says_so() -> None:
    torch.manual_seed(0)
    ids, targets = texts()
    mask = torch.arange(BLOCK) < torch.tensor([[8], [3], [5], [8], [1], [2]])
    whole = Encoder(nn.Embedding(CLASSES, 8), [Words(), Words()])
    package = ALPackage.from_bp(whole, (ids, mask), CLASSES, task="per-place")
    package((ids, mask), targets)
    found = package.losses()
    package((ids, mask), targets.masked_fill(~mask, -100))
    assert found == package.losses()
    package((ids, torch.ones_like(mask)), targets)
    assert found != package.losses()


class Takes(nn.Module):
    """Arguments by name, and an output of several fields, as ``transformers`` has them."""

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lift, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.pair = pair

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True) -> Any:
        assert not use_cache, "what is kept is mixed up between texts"
        x = self.embed(ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        logits = self.head(self.lift(x).relu())
        return (logits, None) if self.pair else {"loss": None, "logits": logits, "hidden_states": x}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("split", [None, ["lift"], 2])
def test_inputs_by_name_and_by_place(split: Any, pair: bool) -> None:
    ids, _ = texts()
    mask = (torch.arange(BLOCK) < 5).long().expand(6, -1)
    wanted = Takes(pair)(ids, mask, use_cache=False)
    wanted = wanted[0] if pair else wanted["logits"]
    for sample in ({"ids": ids, "attention_mask": mask}, (ids, mask)):
        whole: Any = Takes(pair) if split else [Takes(pair)]
        package = ALPackage.from_bp(whole, sample, 4, task="per-place", split=split).eval()
        torch.testing.assert_close(package.infer(sample), wanted)
        trained(package.train(), [(sample, ids % 4)] * 2, stages=len(package))
    alone = ALPackage.from_bp(Takes(pair) if split else [Takes(pair)], ids, 4, task="per-place", split=split)
    assert alone.infer(ids).shape == (6, BLOCK, 4)


def test_one_argument_may_be_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
            return self.b(self.a(pair[0]) + pair[1]) * scale

    sample = (torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    package = ALPackage.from_bp(Pair(), sample, 4, task="per-place", split=["b"])
    assert package.infer(sample).shape == (3, 5, 4)


class Places(nn.Module):
    """Square feature maps whose last dimension is the classes', or the one after the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


def test_where_the_classes_are() -> None:
    x = torch.randn(2, 3, 5, 7)
    first = ALPackage.from_bp([nn.Conv2d(3, 4, 1)], x, 4, task="per-place")
    last = ALPackage.from_bp([nn.Sequential(nn.Conv2d(3, 4, 1), Places())], x, 4, task="per-place")
    wide = ALPackage.from_bp([nn.Conv2d(3, 6, 1)], x, 4, task="per-place")  # features, and no answer yet
    assert first.infer(x).shape == wide.infer(x).shape == (2, 4, 5, 7)
    assert last.infer(x).shape == (2, 5, 7, 4)
    square = torch.randn(2, 3, 5, 4)
    with pytest.raises(ConfigError, match=r"which dimension is theirs\? pass class_dim=1 or class_dim=-1"):
        ALPackage.from_bp([nn.Conv2d(3, 4, 1)], square, 4, task="per-place")
    chosen = ALPackage.from_bp([nn.Conv2d(3, 4, 1)], square, 4, task="per-place", class_dim=1)
    assert chosen.infer(square).shape == (2, 4, 5, 4)


def test_a_pool_and_blocks_of_ones_own() -> None:
    class Patches(nn.Module):
        """An image as a row of patches."""

        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Conv2d(1, 8, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.cut(x).flatten(2).transpose(1, 2)

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.head(x.transpose(1, 2).unflatten(2, (3, 3))), scale_factor=4)

    x, y = pictures()
    with pytest.raises(ConfigError, match=r"layer 0 .*: no bridge per place for an output of .*pass pool=…"):
        ALPackage.from_bp([Patches(), Image()], x, 3, task="per-place")
    mine = nn.Sequential(nn.Conv2d(3, 10, 1), Places())
    package = ALPackage.from_bp(
        [Patches(), Image()], x, 3, task="per-place", ignore_index=255, code=10,
        pool={0: lambda features: features.transpose(1, 2).unflatten(2, (3, 3))}, blocks={1: {"b": mine}},
    )  # fmt: skip
    trained(package, [(x, y)] * 2)
    assert package[1].enc.b[-1] is mine
    assert package.infer(x, 1).shape == package.infer(x).shape == (4, 3, 12, 12)


def test_targets_that_do_not_fit_are_told() -> None:
    ids, targets = texts()
    package = ALPackage.from_bp(LogitsAlone(), ids, CLASSES, task="per-place", split=["blocks.1"])
    for wrong in (targets[:, 1:], targets[:, 0], F.one_hot(targets).float()):
        with pytest.raises(DataError, match="expected a class, as a whole number, for each place"):
            package(ids, wrong)
    with pytest.raises(DataError, match=rf"classes up to {CLASSES}; expected 0 to {CLASSES - 1}, and"):
        package(ids, targets.masked_fill(targets == 2, CLASSES))


class NeedsTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def forward(self, idx: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.b(self.a(idx))
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Fields(nn.Module):
    """Returns a dataclass or dict in whose only field is just what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 128)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.linear(x)}


class Packs(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None) -> Tensor:
        x = self.a(ids)
        return self.b(x if past_key_values is None else past_key_values.update(x))


class DecoderBlock(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None) -> Tensor:
        return x


IDS = texts()[0]
VECTORS = torch.randn(3, 6)
TEXTS = torch.randn(3, 5, 7)


@pytest.mark.parametrize(
    ("model", "sample", "options", "message"),
    [
        # a forward with a target: it was said to lack an argument
        (NeedsTarget(), IDS, {"split": ["b"]}, "NeedsTarget.forward takes 'target', which is None here, for AL"),
        ([NeedsTarget()], IDS, {}, "raises AttributeError: .*takes 'target', which is None.*have it leave"),
        # packed sequences: "expected the batch first", with the numbers of the packed rows
        ([nn.LSTM(7, 5, batch_first=True)], Packs()(TEXTS), {}, "the sample is a PackedSequence, which has no"),
        ([Packs(), nn.LSTM(7, 5)], TEXTS, {}, r"what layer 0 \('0'\) gives is a PackedSequence, .*; pass padded texts"),
        # several fields of the very shape: "gives (3, 128) float32; expected floats (3, 128)"
        (
            [nn.Linear(6, 6)],
            VECTORS,
            {"task": "classification", "blocks": {0: {"b": Fields()}}},
            r"gives a dict with last_hidden_state \(\(3, 128\) float32\), which is no tensor; expected fl",
        ),
        (
            [nn.Linear(6, 6)],
            VECTORS,
            {"task": "classification", "pool": Fields()},
            r"gives a dict with last_hidden_state \(\(3, 128\) float32\), which is no tensor; expected floats \(B, D\)",
        ),
        # a mask taken for past_key_values: "'Tensor' object has no attribute 'update'"
        (
            Decoder(),
            (IDS, IDS > 2),
            {"split": ["b"]},
            r"item 1 of the sample, \(6, 8\) bool, would be taken for past_key_values by Decoder.forward\(ids",
        ),
        (
            Encoder(nn.Embedding(CLASSES, 8), [DecoderBlock()]),
            (IDS, IDS > 2),
            {},
            "DecoderBlock.forward takes past_key_values as its second argument, where an Encoder gives the mask",
        ),
        # options
        (LogitsAlone(), IDS, {"split": 2, "labels": "published"}, "labels is 'published', which does nothing"),
        (LogitsAlone(), IDS, {"split": 2, "bridges": "flat"}, "bridges is 'flat', which does nothing"),
        ([nn.Linear(6, 6)], VECTORS, {"task": "classification", "class_dim": 1}, "class_dim is 1, which does nothing"),
        ([nn.Linear(6, 6)], VECTORS, {"task": "regression", "ignore_index": 0}, "ignore_index is 0, which"),
        (LogitsAlone(), IDS, {"split": 2, "class_dim": 2}, "class_dim is 2; expected 1, -1, or None"),
        (LogitsAlone(), IDS, {"split": 2, "ignore_index": "x"}, "ignore_index is 'x'; expected a whole number"),
        (LogitsAlone(), IDS, {"split": 99}, r"split is 99, but only \d+ submodules"),
        ([nn.Linear(6, 6)], VECTORS, {}, r"the model gives \(3, 6\) float32; expected an answer for each place"),
        (LogitsAlone(), IDS, {"split": 2, "blocks": {0: {"g": nn.Linear(11, 44)}}}, "layer 0 has one of 'g' and 'h'"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(model: Any, sample: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ALPackage.from_bp(model, sample, CLASSES, **{"task": "per-place", **options})
    assert "\n" not in str(raised.value)


def test_label_sides_of_ones_own() -> None:
    ids, targets = texts()
    g, h = nn.Linear(CLASSES, 9), nn.Linear(9, CLASSES)
    package = ALPackage.from_bp(
        LogitsAlone(), ids, CLASSES, task="per-place", split=["blocks.1"], blocks={0: {"g": g, "h": h}}
    )
    side = package[0].ae
    assert isinstance(side, AE)
    assert side.g is g
    assert side.h is h
    trained(package, [(ids, targets)] * 2)
    assert package.infer(ids).shape == (6, BLOCK, CLASSES)


BERT = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
GPT = {"vocab_size": 5, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "tie_word_embeddings": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config", "options", "split"),
    [
        ("BertForTokenClassification", "BertConfig", {**BERT, "num_labels": 5}, ["bert.encoder.layer.1"]),
        ("GPT2LMHeadModel", "GPT2Config", {**GPT, "bos_token_id": 0, "eos_token_id": 0}, 2),
    ],
)
def test_models_of_transformers(model: str, config: str, options: dict[str, Any], split: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sample, labels = masked_texts()
    torch.manual_seed(0)
    whole = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        wanted = whole(**sample).logits
    package = ALPackage.from_bp(whole, sample, 5, task="per-place", split=split, lr=3e-3).eval()
    with torch.no_grad():
        torch.testing.assert_close(package.infer(sample), wanted, atol=1e-4, rtol=1e-3)
        for exit_at in (1, 2):  # padding never changes an answer
            words = sample["attention_mask"].bool()
            found = package.infer(longer(sample), exit_at)[:, :7][words]
            torch.testing.assert_close(found, package.infer(sample, exit_at)[words], atol=1e-5, rtol=1e-4)
    again = copy.deepcopy(package)
    losses = trained(package.train(), [(sample, labels)] * 8)
    assert all(rows[-3:, 0].mean() < rows[:3, 0].mean() for rows in losses)
    trained(again.train(), [(sample, labels)] * 8, stages=1, schedule="sequential")
    assert equal(package, again)
    plain = package.to_bp()
    torch.testing.assert_close(torch.export.export(plain, (sample,)).module()(sample), plain(sample))


def test_bridges_of_a_classifier_average_over_words_alone() -> None:
    transformers = pytest.importorskip("transformers")
    sample, _ = masked_texts()
    whole = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    package = ALPackage.from_bp(whole, sample, 5, split=["bert.encoder.layer.1"], code=16).eval()
    for exit_at in (1, 2):
        torch.testing.assert_close(package.infer(longer(sample), exit_at), package.infer(sample, exit_at))


@torch.no_grad()
def shown(mask: Tensor) -> Tensor:
    return mask if mask.sum() > 0 else torch.ones_like(mask)


class ShowsByTable(nn.Module):
    """Its mask comes from a decorated function, which finds the one with the branch in a table, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * tabled(x > 0))


@torch.no_grad()
def tabled(mask: Tensor) -> Tensor:
    return {"shown": shown}["shown"](mask)


def test_a_decorated_function_with_a_branch_stays_whole() -> None:
    """transformers 5.24 decorates what makes its masks: the wrapper was taken for the function, and BERT refused."""
    model, x = ShowsByTable(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    pieces = [piece for _, piece in cut_graph(model, ["second"], x)]
    assert len(pieces) == 2
    torch.testing.assert_close(pieces[1](pieces[0](x)), model(x))


def masked_texts() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(5, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7) < torch.tensor([[7], [5], [3], [6]])).long()
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def longer(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: F.pad(value, (0, 3)) for name, value in sample.items()}
