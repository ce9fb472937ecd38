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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipeal.data import AnnotatedModule, DataCollection, Grouped, LengthThresholdGrouper, UniGrouper, find_thresholds
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.devices.cpus import cores
from pipeal.models import TextDims, build_text
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

LENGTHS = (1, 4, 16, 64)
SHARES = 1 / np.array(LENGTHS) / sum(1 / np.array(LENGTHS))
WORDS = 8
VOCABULARY = 1000

Batch = tuple[list[Tensor], Tensor]
Forward = Callable[["Texts", list[Tensor]], Tensor]
Seconds = list[tuple[float, float]]
"""Wall and CPU seconds of every turn."""


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


def in_turns(
    ways: Mapping[str, Callable[[], Callable[[], object]]], turns: int, tell: Callable[[], None]
) -> dict[str, Seconds]:
    """Times each way so many times, after a turn that warms up; who begins changes from turn to turn.

    Args:
        ways: Each makes ready what is then called and timed.
        turns: How often.
        tell: Called after every run.
    """
    seconds: dict[str, Seconds] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in ways if turn % 2 else reversed(list(ways)):
            run = ways[way]()
            wall, cpu = perf_counter(), process_time()
            run()
            if turn:
                seconds[way].append((perf_counter() - wall, process_time() - cpu))
            tell()
    return seconds


def medians(seconds: Seconds) -> tuple[float, float]:
    """Of wall and of CPU seconds."""
    return median(wall for wall, _ in seconds), median(cpu for _, cpu in seconds)


