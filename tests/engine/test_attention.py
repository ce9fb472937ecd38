"""Attention on GPUs: by kernels that need no plan for each shape and thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from pipeal import Pipeline
from pipeal.engine.runner.attention import attention_without_plans

from .paper import PaperLayer, World


@pytest.fixture(autouse=True, params=[True, False])
def as_the_user_has_it(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    assert torch.backends.cuda.cudnn_sdp_enabled() == request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_while_a_pipeline_on_a_gpu_is_open_it_is_not_cudnns(
    monkeypatch: pytest.MonkeyPatch, as_the_user_has_it: bool
) -> None:
    """Prediction 1 of the GPU reading: a plan for each size of a batch and each thread of a stage takes a second."""
    world = World(gpus=1)
    world.install(monkeypatch)
    on_gpu, on_cpu = (Pipeline([PaperLayer(world)], [name], threads=1) for name in ("cuda:0", "cpu"))
    with on_cpu:
        assert torch.backends.cuda.cudnn_sdp_enabled() == as_the_user_has_it
    with on_gpu:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == as_the_user_has_it
    with pytest.raises(ZeroDivisionError), on_gpu:
        raise ZeroDivisionError


def test_several_end_in_any_order(as_the_user_has_it: bool) -> None:
    one, two = (attention_without_plans(["cpu", "cuda"]) for _ in range(2))
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    two.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled() == as_the_user_has_it


@pytest.mark.cuda
def test_there_is_a_kernel_for_attention_with_and_without_a_mask() -> None:
    q = torch.randn(2, 4, 37, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 37, 37, dtype=torch.bool, device="cuda")
    wanted = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    with attention_without_plans(["cuda"]):
        for given in (None, mask):
            found = F.scaled_dot_product_attention(q, q, q, attn_mask=given)
            torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
