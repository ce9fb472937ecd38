"""The usual beginning of a pipeline over many files: files in random order, their items, shuffled through a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipeal.core.samples import Samples
from pipeal.data.iterators.base import CheckpointableIterator
from pipeal.data.iterators.buffered import BufferedShuffleIterator
from pipeal.data.iterators.maps import MapIterator
from pipeal.data.iterators.prefetch import PrefetchIterator
from pipeal.data.iterators.sources import Uneven, create_source_iterator
from pipeal.data.iterators.windows import BlockwiseShuffleIterator, SelectManyIterator

__all__ = ["chunked_dataset_iterator"]

Ref = TypeVar("Ref")


def chunked_dataset_iterator(
    chunk_refs: Sequence[Ref],
    read_chunk_fn: Callable[[Ref], Samples[Any]],
    buffer_size: int = 2**20,
    train: bool = True,
    seed: int | None = 0,
    shuffle: bool = True,
    use_windowed: bool = False,
    transform: Callable[[Any], Any] | None = None,
    prefetch: bool = False,
    num_instances: int = 1,
    instance_rank: int = 0,
    *,
    uneven: Uneven = "keep",
) -> CheckpointableIterator[Any]:
    """The items of many chunks (files, say): without end to train on, else once and in order.

    To train, the instances take every n-th chunk of each permutation. Else each has consecutive chunks, so that
    the outputs of all ranks, one after the other, are in the order of the data.

    Args:
        chunk_refs: Names of the chunks. Sort what ``glob`` gives: its order differs between machines.
        read_chunk_fn: Gives the items of a chunk.
        buffer_size: The items in a shuffled block or in the buffer, and those to read ahead.
        train: Without end.
        seed: At least 0. None draws one, which the state remembers.
        shuffle: Shuffle chunks and items; wants ``train``.
        use_windowed: Shuffle through a buffer (:class:`BufferedShuffleIterator`) in place of block by block.
        transform: Applied to each item.
        prefetch: Read ahead on a thread.
        num_instances: How many instances share the chunks.
        instance_rank: Which one this is.
        uneven: See :class:`ChunkedSourceIterator`; equal numbers of chunks are not yet equal numbers of batches,
            for which see :class:`ShardIterator`.

    Raises:
        ConfigError: ``shuffle`` without ``train``, or what the iterators refuse.
    """
    chunks = create_source_iterator(chunk_refs, train, seed, shuffle, num_instances, instance_rank, uneven=uneven)
    samples: CheckpointableIterator[Any] = SelectManyIterator(chunks, read_chunk_fn)
    if prefetch:
        samples = PrefetchIterator(samples, buffer_size)
    if shuffle:
        kind = BufferedShuffleIterator if use_windowed else BlockwiseShuffleIterator
        samples = kind(samples, buffer_size, seed)
    if transform is not None:
        samples = MapIterator(samples, transform)
    return samples
