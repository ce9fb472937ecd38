"""PredSim: its losses by hand, and what of its layers is as in the paper."""

from __future__ import annotations

from math import log, sqrt
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.materialize import materialize
from pipeal.methods.greedy import Greedy
from pipeal.methods.predsim import FromZero, PredSim, Similarity, Spread, cells, make_layers
from pipeal.models import Resnet, Transformer
from tests.methods.test_greedy import TEXT, VISION

Rows = list[list[float]]

IMAGES = torch.randn(4, 5, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 2, 1])


def similarities(rows: Rows) -> Rows:
    """Cosines of centred vectors, as the paper has them."""
    centred = [[value - mean(row) for value in row] for row in rows]
    lengths = [sqrt(sum(value * value for value in row)) for row in centred]
    return [
        [
            sum(a * b for a, b in zip(one, other, strict=True)) / (lengths[i] * lengths[j])
            for j, other in enumerate(centred)
        ]
        for i, one in enumerate(centred)
    ]


def similarity_by_hand(rows: Rows, labels: list[int], classes: int) -> float:
    found = similarities(rows)
    wanted = similarities([[float(label == number) for number in range(classes)] for label in labels])
    count = len(rows)
    return sum((found[i][j] - wanted[i][j]) ** 2 for i in range(count) for j in range(count)) / count**2


def cross_entropy_by_hand(logits: Rows, labels: list[int]) -> float:
    def told(row: list[float], label: int) -> float:
        return log(sum(2.718281828459045**value for value in row)) - row[label]

    return mean(told(row, label) for row, label in zip(logits, labels, strict=True))


def test_images_are_compared_by_the_spread_of_convolved_channels() -> None:
    convolved = nn.Conv2d(5, 5, 3, padding=1, bias=False)
    found = Similarity(nn.Sequential(convolved, Spread()), classes=3)(IMAGES, LABELS)
    spreads = [[stdev(channel.flatten().tolist()) for channel in image] for image in convolved(IMAGES)]
    assert found.item() == pytest.approx(similarity_by_hand(spreads, LABELS.tolist(), 3), abs=1e-5)


@pytest.mark.parametrize("shape", [(4, 3, 4, 4), (4, 5, 1, 4)])
def test_images_with_few_channels_or_one_row_are_compared_whole(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape)
    found = Similarity(Spread(), classes=3)(images, LABELS)
    whole = [image.flatten().tolist() for image in images]
    assert found.item() == pytest.approx(similarity_by_hand(whole, LABELS.tolist(), 3), abs=1e-5)


def test_places_of_a_text_are_compared_with_each_other_alone() -> None:
    vectors, y = torch.randn(2, 3, 4), torch.tensor([[0, 1, 0], [1, 1, 2]])
    found = Similarity(nn.Identity(), classes=3)(vectors, y)
    texts = [similarity_by_hand(vectors[text].tolist(), y[text].tolist(), 3) for text in range(2)]
    assert found.item() == pytest.approx(mean(texts), abs=1e-5)


def made(beta: float) -> PredSim:
    torch.manual_seed(0)
    f = nn.Conv2d(5, 6, 3, padding=1)
    head = nn.Sequential(nn.Flatten(), nn.Linear(96, 3))
    similar = Similarity(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), Spread()), 3)
    return PredSim(f, head, similar, beta=beta, lr=0.5, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("beta", [0.99, 0.3])
def test_its_losses_are_weighed_and_reported_as_they_are(beta: float) -> None:
    layer, x = made(beta), IMAGES.clone().requires_grad_()
    out, after = layer(x, LABELS)
    assert after is LABELS
    assert not out.requires_grad
    answered, similarity = layer.loss() or ()
    logits = layer.head(layer.f(IMAGES))
    spreads = [[stdev(c.flatten().tolist()) for c in image] for image in layer.similar.map[0](layer.f(IMAGES))]  # type: ignore[index,union-attr]
    assert similarity.item() == pytest.approx(similarity_by_hand(spreads, LABELS.tolist(), 3), abs=1e-5)
    assert answered.item() == pytest.approx(cross_entropy_by_hand(logits.tolist(), LABELS.tolist()), abs=1e-5)
    total = beta * published(layer, IMAGES) + (1 - beta) * F.cross_entropy(logits, LABELS)
    wanted = torch.autograd.grad(total, list(layer.parameters()))
    layer.backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(wanted), rtol=1e-4, atol=1e-6)


def published(layer: PredSim, x: Tensor) -> Tensor:
    """The similarity loss in the words of the paper, for its gradient."""
    rows = layer.similar.map[0](layer.f(x)).flatten(2).std(2)  # type: ignore[index,operator,union-attr]
    found, wanted = (_cosines(vectors) for vectors in (rows, F.one_hot(LABELS, 3).float()))
    return F.mse_loss(found, wanted)


def _cosines(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(1, keepdim=True)
    return F.cosine_similarity(centred.unsqueeze(1), centred.unsqueeze(0), dim=2)


def test_a_network_gets_the_published_heads_and_a_plain_last_part() -> None:
    *hidden, last = make_layers(Resnet.network(5, dims=VISION), 1e-3, None, decoder=64)
    assert isinstance(last, Greedy)
    assert [type(layer) for layer in hidden] == [PredSim] * 4
    for layer in hidden:
        *_, answer = layer.head  # type: ignore[misc]
        assert isinstance(answer, FromZero)
        assert answer.in_features <= 64
        assert not answer.weight.any()
        assert set(layer.blocks()) == {"f", "b", "p"}


def test_each_part_is_made_when_it_is_asked_for() -> None:
    layers = make_layers(Transformer.network(50, 4, dims=TEXT), 1e-3, None)
    torch.manual_seed(0)
    next(layers)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    next(make_layers(Transformer.network(50, 4, dims=TEXT), 1e-3, None))
    assert torch.equal(torch.get_rng_state(), drawn)
    next(layers)
    assert not torch.equal(torch.get_rng_state(), drawn)


def test_cells_are_the_published_ones() -> None:
    """As the code of the paper resolves them for VGG8b on images of 32 × 32, with 2048 and 4096 numbers."""
    found = [cells(channels, side, side, 2048) for channels, side in ((128, 32), (256, 32), (256, 16), (512, 8))]
    assert found == [(4, 4), (2, 4), (2, 4), (2, 2)]
    assert cells(4096, 2, 2, 1) == (1, 1)
    assert cells(8, 7, 5, 60) == (2, 3)


def test_a_classifier_of_the_meta_device_starts_at_zero_too() -> None:
    with torch.device("meta"):
        layer = FromZero(3, 2)
    materialize(layer, seed=0, number=0)
    assert not layer.weight.any()
    assert layer.bias.any()
