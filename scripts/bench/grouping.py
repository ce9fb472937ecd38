"""Grouping inside a batch: the published demo again, so that it can be believed.

    python scripts/bench/grouping.py [--quick] [--json FILE]

Lengths of 1, 4, 16 and 64 words, each as often as it is short; embedding, linear map, maximum, linear map. Both ways
train the same model from the same weights, each with an optimizer of its own weights (the published loop steps that
of the other model), on the same batches; making the batches counts. A run of each warms up; then they take turns, and
who begins changes from turn to turn. Wall seconds depend on who else is at work here, CPU seconds hardly.

Table 2 trains the shipped text models, all AL layers but the embedding grouped, on random words: of the lengths above,
and of lengths that spread as those of texts do (log-normal, a median of 25 words).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeal.data.bounds import find_thresholds
from pipeal.data.grouping import AnnotatedModule, DataCollection, Grouped, LengthThresholdGrouper, UniGrouper
from pipeal.engine.allocator import keep_freed_memory
from pipeal.engine.threads import cores
from pipeal.models import TextDims, build_text
from pipeal.train.environment import environment

LENGTHS = (1, 4, 16, 64)
WORDS = 8
VOCABULARY = 1000

Forward = Callable[["Texts", list[Tensor]], Tensor]


class Texts(AnnotatedModule):
    """Embedding, linear map, maximum over the words of a text, linear map: ``(B, T)`` to ``(B,)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb, self.linear, self.proj = nn.Embedding(WORDS, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.linear(self.emb(x)).masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return self.proj(hidden.amax(1)).squeeze(1)

    def get_input_annot(self) -> str:
        return "(b, l_seq)"

    def get_output_annot(self) -> str:
        return "(b)"

    def get_mask_hint(self) -> list[str]:
        return ["seq"]


@dataclass(frozen=True)
class Row:
    """One way of training: seconds per run over all batches, and what it computes."""

    way: str
    positions: int
    padding: float
    median_s: float
    least_s: float
    most_s: float
    cpu_s: float


@dataclass(frozen=True)
class LayersRow:
    """An AL model with its layers plain and grouped; medians, in seconds per batch."""

    model: str
    lengths: str
    thresholds: list[int]
    plain_s: float
    grouped_s: float
    plain_cpu_s: float
    grouped_cpu_s: float


def ungrouped(model: Texts, xs: list[Tensor]) -> Tensor:
    """One batch, padded to the longest."""
    lengths = torch.tensor([len(x) for x in xs], device=xs[0].device)
    padded = pad_sequence(xs, batch_first=True)
    return model(padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1))


def grouped_by(thresholds: Sequence[int]) -> Forward:
    """The same in groups."""
    grouper = LengthThresholdGrouper("sequence", thresholds)

    def grouped(model: Texts, xs: list[Tensor]) -> Tensor:
        batch = DataCollection("(B, L_sequence)", xs)
        batch.group(grouper)
        out = batch.apply(model)
        out.regroup(UniGrouper())
        return out.data_groups[0].value

    return grouped


def make_batches(count: int, size: int, device: str) -> list[tuple[list[Tensor], Tensor]]:
    """Texts and their labels, 0 or 1; the share of a length is inverse to it."""
    draw = np.random.default_rng(0)
    weights = 1 / np.array(LENGTHS)
    made = []
    for _ in range(count):
        lengths = draw.choice(LENGTHS, size, p=weights / weights.sum())
        xs = [torch.from_numpy(draw.integers(0, WORDS, length)).to(device) for length in lengths]
        made.append((xs, torch.from_numpy(draw.integers(0, 2, size)).to(device, torch.float32)))
    return made


def train(start: Texts, forward: Forward, batches: Sequence[tuple[list[Tensor], Tensor]]) -> tuple[float, float]:
    """Wall and CPU seconds of one pass over all batches, from a copy of the same weights."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    wait(model.proj.weight)
    wall, cpu = perf_counter(), process_time()
    for xs, y in batches:
        (y - forward(model, xs)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wait(model.proj.weight)
    return perf_counter() - wall, process_time() - cpu


def measure_layers(model: str, spread: str, turns: int) -> LayersRow:
    """Seconds per batch of an AL model, plain and grouped, in turns."""
    batches = word_batches(spread)
    lengths = [int(length) for x, _ in batches for length in x.ne(0).sum(1)]
    thresholds = find_thresholds(lengths, lambda length: length, 3)
    packages = []
    for grouped in (False, True):
        torch.manual_seed(0)
        dims = TextDims(embedding=96, hidden=96, code=64, blocks=2)
        package = build_text(model, "al", vocab_size=VOCABULARY, classes=4, dims=dims)  # type: ignore[arg-type]
        for layer in list(package)[1:] if grouped else []:
            layer.enc.f = Grouped(layer.enc.f, thresholds)
        packages.append(package)
    seconds: list[list[tuple[float, float]]] = [[], []]
    for turn in range(turns + 1):
        for way in (0, 1) if turn % 2 else (1, 0):
            wall, cpu = perf_counter(), process_time()
            for x, y in batches:
                packages[way](x, y)
                packages[way].backward()
                packages[way].update()
            if turn:
                seconds[way].append((perf_counter() - wall, process_time() - cpu))
    plain, grouped_s = ([median(column) / len(batches) for column in zip(*took, strict=True)] for took in seconds)
    return LayersRow(model, spread, thresholds, plain[0], grouped_s[0], plain[1], grouped_s[1])


def word_batches(spread: str, count: int = 3, rows: int = 64) -> list[tuple[Tensor, Tensor]]:
    """``(B, T)`` words, padded with 0, and labels of four classes."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        if spread == "demo":
            lengths = draw.choice(LENGTHS, rows, p=1 / np.array(LENGTHS) / sum(1 / np.array(LENGTHS)))
        else:
            lengths = draw.lognormal(np.log(25), 0.7, rows).astype(int).clip(1, 200)
        x = draw.integers(2, VOCABULARY, (rows, lengths.max())) * (np.arange(lengths.max()) < lengths[:, None])
        made.append((torch.from_numpy(x), torch.from_numpy(draw.integers(0, 4, rows))))
    return made


