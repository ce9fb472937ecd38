"""The whole way of a network of another library: cut, trained, exported, loaded there, with the same numbers.

All networks are small and made here: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.vision_transformer import VisionTransformer

from pipeal import Pipeline
from pipeal.cli import export, text, vision
from pipeal.core.protocols import UP
from pipeal.core.tree import tensors
from pipeal.data import ImageSplit
from pipeal.data.images import toyimages
from pipeal.run.trained import Trained, load_trained
from tests.cli.running import run_command

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cheap_runs")]

STEPS, BATCH, TESTED = 30, 8, 24
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{n}" for n in range(8)), "good", "fine", "bad", "poor"]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
TEXTS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=len(WORDS), dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=12
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
    ),
}
FOLDERS = {**TEXTS, "vit": lambda: transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)}

THIN: Mapping[str, Callable[..., nn.Module]] = {
    "convnext_tiny": lambda **options: ConvNeXt(
        [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, 32, 2), CNBlockConfig(32, None, 1)],
        **options,
    ),
    "vit_b_16": lambda **options: VisionTransformer(
        patch_size=16, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=24, **options
    ),
}
"""Those of torchvision that take a minute as they are, with fewer channels and layers."""


def made(kind: str, folder: Path) -> str:
    """The name of a model; a folder is made, with a tokenizer where it is for texts."""
    if kind not in FOLDERS:
        return f"torchvision:{kind}"
    FOLDERS[kind]().save_pretrained(folder)
    if kind in TEXTS:
        own = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
        own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]"
        ).save_pretrained(folder)
    return f"hf:{folder}"


def coloured(size: int, seed: int) -> tuple[tuple[str, ...], ImageSplit, ImageSplit]:
    """Noise, more of it red, or green, or blue."""
    random = np.random.default_rng(seed)

    def split(count: int) -> ImageSplit:
        labels = random.integers(3, size=count)
        bright = np.eye(3)[labels][:, None, None, :] * 100
        return ImageSplit((random.uniform(0, 155, (count, size, size, 3)) + bright).astype(np.uint8), labels)

    return ("red", "green", "blue"), split(STEPS * BATCH), split(TESTED)


def trained(
    kind: str, form: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Tensor, Tensor]:
    """The folder of a run of 30 steps, and the mean losses of its first and last five, each ``(layers,)``."""
    reports, run = [], Pipeline.run

    def kept(*arguments: Any, **options: Any) -> Any:
        reports.append(run(*arguments, **options))
        return reports[-1]

    monkeypatch.setattr(Pipeline, "run", kept)
    common = [
        made(kind, folder / kind), f"--mode={form}", "--epochs=1", "--devices=cpu", "--set=engine.threads=1",
        "--set=train.precision=fp32", "--set=data.held_out=0", "--set=train.lr.warmup=2", "--set=train.lr.decay=none",
        "--set=model.y_hid=16", f"--out={folder / 'runs'}",
    ]  # fmt: skip
    if kind in TEXTS:
        samples = STEPS * BATCH + TESTED
        rows = [
            f"word{n % 8} {('bad poor', 'fine good')[n % 2]}{f' word{n % 5}' * (n % 3)},{('no', 'yes')[n % 2]}"
            for n in range(samples)
        ]
        texts = folder / "reviews.csv"
        texts.write_text("\n".join(["text,label", *rows]))
        own = [
            str(texts), "--set=train.lr.base=0.003", f"--set=data.test_share={TESTED / samples}",
            "--set=data.batching.kind=fixed", f"--set=data.batching.batch_size={BATCH}",
        ]  # fmt: skip
    else:
        monkeypatch.setattr("pipeal.data.images.toyimages.TOYIMAGES", replace(toyimages.TOYIMAGES, make=coloured))
        rate = 0.003 if kind == "vit" else 0.001
        own = [
            "toyimages", f"--set=train.lr.base={rate}", f"--set=data.batch_size={BATCH}",
            "--set=data.augmentation=none", "--set=model.x_hid=16", *([] if kind == "vit" else ["--size=32"]),
        ]  # fmt: skip
    code, _, err = run_command(text.command if kind in TEXTS else vision.command, capsys, *own, *common)
    assert code == 0, err
    (report,) = (one for one in reports if len(one.losses[0]) == STEPS)  # others count costs
    losses = torch.stack([rows.sum(1) for rows in report.losses])
    (path,) = (folder / "runs").iterdir()
    return path, losses[:, :5].mean(1), losses[:, -5:].mean(1)


def exported(run: Path, capsys: pytest.CaptureFixture[str], to: str) -> str:
    """What the command says that it left."""
    code, out, err = run_command(export.command, capsys, str(run), f"--to={to}")
    assert code == 0, err
    return out


def features(found: Trained, x: Tensor) -> list[list[Tensor]]:
    """What each layer's ``f`` gives, tensor by tensor."""
    gives, packet = [], x
    for layer in found.package:
        packet = layer.inference(packet, UP)
        gives.append(list(tensors(packet)))
    return gives


