"""The names of ``infinibatch.datasets``: data sets that are compositions of :mod:`pipeal.data.iterators`."""

from pipeal.data.iterators.chunked import chunked_dataset_iterator

__all__ = ["chunked_dataset_iterator"]
