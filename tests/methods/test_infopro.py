"""Parts that rebuild the image: their losses and gradients by hand, and where the image travels; the rest is every
method's."""

from __future__ import annotations

import warnings
from itertools import product
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import ALPackage, ConfigError, Pipeline
from pipeal.engine.runner.split import SplitWarning
from pipeal.methods.greedy import Greedy
from pipeal.methods.infopro import Decoder, InfoPro
from pipeal.models import VisionDims, build_language, build_text, build_vision
from tests.engine.test_out_of_memory import Tight
from tests.methods.test_greedy import batches, built

pytestmark = pytest.mark.usefixtures("one_thread")


def resampled(plane: list[list[float]], side: int) -> list[list[float]]:
    """Bilinear, with the corners on the corners."""
    before = len(plane)

    def at(row: float, column: float) -> float:
        top, left = min(int(row), before - 2), min(int(column), before - 2)
        down, right = row - top, column - left
        return (
            plane[top][left] * (1 - down) * (1 - right)
            + plane[top][left + 1] * (1 - down) * right
            + plane[top + 1][left] * down * (1 - right)
            + plane[top + 1][left + 1] * down * right
        )

    step = (before - 1) / (side - 1)
    return [[at(row * step, column * step) for column in range(side)] for row in range(side)]


def convolved(planes: list[list[list[float]]], convolution: Any) -> list[list[list[float]]]:
    """3 × 3, with zeros around."""
    weight, bias, side = convolution.weight.tolist(), convolution.bias.tolist(), len(planes[0])

    def at(out: int, row: int, column: int) -> float:
        return bias[out] + sum(
            weight[out][c][i + 1][j + 1] * plane[row + i][column + j]
            for c, plane in enumerate(planes)
            for i, j in product((-1, 0, 1), repeat=2)
            if 0 <= row + i < side and 0 <= column + j < side
        )

    return [[[at(out, row, column) for column in range(side)] for row in range(side)] for out in range(len(weight))]


def rebuilt(features: Tensor, image: Tensor, decoder: Decoder) -> float:
    """The reconstruction loss: as published, binary cross entropy of every value of every pixel."""
    first, norm, _, second = decoder.convolutions
    side = image.shape[-1]
    inner = [convolved([resampled(plane, side) for plane in sample], first) for sample in features.tolist()]
    for channel in range(len(inner[0])):
        values = [value for sample in inner for row in sample[channel] for value in row]
        mean = sum(values) / len(values)
        spread = sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-5)
        weight, bias = norm.weight[channel].item(), norm.bias[channel].item()
        for sample in inner:
            sample[channel] = [
                [max(0.0, (value - mean) / spread * weight + bias) for value in row] for row in sample[channel]
            ]
    losses = []
    for sample, wanted in zip(inner, image.tolist(), strict=True):
        for plane, pixels in zip(convolved(sample, second), wanted, strict=True):
            for row, line in zip(plane, pixels, strict=True):
                for logit, value in zip(row, line, strict=True):
                    pixel, said = min(1.0, max(0.0, 0.5 + 0.25 * value)), 1 / (1 + exp(-logit))
                    losses.append(-pixel * log(said) - (1 - pixel) * log(1 - said))
    return sum(losses) / len(losses)


def layer_of(lambda_1: float = 5.0, lambda_2: float = 0.5, **options: Any) -> tuple[InfoPro, Tensor, Tensor]:
    torch.manual_seed(0)
    f, decoder = nn.Conv2d(2, 3, 2, 2), Decoder(3, 4, 2)
    nn.init.uniform_(decoder.convolutions[1].weight, 0.5, 1.5)
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    options = {"is_first": True, "hands_on": True} | options
    layer = InfoPro(f, head, decoder, lambda_1=lambda_1, lambda_2=lambda_2, **options).double()
    return layer, 2 * torch.randn(3, 2, 4, 4, dtype=torch.double), torch.tensor([0, 2, 1])


