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

from pipeal.data.iterators.base import *
from pipeal.data.iterators.buckets import *
from pipeal.data.iterators.buffered import *
from pipeal.data.iterators.chunked import *
from pipeal.data.iterators.dataset import *
from pipeal.data.iterators.maps import *
from pipeal.data.iterators.parallel import *
from pipeal.data.iterators.prefetch import *
from pipeal.data.iterators.shards import *
from pipeal.data.iterators.sources import *
from pipeal.data.iterators.windows import *
