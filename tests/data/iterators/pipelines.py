"""Random pipelines as plain values, and what builds them: importable, so that another process can build them too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from pipeal.data import iterators as its

Spec = tuple[Any, ...]


class Take(its.CheckpointableIterator[Any]):
    """The first ``count`` items; an iterator of a user's own, with a state of its own form."""

    def __init__(self, source: its.CheckpointableIterator[Any], count: int) -> None:
        self.source, self.count, self.taken = source, count, 0
        self.setstate(None)

    def __next__(self) -> Any:
        if self.taken == self.count:
            raise StopIteration
        item = next(self.source)
        self.taken += 1
        return item

    def getstate(self) -> dict[str, Any]:
        return {"taken": self.taken, "source": self.source.getstate()}

    def setstate(self, checkpoint: dict[str, Any] | None) -> None:
        self.taken = checkpoint["taken"] if checkpoint else 0
        self.source.setstate(checkpoint["source"] if checkpoint else None)

    def prepare(self) -> None:
        self.source.prepare()

    def close(self) -> None:
        self.source.close()


def until_gone(left: Callable[[], Any]) -> Any:
    """What is left of processes or threads that were told to end, when none is or a long time is over."""
    deadline = time.monotonic() + 120
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    return left()


class Endless:
    """An iterable that is no sequence."""

    def __iter__(self):
        number = 0
        while True:
            yield number
            number += 1


def weight(item: Any) -> int:
    """A length for items of any make."""
    return sum(map(ord, str(item))) % 7 + 1


def tag(item: Any) -> Any:
    return ("m", item)


def few(item: Any) -> list[Any]:
    return [item] * (weight(item) % 3)


def lazily(item: Any):
    return (item for _ in range(weight(item) % 4))


def add(total: int, item: Any) -> tuple[int, Any]:
    return total + weight(item), (total, item)


def draw(generator: random.Random, item: Any) -> Any:
    return item, generator.randrange(100)


def fits(item: Any) -> int:
    return 20 // weight(item)


def parity(item: Any) -> int:
    return weight(item) % 2


def build(spec: Spec) -> its.CheckpointableIterator[Any]:
    """The pipeline that ``(source, stage, stage, ...)`` describes."""
    (kind, *arguments), *stages = spec
    pipeline = source(kind, *arguments)
    for kind, *arguments in stages:
        pipeline = stage(pipeline, kind, *arguments)
    return pipeline


def source(kind: str, count: int, seed: int) -> its.CheckpointableIterator[Any]:
    items = [f"i{number}" for number in range(count)]
    if kind == "native":
        return its.NativeCheckpointableIterator(items)
    if kind == "endless":
        return Take(its.NativeCheckpointableIterator(Endless()), count)
    if kind == "chunked":
        return its.ChunkedSourceIterator(items, 2, seed % 2, uneven=("keep", "drop", "repeat")[seed % 3])
    if kind == "permuted":
        few_items = items[: count // 2 + 1] or ["i0"]
        return Take(its.InfinitePermutationSourceIterator(few_items, seed, seed % 4 > 0, 2, seed % 2), count)
    if kind == "random":
        return Take(its.RandomIterator(seed), count)
    assert kind == "multiplex"
    control = its.NativeCheckpointableIterator([number % 2 for number in range(2 * count)])
    return its.MultiplexIterator(
        control, [its.NativeCheckpointableIterator(items), Take(its.RandomIterator(seed), count)]
    )


def stage(
    pipeline: its.CheckpointableIterator[Any], kind: str, size: int, seed: int
) -> its.CheckpointableIterator[Any]:
    makers = {
        "map": lambda: its.MapIterator(pipeline, tag),
        "recurrent": lambda: its.RecurrentIterator(pipeline, add, 0),
        "random map": lambda: its.SamplingRandomMapIterator(pipeline, draw, seed),
        "zip": lambda: its.ZipIterator(pipeline, its.RandomIterator(seed)),
        "window": lambda: its.WindowedIterator(pipeline, size),
        "batch": lambda: its.FixedBatchIterator(pipeline, size),
        "select": lambda: its.SelectManyIterator(pipeline, few),
        "lazy select": lambda: its.SelectManyIterator(pipeline, lazily),
        "blocks": lambda: its.BlockwiseShuffleIterator(pipeline, size, seed),
        "buffer": lambda: its.BufferedShuffleIterator(pipeline, size, seed),
        "prefetch": lambda: its.PrefetchIterator(pipeline, size * 20 if seed % 2 else size),
        "shard": lambda: its.ShardIterator(pipeline, size, seed % size, ("keep", "drop", "repeat")[seed % 3]),
        "buckets": lambda: its.BucketedReadaheadBatchIterator(
            pipeline,
            2 * size,
            weight if seed % 5 else None,
            fits if seed % 3 else size,
            parity if seed % 4 == 0 else None,
            bool(seed % 7),
            seed,
            carry=bool(seed % 2),
        ),
        "parallel": lambda: its.ParallelMapIterator(pipeline, tag, 2, size),
    }
    return makers[kind]()


SOURCES = ["native", "endless", "chunked", "permuted", "random", "multiplex"]
STAGES = [
    *("map", "recurrent", "random map", "zip", "window", "batch", "select", "lazy select"),
    *("blocks", "buffer", "prefetch", "shard", "buckets"),
]


def specs(most: int = 4) -> st.SearchStrategy[Spec]:
    seeds = st.integers(0, 1000)
    head = st.tuples(st.sampled_from(SOURCES), st.integers(0, 14), seeds)
    stages = st.lists(st.tuples(st.sampled_from(STAGES), st.integers(1, 5), seeds), max_size=most)
    return st.tuples(head, stages).map(lambda pair: (pair[0], *pair[1]))


def remainders(cases: list[tuple[Spec, Any]]) -> list[list[Any]]:
    """What is left of each pipeline after each state; for another process to compute."""
    found = []
    for spec, state in cases:
        with build(spec) as pipeline:
            pipeline.setstate(state)
            found.append(list(pipeline))
    return found