def test_its_losses_are_the_published_ones() -> None:
    layer, x, y = layer_of()
    out, (labels, image) = layer(x, y)
    entropy, reconstruction = layer.loss() or ()
    logits = layer.head(layer.f(x))
    by_hand = -torch.stack([row.log_softmax(0)[wanted] for row, wanted in zip(logits, y, strict=True)]).mean()
    assert entropy.item() == pytest.approx(by_hand.item(), abs=1e-5)
    assert reconstruction.item() == pytest.approx(rebuilt(layer.f(x), x, layer.decoder), abs=1e-5)
    assert torch.equal(out, layer.f(x))
    assert not out.requires_grad
    assert labels is y
    assert torch.equal(image, x)
    above, _, _ = layer_of(is_first=False, hands_on=False)
    assert above(x, (y, image))[1] is y
    assert all(map(torch.equal, above.loss() or (), (entropy, reconstruction)))


@pytest.mark.parametrize(("lambda_1", "lambda_2"), [(5.0, 0.05), (0.3, 0.0), (0.0, 2.0), (1.0, 1.0)])
def test_its_block_learns_by_the_weighted_sum_and_head_and_decoder_by_their_own(
    lambda_1: float, lambda_2: float
) -> None:
    layer, x, y = layer_of(lambda_1, lambda_2)
    x.requires_grad_()
    out, after = layer(x, y)
    layer.backward()
    found = [weights.grad for weights in layer.parameters()]
    features = layer.f(x.detach())
    entropy = nn.functional.cross_entropy(layer.head(features), y)
    reconstruction = layer.decoder(features, x.detach())
    weighted = lambda_1 * reconstruction + lambda_2 * entropy
    wanted = torch.autograd.grad(weighted, list(layer.f.parameters()), retain_graph=True)
    wanted += torch.autograd.grad(entropy, list(layer.head.parameters()), retain_graph=True)
    wanted += torch.autograd.grad(reconstruction, list(layer.decoder.parameters()))
    torch.testing.assert_close(found, list(wanted), atol=1e-7, rtol=1e-5)
    assert not out.requires_grad
    assert not after[1].requires_grad  # so that nothing of the next part's decoder comes back


def test_weights_change_linearly_from_the_first_hidden_part_to_the_last() -> None:
    options = {"lambda_1": 6.0, "lambda_2": 0.0, "lambda_1_last": 0.0, "lambda_2_last": 3.0}
    torch.manual_seed(0)
    dims = VisionDims(size=16, width=0.05)
    *hidden, last = build_vision("resnet", "infopro", classes=5, dims=dims, method_options=options)
    assert [(layer.lambda_1, layer.lambda_2) for layer in hidden] == [(6, 0), (4, 1), (2, 2), (0, 3)]
    assert type(last) is Greedy
    for parts in (1, 2):
        few = VisionDims(size=16, width=0.05, parts=parts)
        *hidden, last = build_vision("resnet", "infopro", classes=5, dims=few, method_options=options)
        assert [(layer.lambda_1, layer.lambda_2) for layer in hidden] == [(6, 0)] * (parts - 1)
        with Pipeline([*hidden, last], "cpu", "sequential", threads=1) as pipe:
            pipe.run(batches("resnet", 1))


@pytest.mark.parametrize("name", ["vgg", "resnet"])
def test_the_image_travels_as_far_as_it_is_rebuilt_and_no_further(name: str) -> None:
    package = built(name, "infopro")
    ((x, y),) = batches(name, 1)
    target: Any = y
    features = x
    for number, layer in enumerate(package):
        features, target = layer(features, target)
        if number < len(package) - 2:
            assert target[0] is y
            assert torch.equal(target[1], x)
        else:
            assert target is y


