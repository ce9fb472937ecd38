"""The same batches, whoever makes them; workers that end when they should."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from time import monotonic, sleep

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pipeal.core.errors import ConfigError, DataError, ScheduleError, WorkerError
from pipeal.data import ImageBatches, ImageSplit, Share

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> ImageSplit:
    random = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("images") / "a.npy"
    np.save(file, random.integers(0, 256, (37, 12, 12, 3), dtype=np.uint8))
    return ImageSplit(np.load(file, mmap_mode="r"), random.integers(5, size=37), file=file)


def batches(split, **options) -> ImageBatches:
    return ImageBatches(split, **{"batch_size": 8, "mean": MEAN, "std": STD} | options)


def epoch(loader: ImageBatches, number: int):
    loader.set_epoch(number)
    return [(batch.x, batch.y, batch.indices) for batch in loader]


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(one, other, strict=True)
    )


def no_children(within_s: float = 120.0) -> bool:
    until = monotonic() + within_s
    while multiprocessing.active_children() and monotonic() < until:
        sleep(0.02)
    return not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_shares_of_all_ranks_are_the_batch(split, workers):
    """Augmented alike, since a sample's randomness is its own."""
    whole = epoch(batches(split, augmentation="strong"), 3)
    options = {"augmentation": "strong", "workers": workers}
    shares = []
    for rank in range(2):
        with batches(split, share=Share(rank, 2), **options) as loader:
            shares.append(epoch(loader, 3))
    for (x, y, indices), *parts in zip(whole, *shares, strict=True):
        for rank, part in enumerate(parts):
            assert torch.equal(part[0], x[rank::2])
            assert torch.equal(part[1], y[rank::2])
            assert part[2] == indices


@pytest.mark.parametrize("augmentation", ["none", "basic", "strong"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_sample_once(split, augmentation, shuffle):
    loader = batches(split, augmentation=augmentation, shuffle=shuffle)
    found = list(loader)
    assert [len(batch) for batch in found] == [8, 8, 8, 8, 5]
    assert len(loader) == 5
    order = [index for batch in found for index in batch.indices]
    assert sorted(order) == list(range(37))
    assert (order == list(range(37))) is not shuffle
    for batch in found:
        assert batch.x.shape == (len(batch), 3, 12, 12)
        assert batch.y.tolist() == split.labels[batch.indices].tolist()
        assert (batch.x.dtype, batch.y.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_begins_with_the_batch_that_a_training_stands_before(split, workers):
    with batches(split, augmentation="basic", workers=workers) as loader:
        whole = epoch(loader, 1)
        loader.set_epoch(1, 3)
        assert len(loader) == 5, "of the epoch, not of what is left of it"
        assert same([(batch.x, batch.y, batch.indices) for batch in loader], whole[3:])


def test_none_is_the_scaled_image(split):
    (batch,) = batches(split, batch_size=37, shuffle=False)
    wanted = (torch.from_numpy(np.array(split.pixels)) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(batch.x, wanted.permute(0, 3, 1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("augmentation", ["basic", "strong"])
def test_a_sample_is_the_same_in_batches_of_any_size(split, augmentation):
    def samples(size):
        loader = batches(split, batch_size=size, augmentation=augmentation, seed=3)
        return {i: x for xs, _, indices in epoch(loader, 2) for i, x in zip(indices, xs, strict=True)}

    one, other = samples(1), samples(16)
    assert all(torch.equal(one[i], other[i]) for i in range(37))


@pytest.mark.parametrize("augmentation", ["basic", "strong"])
def test_the_same_batches_for_any_number_of_workers(split, augmentation):
    options = {"augmentation": augmentation, "seed": 4, "channels_last": augmentation == "basic"}
    alone = batches(split, **options)
    wanted = [epoch(alone, number) for number in range(3)]
    assert not same(wanted[0], wanted[1])
    state = torch.get_rng_state()
    for workers in (1, 2):
        with batches(split, workers=workers, **options) as loader:
            for number in (0, 2, 1, 0, 0):
                assert same(epoch(loader, number), wanted[number])
    assert torch.equal(torch.get_rng_state(), state)
    assert no_children()


@pytest.mark.slow
def test_spawned_workers_map_the_file_again(split):
    part = split.subset(range(20))
    with batches(part, augmentation="basic", workers=1, start_method="spawn") as loader:
        assert same(epoch(loader, 1), epoch(batches(part, augmentation="basic"), 1))


def test_a_broken_off_epoch_does_not_reach_into_the_next(split):
    with batches(split, workers=2, augmentation="basic") as loader:
        first = iter(loader)
        next(first)
        assert same(epoch(loader, 1), epoch(batches(split, augmentation="basic"), 1))
        with pytest.raises(ScheduleError, match="begun again"):
            next(first)


def test_a_left_iterator_does_not_end_the_one_under_way(split):
    """Symptom: the live pass failed as well. Cause: the refusal of the old one closed the workers of both."""
    with batches(split, workers=1) as loader:
        old, live = iter(loader), iter(loader)
        next(old)
        seen = [next(live)]
        with pytest.raises(ScheduleError, match="begun again"):
            next(old)
        seen += list(live)
        assert [batch.indices for batch in seen] == [batch.indices for batch in batches(split)]


@pytest.mark.parametrize("how", ["close", "forget"])
def test_workers_end(split, how):
    loader = batches(split, workers=2)
    next(iter(loader))
    assert len(multiprocessing.active_children()) == 2
    if how == "close":
        loader.close()
        assert no_children()
        assert len(list(loader)) == 5
    del loader
    gc.collect()
    assert no_children()


def test_an_interrupt_ends_the_workers(split):
    loader = batches(split, workers=1)
    pending = iter(loader)
    next(pending)

    def interrupted():
        raise KeyboardInterrupt
        yield

    loader._arriving = interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(pending)
    gc.collect()
    assert no_children()


def test_a_worker_that_has_died_between_two_passes_is_named(split, monkeypatch):
    """Symptom: where layers are measured, which goes over a few batches twice, its end was a traceback."""

    def dead(_):
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    with batches(split, workers=1) as loader:
        monkeypatch.setattr(DataLoader, "__iter__", dead)
        with pytest.raises(WorkerError, match="a worker process that prepares batches died"):
            list(loader)


class DyingSplit(ImageSplit):
    def images(self, indices):
        os.kill(os.getpid(), signal.SIGKILL)


class FailingSplit(ImageSplit):
    def images(self, indices):
        raise LookupError("no such image")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "words"), [(DyingSplit, DataError, "died"), (FailingSplit, LookupError, "no such")]
)
def test_a_worker_that_fails_is_told_of(split, kind, error, words):
    with batches(kind(split.pixels, split.labels), workers=1) as loader, pytest.raises(error, match=words):
        list(loader)
    gc.collect()
    assert no_children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "bassic"}, "unknown augmentation 'bassic'; did you mean 'basic'"),
        ({"workers": -1}, "workers is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_range(split, options, message):
    with pytest.raises(ConfigError, match=message):
        batches(split, **options)


def test_no_images():
    empty = ImageSplit(np.empty((0, 8, 8, 3), np.uint8), np.empty(0, np.int64), ("a.png",))
    with pytest.raises(DataError, match=r"no images \(1 broken"):
        batches(empty)
