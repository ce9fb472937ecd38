"""Streams of data that stop and go on exactly where they were: small states, any composition, any number of workers.

Built from a source at the end of the pipeline to what the consumer sees at its head; the state of the head is the
state of the whole:

>>> lines = NativeCheckpointableIterator(["a b c", "d", "e f"])
>>> words = MapIterator(lines, str.split)
>>> batches = FixedBatchIterator(words, batch_size=2)
>>> next(batches)
[['a', 'b', 'c'], ['d']]
>>> state = batches.getstate()
>>> list(batches)
[[['e', 'f']]]
>>> batches.setstate(state)
>>> list(batches)
[[['e', 'f']]]
"""

from pipeal.data.iterators.base import CheckpointableIterator
from pipeal.data.iterators.buckets import BucketedReadaheadBatchIterator
from pipeal.data.iterators.buffered import BufferedShuffleIterator
from pipeal.data.iterators.chunked import chunked_dataset_iterator
from pipeal.data.iterators.dataset import CheckpointableLoader, IterableCheckpointedDataset
from pipeal.data.iterators.maps import (
    MapIterator,
    MultiplexIterator,
    RecurrentIterator,
    SamplingRandomMapIterator,
    ZipIterator,
)
from pipeal.data.iterators.parallel import ParallelMapIterator
from pipeal.data.iterators.prefetch import PrefetchIterator
from pipeal.data.iterators.shards import ShardIterator
from pipeal.data.iterators.sources import (
    ChunkedSourceIterator,
    InfinitePermutationSourceIterator,
    NativeCheckpointableIterator,
    RandomIterator,
    create_source_iterator,
)
from pipeal.data.iterators.windows import (
    BlockwiseShuffleIterator,
    FixedBatchIterator,
    SelectManyIterator,
    WindowedIterator,
)

__all__ = [
    "BlockwiseShuffleIterator",
    "BucketedReadaheadBatchIterator",
    "BufferedShuffleIterator",
    "CheckpointableIterator",
    "CheckpointableLoader",
    "ChunkedSourceIterator",
    "FixedBatchIterator",
    "InfinitePermutationSourceIterator",
    "IterableCheckpointedDataset",
    "MapIterator",
    "MultiplexIterator",
    "NativeCheckpointableIterator",
    "ParallelMapIterator",
    "PrefetchIterator",
    "RandomIterator",
    "RecurrentIterator",
    "SamplingRandomMapIterator",
    "SelectManyIterator",
    "ShardIterator",
    "WindowedIterator",
    "ZipIterator",
    "chunked_dataset_iterator",
    "create_source_iterator",
]