@pytest.mark.parametrize("form", ["al", "bp"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_model_of_transformers_goes_all_the_way(
    kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, last = trained(kind, form, tmp_path, capsys, monkeypatch)
    assert (last < first).all(), f"{first.tolist()} to {last.tolist()}"
    (tmp_path / kind).rename(tmp_path / "gone")
    assert ("go through bridges and h, which it does not have" in exported(run, capsys, "hf")) == (form == "al")
    exported(run, capsys, "safetensors")
    found = load_trained(run)
    library: Any = transformers
    auto = library.AutoModelForSequenceClassification if kind in TEXTS else library.AutoModelForImageClassification
    model = auto.from_pretrained(run / "model-hf").eval()
    x = found.inputs(3, found.longest)
    given = {"input_ids": x, "attention_mask": x.ne(0).long()} if kind in TEXTS else {"pixel_values": x}
    with torch.no_grad():
        answer = model(**given, output_hidden_states=True)
    if form == "bp":
        torch.testing.assert_close(answer.logits, found.package.infer(x))
        plain = auto.from_config(library.AutoConfig.from_pretrained(run / "hf")).eval()
        plain.load_state_dict(load_file(run / "model.safetensors"))
        torch.testing.assert_close(plain(**given).logits, found.package.infer(x))
        return
    *hidden, top = features(found, x)
    for number, tensors_of_one in enumerate(hidden):
        torch.testing.assert_close(tensors_of_one[0], answer.hidden_states[number])
    setattr(model, "score" if kind == "gpt2" else "classifier", nn.Identity())
    torch.testing.assert_close(model(**given).logits, top[0])
    exported(run, capsys, "torch-export")
    torch.testing.assert_close(torch.export.load(run / "model.pt2").module()(x), found.package.infer(x))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("regnet_y_400mf", "al"), ("convnext_tiny", "bp"), ("convnext_tiny", "al"),
        ("mobilenet_v3_small", "al"), ("vit_b_16", "bp"), ("vit_b_16", "al"),
    ],
)  # fmt: skip
def test_a_model_of_torchvision_goes_all_the_way(
    kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get_model = torchvision.models.get_model

    def maybe_thin(name: str, *, weights: None, **options: Any) -> nn.Module:
        return THIN[name](**options) if name in THIN else get_model(name, weights=weights, **options)

    monkeypatch.setattr(torchvision.models, "get_model", maybe_thin)
    run, first, last = trained(kind, form, tmp_path, capsys, monkeypatch)
    assert (last < first).all(), f"{first.tolist()} to {last.tolist()}"
    assert len(first) == (4 if form == "al" else 1)
    said, found = exported(run, capsys, "safetensors"), load_trained(run)
    options = {"image_size": 32} if kind == "vit_b_16" else {}
    model = torchvision.models.get_model(kind, weights=None, num_classes=3, **options).eval()
    weights, x = load_file(run / "model.safetensors"), found.inputs(3, None)
    if form == "bp":
        model.load_state_dict(weights)
        torch.testing.assert_close(model(x), found.package.infer(x))
        assert "bridges" not in said
        return
    assert "answers go through bridges and h" in said
    own = {name.split(".", 2)[2]: tensor for name, tensor in weights.items() if name.startswith("f.")}
    missing, superfluous = model.load_state_dict(own, strict=False)
    head = next(name for name, part in reversed([*model.named_modules()]) if isinstance(part, nn.Linear))
    assert sorted(missing) == [f"{head}.bias", f"{head}.weight"]
    assert not superfluous
    model.set_submodule(head, nn.Identity())
    torch.testing.assert_close(model(x), features(found, x)[-1][0])
    if kind == "mobilenet_v3_small":
        exported(run, capsys, "torch-export")
        torch.testing.assert_close(torch.export.load(run / "model.pt2").module()(x), found.package.infer(x))
