"""Batch norm for heads: one value per channel, as a last batch of one sample may leave of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeal import ALPackage
from pipeal.methods.infopro import Decoder
from pipeal.methods.norm import BatchNorm


def test_a_norm_of_one_value_is_that_of_evaluation() -> None:
    norm, plain = BatchNorm(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(norm(x), plain(x))
    seen = {name: value.clone() for name, value in norm.state_dict().items()}
    assert norm.state_dict().keys() == plain.state_dict().keys()
    one = torch.randn(1, 3, 1, 1)
    torch.testing.assert_close(norm(one), plain.eval()(one))
    torch.testing.assert_close(norm(one.flatten(1)), plain(one).flatten(1))
    assert all(torch.equal(value, seen[name]) for name, value in norm.state_dict().items())
    assert torch.equal(norm.eval()(x), plain(x))


@pytest.mark.parametrize("method", ["dgl", "infopro", "deinforeg"])
def test_one_sample_of_one_pixel_is_learnt_from(method: str) -> None:
    """Symptom: ``Expected more than 1 value per channel`` under infopro. Cause: its head had the norm of PyTorch."""
    shrinking = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.ReLU())
    pieces = [shrinking, nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 1)]
    options = {"width": 5} if method == "deinforeg" else {}
    package = ALPackage.from_bp(pieces, torch.randn(2, 3, 4, 4), 5, method=method, method_options=options)
    x, y = torch.randn(1, 3, 4, 4), torch.tensor([3])
    for layer in package:
        x, y = layer(x, y)
        layer.backward()
        assert all(loss.isfinite() for loss in layer.loss() or ())


def test_an_image_of_one_pixel_is_rebuilt() -> None:
    """The same symptom in a decoder, whose maps are as large as the image."""
    assert Decoder(4, 12, 3)(torch.randn(1, 4, 1, 1), torch.randn(1, 3, 1, 1)).isfinite()