def test_heads_and_decoders_have_the_published_shapes() -> None:
    """Twice the channels on half the side, up to the network's widest; 128 inside; decoders have 12 channels."""
    package: Any = build_vision("resnet", "infopro", classes=5, dims=VisionDims(size=32, width=0.25))
    *hidden, _ = package
    convolutions = [layer.head[0] for layer in hidden]
    assert [(one.in_channels, one.out_channels, one.stride) for one in convolutions] == [
        (16, 32, (2, 2)), (16, 32, (2, 2)), (32, 64, (2, 2)), (64, 128, (2, 2)),
    ]  # fmt: skip
    assert all([m.out_features for m in layer.head if isinstance(m, nn.Linear)] == [128, 5] for layer in hidden)
    assert all(
        [(m.in_channels, m.out_channels) for m in layer.decoder.convolutions if isinstance(m, nn.Conv2d)]
        == [(layer.head[0].in_channels, 12), (12, 3)]
        for layer in hidden
    )
    vgg: Any = build_vision("vgg", "infopro", classes=5, dims=VisionDims(size=32, width=0.25))
    assert [layer.head[0].stride for layer in list(vgg)[:-1]] == [(2, 2), (1, 1), (1, 1)]
    wide: Any = build_vision(
        "vgg", "infopro", classes=5, dims=VisionDims(size=32, width=0.25), method_options={"width": 0.5}
    )
    assert [wide[0].head[0].out_channels, wide[0].head[5].out_features] == [64, 64]
    assert wide[0].decoder.convolutions[0].out_channels == 6


def test_what_serves_training_alone_is_counted_so_and_leaves_the_exported_model() -> None:
    package = built("vgg", "infopro").eval()
    decoders = sum(weights.numel() for layer in list(package)[:-1] for weights in layer.decoder.parameters())
    heads = sum(weights.numel() for layer in list(package)[:-1] for weights in layer.head.parameters())
    assert package.affiliated_parameters() == decoders + heads
    found = sum(weights.numel() for weights in package.to_bp().parameters())
    assert found == package.effective_parameters()


@pytest.mark.parametrize("where", "FB")
def test_a_batch_learnt_from_in_parts_teaches_what_it_does_whole(where: str) -> None:
    """Both losses are means over the samples; the image is cut along with the features and the labels."""
    left = []
    for most in (9, 2):
        layers = [layer_of(optimizer=torch.optim.SGD, lr=0.1)[0]]
        layers.append(layer_of(is_first=False, hands_on=False, optimizer=torch.optim.SGD, lr=0.1)[0])
        for layer in layers:
            layer.decoder.convolutions[1] = nn.Identity()  # batch norm sees each part's statistics
            layer.f = Tight(nn.Conv2d(2, 3, 2, 2) if layer.is_first else nn.Conv2d(3, 3, 1), most, where).double()
            torch.manual_seed(1)
            nn.init.normal_(layer.f.block.weight)
            nn.init.zeros_(layer.f.block.bias)
            layer.opt = torch.optim.SGD(layer.parameters(), 0.1)
            layer.opt.param_groups[0]["initial_lr"] = 0.1
        _, x, y = layer_of()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitWarning)
            with Pipeline(layers, "cpu", "sequential", threads=1, on_oom="split") as pipe:
                report = pipe.run([(x, y)] * 2)
        assert report.splits == ([0, 0] if most == 9 else [2, 2])
        left.append([*report.losses, *(weights for layer in layers for weights in layer.parameters())])
    torch.testing.assert_close(*left)


def test_what_has_no_image_is_refused() -> None:
    for build, kind in (
        (lambda: build_text("lstm", "infopro", vocab_size=9, classes=3), "is no model of images alone"),
        (lambda: build_language("charlm", "infopro", characters=9), "answers at each place"),
    ):
        before = torch.get_rng_state()
        with pytest.raises(ConfigError, match=rf"InfoPro rebuilds the input image .*, but this network {kind}"):
            build()
        assert torch.equal(before, torch.get_rng_state())  # before anything was drawn
    with pytest.raises(ConfigError, match="width is 0"):
        build_vision("vgg", "infopro", classes=2, method_options={"width": 0.0})


def test_the_image_is_rebuilt_in_all_of_its_channels() -> None:
    """Symptom: a first part whose first convolution reads one channel alone was taken for an image of one."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.all = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.all(x) + self.one(x[:, :1])

    images, y = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    net = [Aside(), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)]
    package = ALPackage.from_bp(net, images, 3, method="infopro")
    package(images, y)
    package.backward()
