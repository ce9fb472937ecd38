"""Data sets, words, vectors and batches; works with a plain PyTorch ``DataLoader`` and no engine."""

from pipeal.core.names import IMAGE_DATASETS, TEXT_DATASETS, Augmentation, canonical_image_name, canonical_text_name
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.data.batching.binned import BinnedBatchSampler
from pipeal.data.batching.bounds import find_thresholds, length_bounds, round_up
from pipeal.data.batching.packing import SizeTypeError
from pipeal.data.batching.passes import PassSampler
from pipeal.data.batching.plan import PlannedBatchSampler
from pipeal.data.batching.ranks import WHOLE, EvenBatches, Share, even_batches, steps_of
from pipeal.data.batching.reread import CheckpointableSource
from pipeal.data.batching.samplers import (
    EpochSampler,
    FixedBatchSampler,
    LengthGroupedBatchSampler,
    TokenBudgetBatchSampler,
    padding_share,
)
from pipeal.data.batching.size_aware import SizeAwareBatchSampler, size_aware_batching
from pipeal.data.batching.size_buckets import BucketBatchSampler, EmptyBucketsError
from pipeal.data.batching.size_ranges import Buckets, create_buckets
from pipeal.data.batching.stream import BinnedBatchIterator, StreamBatch
from pipeal.data.grouping import (
    FEATURES,
    Annotated,
    AnnotatedModule,
    CDimPadder,
    DataCollection,
    Grouped,
    Grouper,
    LengthThresholdGrouper,
    Padder,
    PredefinedConsecutiveGrouper,
    PredefinedGrouper,
    TensorData,
    UniGrouper,
    ValuePadder,
    ZeroPadder,
)
from pipeal.data.images.augment import Augment
from pipeal.data.images.cache import OnBroken
from pipeal.data.images.datasets import ImageDataset, load_images
from pipeal.data.images.loader import ImageBatches
from pipeal.data.images.split import ImageSplit
from pipeal.data.iterators import (
    BlockwiseShuffleIterator,
    BucketedReadaheadBatchIterator,
    BufferedShuffleIterator,
    CheckpointableIterator,
    CheckpointableLoader,
    ChunkedSourceIterator,
    FixedBatchIterator,
    InfinitePermutationSourceIterator,
    IterableCheckpointedDataset,
    MapIterator,
    MultiplexIterator,
    NativeCheckpointableIterator,
    ParallelMapIterator,
    PrefetchIterator,
    RandomIterator,
    RecurrentIterator,
    SamplingRandomMapIterator,
    SelectManyIterator,
    ShardIterator,
    WindowedIterator,
    ZipIterator,
    chunked_dataset_iterator,
    create_source_iterator,
)
from pipeal.data.loading.ahead import ReadAhead
from pipeal.data.loading.download import Progress, download
from pipeal.data.loading.loader import Batch, BatchLoader, EpochBatches, EpochBatchSampler
from pipeal.data.loading.sources import SOURCES, Source, unpack_imdb, unpack_members
from pipeal.data.memory.model import MemoryModel, fit_memory_model, max_batch_cost, probe_memory
from pipeal.data.memory.peaks import (
    CudaPeak,
    PeakMeter,
    ResidentPeak,
    collect_cuda_peak_alloc,
    collect_peaks,
    device_memory,
    meter_for,
)
from pipeal.data.text.characters import Alphabet, Characters, RandomBlocks, find_shakespeare, read_characters
from pipeal.data.text.cleaning import STOP_WORDS, clean
from pipeal.data.text.corpus import Corpus
from pipeal.data.text.datasets import TextDataset, TextSplit, load_text
from pipeal.data.text.embeddings import VectorTable, find_vectors, list_vectors, load_vectors, vectors_from_torchtext
from pipeal.data.text.vocab import Vocab

__all__ = [
    "FEATURES",
    "IMAGE_DATASETS",
    "SOURCES",
    "STOP_WORDS",
    "TEXT_DATASETS",
    "WHOLE",
    "Alphabet",
    "Annotated",
    "AnnotatedModule",
    "Augment",
    "Augmentation",
    "Batch",
    "BatchLoader",
    "BinnedBatchIterator",
    "BinnedBatchSampler",
    "BlockwiseShuffleIterator",
    "BucketBatchSampler",
    "BucketedReadaheadBatchIterator",
    "Buckets",
    "BufferedShuffleIterator",
    "CDimPadder",
    "Characters",
    "CheckpointableIterator",
    "CheckpointableLoader",
    "CheckpointableSource",
    "ChunkedSourceIterator",
    "Corpus",
    "CudaPeak",
    "DataCollection",
    "EmptyBucketsError",
    "EpochBatchSampler",
    "EpochBatches",
    "EpochSampler",
    "EvenBatches",
    "FixedBatchIterator",
    "FixedBatchSampler",
    "Grouped",
    "Grouper",
    "ImageBatches",
    "ImageDataset",
    "ImageSplit",
    "InfinitePermutationSourceIterator",
    "IterableCheckpointedDataset",
    "LengthGroupedBatchSampler",
    "LengthThresholdGrouper",
    "MapIterator",
    "MemoryModel",
    "MultiplexIterator",
    "NativeCheckpointableIterator",
    "OnBroken",
    "Padder",
    "ParallelMapIterator",
    "PassSampler",
    "PeakMeter",
    "PlannedBatchSampler",
    "PredefinedConsecutiveGrouper",
    "PredefinedGrouper",
    "PrefetchIterator",
    "Progress",
    "RandomBlocks",
    "RandomIterator",
    "ReadAhead",
    "RecurrentIterator",
    "ResidentPeak",
    "SamplingRandomMapIterator",
    "SelectManyIterator",
    "ShardIterator",
    "Share",
    "SizeAwareBatchSampler",
    "SizeTypeError",
    "Source",
    "StreamBatch",
    "TensorData",
    "TextDataset",
    "TextSplit",
    "TokenBudgetBatchSampler",
    "UniGrouper",
    "ValuePadder",
    "VectorTable",
    "Vocab",
    "WindowedIterator",
    "ZeroPadder",
    "ZipIterator",
    "canonical_image_name",
    "canonical_text_name",
    "chunked_dataset_iterator",
    "clean",
    "collect_cuda_peak_alloc",
    "collect_peaks",
    "create_buckets",
    "create_source_iterator",
    "device_memory",
    "download",
    "even_batches",
    "find_shakespeare",
    "find_thresholds",
    "find_vectors",
    "fit_memory_model",
    "is_out_of_memory",
    "length_bounds",
    "list_vectors",
    "load_images",
    "load_text",
    "load_vectors",
    "max_batch_cost",
    "meter_for",
    "padding_share",
    "probe_memory",
    "read_characters",
    "round_up",
    "size_aware_batching",
    "steps_of",
    "unpack_imdb",
    "unpack_members",
    "vectors_from_torchtext",
]
