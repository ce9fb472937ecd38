"""How many training images a second the cached images give, in turns in one process.

    python scripts/bench/reading.py --dataset cifar10 --data-root DIR [--json FILE]

Each line is a choice of augmentation, worker processes and memory layout; an epoch is read and dropped, with nothing
trained in between. The first epoch of each, which starts the workers and touches the mapped file, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import get_args

from pipeal.data import Augmentation, ImageBatches, ImageDataset, load_images
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table


@dataclass
class Choice:
    """One way to read; its rates are collected turn by turn."""

    augmentation: Augmentation
    workers: int
    channels_last: bool
    rates: list[float] = field(default_factory=list)

    def turn(self, data: ImageDataset, batch_size: int, epochs: int) -> None:
        with ImageBatches(
            data.train,
            batch_size=batch_size,
            mean=data.mean,
            std=data.std,
            augmentation=self.augmentation,
            workers=self.workers,
            channels_last=self.channels_last,
        ) as batches:
            for epoch in range(epochs + 1):
                batches.set_epoch(epoch)
                begin = perf_counter()
                images = sum(len(batch) for batch in batches)
                if epoch:
                    self.rates.append(images / (perf_counter() - begin))

    @property
    def row(self) -> list[str | int]:
        layout = "NHWC" if self.channels_last else "NCHW"
        figures = [f"{figure:,.0f}" for figure in (median(self.rates), min(self.rates), max(self.rates))]
        return [self.augmentation, self.workers, layout, *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="counted in each turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()

    begin = perf_counter()
    data = load_images(options.dataset, options.data_root, size=options.size)
    loaded_s = perf_counter() - begin
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {os.getloadavg()[0]:.1f}; {len(data.train):,} images opened in {loaded_s:.2f} s")
    choices = [Choice(*which) for which in product(get_args(Augmentation), options.workers, (False, True))]
    for _ in range(options.turns):
        for choice in choices:
            choice.turn(data, options.batch_size, options.epochs)
    title = f"{data.name}, {options.size} pixels, batches of {options.batch_size}: training images per second"
    columns = ["augmentation", "workers", "layout", "median", "least", "most"]
    print_table(title, columns, [choice.row for choice in choices])
    if options.json is not None:
        figures = {"machine": facts, "load": os.getloadavg(), "choices": [asdict(choice) for choice in choices]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
