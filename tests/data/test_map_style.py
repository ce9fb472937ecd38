"""Data sets with ``__getitem__`` and ``__len__`` and no ``__iter__``, as most data sets of PyTorch are."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from pipeal.core.errors import a_type
from pipeal.core.samples import as_iterable
from pipeal.data import (
    BinnedBatchIterator,
    ChunkedSourceIterator,
    InfinitePermutationSourceIterator,
    NativeCheckpointableIterator,
    ResidentPeak,
    SelectManyIterator,
    chunked_dataset_iterator,
    collect_peaks,
    size_aware_batching,
)

WORDS = ["a", "bb", "ccc", "dd", "e"]


class RaisesAtTheEnd(Dataset):
    """The list behind it raises IndexError."""

    def __len__(self):
        return len(WORDS)

    def __getitem__(self, index):
        return WORDS[index]


class NeverRaises(Dataset):
    """Its numbers go around: only ``len`` tells that it has an end."""

    def __len__(self):
        return len(WORDS)

    def __getitem__(self, index):
        return WORDS[index % len(WORDS)]


class WithoutLen:
    """Only IndexError tells that it has an end."""

    def __getitem__(self, index):
        return WORDS[index]


each = pytest.mark.parametrize("kind", [RaisesAtTheEnd, NeverRaises, WithoutLen])


def resumed(iterator):
    """What is left after two samples, read by another iterator from the state then."""
    first = [next(iterator), next(iterator)]
    state = iterator.getstate()
    iterator.setstate(None)
    iterator.setstate(state)
    return first + list(iterator)


WAYS = {
    "size_aware_batching": lambda data: [word for batch in size_aware_batching(data, len, 4) for word in batch],
    "collect_peaks": lambda data: collect_peaks(data, lambda word: word, _Always())[0],
    "NativeCheckpointableIterator": lambda data: resumed(NativeCheckpointableIterator(data)),
    "SelectManyIterator": lambda data: resumed(SelectManyIterator(NativeCheckpointableIterator([0]), lambda _: data)),
    "chunked_dataset_iterator": lambda data: resumed(
        chunked_dataset_iterator(["file"], lambda _: data, train=False, shuffle=False)
    ),
    "BinnedBatchIterator": lambda data: [
        word for batch in BinnedBatchIterator(data, [3], 3, buffer_samples=1) for word in batch.samples
    ],
}


class _Always(ResidentPeak):
    """A meter that always knows."""

    def peak_bytes(self):
        return 1


@each
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_sample_once_and_in_order(kind, way):
    assert way(kind()) == WORDS


@pytest.mark.parametrize("kind", [RaisesAtTheEnd, NeverRaises])
def test_sources_that_want_a_length(kind):
    assert list(ChunkedSourceIterator(kind())) == WORDS
    endless = InfinitePermutationSourceIterator(kind())
    assert sorted(next(endless) for _ in WORDS) == WORDS


def test_a_tensor_dataset_of_pytorch_is_batched():
    data = TensorDataset(torch.arange(5), torch.tensor([2, 1, 2, 2, 1]))
    batches = size_aware_batching(data, lambda pair: int(pair[1]), 4)
    assert [[int(number) for number, _ in batch] for batch in batches] == [[0, 1], [2, 3], [4]]


def test_a_restored_one_is_not_read_from_its_beginning():
    asked = []

    class Counts(RaisesAtTheEnd):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    iterator = NativeCheckpointableIterator(Counts())
    next(iterator), next(iterator), next(iterator)
    state = iterator.getstate()
    asked.clear()
    iterator.setstate(state)
    assert next(iterator) == "dd"
    assert asked == [3]


def test_an_index_error_in_the_middle_is_no_end():
    class Broken(RaisesAtTheEnd):
        def __getitem__(self, index):
            return [WORDS[0]][index]

    with pytest.raises(IndexError):
        list(size_aware_batching(Broken(), len, 4))


@pytest.mark.parametrize("found", [5, None, list, object()])
def test_what_is_no_data_set_is_named(found):
    with pytest.raises(TypeError, match=f"dataset is {a_type(found)}; wanted something .* __len__"):
        as_iterable(found, TypeError)
    with pytest.raises(ValueError, match="is a"):
        NativeCheckpointableIterator(found)
    with pytest.raises(ValueError, match="is a"):
        BinnedBatchIterator(found, [3], 3)
    with pytest.raises(ValueError, match="is a"):
        collect_peaks(found, len, _Always())
