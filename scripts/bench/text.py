"""What each part brings to text training on this machine, in turns in one process.

    python scripts/bench/text.py transformer --data-root DIR
    python scripts/bench/text.py lstm --data-root DIR

First table, the ladder: from the published step (published.py: random batches of 256 padded to the longest, a new
thread per layer and batch) one part at a time. Second table: schedules and placements of our own step, and what
``--devices auto`` chooses among them. Seconds per epoch are the epoch's real tokens over the measured rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from published import published, published_step

from pipeal.core.options import EngineOptions
from pipeal.core.partition import balance
from pipeal.core.rng import keyed
from pipeal.data import (
    Batch,
    BatchLoader,
    Corpus,
    FixedBatchSampler,
    TokenBudgetBatchSampler,
    Vocab,
    clean,
    load_text,
)
from pipeal.engine import Pipeline
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.devices.cpus import cores
from pipeal.methods.al import ALPackage
from pipeal.models import build_text
from pipeal.planning.measure.layers import WARM_UP
from pipeal.planning.placement import Placement
from pipeal.planning.planner import place
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table


@dataclass
class Contestant:
    """Something that trains on batches; its rates are collected turn by turn."""

    name: str
    batches: Iterator[Batch]
    train: Callable[[list[Batch]], None]
    per_turn: int
    rates: list[float] = field(default_factory=list)

    def turn(self) -> None:
        batches = list(islice(self.batches, self.per_turn))
        begin = perf_counter()
        self.train(batches)
        self.rates.append(sum(batch.tokens for batch in batches) / (perf_counter() - begin))

    @property
    def rate(self) -> float:
        """Real tokens per second, the median of the turns after the first, which warms up."""
        return median(self.rates[1:])

    @property
    def spread(self) -> float:
        counted = self.rates[1:]
        return (max(counted) - min(counted)) / self.rate


def in_turns(contestants: list[Contestant], turns: int) -> None:
    for _ in range(turns + 1):
        for contestant in contestants:
            contestant.turn()


def endless(corpus: Corpus, sampler: Any) -> Iterator[Batch]:
    return cycle(BatchLoader(corpus, sampler))


def by_thread(package: ALPackage) -> Callable[[list[Batch]], None]:
    """The published step."""

    def train(batches: list[Batch]) -> None:
        torch.set_num_threads(cores())
        for number, batch in enumerate(batches):
            with keyed(0, 0, number):
                published_step(package, batch.x, batch.y)

    return train


def by_pipeline(
    package: ALPackage, placement: Placement, schedule: str, precision: Any
) -> Callable[[list[Batch]], None]:
    def train(batches: list[Batch]) -> None:
        with Pipeline(
            package,
            placement.devices,
            schedule,
            sizes=placement.sizes,
            threads=placement.threads,
            precision=precision,
        ) as pipe:
            pipe.run(batches)

    return train


def ours(model: str, vocab: Vocab, classes: int) -> ALPackage:
    torch.manual_seed(0)
    return build_text(model, "al", vocab_size=len(vocab), classes=classes, lr={"enc": 1e-3, "ae": 1e-3})


def show(title: str, contestants: list[Contestant], tokens: int) -> None:
    slowest = contestants[0].rate
    rows = [
        [c.name, f"{tokens / c.rate:.2f}", f"{c.rate:,.0f}", f"{c.rate / slowest:.2f}×", f"{c.spread:.0%}"]
        for c in contestants
    ]
    print_table(title, ["", "s/epoch", "tokens/s", "speed-up", "spread"], rows)


def ladder(model: str, corpus: Corpus, vocab: Vocab, budget: int) -> list[Contestant]:
    def random_batches() -> Iterator[Batch]:
        return endless(corpus, FixedBatchSampler(corpus.lengths, 256))

    def by_length() -> Iterator[Batch]:
        return endless(corpus, TokenBudgetBatchSampler(corpus.lengths, budget, max_samples=512))

    package = ours(model, vocab, corpus.classes)
    sample = list(islice(by_length(), WARM_UP + 8))
    chosen = {
        precision: place(package, sample, "pipelined", EngineOptions(precision=precision))
        for precision in ("fp32", "bf16")
    }
    torch.manual_seed(0)
    plain = [published(model, len(vocab), corpus.classes) for _ in range(2)]
    mine = [ours(model, vocab, corpus.classes) for _ in range(3)]
    return [
        Contestant("published step and operators", random_batches(), by_thread(plain[0]), 2),
        Contestant("+ batches by length", by_length(), by_thread(plain[1]), 4),
        Contestant("+ operators", by_length(), by_thread(mine[0]), 6),
        Contestant(
            f"+ pipelined: {chosen['fp32']}",
            by_length(),
            by_pipeline(mine[1], chosen["fp32"], "pipelined", "fp32"),
            12,
        ),
        Contestant(
            f"+ bf16: {chosen['bf16']}",
            by_length(),
            by_pipeline(mine[2], chosen["bf16"], "pipelined", "bf16"),
            24,
        ),
    ]


def placements(model: str, corpus: Corpus, vocab: Vocab, budget: int, precision: Any) -> list[Contestant]:
    """Every schedule with one thread per worker, then all cores for one stage, then what auto chooses."""

    def batches() -> Iterator[Batch]:
        return endless(corpus, TokenBudgetBatchSampler(corpus.lengths, budget, max_samples=512))

    def contestant(name: str, placement: Placement, schedule: str) -> Contestant:
        package = ours(model, vocab, corpus.classes)
        return Contestant(name, batches(), by_pipeline(package, placement, schedule, precision), 16)

    package = ours(model, vocab, corpus.classes)
    layers = len(package)
    found = [contestant("sequential, 1 thread", Placement(["cpu"], [layers], 1), "sequential")]
    for schedule in ("al-fm", "pipelined"):
        for stages in range(2, layers + 1):
            placement = Placement(["cpu"] * stages, balance([1.0] * layers, stages), 1)
            found.append(contestant(f"{schedule}, {stages} stages", placement, schedule))
    if cores() > 1:
        whole = Placement(["cpu"], [layers], cores())
        found.append(contestant(f"sequential, {cores()} threads", whole, "sequential"))
    chosen = place(package, list(islice(batches(), WARM_UP + 8)), "pipelined", EngineOptions(precision=precision))
    found.append(contestant(f"auto: {chosen}", chosen, "pipelined"))
    return found


def read(dataset: str, root: Path) -> tuple[Corpus, Vocab]:
    """The training samples, cut after 128 words, and the vocabulary."""
    data = load_text(dataset, root)
    words = [clean(text) for text in data.train.texts]
    vocab = Vocab.build(words)
    return Corpus.from_tokens(words, data.train.labels, vocab, max_len=128, classes=len(data.classes)), vocab


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["transformer", "lstm"])
    parser.add_argument("--dataset", default="agnews")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--budget-tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--table", choices=["ladder", "placements", "both"], default="both")
    options = parser.parse_args()

    corpus, vocab = read(options.dataset, options.data_root)
    tokens = int(corpus.lengths.sum())
    print("  ".join(f"{key} {value}" for key, value in environment().items()))
    title = f"{options.dataset} {options.model}: {len(corpus):,} samples, {tokens:,} tokens per epoch"
    if options.table in ("ladder", "both"):
        rungs = ladder(options.model, corpus, vocab, options.budget_tokens)
        in_turns(rungs, options.turns)
        show(f"{title}; each line adds one part", rungs, tokens)
    if options.table in ("placements", "both"):
        choices = placements(options.model, corpus, vocab, options.budget_tokens, fastest_precision("cpu"))
        in_turns(choices, options.turns)
        show(f"{title}; {fastest_precision('cpu')}, over one thread", choices, tokens)


if __name__ == "__main__":
    main()
