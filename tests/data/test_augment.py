"""Augmentation is torchvision's, image by image, and what a sample draws belongs to it alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional

from pipeal.data import Augment
from pipeal.data.images.augment import crop_flip, draw, jitter

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pixels(count: int, size: int = 8, seed: int = 0) -> np.ndarray:
    images = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    # Greys, blacks and flat colours: where hue has no meaning and the largest channel is not unique.
    images[::5] = images[::5, :, :, :1]
    images[1::7, :2] = 0
    images[2::7, 2:4] = (200, 200, 10)
    return images


def planar(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def normalised(images: torch.Tensor) -> torch.Tensor:
    return functional.normalize(functional.to_dtype(images, torch.float32, scale=True), MEAN, STD)


def cropped_by_torchvision(images: np.ndarray, draws) -> torch.Tensor:
    size, found = images.shape[1], []
    for i, image in enumerate(planar(images)):
        padded = functional.pad(image, [4, 4, 4, 4])
        cut = functional.crop(padded, int(draws.top[i]), int(draws.left[i]), size, size)
        found.append(functional.horizontal_flip(cut) if draws.flip[i] else cut)
    return torch.stack(found)


def jittered_by_torchvision(images: torch.Tensor, draws) -> torch.Tensor:
    kernels = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    found = []
    for i, image in enumerate(images):
        for kind in draws.order[i] if draws.jitter[i] else ():
            image = kernels[kind](image, float(draws.factors[i, kind]))
        found.append(functional.rgb_to_grayscale(image, 3) if draws.grey[i] else image)
    return torch.stack(found)


@given(seed=st.integers(0, 2**40), size=st.integers(1, 12))
def test_crop_and_flip_are_torchvisions_to_the_bit(seed, size):
    images, draws = pixels(20, size, seed), draw(seed, 3, range(20))
    assert torch.equal(planar(crop_flip(images, draws)), cropped_by_torchvision(images, draws))


@given(seed=st.integers(0, 2**40))
def test_colours_are_torchvisions(seed):
    images = functional.to_dtype(planar(pixels(40, 6, seed)), torch.float32, scale=True)
    draws = draw(seed, 0, range(40))
    changed = images.numpy().copy()
    jitter(changed, draws)
    torch.testing.assert_close(torch.from_numpy(changed), jittered_by_torchvision(images, draws), rtol=0, atol=2e-5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["none", "basic", "strong"])
def test_a_batch_is_what_torchvision_makes_image_by_image(kind, channels_last):
    images, indices = pixels(30), list(range(100, 130))
    x = Augment(kind, mean=MEAN, std=STD, seed=5, channels_last=channels_last)(images, 2, indices)
    draws = draw(5, 2, indices)
    wanted = planar(images) if kind == "none" else cropped_by_torchvision(images, draws)
    if kind == "strong":
        wanted = jittered_by_torchvision(functional.to_dtype(wanted, torch.float32, scale=True), draws)
    torch.testing.assert_close(x, normalised(wanted), rtol=1e-5, atol=1e-4)
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_the_layout_changes_no_value_and_the_pixels_stay_as_they_are():
    images = pixels(30)
    before = images.copy()
    for kind in ("none", "basic", "strong"):
        planes, last = (
            Augment(kind, mean=MEAN, std=STD, channels_last=layout)(images, 0, list(range(30)))
            for layout in (False, True)
        )
        assert torch.equal(planes, last)
    assert np.array_equal(images, before)


@given(
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
    indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    cut=st.integers(0, 20),
)
def test_what_a_sample_draws_does_not_depend_on_its_batch(seed, epoch, indices, cut):
    whole = draw(seed, epoch, indices)
    parts = [draw(seed, epoch, part) for part in (indices[:cut], indices[cut:])]
    for name in vars(whole):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts])), name


def test_seed_epoch_and_sample_each_change_the_draws():
    first = draw(0, 0, range(1000)).factors
    for other in (draw(1, 0, range(1000)), draw(0, 1, range(1000)), draw(0, 0, range(1, 1001))):
        assert not (first == other.factors).all(1).any()
        assert abs(np.corrcoef(first[:, 0], other.factors[:, 0])[0, 1]) < 0.15


def test_draws_have_torchvisions_ranges_and_shares():
    count = 40_000
    draws = draw(7, 3, range(count))
    for places in (draws.top, draws.left):
        shares = np.bincount(places, minlength=9) / count
        assert len(shares) == 9
        assert np.allclose(shares, 1 / 9, atol=0.01)
    for found, wanted in ((draws.flip, 0.5), (draws.jitter, 0.8), (draws.grey, 0.2)):
        assert found.mean() == pytest.approx(wanted, abs=0.01)
    for kind, (least, most) in enumerate([(0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1)]):
        factors = draws.factors[:, kind]
        assert least <= factors.min() < least + 0.001 < most - 0.001 < factors.max() <= most + 1e-6
        quarters = np.histogram(factors, 4, (least, most))[0] / count
        assert np.allclose(quarters, 0.25, atol=0.015)
    orders, counts = np.unique(draws.order, axis=0, return_counts=True)
    assert len(orders) == 24
    assert np.allclose(counts / count, 1 / 24, atol=0.006)
    columns = np.column_stack([draws.top, draws.left, draws.flip, draws.jitter, draws.grey, draws.factors])
    assert np.abs(np.corrcoef(columns.T) - np.eye(columns.shape[1])).max() < 0.03
