"""Laws of the vision models: the published sizes, gradients that stay home, names that mean what they meant."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeal.core.draws import may_draw
from pipeal.core.errors import ConfigError
from pipeal.core.names import VISION
from pipeal.methods.al import ALPackage
from pipeal.methods.al.place_codes import OnwardCodes
from pipeal.models import VGG, VGGAL, VISION_MODELS, Resnet, ResnetAL, VisionDims, build_vision
from pipeal.models.convolution import SubsampledConv2d
from pipeal.models.vision import IMAGE_LABELS

SMALL = VisionDims(size=16, hidden=10, code=8, width=0.05)
EVERY_MODEL = pytest.mark.parametrize("name", VISION_MODELS)
BOTH_MODES = pytest.mark.parametrize("mode", ["al", "bp"])


pytestmark = pytest.mark.usefixtures("one_thread")


def small(name: str, mode: str = "al") -> ALPackage:
    torch.manual_seed(0)
    return build_vision(name, mode, classes=4, dims=SMALL)  # type: ignore[arg-type]


def convolutions(module: nn.Module) -> list[tuple[int, int]]:
    """Input and output channels of the 3 × 3 convolutions, in order."""
    found = [part for part in module.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3)]
    return [(part.in_channels, part.out_channels) for part in found]


@pytest.mark.parametrize(
    ("al", "bp", "layers", "channels"),
    [
        (VGGAL, VGG, 4, [128, 256, 256, 512, 512, 512]),
        (ResnetAL, Resnet, 5, [64, *[64] * 4, *[128] * 4, *[256] * 4, *[512] * 4]),
    ],
)
def test_the_published_layers_and_widths(al: type, bp: type, layers: int, channels: list[int]) -> None:
    with torch.device("meta"):
        package, network = al(classes=200), bp(classes=200)
    assert len(package) == layers
    assert len(network) == layers + 1
    pairs = list(zip([3, *channels[:-1]], channels, strict=True))
    for form in (network, nn.Sequential(*(layer.enc.f for layer in package))):
        assert convolutions(form) == pairs
    for number, layer in enumerate(package):
        bridge = [part.out_features for part in layer.enc.b.modules() if isinstance(part, nn.Linear)]
        assert bridge == [1000, 700]
        assert (layer.ae.g[0].in_features, layer.ae.g[0].out_features) == (700 if number else 200, 700)


@pytest.mark.parametrize("bridge", ["pooled", "flat"])
@pytest.mark.parametrize("size", [32, 64])
@EVERY_MODEL
def test_images_of_32_and_64_pixels(name: str, size: int, bridge: str) -> None:
    dims = VisionDims(size=size, hidden=6, code=5, width=0.05, bridges=bridge)  # type: ignore[arg-type]
    x = torch.randn(2, 3, size, size)
    for mode in ("al", "bp"):
        package = build_vision(name, mode, classes=7, dims=dims)  # type: ignore[arg-type]
        package(x, torch.tensor([0, 6]))
        package.backward()
        package.update()
        for exit_at in range(1, len(package) + 1):
            assert package.infer(x, exit_at).shape == (2, 7)


@pytest.mark.parametrize("bridges", ["pooled", "lookahead", "mlp"])
@EVERY_MODEL
def test_codes_ask_which_class_was_meant(name: str, bridges: str) -> None:
    """The loss of each part is the cross entropy of the answer of its exit, and the last one needs no more weights than
    a linear classifier where the code is narrow."""
    torch.manual_seed(0)
    dims = VisionDims(size=16, hidden=9, code=4, width=0.1, labels="codes", bridges=bridges)  # type: ignore[arg-type]
    package = build_vision(name, classes=7, dims=dims)
    x, y = torch.randn(6, 3, 16, 16), torch.randint(7, (6,))
    features, target, answers = x, y, []
    for number, layer in enumerate(package):
        answers.append(layer.enc.b(layer.enc.f(features)))
        for below in reversed(list(package)[: number + 1]):
            answers[-1] = below.ae.h(answers[-1])
        features, target = layer(features, target)
    for layer, answer in zip(package, answers, strict=True):
        torch.testing.assert_close(layer.loss()[0], nn.functional.cross_entropy(answer, y))
        assert answer.shape == (6, 7)
    network = build_vision("resnet", "bp", classes=7, dims=dims)
    if name == "resnet":
        assert package.effective_parameters() <= network.effective_parameters()


@pytest.mark.parametrize("labels", IMAGE_LABELS)
@EVERY_MODEL
def test_further_maps_of_bridges_learn_and_are_no_part_of_the_answer(name: str, labels: str) -> None:
    torch.manual_seed(0)
    plain = build_vision(name, classes=4, dims=replace(SMALL, labels=labels))  # type: ignore[arg-type]
    package = build_vision(name, classes=4, dims=replace(SMALL, labels=labels, bridges="mlp"))  # type: ignore[arg-type]
    assert package.effective_parameters() == plain.effective_parameters()
    for layer in list(package)[:-1]:
        assert [part.out_features for part in layer.enc.b.modules() if isinstance(part, nn.Linear)] == [
            *[10] * 3,
            4 if labels == "one-hot" else 8,
        ]
    before = [[weight.detach().clone() for weight in layer.enc.b.parameters()] for layer in package]
    x, y = torch.randn(6, 3, 16, 16), torch.randint(4, (6,))
    for batch in (6, 1):
        package(x[:batch], y[:batch])
        package.backward()
        package.update()
    for layer, old in zip(package, before, strict=True):
        assert not any(torch.equal(*pair) for pair in zip(layer.enc.b.parameters(), old, strict=True))


@pytest.mark.parametrize("bridges", ["pooled", "mlp"])
@EVERY_MODEL
def test_one_hot_codes_stay_as_they_are(name: str, bridges: str) -> None:
    torch.manual_seed(0)
    dims = replace(SMALL, labels="one-hot", bridges=bridges)  # type: ignore[arg-type]
    package = build_vision(name, classes=4, dims=dims)
    for _ in range(5):
        package(torch.randn(6, 3, 16, 16), torch.randint(4, (6,)))
        package.backward()
        package.update()
    for number, layer in enumerate(package):
        assert torch.equal(layer.ae.h.weight, torch.eye(4) * (1 if number else 128))


def test_codes_that_are_handed_on_are_as_wide_as_they_come() -> None:
    for options in ({"start": "one-hot"}, {"same": True}):
        with pytest.raises(ConfigError, match="code is 4, and codes are handed on; expected 6"):
            OnwardCodes(6, 4, **options)  # type: ignore[arg-type]


@EVERY_MODEL
@given(seed=st.integers(0, 100))
@settings(max_examples=5, deadline=None)
def test_no_gradient_leaves_a_layer(name: str, seed: int) -> None:
    package = small(name)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(3, 3, 16, 16, generator=generator), torch.randint(4, (3,), generator=generator)
    for at, layer in enumerate(package):
        x, y = layer(x, y)
        assert not x.requires_grad
        assert not y.requires_grad
        layer.backward()
        touched = [
            number for number, other in enumerate(package) if any(p.grad is not None for p in other.parameters())
        ]
        assert touched == [at]
        layer.zero_grad()


@EVERY_MODEL
@BOTH_MODES
def test_nothing_is_drawn_in_a_forward(name: str, mode: str) -> None:
    assert not may_draw(small(name, mode))


@EVERY_MODEL
def test_the_inverse_codes_decode_from_the_start(name: str) -> None:
    """The published label sides give every class nearly the same code, and their decoders nothing to tell apart."""
    classes = torch.arange(200)
    told_apart = {}
    for labels in ("inverse", "published"):
        torch.manual_seed(0)
        dims = VisionDims(size=16, width=0.05, labels=labels)  # type: ignore[arg-type]
        package = build_vision(name, classes=200, dims=dims)
        code = classes
        for layer in package:
            _, code = layer.ae(code)
        for layer in reversed(list(package)):
            code = layer.inference(code, "h")
        told_apart[labels] = (code.argmax(1) == classes).float().mean().item()
    assert told_apart["inverse"] == 1
    assert told_apart["published"] < 0.1


def test_published_spellings() -> None:
    assert VISION.model("ResnetAL") == ("resnet", "al")
    assert VISION.model("Resnet") == ("resnet", "bp")
    assert VISION.model("VGGAL") == ("vgg", "al")
    assert VISION.model("VGG") == ("vgg", "bp")
    for other in ("RESNET", "ResNet", "resnet", "rEsnet"):
        assert VISION.model(other) == ("resnet", None)
    for other in ("ResNetAL", "RESNETAL", "resnetal"):
        assert VISION.model(other) == ("resnet", "al")
    assert len(build_vision("Resnet", classes=3, dims=SMALL)) == 1
    assert len(build_vision("resnet", classes=3, dims=SMALL)) == 5
    with pytest.raises(ConfigError, match="did you mean 'resnet'"):
        VISION.model("resnt")
    with pytest.raises(ConfigError, match="is the AL form, but the mode is 'bp'"):
        build_vision("VGGAL", "bp", classes=3)
    with pytest.raises(ConfigError, match="the BP form has no sides"):
        build_vision("VGG", classes=3, dims=SMALL, lr={"enc": 1.0, "ae": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 8}, "size is 8; expected a multiple of 16"),
        ({"size": 40}, "size is 40; expected a multiple of 16"),
        ({"code": 0}, "code is 0; expected a whole number"),
        ({"width": 0.0}, "width is 0.0; expected a number above 0"),
        ({"bridges": "pool"}, "bridges 'pool'"),
        ({"labels": "sigmoid"}, "labels 'sigmoid'"),
        ({"labels": "codes", "bridges": "flat"}, "labels are codes, which do not go with bridges that are flat"),
        ({"activation": "rely"}, "activation 'rely'"),
    ],
)
def test_sizes_that_do_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VisionDims(**change)  # type: ignore[arg-type]


@given(batch=st.integers(1, 5), channels=st.integers(1, 20), side=st.integers(1, 9), stride=st.integers(2, 3))
@settings(max_examples=25, deadline=None)
def test_a_subsampled_convolution_is_one_with_a_stride(batch: int, channels: int, side: int, stride: int) -> None:
    torch.manual_seed(batch)
    subsampled = SubsampledConv2d(channels, 7, stride).double()
    plain = nn.Conv2d(channels, 7, 1, stride, bias=False).double()
    plain.load_state_dict(subsampled.state_dict())
    x = torch.randn(batch, channels, side, side, dtype=torch.float64)
    found, wanted = [], []
    for form, results in ((subsampled, found), (plain, wanted)):
        given_x = x.clone().requires_grad_()
        y = form(given_x)
        y.square().sum().backward()
        results += [y, given_x.grad, form.weight.grad]
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_shortcuts_of_few_channels_leave_memory_whole() -> None:
    """In another process: with the strided convolution, oneDNN writes where it may not, and the process dies."""
    rounds = """
import torch
from pipeal.models.convolution import ConvBN
torch.set_num_threads(2)
for channels in (2, 3, 8, 15):
    shortcut = ConvBN(channels, 2 * channels, None, stride=2, kernel=1).to(memory_format=torch.channels_last)
    for _ in range(60):
        x = torch.randn(7, channels, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
        shortcut(x).sum().backward()
"""
    ended = subprocess.run([sys.executable, "-c", rounds], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
