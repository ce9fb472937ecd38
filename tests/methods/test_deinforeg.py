"""DeInfoReg: its terms by hand, what they count for, and its projectors."""

from __future__ import annotations

from math import sqrt
from statistics import mean, variance

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.methods.deinforeg import DeInfoReg, Terms, make_layers
from pipeal.methods.greedy import Greedy
from pipeal.methods.norm import BatchNorm
from pipeal.models import Resnet, Transformer
from tests.methods.test_greedy import TEXT, VISION
from tests.methods.test_predsim import Rows, similarity_by_hand

WIDE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TALL = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def terms_by_hand(rows: Rows, labels: list[int], classes: int) -> tuple[float, float, float]:
    lengths = [sqrt(sum(value * value for value in row)) for row in rows]
    unit = [[value / length for value in row] for row, length in zip(rows, lengths, strict=True)]
    columns = [list(column) for column in zip(*unit, strict=True)]
    count, dims = len(unit), len(columns)
    spreads = [sqrt(variance(column) + 1e-7) for column in columns]
    covariances = [
        sum((a - mean(one)) * (b - mean(other)) for a, b in zip(one, other, strict=True)) / count
        for i, one in enumerate(columns)
        for j, other in enumerate(columns)
        if i != j
    ]
    return (
        mean(max(0.0, 1 - spread) for spread in spreads) / count,
        similarity_by_hand(unit, labels, classes),
        sum(value * value for value in covariances) / dims,
    )


@pytest.mark.parametrize("vectors", [WIDE, TALL], ids=["fewer samples than dimensions", "more"])
def test_its_terms_are_those_of_the_paper(vectors: Tensor) -> None:
    y = torch.arange(len(vectors)) % 3
    found = [term.item() for term in Terms(3)(vectors, y)]
    assert found == pytest.approx(terms_by_hand(vectors.tolist(), y.tolist(), 3), abs=1e-5)
    assert all(term > 1e-4 for term in found)


def test_of_places_variance_and_covariance_are_those_of_all() -> None:
    vectors, y = torch.randn(2, 3, 4), torch.tensor([[0, 1, 0], [1, 1, 2]])
    spread, alike, covariance = (term.item() for term in Terms(3)(vectors, y))
    every = terms_by_hand(vectors.flatten(0, 1).tolist(), y.flatten().tolist(), 3)
    assert (spread, covariance) == pytest.approx((every[0], every[2]), abs=1e-5)
    texts = [similarity_by_hand(vectors[text].tolist(), y[text].tolist(), 3) for text in range(2)]
    assert alike == pytest.approx(mean(texts), abs=1e-5)


def test_its_terms_are_weighed_and_reported_as_they_are() -> None:
    torch.manual_seed(0)
    f, project, answer = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)
    y = torch.tensor([0, 1, 1, 2])
    layer = DeInfoReg(f, project, answer, 3, weights=(0.25, 2.0, 0.5, 3.0), optimizer=torch.optim.SGD)
    out, after = layer(WIDE, y)
    assert after is y
    assert not out.requires_grad
    found = torch.stack(layer.loss() or ())
    vectors = project(f(WIDE))
    answered = F.cross_entropy(answer(vectors), y)
    assert found[1:].tolist() == pytest.approx(terms_by_hand(vectors.tolist(), y.tolist(), 3), abs=1e-5)
    torch.testing.assert_close(found[0], answered.detach())
    spread, alike, covariance = published(vectors, y)
    total = 2 * spread + 0.5 * alike + 3 * covariance + 0.25 * answered
    wanted = torch.autograd.grad(total, list(layer.parameters()))
    layer.backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(wanted), rtol=1e-4, atol=1e-6)
    assert torch.equal(layer.inference(out, "b"), answer(project(out)))


def published(vectors: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The terms in the words of the paper, for their gradients."""
    unit = F.normalize(vectors)
    spread = F.relu(1 - (unit.var(0) + 1e-7).sqrt()).mean() / len(unit)
    found, wanted = torch.corrcoef(unit), torch.corrcoef(F.one_hot(y, 3).float())
    covariances = torch.cov(unit.t(), correction=0)
    off = ~torch.eye(len(covariances), dtype=torch.bool)
    return spread, F.mse_loss(found, wanted), covariances[off].square().sum() / len(covariances)


def test_images_go_through_three_maps_as_published() -> None:
    *hidden, last = make_layers(Resnet.network(5, dims=VISION), 1e-3, None, width=32)
    assert isinstance(last, Greedy)
    first = hidden[0]
    assert isinstance(first, DeInfoReg)
    kinds = [type(module) for module in (*first.project, *first.answer)]  # type: ignore[arg-type,misc]
    maps = [nn.Linear, BatchNorm, nn.ReLU]
    assert kinds[2:] == [*maps, *maps, nn.Linear, BatchNorm, nn.ReLU, nn.Linear]
    assert first.project[2].in_features == 3 * 16  # type: ignore[index]
    flat, *_ = make_layers(Resnet.network(5, dims=VISION), 1e-3, None, width=32, cells=None)
    assert flat.project[1].in_features == 3 * 256  # type: ignore[index,union-attr]
    assert first.weights == (0.001, 1.0, 1.0, 1.0)


def test_texts_are_taken_as_they_are() -> None:
    first, *_ = make_layers(Transformer.network(50, 4, dims=TEXT), 1e-3, None)
    assert isinstance(first, DeInfoReg)
    assert list(first.project.parameters()) == []
    assert [type(module) for module in first.answer] == [nn.Tanh, nn.Linear]  # type: ignore[union-attr,arg-type]
