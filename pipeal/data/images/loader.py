"""Batches of augmented images, made in the calling process or by worker processes: the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeal.core.errors import DataError, ScheduleError, check_named
from pipeal.core.names import Augmentation
from pipeal.data.batching.fixed import FixedBatchSampler
from pipeal.data.batching.ranks import WHOLE, Share
from pipeal.data.checks import at_least
from pipeal.data.images.augment import Augment
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.loader import Batch
from pipeal.data.loading.workers import serve_parent, starting_workers, worker_context, worker_failure

__all__ = ["ImageBatches"]

_Made: TypeAlias = tuple[Tensor, Tensor]
_Order: TypeAlias = tuple[int, list[int]]
"""A request to a worker: the epoch, and the samples of a batch. The epoch travels with each request, because
workers live on from one epoch to the next and know nothing else of it."""


class ImageBatches:
    """Iterates over the batches of one epoch.

    What a batch holds depends on the arguments and the epoch, never on who makes it: for any number of workers
    there are the same batches in the same order. A sample's randomness belongs to (seed, epoch, sample).

    Workers start with the first iterator and stay until :meth:`close`, the end of the ``with`` block, or until
    these batches are no longer referred to. With workers, one iterator runs at a time: beginning another ends the
    first.

    Args:
        split: The images.
        batch_size: Samples per batch; the last one may be smaller.
        mean: Per channel, of values in [0, 1].
        std: Per channel.
        augmentation: See :mod:`pipeal.data.images.augment`.
        shuffle: False gives the samples as they stand.
        seed: Of the order and of the augmentation; at least 0.
        workers: Processes that prepare batches; 0 prepares each when it is asked for.
        pin_memory: Put the tensors into page-locked memory, for copies that do not block. Without a CUDA device
            there is nothing to copy to and the switch has no effect.
        channels_last: Lay ``x`` out channel by channel (``torch.channels_last``).
        share: Which of the samples of each batch become tensors here.
        start_method: How workers start (``fork``, ``spawn``, ``forkserver``); None for Python's default.

    Raises:
        ConfigError: A value out of range.
        DataError: No images.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation = "none",
        shuffle: bool = True,
        seed: int = 0,
        workers: int = 0,
        pin_memory: bool = False,
        channels_last: bool = False,
        share: Share = WHOLE,
        start_method: str | None = None,
    ) -> None:
        check_named("augmentation", augmentation, get_args(Augmentation))
        if not len(split):
            raise DataError(f"no images ({len(split.skipped)} broken ones were left out); wanted at least 1")
        augment = Augment(augmentation, mean=mean, std=std, seed=seed, channels_last=channels_last)
        self.split = split
        self.workers = at_least("workers", workers, 0)
        self.share = share
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.start_method = start_method
        self._sampler = FixedBatchSampler(np.ones(len(split), np.int64), batch_size, shuffle, seed)
        self._maker = _Maker(split, augment)
        self._orders: list[_Order] = []  # what the workers make next; replaced for every pass
        self._loader: DataLoader[_Made] | None = None
        self._arriving: Iterator[_Made] | None = None
        self._passes = 0
        self._first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch that the next iterators are for, and the batch they begin with, counted from 0."""
        self._sampler.set_epoch(epoch)
        self._first = first

    def __len__(self) -> int:
        """The number of batches in the chosen epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        epoch, batches = self._sampler.epoch, list(self._sampler)[self._first :]
        orders = [(epoch, self.share.of(indices)) for indices in batches]
        made = self._by_workers(orders) if self.workers else self._by_caller(orders)
        return (Batch(x, y, indices, 0, 0) for indices, (x, y) in zip(batches, made, strict=False))

    def __enter__(self) -> ImageBatches:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; the next iterator starts new ones."""
        # The processes end with the loader's iterator, which nothing else refers to.
        self._arriving = self._loader = None

    def _by_caller(self, orders: Sequence[_Order]) -> Iterator[_Made]:
        for order in orders:
            x, y = self._maker[order]
            yield (x.pin_memory(), y.pin_memory()) if self.pin_memory else (x, y)

    def _by_workers(self, orders: Sequence[_Order]) -> Iterator[_Made]:
        self._loader = self._loader or DataLoader(
            self._maker,
            batch_size=None,
            sampler=self._orders,
            num_workers=self.workers,
            pin_memory=self.pin_memory,
            prefetch_factor=2,
            persistent_workers=True,
            multiprocessing_context=worker_context(self.start_method),
            worker_init_fn=serve_parent,
            # Of its own: the loader would draw its workers' seeds from the default generator.
            generator=torch.Generator(),
        )
        self._orders[:] = orders
        with self._naming_failures(), starting_workers(self.start_method):
            self._arriving = iter(self._loader)  # a second time it asks the workers that there are
        self._passes += 1
        number = self._passes
        for _ in orders:
            if number != self._passes or self._arriving is None:
                raise ScheduleError(
                    "these batches were begun again or closed while an iterator was under way; with workers, "
                    "finish one before the next, or use two ImageBatches"
                )
            with self._naming_failures():
                made = next(self._arriving)
            yield made

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Ends the workers with whatever is raised, and says so where one of them has died."""
        try:
            yield
        except BaseException as error:
            self.close()
            failure = worker_failure(error)
            if failure is None:
                raise
            raise failure from error


class _Maker(Dataset[_Made]):
    """Makes whole batches: a "sample" of this data set is a batch."""

    def __init__(self, split: ImageSplit, augment: Augment) -> None:
        self.split = split
        self.augment = augment

    def __getitem__(self, order: _Order) -> _Made:
        epoch, indices = order
        x = self.augment(self.split.images(indices), epoch, indices)
        return x, torch.from_numpy(self.split.labels[indices])
