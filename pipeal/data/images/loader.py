"""Batches of augmented images, made in the calling process or by worker processes: the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeal.core.errors import ConfigError, DataError, ScheduleError, unknown_name
from pipeal.core.names import Augmentation
from pipeal.data.batching.fixed import FixedBatchSampler
from pipeal.data.batching.ranks import WHOLE, Share
from pipeal.data.images.augment import Augment
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.loader import Batch
from pipeal.data.loading.workers import serve_parent, starting_workers, worker_failure

__all__ = ["ImageBatches"]

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
        if augmentation not in get_args(Augmentation):
            raise ConfigError(unknown_name("augmentation", augmentation, get_args(Augmentation)))
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise ConfigError(f"workers is {workers!r}; wanted a whole number of at least 0")
        if not len(split):
            raise DataError(f"no images ({len(split.skipped)} broken ones were left out); wanted at least 1")
        augment = Augment(augmentation, mean=mean, std=std, seed=seed, channels_last=channels_last)
        self.split = split
        self.workers = workers
        self.share = share
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.start_method = start_method
        self._sampler = FixedBatchSampler(np.ones(len(split), np.int64), batch_size, shuffle, seed)
        self._maker = _Maker(split, augment)
        self._crew: _Crew | None = None
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
        return self._by_workers(epoch, batches) if self.workers else self._by_caller(epoch, batches)

    def __enter__(self) -> ImageBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; the next iterator starts new ones."""
        crew, self._crew = self._crew, None
        if crew:
            crew.close()

    def _by_caller(self, epoch: int, batches: Sequence[list[int]]) -> Iterator[Batch]:
        for indices in batches:
            x, y = self._maker[epoch, self.share.of(indices)]
            if self.pin_memory:
                x, y = x.pin_memory(), y.pin_memory()
            yield Batch(x, y, indices, 0, 0)

    def _by_workers(self, epoch: int, batches: Sequence[list[int]]) -> Iterator[Batch]:
        crew = self._crew = self._crew or _Crew(self._maker, self.workers, self.pin_memory, self.start_method)
        turn = crew.begin([(epoch, self.share.of(indices)) for indices in batches])
        for indices in batches:
            crew.check(turn)
            try:
                x, y = crew.next()
            except BaseException:
                self.close()
                raise
            yield Batch(x, y, indices, 0, 0)


class _Maker(Dataset[tuple[Tensor, Tensor]]):
    """Makes whole batches: a "sample" of this data set is a batch."""

    def __init__(self, split: ImageSplit, augment: Augment) -> None:
        self.split = split
        self.augment = augment

    def __getitem__(self, order: _Order) -> tuple[Tensor, Tensor]:
        epoch, indices = order
        x = self.augment(self.split.images(indices), epoch, indices)
        return x, torch.from_numpy(self.split.labels[indices])


class _Orders(Sampler[_Order]):
    """What the workers shall make next; replaced for every epoch."""

    def __init__(self) -> None:
        self.orders: list[_Order] = []

    def __iter__(self) -> Iterator[_Order]:
        return iter(self.orders)

    def __len__(self) -> int:
        return len(self.orders)


class _Crew:
    """The worker processes, and the one pass over them that is under way."""

    def __init__(self, maker: _Maker, workers: int, pin_memory: bool, start_method: str | None) -> None:
        self._orders = _Orders()
        self._start_method = start_method
        self._loader: DataLoader[tuple[Tensor, Tensor]] | None = DataLoader(
            maker,
            batch_size=None,
            sampler=self._orders,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            prefetch_factor=2,
            persistent_workers=True,
            multiprocessing_context=start_method,
            worker_init_fn=serve_parent,
            # Of its own: the loader would draw its workers' seeds from the default generator.
            generator=torch.Generator(),
        )
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None
        self._turn = 0

    def begin(self, orders: list[_Order]) -> int:
        """Begins a pass, and gives its number."""
        assert self._loader is not None
        self._orders.orders = orders
        with starting_workers(self._start_method):
            self._batches = iter(self._loader)
        self._turn += 1
        return self._turn

    def check(self, turn: int) -> None:
        """Whether a pass is still the one under way.

        Raises:
            ScheduleError: Another pass was begun since, or the workers were ended.
        """
        if turn != self._turn or self._batches is None:
            raise ScheduleError(
                "these batches were begun again or closed while an iterator was under way; with workers, "
                "finish one before the next, or use two ImageBatches"
            )

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch of the pass under way.

        Raises:
            WorkerError: A worker died.
        """
        assert self._batches is not None
        try:
            x, y = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            failure = worker_failure(error)
            if failure is None:
                raise
            raise failure from error
        return x, y

    def close(self) -> None:
        # The processes end with the loader's iterator, which nothing else refers to.
        self._batches = self._loader = None


def _as_it_is(made: Any) -> Any:
    return made
