"""Padding, batches, shapes and speed of every way to batch, on any lengths.

    python scripts/bench/batching.py --data-root DIR [--datasets wikitext-2 agnews imdb]
    python scripts/bench/batching.py --lengths FILE

A lengths file holds one whole number in each line, or is a numpy ``.npy`` array. Of the data sets, lengths are the
words between spaces of each training text (WikiText-2: lines of more than 2 characters once stripped). Rows are means
over the epochs, speeds are medians; all methods take turns in one process, and are timed in its CPU seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import process_time

import numpy as np
import numpy.typing as npt

from pipeal.data.bounds import length_bounds
from pipeal.data.plan import PlannedBatchSampler
from pipeal.data.samplers import (
    EpochSampler,
    FixedBatchSampler,
    LengthGroupedBatchSampler,
    TokenBudgetBatchSampler,
)
from pipeal.data.stream import BinnedBatchIterator, PadTo
from pipeal.data.text import load_text
from pipeal.train.environment import environment
from pipeal.train.tables import print_table

Lengths = npt.NDArray[np.int64]


@dataclass
class Epoch:
    """What one epoch was: its batches' sizes and padded lengths, and the CPU seconds it took."""

    sizes: list[int]
    longest: list[int]
    plan_s: float
    iterate_s: float


@dataclass
class Method:
    """One way to batch; its figures are collected epoch by epoch."""

    name: str
    run: Callable[[int], Epoch]
    padding: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)

    def turn(self, epoch: int, lengths: Lengths) -> None:
        found = self.run(epoch)
        sizes, longest = np.array(found.sizes), np.array(found.longest)
        if sizes.sum() != len(lengths):
            raise SystemExit(f"{self.name}: gave {sizes.sum()} of {len(lengths)} samples")
        self.padding.append(1 - int(lengths.sum()) / int((sizes * longest).sum()))
        self.batches.append(len(sizes))
        self.shapes.append(len(set(zip(found.sizes, found.longest, strict=True))))
        self.plan_s.append(found.plan_s)
        self.samples_per_s.append(len(lengths) / found.iterate_s)

    @property
    def row(self) -> list[str | int]:
        return [
            self.name,
            f"{100 * mean(self.padding):.2f}",
            f"{mean(self.batches):,.0f}",
            f"{mean(self.shapes):,.0f}",
            f"{median(self.samples_per_s) / 1e6:.2f}",
            f"{1000 * median(self.plan_s):.1f}",
        ]


def sampled(name: str, build: Callable[[], EpochSampler], lengths: Lengths) -> Method:
    """A sampler: planning is building it and taking its first batch, iterating is taking them all once planned."""

    def run(epoch: int) -> Epoch:
        begin = process_time()
        sampler = build()
        sampler.set_epoch(epoch)
        next(iter(sampler))
        planned = process_time()
        batches = list(sampler)
        done = process_time()
        padded = sampler.padded_lengths if isinstance(sampler, PlannedBatchSampler) else lengths
        longest = [int(padded[batch].max()) for batch in batches]
        return Epoch([len(batch) for batch in batches], longest, planned - begin, done - planned)

    return Method(name, run)


def streamed(name: str, lengths: Lengths, budget: int, bounds: int, sample: int, pad_to: PadTo) -> Method:
    """Bins whose bounds come from the first samples alone; indices of a shuffled order stand for the samples."""

    def run(epoch: int) -> Epoch:
        order = np.random.default_rng(epoch).permutation(len(lengths)).tolist()
        length = lengths.tolist().__getitem__
        begin = process_time()
        found = length_bounds(lengths[order[:sample]], bounds)
        planned = process_time()
        stream = BinnedBatchIterator(order, found, budget, length=length, pad_to=pad_to, oversize="single")
        batches = list(stream)
        done = process_time()
        sizes, longest = [len(batch) for batch in batches], [batch.padded_length for batch in batches]
        return Epoch(sizes, longest, planned - begin, done - planned)

    return Method(name, run)


