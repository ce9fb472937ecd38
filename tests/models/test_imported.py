"""Models of other libraries by name. All are small, and made here: nothing is downloaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeal import ALPackage, ConfigError, DataError, Pipeline
from pipeal.core.names import TEXT
from pipeal.methods.bp_parts import bp_parts
from pipeal.models import TextDims, imported, model_layers
from pipeal.models.hf_folder import text_limits
from pipeal.models.imported import Imported, head_of

transformers = pytest.importorskip("transformers")

CLASSES, VOCABULARY = 3, 40
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
TEXTS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=20, **SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=20
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=0
    ),
    "roberta": lambda: transformers.RobertaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=21, pad_token_id=0, **SIZES
    ),
}


def vit() -> Any:
    return transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)


def texts(rows: int = 6, longest: int = 9, padding: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(rows)
    tokens = torch.randint(1, VOCABULARY, (rows, longest + padding), generator=random)
    lengths = torch.randint(1, longest + 1, (rows, 1), generator=random)
    return tokens.masked_fill(torch.arange(longest + padding) >= lengths, 0)


def learns(
    network: Imported, x: torch.Tensor, method: str = "al", *, steps: int = 30, lr: float = 3e-3, to: float = 0.8
) -> ALPackage:
    """Trains it on one batch, and asks that the losses fall."""
    torch.manual_seed(0)
    package = ALPackage(network.layers(method, code=16, lr=lr))
    y = torch.arange(len(x)) % CLASSES
    with Pipeline(package, ["cpu"], "sequential", threads=1) as pipe:
        losses = torch.stack([rows.mean(1) for rows in pipe.run([(x, y)] * steps).losses])  # by layer
        assert losses[:, -3:].mean() < to * losses[:, :3].mean()
        assert pipe.predict(x).shape == (len(x), CLASSES)
    return package


@pytest.mark.parametrize("kind", TEXTS)
def test_the_parts_of_a_folder_of_transformers_are_its_network(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asked another host"))
    TEXTS[kind]().save_pretrained(tmp_path)
    network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0)
    whole = network.network()
    pieces = [piece.eval() for piece in network.pieces(whole, network.sample())]
    assert len(pieces) == 4, "what comes before the blocks, and three blocks"
    whole.eval()
    with torch.no_grad():
        for x in (texts(), texts(2, 3), texts(5, 7, padding=4), texts(1, 1)):  # not of the sample's size
            wanted, found = whole(x), x
            for piece in pieces:
                found = piece(found)
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(one, marks=pytest.mark.slow) for one in ("distilbert", "gpt2"))]
)
def test_a_folder_of_texts_learns_and_padding_changes_no_answer(kind: str, tmp_path: Path) -> None:
    TEXTS[kind]().save_pretrained(tmp_path)
    x = texts()
    package = learns(Imported(f"hf:{tmp_path}", CLASSES, pad_index=0, parts=3), x).eval()
    assert len(package) == 3
    longer = torch.nn.functional.pad(x, (0, 5))
    for exit_at in (1, 3):
        torch.testing.assert_close(package.infer(longer, exit_at), package.infer(x, exit_at))


def test_a_token_that_pads_is_a_word_where_others_follow(tmp_path: Path) -> None:
    """GPT-2 pads with its end of a text, which a text may have, too."""
    TEXTS["gpt2"]().save_pretrained(tmp_path)
    whole = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0).network()
    assert whole.words(torch.tensor([[0, 3, 0, 4, 0, 0], [0, 0, 0, 0, 0, 0]])).tolist() == [  # type: ignore[operator]
        [1, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]


def test_a_text_of_a_model_without_positions_may_have_any_length(tmp_path: Path) -> None:
    """Symptom: a sample of a negative length. Cause: XLNet's most positions are -1: there is no most."""
    config = transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=8, n_layer=1, n_head=2, d_inner=8)
    config.save_pretrained(str(tmp_path))
    assert text_limits(f"hf:{tmp_path}").positions is None
    assert Imported(f"hf:{tmp_path}", CLASSES, pad_index=5).sample().shape == (4, 8)


@pytest.mark.slow
def test_a_vision_transformer_of_a_folder_learns(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    learns(Imported(f"hf:{tmp_path}", CLASSES, size=16), torch.randn(6, 3, 16, 16))
    with pytest.raises(ConfigError, match=r"hf:.*: it does not take images of 32 pixels: .*match"):
        next(Imported(f"hf:{tmp_path}", CLASSES, size=32).layers("al", code=16))


@pytest.mark.parametrize("method", ["greedy", "predsim"])
def test_other_methods_train_it_without_its_head(method: str, tmp_path: Path) -> None:
    TEXTS["bert"]().save_pretrained(tmp_path)
    network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0, parts=2)
    assert head_of(network.network(), CLASSES) == "model.classifier"
    package = learns(network, texts(), method)
    assert not [name for name, _ in package.named_parameters() if "classifier.weight" in name]


