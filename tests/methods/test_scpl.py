"""SCPL: its loss by hand, what learns from which loss, and its projectors."""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import mean

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeal.methods.greedy import Greedy
from pipeal.methods.scpl import SCPL, Contrast, make_layers
from pipeal.models import Resnet, Transformer
from tests.methods.test_greedy import TEXT, VISION

VECTORS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 0, 1, 2, 1])
"""The second and the fourth have no other of their class."""


def contrast_by_hand(rows: list[list[float]], labels: list[int], temperature: float) -> float:
    lengths = [sqrt(sum(value * value for value in row)) for row in rows]
    count = range(len(rows))

    def score(i: int, j: int) -> float:
        return sum(a * b for a, b in zip(rows[i], rows[j], strict=True)) / (lengths[i] * lengths[j] * temperature)

    losses = []
    for i in count:
        total = sum(exp(score(i, k)) for k in count if k != i)
        alike = [j for j in count if j != i and labels[j] == labels[i]]
        losses.append(-sum(log(exp(score(i, j)) / total) for j in alike) / (len(alike) + 1))
    return mean(losses)


@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_its_loss_is_that_of_the_paper(temperature: float) -> None:
    found = Contrast(nn.Identity(), temperature)(VECTORS, LABELS)
    assert found.item() == pytest.approx(contrast_by_hand(VECTORS.tolist(), LABELS.tolist(), temperature), abs=1e-5)


def test_its_gradient_is_that_of_the_paper() -> None:
    found, wanted = VECTORS.clone().requires_grad_(), VECTORS.clone().requires_grad_()
    Contrast(nn.Identity())(found, LABELS).backward()
    scores = F.normalize(wanted) @ F.normalize(wanted).t() / 0.1
    others = ~torch.eye(5, dtype=torch.bool)
    chances = scores - (scores.exp() * others).sum(1, keepdim=True).log()
    alike = others & (LABELS.unsqueeze(0) == LABELS.unsqueeze(1))
    (-(chances * alike).sum(1) / (alike.sum(1) + 1)).mean().backward()
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_places_of_a_text_are_compared_with_each_other_alone() -> None:
    vectors, y = torch.randn(2, 3, 4), torch.tensor([[0, 1, 0], [1, 1, 2]])
    texts = [contrast_by_hand(vectors[text].tolist(), y[text].tolist(), 0.1) for text in range(2)]
    assert Contrast(nn.Identity())(vectors, y).item() == pytest.approx(mean(texts), abs=1e-5)


def test_features_learn_by_the_contrast_alone_and_the_head_by_the_cross_entropy() -> None:
    torch.manual_seed(0)
    f, head, project = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
    layer = SCPL(f, head, Contrast(project), lr=0.5, optimizer=torch.optim.SGD)
    out, after = layer(VECTORS, LABELS)
    assert after is LABELS
    assert not out.requires_grad
    contrast = Contrast(project)(f(VECTORS), LABELS)
    answered = F.cross_entropy(head(f(VECTORS)), LABELS)
    torch.testing.assert_close(layer.loss(), (answered.detach(), contrast.detach()))
    below, above = [*f.parameters(), *project.parameters()], [*head.parameters()]
    wanted = [*torch.autograd.grad(contrast, below), *torch.autograd.grad(answered, above)]
    layer.backward()
    torch.testing.assert_close([weights.grad for weights in (*below, *above)], wanted)
    assert set(layer.blocks()) == {"f", "b", "p"}


def projectors(**options: object) -> list[nn.Module]:
    *hidden, last = make_layers(Resnet.network(5, dims=VISION), 1e-3, None, **options)  # type: ignore[arg-type]
    assert isinstance(last, Greedy)
    return [layer.contrast.project for layer in hidden]  # type: ignore[union-attr,misc]


def widths(projector: nn.Module) -> list[int]:
    maps = [module for module in projector.modules() if isinstance(module, nn.Linear)]
    return [*(one.in_features for one in maps), *(one.out_features for one in maps[-1:])]


def test_images_go_through_two_maps_as_published() -> None:
    assert widths(projectors()[0]) == [3 * 16, 512, 1024]
    assert widths(projectors(cells=None)[0]) == [3 * 256, 512, 1024]
    assert widths(projectors(hidden=7, width=9)[0]) == [48, 7, 9]
    assert widths(projectors(projector="linear", width=9)[0]) == [48, 9]
    assert widths(projectors(projector="identity")[0]) == []


def test_texts_are_compared_as_they_are_unless_told_otherwise() -> None:
    network = Transformer.network(50, 4, dims=TEXT)
    plain, *_ = make_layers(network, 1e-3, None)
    assert list(plain.contrast.parameters()) == []  # type: ignore[union-attr]
    mapped, *_ = make_layers(network, 1e-3, None, projector="mlp")
    assert widths(mapped.contrast) == [12, 12, 12]  # type: ignore[union-attr]
