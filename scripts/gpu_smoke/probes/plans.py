"""Predictions 1 and 2: plans that cuDNN makes for each thread and shape, and how dear they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from gpu_smoke.place import Place, in_new_thread
from gpu_smoke.predictions import Finding
from gpu_smoke.probes.models import STAGES, data, package, pipeline

HEADS, WIDTH = 6, 56
"""Of the published transformer; a head of 50 is padded to whole eights."""


def attention(place: Place) -> Finding:
    """Prediction 1. The first attention of each new (B, T) against the second, forward and backward."""
    rows = place.size(256, 4)
    first = 17
    _attend(place, rows, 16)  # libraries are loaded, and kernels that all shapes share
    torch.backends.cuda.enable_cudnn_sdp(False)
    _attend(place, rows, 16)
    torch.backends.cuda.enable_cudnn_sdp(True)
    chosen = _backend(place, rows)
    lengths, others = range(first, first + 6), range(first + 6, first + 12)
    default, again = (in_new_thread(lambda: _extras(place, rows, lengths)) for _ in range(2))
    torch.backends.cuda.enable_cudnn_sdp(False)
    without = in_new_thread(lambda: _extras(place, rows, others))
    torch.backends.cuda.enable_cudnn_sdp(True)
    ours = _new_lengths(place)
    figures = {
        "extra_ms_per_shape": 1e3 * median(default),
        "extra_ms_per_shape_in_another_thread": 1e3 * median(again),
        "extra_ms_per_shape_without_cudnn": 1e3 * median(without),
        "pipeal_extra_ms_per_length": 1e3 * ours,
    }
    extra, other = figures["extra_ms_per_shape"], figures["extra_ms_per_shape_without_cudnn"]
    return Finding(
        verdict=extra >= 250 and extra >= 4 * other,
        figure=f"{extra:,.0f} ms more for the first attention of a shape than for the second, {other:,.0f} ms without "
        f"cuDNN's; in a thread after it {figures['extra_ms_per_shape_in_another_thread']:,.0f} ms; the kernel by "
        f"default is {chosen}",
        how=f"forward and backward, bf16 on a GPU, {rows} × {HEADS} heads × T × {WIDTH} with a mask, medians of six T "
        "in a fresh thread; true from 250 ms and four times what it is without cuDNN",
        affected=ours >= 0.1,
        affected_figure=f"a training batch of a new length takes {1e3 * ours:,.0f} ms more than the next of that "
        f"length ({STAGES} stages, median of four lengths; affected from 100 ms)",
        figures=figures,
    )


def convolution(place: Place) -> Finding:
    """Prediction 2. A row of convolutions in a thread that has not seen them, against its second pass."""
    side, rows = place.size(32, 8), place.size(256, 2)
    widths = [3, *(place.size(width, 4) for width in (64, 128, 256, 512))]
    convolutions = [nn.Conv2d(one, other, 3, padding=1) for one, other in pairwise(widths)]
    net = nn.Sequential(*convolutions).to(place.device).to(memory_format=torch.channels_last)
    x = torch.randn(rows, 3, side, side, device=place.device).contiguous(memory_format=torch.channels_last)
    place.seconds(lambda: _pass(net, x))
    place.seconds(lambda: _pass(net, x))
    threads = [in_new_thread(lambda: [place.seconds(lambda: _pass(net, x)) for _ in range(2)]) for _ in range(3)]
    extra = 1e3 * median(first - second for first, second in threads)
    predict, train = _first_batches(place)
    return Finding(
        verdict=extra >= 50,
        figure=f"{extra:,.1f} ms more for the first pass of a new thread than for its second, in a process that has "
        "made the same pass before",
        how=f"{len(widths) - 1} convolutions forward and backward, {rows} images of {side} pixels, bf16 on a GPU, "
        "median of three threads; true from 50 ms (a network has some twenty)",
        affected=max(predict, train) >= 0.1,
        affected_figure=f"resnet in {STAGES} stages: a second predict_each of one batch takes "
        f"{1e3 * predict:,.0f} ms more than one more batch does, the first batch of a second `with` "
        f"{1e3 * train:,.0f} ms more than its third (affected from 100 ms)",
        figures={
            "extra_ms_per_thread": extra,
            "pipeal_predict_extra_ms": 1e3 * predict,
            "pipeal_with_extra_ms": 1e3 * train,
        },
    )


def _query(place: Place, rows: int, length: int) -> tuple[Tensor, Tensor]:
    kind = torch.float32 if place.stand_in else torch.bfloat16
    qkv = torch.randn(3, rows, HEADS, length, WIDTH, device=place.device, dtype=kind, requires_grad=True)
    bias = torch.zeros(rows, length, device=place.device, dtype=kind)
    bias[:, -1] = -1e4
    return qkv, bias[:, None, None, :].expand(-1, -1, length, -1)


def _attend(place: Place, rows: int, length: int) -> None:
    qkv, mask = _query(place, rows, length)
    q, k, v = qkv.unbind(0)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()


def _extras(place: Place, rows: int, lengths: Sequence[int]) -> list[float]:
    """Of each length, the seconds that the first attention takes more than the second."""
    return [_extra(place, partial(_attend, place, rows, length)) for length in lengths]


def _extra(place: Place, work: Callable[[], object]) -> float:
    first, second = (place.seconds(work) for _ in range(2))
    return first - second


def _backend(place: Place, rows: int) -> str:
    qkv, mask = _query(place, rows, 16)
    q, k, v = qkv.unbind(0)
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask)).name


def _new_lengths(place: Place) -> float:
    """What a pipeline's first batch of a new length takes more than the second, in seconds."""
    model, (x, y) = package(place, "transformer"), data(place, "transformer", 1)[0]
    x = x.clamp(min=2)  # no padding: every length is the longest of its batch
    longest = x.shape[1]
    with pipeline(place, model) as pipe:
        pipe.run([(x, y)] * 3)
        batches = [[(x[:, :length].contiguous(), y)] for length in range(longest - 4, longest)]
        return median(_extra(place, partial(pipe.run, batch)) for batch in batches)


def _pass(net: nn.Module, x: Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        net(x).float().sum().backward()


def _first_batches(place: Place) -> tuple[float, float]:
    """What starting again takes: a later prediction, and a second training, its first batch against its third.

    A prediction has batches under way beside the one that is waited for: so it is of one batch, and the batch that a
    prediction of two takes longer is held against it.
    """
    batches = data(place, "resnet", 4)
    pipe = pipeline(place, package(place, "resnet"))
    inputs = [x for x, _ in batches]
    with pipe:

        def predict(count: int) -> float:
            return place.seconds(lambda: list(pipe.predict_each(inputs[:count])))

        predict(2)  # the first prediction of all
        one, two = predict(1), predict(2)
    for _ in range(2):
        with pipe:
            training = [place.seconds(partial(pipe.run, [batch])) for batch in batches]
    return one - (two - one), training[0] - training[2]
