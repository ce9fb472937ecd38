"""Padding, batches, shapes and speed of every way to batch, on any lengths.

    python scripts/bench/batching.py --data-root DIR [--datasets wikitext-2 agnews imdb]
    python scripts/bench/batching.py --lengths FILE
    python scripts/bench/batching.py --made 1000000

A lengths file holds one whole number in each line, or is a numpy ``.npy`` array. Of the data sets, lengths are the
words between spaces of each training text (WikiText-2: lines of more than 2 characters once stripped); made ones are
log-normal, with a median of 60.

Every method gives every sample once an epoch, which is checked, and all take turns in one process. Padding, batches
and shapes are means over the epochs. "Largest" is the most padded tokens in a batch: methods that count samples or
add up lengths keep no padded budget. "Plan ms" is the time from nothing to the first batch, in CPU seconds, and the
speed is that of all further batches: what a method plans as it goes, window by window say, slows it down there. The
two are medians.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import BatchSampler

from pipeal.data import (
    BinnedBatchIterator,
    BucketBatchSampler,
    BucketedReadaheadBatchIterator,
    FixedBatchSampler,
    LengthGroupedBatchSampler,
    NativeCheckpointableIterator,
    PlannedBatchSampler,
    SizeAwareBatchSampler,
    StreamBatch,
    TokenBudgetBatchSampler,
    create_buckets,
    find_thresholds,
    length_bounds,
    load_text,
)
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

Lengths = npt.NDArray[np.int64]
Batches = Iterable[list[int] | StreamBatch[int]]


@dataclass
class Method:
    """One way to batch; its figures are collected epoch by epoch."""

    name: str
    build: Callable[[int], Batches]
    padding: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)

    def turn(self, epoch: int, lengths: Lengths) -> None:
        """One epoch, from nothing."""
        begin = process_time()
        source = self.build(epoch)
        iterator = iter(source)
        first = next(iterator)
        planned = process_time()
        found = [first, *iterator]
        iterate_s = process_time() - planned

        indices = [batch.samples if isinstance(batch, StreamBatch) else batch for batch in found]
        times = np.bincount(np.concatenate(indices), minlength=len(lengths))
        if (times != 1).any():
            raise SystemExit(f"{self.name}: gave {(times == 0).sum()} samples never, {(times > 1).sum()} repeatedly")
        padded = source.padded_lengths if isinstance(source, PlannedBatchSampler) else lengths
        longest = [
            batch.padded_length if isinstance(batch, StreamBatch) else int(padded[batch].max()) for batch in found
        ]
        sizes = list(map(len, indices))
        tokens = np.array(sizes) * np.array(longest)
        self.padding.append(1 - int(lengths.sum()) / int(tokens.sum()))
        self.batches.append(len(found))
        self.shapes.append(len(set(zip(sizes, longest, strict=True))))
        self.largest.append(int(tokens.max()))
        self.plan_s.append(planned - begin)
        if len(found) > 1 and iterate_s > 0:
            self.samples_per_s.append((len(lengths) - sizes[0]) / iterate_s)

    @property
    def row(self) -> list[str | int]:
        return [
            self.name,
            f"{100 * mean(self.padding):.2f}",
            f"{mean(self.batches):,.0f}",
            f"{mean(self.shapes):,.0f}",
            f"{max(self.largest):,}",
            f"{median(self.samples_per_s) / 1e6:.2f}" if self.samples_per_s else "-",
            f"{1000 * median(self.plan_s):.1f}",
        ]


def methods(lengths: Lengths, options: argparse.Namespace) -> list[Method]:
    budget, size, window, bounds = options.budget, options.batch_size, options.window, options.bounds
    sizes, of = torch.from_numpy(lengths), lengths.tolist()

    def sampler(name: str, build: Callable[[], Any]) -> Method:
        def begin(epoch: int) -> Batches:
            made = build()
            made.set_epoch(epoch)
            return made

        return Method(name, begin)

    def bucket(name: str, base: type[Any], **arguments: Any) -> Method:
        def build() -> BucketBatchSampler:
            buckets = create_buckets(sizes, options.bucket_width, options.bucket_count)
            return BucketBatchSampler(sizes, buckets.bucket_boundaries, base, arguments)

        return sampler(name, build)

    def size_aware(cost: Any) -> Method:
        return sampler(
            f"size-aware, {cost} cost",
            lambda: SizeAwareBatchSampler(range(len(of)), of, budget, cost=cost, shuffle=True),
        )

    def plan(name: str, **arguments: Any) -> Method:
        return sampler(name, lambda: PlannedBatchSampler(lengths, budget, **arguments))

    def shuffled(epoch: int) -> list[int]:
        return np.random.default_rng(epoch).permutation(len(of)).tolist()

    def read_ahead(name: str, carry: bool) -> Method:
        return Method(
            name,
            lambda epoch: BucketedReadaheadBatchIterator(
                NativeCheckpointableIterator(shuffled(epoch)),
                window,
                key=of.__getitem__,
                batch_size=lambda longest: budget // of[longest],
                seed=epoch,
                carry=carry,
            ),
        )

    def stream(name: str, pad_to: Any) -> Method:
        """Bounds come from the first samples alone; indices of a shuffled order stand for the samples."""

        def build(epoch: int) -> Batches:
            order = shuffled(epoch)
            found = length_bounds(lengths[order[: options.sample]], bounds)
            return BinnedBatchIterator(order, found, budget, length=of.__getitem__, pad_to=pad_to, oversize="single")

        return Method(name, build)

    return [
        sampler(f"random, {size} each", lambda: FixedBatchSampler(lengths, size)),
        sampler(f"grouped by length, {size} each", lambda: LengthGroupedBatchSampler(lengths, size)),
        bucket(f"bucket, {size} each", BatchSampler, batch_size=size, drop_last=False),
        bucket("bucket, size-aware", SizeAwareBatchSampler, sizeof=of, max_total_size=budget, cost="padded"),
        size_aware("sum"),
        size_aware("padded"),
        read_ahead(f"read-ahead of {window:,}, as in seed 4", carry=False),
        read_ahead(f"read-ahead of {window:,}, rest carried on", carry=True),
        sampler("token budget", lambda: TokenBudgetBatchSampler(lengths, budget)),
        plan("plan"),
        plan("plan, not shuffled", shuffle=False),
        plan(f"plan, {bounds} lengths", shapes=bounds),
        stream(f"stream, {bounds} bounds", "bound"),
        stream("stream, padded to longest", "longest"),
    ]


def counting(lengths: Lengths, k: int) -> str:
    """How long thresholds take: counting the lengths, and then choosing among the distinct ones."""
    begin = process_time()
    values, counts = np.unique(lengths, return_counts=True)
    counted = process_time()
    k = min(k, len(values))
    find_thresholds((values, counts), float, k)
    done = process_time()
    return (
        f"{len(lengths):,} lengths up to {values[-1]:,}: counted in {1000 * (counted - begin):.1f} ms, "
        f"{k} thresholds of {len(values):,} distinct ones in {1000 * (done - counted):.1f} ms"
    )


def read_lengths(path: Path) -> Lengths:
    if path.suffix == ".npy":
        return np.load(path).astype(np.int64)
    return np.array(path.read_text(encoding="utf-8").split(), dtype=np.int64)


def made_lengths(count: int) -> Lengths:
    return np.maximum(1, np.random.default_rng(0).lognormal(np.log(60), 1, count)).astype(np.int64)


def real_lengths(name: str, root: Path) -> Lengths:
    if name == "wikitext-2":
        with gzip.open(root / "wikitext-2" / "train.txt.gz", "rt", encoding="utf-8") as lines:
            texts = [line for line in lines if len(line.strip()) > 2]
    else:
        texts = load_text(name, root, download=False).train.texts
    return np.array([max(1, len(text.split())) for text in texts])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--made", type=int, nargs="+", default=[], metavar="N", help="make so many lengths")
    parser.add_argument("--data-root", type=Path, help="the folder of the data sets")
    parser.add_argument("--datasets", nargs="+", default=["wikitext-2", "agnews", "imdb"])
    parser.add_argument("--max-len", type=int, default=512, help="longer samples are cut")
    parser.add_argument("--budget", type=int, default=16_384, help="padded tokens in a batch; at least --max-len")
    parser.add_argument("--batch-size", type=int, default=32, help="of the methods that count samples")
    parser.add_argument("--bounds", type=int, default=64)
    parser.add_argument("--bucket-width", type=int, default=16, help="the widest range of lengths of a bucket")
    parser.add_argument("--bucket-count", type=int, default=1_000, help="samples that are enough for a bucket")
    parser.add_argument("--window", type=int, default=10_000, help="of the read-ahead")
    parser.add_argument("--sample", type=int, default=5_000, help="lengths that the stream's bounds are made of")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    if not (options.lengths or options.made or options.data_root):
        parser.error("nothing to batch; give --lengths FILE, --made N or --data-root DIR")
    if options.budget < options.max_len:
        parser.error(f"a budget of {options.budget} does not hold one sample of {options.max_len}; raise one, cut more")

    sources: dict[str, Callable[[], Lengths]] = {path.name: partial(read_lengths, path) for path in options.lengths}
    sources |= {f"{count:,} made": partial(made_lengths, count) for count in options.made}
    if options.data_root:
        sources |= {name: partial(real_lengths, name, options.data_root) for name in options.datasets}
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {os.getloadavg()[0]:.1f}; CPU seconds")
    figures = {}
    for name, load in sources.items():
        # Drawn between the turns: a thread beside them would spend CPU seconds in them.
        with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
            task = progress.add_task(f"{name}: reading", total=None)
            progress.refresh()
            found = load()
            lengths = np.minimum(found, options.max_len)
            rows = methods(lengths, options)
            progress.update(task, total=options.epochs * len(rows), refresh=True)
            for epoch in range(options.epochs):
                for method in rows:
                    progress.update(task, description=f"{name}, epoch {epoch + 1}: {method.name}", refresh=True)
                    method.turn(epoch, lengths)
                    progress.advance(task)
        least = -(-int(lengths.sum()) // options.budget)
        title = (
            f"\n{name}: {len(lengths):,} samples, {lengths.sum():,} tokens, longest {lengths.max()}; "
            f"budget {options.budget:,}, so {least:,} batches at least"
        )
        columns = ["method", "padding %", "batches", "shapes", "largest", "million samples/s", "plan ms"]
        print_table(title, columns, [method.row for method in rows])
        print(counting(lengths, options.bounds))
        if found.max() > options.max_len:
            print(counting(found, options.bounds))
        figures[name] = [{key: value for key, value in vars(method).items() if key != "build"} for method in rows]
    if options.json is not None:
        record = {"machine": facts, "load": os.getloadavg(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.json.write_text(json.dumps(record | {"datasets": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
