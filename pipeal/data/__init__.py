"""Data sets, words, vectors and batches; works with a plain PyTorch ``DataLoader`` and no engine.

Each module says in its ``__all__`` which of its names are public; they are all names of this package too.
"""

import types

from pipeal.core.names import Augmentation as Augmentation
from pipeal.core.outofmemory import is_out_of_memory as is_out_of_memory
from pipeal.data.batching.binned import *
from pipeal.data.batching.bounds import *
from pipeal.data.batching.bucket import *
from pipeal.data.batching.fixed import *
from pipeal.data.batching.packing import *
from pipeal.data.batching.passes import *
from pipeal.data.batching.plan import *
from pipeal.data.batching.ranks import *
from pipeal.data.batching.reread import *
from pipeal.data.batching.samplers import *
from pipeal.data.batching.size_aware import *
from pipeal.data.batching.size_ranges import *
from pipeal.data.batching.stream import *
from pipeal.data.batching.token_budget import *
from pipeal.data.grouping import *
from pipeal.data.images.augment import *
from pipeal.data.images.cache import *
from pipeal.data.images.datasets import *
from pipeal.data.images.loader import *
from pipeal.data.images.split import *
from pipeal.data.iterators import *
from pipeal.data.loading.ahead import *
from pipeal.data.loading.download import *
from pipeal.data.loading.loader import *
from pipeal.data.loading.sources import *
from pipeal.data.memory.model import *
from pipeal.data.memory.peaks import *
from pipeal.data.text.characters import *
from pipeal.data.text.cleaning import *
from pipeal.data.text.corpus import *
from pipeal.data.text.datasets import *
from pipeal.data.text.embeddings import *
from pipeal.data.text.imdb import *
from pipeal.data.text.labelled_file import *
from pipeal.data.text.tokens import *
from pipeal.data.text.vocab import *

__all__ = sorted(
    name for name, found in globals().items() if name[0] != "_" and not isinstance(found, types.ModuleType)
)