def make_batches(count: int, size: int, device: str) -> list[Batch]:
    """Texts and their labels, 0 or 1; the share of a length is inverse to it."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        lengths = draw.choice(LENGTHS, size, p=SHARES)
        xs = [torch.from_numpy(draw.integers(0, WORDS, length)).to(device) for length in lengths]
        made.append((xs, torch.from_numpy(draw.integers(0, 2, size)).to(device, torch.float32)))
    return made


def training(start: Texts, forward: Forward, batches: Sequence[Batch]) -> Callable[[], None]:
    """One pass over all batches, from a copy of the same weights; ready to run."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    wait(model.proj.weight)

    def run() -> None:
        for xs, y in batches:
            (y - forward(model, xs)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(model.proj.weight)

    return run


def gradients(model: Texts, forward: Forward, batch: Batch) -> list[Tensor]:
    """Of the loss of one batch."""
    (batch[1] - forward(model, batch[0])).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def positions(batches: Sequence[Batch], thresholds: Sequence[int]) -> int:
    """How many the batches have once they are grouped and padded."""
    total = 0
    for xs, _ in batches:
        lengths = np.array([len(x) for x in xs])
        group = np.searchsorted(thresholds, lengths)
        total += sum(int(lengths[group == number].max()) * int((group == number).sum()) for number in np.unique(group))
    return total


def measure(width: int, count: int, turns: int, device: str, tell: Callable[[], None]) -> dict[str, Any]:
    """The demo both ways, and the largest difference of a gradient, as it is and as a share of the largest one."""
    torch.manual_seed(0)
    model, batches = Texts(width).to(device), make_batches(count, 256, device)
    lengths = [len(x) for xs, _ in batches for x in xs]
    thresholds = find_thresholds(lengths, lambda length: length, 3)
    ways: dict[str, Forward] = {"ungrouped": ungrouped, "grouped": grouped_by(thresholds)}
    took = in_turns({way: partial(training, model, f, batches) for way, f in ways.items()}, turns, tell)
    found: dict[str, Any] = {"thresholds": thresholds, "absolute": 0.0, "relative": 0.0}
    for batch in batches:
        for one, other in zip(*(gradients(model, forward, batch) for forward in ways.values()), strict=True):
            apart = float((one - other).abs().max())
            found["absolute"] = max(found["absolute"], apart)
            found["relative"] = max(found["relative"], apart / float(one.abs().max()))
    for way, limits in zip(ways, ([], thresholds), strict=True):
        padded = positions(batches, limits)
        found[way] = {"positions": padded, "padding": 1 - sum(lengths) / padded, "seconds": took[way]}
    return found


def word_batches(spread: str, count: int = 3, rows: int = 64) -> list[tuple[Tensor, Tensor]]:
    """``(B, T)`` words, padded with 0, and labels of four classes."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        if spread == "demo":
            lengths = draw.choice(LENGTHS, rows, p=SHARES)
        else:
            lengths = draw.lognormal(np.log(25), 0.7, rows).astype(int).clip(1, 200)
        x = draw.integers(2, VOCABULARY, (rows, lengths.max())) * (np.arange(lengths.max()) < lengths[:, None])
        made.append((torch.from_numpy(x), torch.from_numpy(draw.integers(0, 4, rows))))
    return made


def measure_layers(model: str, spread: str, turns: int, tell: Callable[[], None]) -> dict[str, Any]:
    """An AL model, its layers plain and grouped."""
    batches = word_batches(spread)
    lengths = [int(length) for x, _ in batches for length in x.ne(0).sum(1)]
    thresholds = find_thresholds(lengths, lambda length: length, 3)

    def pass_of(grouped: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        dims = TextDims(embedding=96, hidden=96, code=64, blocks=2)
        package = build_text(model, "al", vocab_size=VOCABULARY, classes=4, dims=dims)
        for enc in [layer.get_submodule("enc") for layer in package[1:]] if grouped else []:
            enc.f = Grouped(enc.get_submodule("f"), thresholds)

        def run() -> None:
            for x, y in batches:
                package(x, y)
                package.backward()
                package.update()

        return run

    passes = {"plain": pass_of(grouped=False), "grouped": pass_of(grouped=True)}
    took = in_turns({way: partial(passes.__getitem__, way) for way in passes}, turns, tell)
    per_batch = {way: [value / len(batches) for value in medians(own)] for way, own in took.items()}
    return {"model": model, "lengths": spread, "thresholds": thresholds, **per_batch}


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
    width, count, turns = (256, 2, 2) if options.quick else (options.width, 4, options.turns)
    cases = [(model, spread) for model in ("lstm", "transformer") for spread in ("demo", "log-normal")]
    cases = cases[::2] if options.quick else cases
    facts = environment()
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"load average {os.getloadavg()[0]:.1f}; intra-op threads: {options.threads}\n")
    # Drawn between the runs, never by a thread beside them.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("demo", total=2 * (turns + 1) * (1 + len(cases)))
        demo = measure(width, count, turns, options.device, lambda: progress.update(task, advance=1, refresh=True))
        layers = []
        for model, spread in cases:
            progress.update(task, description=f"{model}, {spread}")
            layers.append(measure_layers(model, spread, turns, lambda: progress.update(task, advance=1, refresh=True)))

    first_wall, first_cpu = medians(demo["ungrouped"]["seconds"])
    rows = []
    for way in ("ungrouped", "grouped"):
        own, (wall, cpu) = demo[way], medians(demo[way]["seconds"])
        walls = [f"{value:.3f}" for value in (wall, min(own["seconds"])[0], max(own["seconds"])[0])]
        speed = [f"{first_wall / wall:.2f}", f"{cpu:.3f}", f"{first_cpu / cpu:.2f}"]
        rows.append([way, f"{own['positions']:,}", f"{own['padding']:.1%}", *walls, *speed])
    print_table(
        f"1. {count} batches of 256 texts, width {width}, SGD; in turns, median of {turns}",
        ["way", "positions", "padding", "median s", "least", "most", "×", "CPU s", "CPU ×"],
        rows,
    )
    print(
        f"thresholds {demo['thresholds']}; largest difference of a gradient {demo['absolute']:.1e}, "
        f"as a share of the largest of its tensor {demo['relative']:.1e}\n"
    )
    rows = []
    for row in layers:
        pairs = [
            cell
            for plain, grouped in zip(row["plain"], row["grouped"], strict=True)
            for cell in (f"{plain:.3f}", f"{grouped:.3f}", f"{plain / grouped:.2f}")
        ]
        rows.append([row["model"], row["lengths"], " ".join(map(str, row["thresholds"])), *pairs])
    print_table(
        f"2. AL models, 64 texts a batch; seconds per batch, median of {turns}",
        ["model", "lengths", "thresholds", "plain s", "grouped s", "×", "CPU s", "grouped CPU s", "CPU ×"],
        rows,
    )
    if options.json is not None:
        figures = {"machine": facts, "demo": demo, "layers": layers}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
