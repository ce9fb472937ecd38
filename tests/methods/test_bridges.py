"""Bridges: from whatever a layer gives to a code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal import ConfigError
from pipeal.core.draws import may_draw
from pipeal.methods.al.bridges import bridge_for
from pipeal.methods.al.codes import CODE_ACTIVATIONS
from pipeal.methods.pooling import CellMeans, MaskedMean

B = 3
OUTPUTS = {
    "image": torch.randn(B, 5, 9, 7),
    "small image": torch.randn(B, 5, 1, 2),
    "sequence": torch.randn(B, 6, 5),
    "sequence and mask": (torch.randn(B, 6, 5), torch.ones(B, 6, dtype=torch.bool)),
    "vector": torch.randn(B, 5),
}


@pytest.mark.parametrize("hidden", [None, 11])
@pytest.mark.parametrize("labels", ["inverse", "published"])
@pytest.mark.parametrize("style", ["pooled", "flat"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_shape_has_a_bridge(kind: str, style: Any, labels: Any, hidden: int | None) -> None:
    bridge = bridge_for(OUTPUTS[kind], 4, hidden=hidden, style=style, labels=labels)
    code = bridge(OUTPUTS[kind])
    assert code.shape == (B, 4)
    assert code.abs().max() < 1
    assert type(bridge[-1]) is CODE_ACTIVATIONS[labels]  # type: ignore[index]
    linear = [part.out_features for part in bridge.modules() if isinstance(part, nn.Linear)]
    assert linear == ([4] if hidden is None else [11, 4])
    assert not may_draw(bridge)
    code.sum().backward()
    assert all(parameter.grad is not None for parameter in bridge.parameters())


@given(size=st.integers(1, 40), wide=st.integers(1, 40))
def test_a_pooled_bridge_does_not_grow_with_the_image(size: int, wide: int) -> None:
    bridge = bridge_for(torch.zeros(2, 3, size, wide), 2)
    weights = sum(parameter.numel() for parameter in bridge.parameters())
    assert weights == 2 * (1 + 3 * min(size, 4) * min(wide, 4))
    assert bridge(torch.zeros(1, 3, size + 4, wide + 4)).shape == (1, 2)


SIDES = st.integers(1, 4)
LAYOUTS = st.sampled_from([torch.contiguous_format, torch.channels_last])


@given(rows=SIDES, columns=SIDES, height=st.integers(1, 12), width=st.integers(1, 12), layout=LAYOUTS)
def test_cells_are_averaged_as_pytorch_does(rows: int, columns: int, height: int, width: int, layout: Any) -> None:
    """Forward and backward; cells of one size by the operator whose backward compiles."""
    image = torch.randn(2, 3, height, width, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    means, expected = CellMeans(rows, columns)(image), F.adaptive_avg_pool2d(image, (rows, columns))
    alike = not (height % rows or width % columns)
    assert means.grad_fn is not None
    assert means.grad_fn.name().startswith("AvgPool2D") == alike
    torch.testing.assert_close(means, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(means, image, upstream), torch.autograd.grad(expected, image, upstream)
    )


def test_an_image_bridge_is_exported_for_images_of_any_size() -> None:
    bridge = bridge_for(torch.zeros(2, 3, 8, 8), 4).eval()
    size = {2: torch.export.Dim("height", min=4, max=64), 3: torch.export.Dim("width", min=4, max=64)}
    exported = torch.export.export(bridge, (torch.randn(2, 3, 8, 8),), dynamic_shapes={"input": size}).module()
    image = torch.randn(2, 3, 24, 17)
    torch.testing.assert_close(exported(image), bridge(image))


@pytest.mark.cuda
def test_the_backward_of_equal_cells_is_deterministic_on_a_gpu() -> None:
    image = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        CellMeans(4, 4)(image).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(image.grad, torch.full_like(image, 1 / 4))


@given(words=st.integers(1, 6), padding=st.integers(0, 5), seed=st.integers(0, 99))
def test_padding_never_changes_a_mean(words: int, padding: int, seed: int) -> None:
    """Law 5: whatever stands there."""
    torch.manual_seed(seed)
    text = torch.randn(1, words, 4)
    padded = torch.cat([text, 1e6 * torch.randn(1, padding, 4)], 1)
    mask = torch.arange(words + padding).unsqueeze(0) < words
    pool = MaskedMean()
    torch.testing.assert_close(pool((padded, mask)), pool(text), rtol=0, atol=1e-5)
    assert torch.equal(pool((padded, mask.long())), pool((padded, mask)))


def test_a_text_without_words_has_a_mean() -> None:
    assert torch.equal(MaskedMean()((torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.bool))), torch.zeros(1, 2))


def test_a_users_pool_takes_any_output() -> None:
    def last_state(output: Any) -> Tensor:
        return output[1][0][-1]

    output = nn.LSTM(5, 7, batch_first=True)(torch.randn(B, 6, 5))
    bridge = bridge_for(output, 4, pool=last_state)
    assert bridge(output).shape == (B, 4)
    assert may_draw(bridge)  # nobody has vouched for a function
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 8))
    bridge = bridge_for(OUTPUTS["sequence"], 4, pool=module)
    assert bridge(OUTPUTS["sequence"]).shape == (B, 4)
    assert {id(p) for p in module.parameters()} < {id(p) for p in bridge.parameters()}


def test_what_has_no_bridge_is_told() -> None:
    for output in (
        torch.zeros(2, 3, 4, 5, 6),
        torch.zeros(2, 3, dtype=torch.long),
        (torch.zeros(2, 3), torch.zeros(2)),
    ):
        with pytest.raises(ConfigError, match=r"no bridge for an output of \(2, 3.*pass pool=…"):
            bridge_for(output, 4)
    with pytest.raises(
        ConfigError, match=r"pool, given .*, gives \(3, 6\) float32, \(3,\) int64; expected floats \(B, D\)"
    ):
        bridge_for(OUTPUTS["sequence"], 4, pool=lambda x: (x.mean(2), torch.zeros(3, dtype=torch.long)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="unknown style of bridges 'pool'; did you mean 'pooled'"):
        bridge_for(OUTPUTS["vector"], 4, style="pool")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden is 0; expected a whole number, at least 1"):
        bridge_for(OUTPUTS["vector"], 4, hidden=0)