def gradients(model: Texts, forward: Forward, batch: tuple[list[Tensor], Tensor]) -> list[Tensor]:
    """Of the loss of one batch."""
    (batch[1] - forward(model, batch[0])).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def computed(batches: Sequence[tuple[list[Tensor], Tensor]], thresholds: Sequence[int]) -> int:
    """How many positions the batches have once they are grouped and padded."""
    total = 0
    for xs, _ in batches:
        lengths = np.array([len(x) for x in xs])
        for group in np.unique(np.searchsorted(thresholds, lengths)):
            own = lengths[np.searchsorted(thresholds, lengths) == group]
            total += int(own.max()) * len(own)
    return total


def measure(width: int, count: int, size: int, turns: int, device: str) -> tuple[list[Row], dict[str, Any]]:
    """Both ways, in turns; and the largest difference of a gradient, as it is and as a share of the largest one."""
    torch.manual_seed(0)
    model, batches = Texts(width).to(device), make_batches(count, size, device)
    lengths = [len(x) for xs, _ in batches for x in xs]
    thresholds = find_thresholds(lengths, lambda length: length, 3)
    ways: dict[str, tuple[Forward, list[int]]] = {
        "ungrouped": (ungrouped, []),
        "grouped": (grouped_by(thresholds), thresholds),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in list(ways) if turn % 2 else reversed(ways):
            took = train(model, ways[way][0], batches)
            if turn:
                seconds[way].append(took)
    rows = []
    for way, (_, limits) in ways.items():
        positions, wall = computed(batches, limits), [took for took, _ in seconds[way]]
        padding = 1 - sum(lengths) / positions
        cpu_s = median(took for _, took in seconds[way])
        rows.append(Row(way, positions, padding, median(wall), min(wall), max(wall), cpu_s))
    pairs = [
        (one, other)
        for batch in batches
        for one, other in zip(*(gradients(model, forward, batch) for forward, _ in ways.values()), strict=True)
    ]
    differences = {
        "thresholds": thresholds,
        "largest_difference": max(float((one - other).abs().max()) for one, other in pairs),
        "relative_difference": max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs),
    }
    return rows, differences


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title, title_justify="left", box=None)
    for column in ("", "positions", "padding", "median s", "least", "most", "×", "CPU s", "CPU ×"):
        shown.add_column(column, justify="right" if column else "left")
    for row in rows:
        shown.add_row(
            row.way,
            f"{row.positions:,}",
            f"{row.padding:.1%}",
            *(f"{value:.3f}" for value in (row.median_s, row.least_s, row.most_s)),
            f"{rows[0].median_s / row.median_s:.2f}",
            f"{row.cpu_s:.3f}",
            f"{rows[0].cpu_s / row.cpu_s:.2f}",
        )
    return shown


def layers_table(rows: Sequence[LayersRow]) -> Table:
    shown = Table(title="2. AL models, 64 texts a batch; seconds per batch", title_justify="left", box=None)
    for column in ("model", "lengths", "thresholds", "plain s", "grouped s", "×", "CPU s", "grouped CPU s", "CPU ×"):
        shown.add_column(column, justify="left" if column in ("model", "lengths", "thresholds") else "right")
    for row in rows:
        shown.add_row(
            row.model,
            row.lengths,
            " ".join(map(str, row.thresholds)),
            *(f"{row.plain_s:.3f}", f"{row.grouped_s:.3f}", f"{row.plain_s / row.grouped_s:.2f}"),
            *(f"{row.plain_cpu_s:.3f}", f"{row.grouped_cpu_s:.3f}", f"{row.plain_cpu_s / row.grouped_cpu_s:.2f}"),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow model, two batches, two turns: some seconds")
    parser.add_argument("--width", type=int, default=1024, help="of embedding and linear map; the demo has 8192")
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda")
    parser.add_argument("--threads", type=int, default=cores(), help="intra-op threads; all cores by default")
    parser.add_argument("--turns", type=int, default=6, help="timed runs of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    width, batches, turns = (256, 2, 2) if options.quick else (options.width, 4, options.turns)
    console = Console(width=120, highlight=False)
    facts = environment()
    console.print("  ".join(f"{key}: {value}" for key, value in facts.items()), "\n", markup=False)
    console.print(f"load average: {os.getloadavg()[0]:.1f}; intra-op threads: {options.threads}\n")
    rows, found = measure(width, batches, 256, turns, options.device)
    title = f"1. {batches} batches of 256 texts, width {width}, SGD; in turns, median of {turns}"
    console.print(table(rows, title), "")
    console.print(
        f"thresholds {found['thresholds']}; largest difference of a gradient {found['largest_difference']:.1e}, "
        f"as a share of the largest of its tensor {found['relative_difference']:.1e}",
        markup=False,
    )
    layers = [
        measure_layers(model, spread, turns)
        for model in ("lstm", "transformer")
        for spread in (["demo"] if options.quick else ["demo", "log-normal"])
    ]
    console.print()
    console.print(layers_table(layers))
    if options.json is not None:
        figures = {"machine": facts, "demo": [asdict(row) for row in rows], **found}
        figures["layers"] = [asdict(row) for row in layers]
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