@pytest.mark.parametrize("order", [("al", "bp"), ("bp", "al"), ("bp",)])
def test_a_network_is_cut_alike_whatever_was_cut_before(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: BP's checkpoint of a comparison could not be read again, and AL after BP had a part without weights.

    Cause: where to cut was counted with the head for BP, without it for others, and kept for both.
    """
    monkeypatch.setattr(imported, "_BY_COST", {})
    network = Imported("torchvision:mobilenet_v3_small", 10, size=32, parts=6)
    weights = {}
    for method in order:
        layers = list(network.layers(method, code=4))
        parts = layers[0].model if method == "bp" else [layer.enc.f for layer in layers]  # type: ignore[union-attr]
        weights[method] = [sum(weight.numel() for weight in part.parameters()) for part in parts]  # type: ignore[operator, union-attr]
    without_head = [1208, 80280, 200880, 294096, 350544, 590848]
    head = 1024 * 10 + 10
    assert weights["bp"] == [*without_head[:-1], without_head[-1] + head]
    assert weights.get("al", without_head) == without_head


def test_a_network_has_as_many_parts_as_it_can_be_cut_into(tmp_path: Path) -> None:
    """ALBERT has its one block called several times. It was cut into four between its tables of words and of texts."""
    config = transformers.AlbertConfig(vocab_size=VOCABULARY, max_position_embeddings=20, embedding_size=8, **SIZES)
    config.save_pretrained(tmp_path)
    assert len(learns(Imported(f"hf:{tmp_path}", CLASSES, 0), texts())) == 3
    with pytest.raises(ConfigError, match=r"model.parts is 4, but there are only 3 parts"):
        next(Imported(f"hf:{tmp_path}", CLASSES, 0, parts=4).layers("al", code=16))


def test_what_a_user_asked_for_is_named_where_a_network_cannot_be_cut() -> None:
    for name, method, parts, refused in (
        ("squeezenet1_1", "bp", 500, "model.parts is 500, but only "),
        ("alexnet", "bp", 2, r"images of 32 pixels: .*; another data.size \(--size\) may do"),
        ("mobilenet_v3_small", "infopro", 4, "no images where one of its parts ends, .*; cut it into fewer parts, or "),
    ):
        with pytest.raises(ConfigError, match=f"torchvision:{name}: .*{refused}"):
            next(Imported(f"torchvision:{name}", 10, size=32, parts=parts).layers(method, code=4))


def test_a_last_batch_of_one_image_is_learnt_from(tmp_path: Path) -> None:
    """Symptom: a run ended after its first epoch. Cause: PyTorch's batch norm refuses one value per channel, which
    is what deep layers see of one image."""
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic")
    config.save_pretrained(str(tmp_path))
    layers = list(Imported(f"hf:{tmp_path}", CLASSES, size=8).layers("al", code=4))
    x, y = torch.randn(1, 3, 8, 8), torch.tensor([1])
    ALPackage(layers)(x, y)
    assert all(loss.isfinite() for layer in layers for loss in layer.loss() or ())
    saved = transformers.AutoModelForImageClassification.from_config(config).state_dict()
    assert Imported(f"hf:{tmp_path}", 2, size=8).network().model.state_dict().keys() == saved.keys()


def test_backpropagation_has_its_own_head_and_a_row_of_blocks(tmp_path: Path) -> None:
    TEXTS["bert"]().save_pretrained(tmp_path)
    package = learns(Imported(f"hf:{tmp_path}", CLASSES, pad_index=0), texts(), "bp")
    assert [name for name, _ in package.named_parameters() if name.endswith("classifier.weight")]
    assert len(bp_parts(list(package))) == 4


def test_a_checkpoint_begins_with_its_weights_and_a_seed_with_its_own(tmp_path: Path) -> None:
    config = TEXTS["bert"]()
    config.save_pretrained(tmp_path)
    network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0)

    def first(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return network.network().get_parameter("model.bert.encoder.layer.1.output.dense.weight").detach()

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    trained = transformers.BertModel(config)
    trained.save_pretrained(tmp_path)
    assert torch.equal(first(0), trained.encoder.layer[1].output.dense.weight)


def test_layers_that_are_elsewhere_are_on_the_meta_device(tmp_path: Path) -> None:
    TEXTS["bert"]().save_pretrained(tmp_path)
    network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0, parts=2)
    torch.manual_seed(0)
    here = list(network.layers("al", code=16))
    torch.manual_seed(0)
    made = network.layers("al", code=16)
    with torch.device("meta"):
        first = next(made)
    second = next(made)
    assert all(tensor.is_meta for tensor in first.state_dict().values())  # type: ignore[attr-defined]
    held = {id(weight) for group in first.enc_opt.param_groups for weight in group["params"]}  # type: ignore[attr-defined]
    assert held <= {id(weight) for weight in first.parameters()}, "a run is taken up by layers without numbers"  # type: ignore[attr-defined]
    for name, tensor in second.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, here[1].state_dict()[name])  # type: ignore[attr-defined]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[Exception], match: str, network: Imported) -> None:
        with pytest.raises(error, match=match) as found:
            next(network.layers("al", code=16))
        assert "\n" not in str(found.value)

    refused(ConfigError, "is no folder; expected", Imported(f"hf:{tmp_path}/none", CLASSES, pad_index=0))
    refused(ConfigError, "has no config.json; expected", Imported(f"hf:{tmp_path}", CLASSES, pad_index=0))
    refused(ConfigError, "did you mean 'resnet18'", Imported("torchvision:resnet_18", CLASSES))
    refused(ConfigError, "torchvision:vit_b_16 for images of 24 pixels", Imported("torchvision:vit_b_16", 3, size=24))
    TEXTS["bert"]().save_pretrained(tmp_path)
    here = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0)
    refused(ConfigError, "parts is 9; expected 1 to 4", Imported(here.name, CLASSES, pad_index=0, parts=9))
    refused(ConfigError, "no classifier of images of the model type 'bert'", Imported(here.name, CLASSES))
    (tmp_path / "pytorch_model.bin").touch()
    refused(DataError, "pytorch_model.bin, which is not read", here)
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(DataError, "its weights are of another model", here)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none-such"}))
    refused(ConfigError, "transformers cannot read its config.json", here)


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_no_kernels_are_fetched_because_a_configuration_names_them(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asked another host"))
    TEXTS["bert"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for named in ("kernels-community/flash-attn3", "flash_attention_2", {"": "other/kernel"}):
        path.write_text(json.dumps({**plain, key: named}))
        network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0).network()
        assert network.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert any(f"{key} 'flash_attention_2' of its config.json is not taken" in line for line in said)
    path.write_text(json.dumps({**plain, key: "eager"}))
    Imported(f"hf:{tmp_path}", CLASSES, pad_index=0).network()
    path.write_text(json.dumps({**plain, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="has a quantization_config; expected a model of plain numbers"):
        next(Imported(f"hf:{tmp_path}", CLASSES, pad_index=0).layers("al", code=16))


def test_a_network_that_cannot_be_cut_says_where_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TEXTS["bert"]().save_pretrained(tmp_path)
    encoder = transformers.models.bert.modeling_bert.BertEncoder
    forward = encoder.forward

    def branching(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.sum() > 0:
            hidden_states = hidden_states * 2
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(encoder, "forward", branching)
    with pytest.raises(ConfigError, match=r"hf:.* cannot be followed between the cuts, at test_imported.py:\d+:"):
        next(Imported(f"hf:{tmp_path}", CLASSES, pad_index=0).layers("al", code=16))


def test_weights_begin_any_form_of_a_network(tmp_path: Path) -> None:
    dims = TextDims(embedding=8, hidden=6, code=4, heads=2, parts=2)
    path = str(tmp_path / "weights.safetensors")

    def layers(method: str, seed: int, **options: Any) -> ALPackage:
        torch.manual_seed(seed)
        return ALPackage(model_layers(TEXT, "transformer", method, VOCABULARY, CLASSES, dims=dims, **options))

    trained = layers("bp", 0)[0].model.state_dict()  # type: ignore[union-attr, operator]
    save_file(trained, path)
    whole = layers("bp", 1, weights=path)[0].model.state_dict()  # type: ignore[union-attr, operator]
    assert all(torch.equal(whole[name], tensor) for name, tensor in trained.items())
    for method in ("al", "greedy"):
        package = layers(method, 1, weights=path)
        found = [tensor for name, tensor in package.state_dict().items() if ".f." in name]
        assert len(found) > 20
        assert all(
            torch.equal(tensor, wanted)
            for tensor, wanted in zip(found, list(trained.values())[: len(found)], strict=True)
        )
    save_file(
        {name: tensor for name, tensor in trained.items() if name != "1.norm.weight"} | {"x": torch.ones(1)}, path
    )
    with pytest.raises(ConfigError, match=r"model.weights: .*weights.safetensors: weights (lack|have) 1 "):
        layers("al", 1, weights=path)
    (tmp_path / "weights.safetensors").write_text("no weights")
    with pytest.raises(DataError, match=r"expected a \.safetensors file"):
        layers("al", 1, weights=path)


def test_weights_of_another_library_go_by_its_names(tmp_path: Path) -> None:
    TEXTS["bert"]().save_pretrained(tmp_path)
    path = str(tmp_path / "other.weights")
    network = Imported(f"hf:{tmp_path}", CLASSES, pad_index=0, weights=path)
    torch.manual_seed(3)
    trained = Imported(network.name, CLASSES + 4, pad_index=0).network().model.state_dict()  # type: ignore[union-attr]
    save_file(trained, path)
    found = network.network().model.state_dict()  # type: ignore[union-attr, operator]
    assert {name for name, tensor in found.items() if not torch.equal(tensor, trained[name])} == {
        "classifier.weight",
        "classifier.bias",
    }
    left = load_file(path)
    del left["bert.pooler.dense.bias"]
    save_file(left, path)
    with pytest.raises(ConfigError, match=r"other.weights: weights lack 1 .*'bert.pooler.dense.bias'"):
        network.network()
