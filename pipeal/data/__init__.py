"""Data sets, words, vectors and batches; works with a plain PyTorch ``DataLoader`` and no engine."""

from pipeal.data.augment import Augment, Augmentation
from pipeal.data.cleaning import STOP_WORDS, clean
from pipeal.data.corpus import Corpus
from pipeal.data.download import Progress, download
from pipeal.data.embeddings import VectorTable, find_vectors, load_vectors, vectors_from_torchtext
from pipeal.data.imagecache import OnBroken
from pipeal.data.imageloader import ImageBatches
from pipeal.data.images import ImageDataset, canonical_image_name, load_images
from pipeal.data.imagesplit import ImageSplit
from pipeal.data.loader import Batch, BatchLoader, BatchSampler
from pipeal.data.samplers import (
    EpochSampler,
    FixedBatchSampler,
    LengthGroupedBatchSampler,
    TokenBudgetBatchSampler,
    padding_share,
)
from pipeal.data.sources import SOURCES, Source, unpack_imdb, unpack_members
from pipeal.data.text import TextDataset, TextSplit, canonical_text_name, load_text
from pipeal.data.vocab import Vocab

__all__ = [
    "SOURCES",
    "STOP_WORDS",
    "Augment",
    "Augmentation",
    "Batch",
    "BatchLoader",
    "BatchSampler",
    "Corpus",
    "EpochSampler",
    "FixedBatchSampler",
    "ImageBatches",
    "ImageDataset",
    "ImageSplit",
    "LengthGroupedBatchSampler",
    "OnBroken",
    "Progress",
    "Source",
    "TextDataset",
    "TextSplit",
    "TokenBudgetBatchSampler",
    "VectorTable",
    "Vocab",
    "canonical_image_name",
    "canonical_text_name",
    "clean",
    "download",
    "find_vectors",
    "load_images",
    "load_text",
    "load_vectors",
    "padding_share",
    "unpack_imdb",
    "unpack_members",
    "vectors_from_torchtext",
]