def read_ahead(lengths: Lengths, order: list[int], budget: int, window: int) -> Iterator[list[int]]:
    """Windows of samples, each sorted by length and cut from the longest on; what is left of a window is a batch."""
    for begin in range(0, len(order), window):
        part = sorted(order[begin : begin + window], key=lambda index: -lengths[index])
        while part:
            take = max(1, budget // int(lengths[part[0]]))
            yield part[:take]
            part = part[take:]


def windowed(name: str, lengths: Lengths, budget: int, window: int) -> Method:
    def run(epoch: int) -> Epoch:
        order = np.random.default_rng(epoch).permutation(len(lengths)).tolist()
        begin = process_time()
        batches = list(read_ahead(lengths, order, budget, window))
        done = process_time()
        longest = [int(lengths[batch].max()) for batch in batches]
        return Epoch([len(batch) for batch in batches], longest, 0.0, done - begin)

    return Method(name, run)


def methods(lengths: Lengths, options: argparse.Namespace) -> list[Method]:
    budget, size = options.budget, options.batch_size
    return [
        sampled(f"random, {size} each", lambda: FixedBatchSampler(lengths, size), lengths),
        sampled(f"grouped by length, {size} each", lambda: LengthGroupedBatchSampler(lengths, size), lengths),
        windowed(f"read-ahead of {options.window:,}", lengths, budget, options.window),
        sampled("token budget", lambda: TokenBudgetBatchSampler(lengths, budget), lengths),
        sampled("plan", lambda: PlannedBatchSampler(lengths, budget), lengths),
        sampled("plan, not shuffled", lambda: PlannedBatchSampler(lengths, budget, shuffle=False), lengths),
        sampled(
            f"plan, {options.bounds} lengths",
            lambda: PlannedBatchSampler(lengths, budget, shapes=options.bounds),
            lengths,
        ),
        streamed(f"stream, {options.bounds} bounds", lengths, budget, options.bounds, options.sample, "bound"),
        streamed("stream, padded to longest", lengths, budget, options.bounds, options.sample, "longest"),
    ]


def read_lengths(path: Path) -> Lengths:
    if path.suffix == ".npy":
        return np.load(path).astype(np.int64)
    return np.array(path.read_text(encoding="utf-8").split(), dtype=np.int64)


def real_lengths(name: str, root: Path) -> Lengths:
    if name == "wikitext-2":
        with gzip.open(root / "wikitext-2" / "train.txt.gz", "rt", encoding="utf-8") as lines:
            texts = [line for line in lines if len(line.strip()) > 2]
    else:
        texts = load_text(name, root, download=False).train.texts
    return np.array([max(1, len(text.split())) for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--data-root", type=Path, help="the folder of the data sets")
    parser.add_argument("--datasets", nargs="+", default=["wikitext-2", "agnews", "imdb"])
    parser.add_argument("--max-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--budget", type=int, default=16_384, help="padded tokens in a batch")
    parser.add_argument("--batch-size", type=int, default=32, help="of the methods that count samples")
    parser.add_argument("--bounds", type=int, default=64)
    parser.add_argument("--window", type=int, default=10_000, help="of the read-ahead")
    parser.add_argument("--sample", type=int, default=5_000, help="lengths that the stream's bounds are made of")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()
    if not options.lengths and options.data_root is None:
        parser.error("nothing to batch; give --lengths FILE or --data-root DIR")

    every = {path.name: read_lengths(path) for path in options.lengths}
    if options.data_root is not None:
        every |= {name: real_lengths(name, options.data_root) for name in options.datasets}
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {os.getloadavg()[0]:.1f}; CPU seconds")
    figures = {}
    for name, found in every.items():
        lengths = np.minimum(found, options.max_len)
        rows = methods(lengths, options)
        for epoch in range(options.epochs):
            for method in rows:
                method.turn(epoch, lengths)
        least = -(-int(lengths.sum()) // options.budget)
        title = (
            f"{name}: {len(lengths):,} samples, {lengths.sum():,} tokens, longest {lengths.max()}; "
            f"budget {options.budget:,}, so {least:,} batches at least"
        )
        columns = ["method", "padding %", "batches", "shapes", "million samples/s", "plan ms"]
        print_table(title, columns, [method.row for method in rows])
        figures[name] = [{key: value for key, value in vars(method).items() if key != "run"} for method in rows]
    if options.json is not None:
        record = {"machine": facts, "load": os.getloadavg(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.json.write_text(json.dumps(record | {"datasets": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
