"""What stages as streams bring on one GPU, and stages on several: against one stream and against BP, in turns.

    python scripts/bench/gpu.py --quick                  # some minutes; everything is kept under runs/gpu
    python scripts/bench/gpu.py --models transformer,resnet --precisions fp32,bf16 --turns 5 --steps 60
    python scripts/bench/gpu.py --quick --device cpu     # the same on a CPU, at toy size

Batches are random, of the published sizes, and lie ready in pinned memory, so that their way to the GPU counts. Of
each contestant: samples and real tokens per second (medians), peak memory, the share of the time with two stages at
work (by events on their streams), and from a profile the share of the time in which kernels ran, and in which kernels
of two streams ran at once. The profiles are kept as traces, for Perfetto.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeal.core.errors import unknown_name
from pipeal.engine import Pipeline, Window
from pipeal.engine.devices import fastest_precision, parse_device
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.methods.al import ALPackage
from pipeal.models import TEXT_MODELS, VISION_MODELS, TextDims, VisionDims, build_text, build_vision
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table

WARM_UP = 3
PROFILED = 8
"""Batches in a profile; a trace of more is slow to look at."""

Interval: TypeAlias = tuple[Any, float, float]
"""Whose it is (a stream, a stage), begin and end."""


@dataclass(frozen=True)
class Size:
    """How large models and batches are."""

    rows: int
    tokens: int
    vocab: int
    text: TextDims
    vision: VisionDims
    classes: int


SIZES = {
    "published": Size(256, 40, 30_000, TextDims(), VisionDims(), 200),
    "small-batches": Size(32, 40, 30_000, TextDims(), VisionDims(), 200),
    "toy": Size(
        8, 6, 100, TextDims(embedding=24, hidden=16, code=8, heads=3), VisionDims(hidden=16, code=8, width=0.06), 5
    ),
}


@dataclass(frozen=True)
class Way:
    """A form of a model, and where its layers go."""

    name: str
    form: str
    devices: list[str]

    @property
    def schedule(self) -> str:
        return "pipelined" if len(self.devices) > 1 else "sequential"


@dataclass
class Contestant:
    """A way that trains; what it came to is collected turn by turn."""

    model: str
    precision: str
    way: Way
    package: ALPackage
    batches: list[tuple[Tensor, Tensor]]
    compile: str
    samples_per_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    stages_at_once: float = 0.0
    kernels: Overlap | None = None

    @property
    def name(self) -> str:
        compiled = "" if self.compile == "none" else f", {self.compile}"
        return f"{self.model}, {self.precision}{compiled}: {self.way.name}"

    def open(self, **options: Any) -> Pipeline:
        how: Any = {"precision": self.precision, "compile": self.compile, "threads": 1, **options}
        return Pipeline(self.package, self.way.devices, self.way.schedule, **how)

    def turn(self, steps: int) -> None:
        """Trains, on the clock. Elsewhere than in its turn the model lies on the CPU: peaks are its own."""
        gpus = {device for device in self.way.devices if device != "cpu"}
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        with self.open(trace=Window(WARM_UP, steps)) as pipe:
            pipe.run(self.some(WARM_UP))
            batches = self.some(steps)
            report = pipe.run(batches)
            spans = pipe.spans()
        self.samples_per_s.append(report.samples / report.seconds)
        if self.model in TEXT_MODELS:
            self.tokens_per_s.append(sum(int((x != 0).sum()) for x, _ in batches) / report.seconds)
        self.peak_bytes = max([self.peak_bytes, *(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)])
        self.stages_at_once = overlap((span.stage, span.begin, span.end) for span in spans).at_once
        self.package.to("cpu")

    def profile(self, trace: Path) -> None:
        """Trains some batches under the profiler, and keeps what it saw."""
        activity = torch.profiler.ProfilerActivity
        on_gpu = any(device != "cpu" for device in self.way.devices)
        with self.open() as pipe:
            pipe.run(self.some(WARM_UP))
            with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
                pipe.run(self.some(PROFILED))
        seen.export_chrome_trace(str(trace))
        if on_gpu:
            self.kernels = overlap(kernels_in(trace))
        self.package.to("cpu")

    def some(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return list(islice(cycle(self.batches), count))


@dataclass(frozen=True)
class Overlap:
    """Of the time from the first begin to the last end, the shares in which something ran, and two things at once.

    Attributes:
        busy: At least one.
        at_once: Of at least two owners.
        owners: How many there were.
    """

    busy: float
    at_once: float
    owners: int


def overlap(intervals: Iterable[Interval]) -> Overlap:
    """What ran at once; of one owner, nothing does.

    >>> overlap([("a", 0.0, 4.0), ("b", 3.0, 5.0), ("b", 8.0, 10.0)])
    Overlap(busy=0.7, at_once=0.1, owners=2)
    """
    edges = []
    for owner, begin, end in intervals:
        edges += [(begin, 1, owner), (end, -1, owner)]
    if not edges:
        return Overlap(0.0, 0.0, 0)
    edges.sort(key=lambda edge: edge[:2])  # at one moment, ends come first
    running: Counter[Any] = Counter()
    busy = at_once = 0.0
    before = edges[0][0]
    for moment, step, owner in edges:
        active = sum(count > 0 for count in running.values())
        busy += (moment - before) * (active > 0)
        at_once += (moment - before) * (active > 1)
        running[owner] += step
        before = moment
    length = before - edges[0][0]
    return Overlap(busy / length, at_once / length, len(running)) if length else Overlap(0.0, 0.0, len(running))


def kernels_in(trace: Path) -> list[Interval]:
    """The kernels of a trace, each with its device and stream; copies, which other engines make, are left out."""
    read = gzip.open if trace.suffix == ".gz" else open
    with read(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [
        ((event["args"].get("device"), event["args"].get("stream")), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]


def ways(device: str, layers: int) -> list[Way]:
    """BP and AL in one stream, AL in stages, and, where there are several GPUs, AL over them."""
    found = [Way("BP", "bp", [device]), Way("AL, one stage", "al", [device])]
    found += [Way(f"AL, {count} stages on {device}", "al", [device] * count) for count in sorted({2, layers})]
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus > 1:
        count = min(gpus, layers)
        found.append(Way(f"AL, {count} GPUs", "al", [f"cuda:{number}" for number in range(count)]))
    return found


def build(model: str, form: str, size: Size) -> ALPackage:
    torch.manual_seed(0)
    how: Any = form
    if model in TEXT_MODELS:
        return build_text(model, how, vocab_size=size.vocab, classes=size.classes, dims=size.text)
    return build_vision(model, how, classes=size.classes, dims=size.vision).to(memory_format=torch.channels_last)


def batches(model: str, size: Size, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Random ones, pinned where there is a GPU. Texts are of different lengths, padded by a tenth or so."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        if model in TEXT_MODELS:
            x = torch.randint(2, size.vocab, (size.rows, size.tokens), generator=draw)
            ends = torch.randint(size.tokens * 4 // 5, size.tokens + 1, (size.rows, 1), generator=draw)
            x[torch.arange(size.tokens) >= ends] = 0
        else:
            x = torch.randn(size.rows, 3, size.vision.size, size.vision.size, generator=draw)
            x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(size.classes, (size.rows,), generator=draw)
        made.append((x.pin_memory(), y.pin_memory()) if torch.cuda.is_available() else (x, y))
    return made


def contestants(model: str, size: Size, options: argparse.Namespace) -> list[Contestant]:
    layers = len(build(model, "al", size))
    data = batches(model, size)
    return [
        Contestant(model, precision, way, build(model, way.form, size), data, compiled)
        for precision in options.precisions
        for compiled in options.compile
        for way in ways(options.device, layers)
    ]


def row(one: Contestant, base: float) -> list[str | float | None]:
    rates = one.samples_per_s
    kernels = one.kernels
    return [
        one.model,
        one.precision if one.compile == "none" else f"{one.precision} {one.compile}",
        one.way.name,
        f"{median(rates):,.0f}",
        f"{median(one.tokens_per_s):,.0f}" if one.tokens_per_s else None,
        f"{(max(rates) - min(rates)) / median(rates):.0%}",
        f"{median(rates) / base:.2f}×",
        f"{one.peak_bytes / 2**20:,.0f}" if one.peak_bytes else None,
        f"{one.stages_at_once:.0%}",
        None if kernels is None else f"{kernels.busy:.0%}",
        None if kernels is None else f"{kernels.at_once:.0%}",
    ]


COLUMNS = [
    "model", "precision", "way", "samples/s", "tokens/s", "spread", "× BP", "peak MiB", "two stages at work",
    "kernels run", "of two streams",
]  # fmt: skip


def measure(model: str, size: str, options: argparse.Namespace) -> list[Contestant]:
    """The ways of one model, in turns; then a profile of each."""
    found = contestants(model, SIZES[size], options)
    for turn in range(options.turns + 1):
        for one in found:
            one.turn(options.steps)
            print(f"  turn {turn}/{options.turns}: {one.name}: {one.samples_per_s[-1]:,.0f} samples/s", flush=True)
    for one in found:
        del one.samples_per_s[0], one.tokens_per_s[:1]  # it chose kernels, and filled caches
        words = f"{size} {one.model} {one.precision} {one.compile} {one.way.name}"
        one.profile(options.out / f"{'-'.join(words.replace(',', '').replace(':', '').split())}.json.gz")
    bp = {(one.precision, one.compile): median(one.samples_per_s) for one in found if one.way.form == "bp"}
    rows = [row(one, bp[one.precision, one.compile]) for one in found]
    rows_in, tokens = SIZES[size].rows, SIZES[size].tokens
    batch = f"{rows_in} × {tokens} tokens" if model in TEXT_MODELS else f"{rows_in} images"
    print_table(f"{model}, batches of {batch}, {options.turns} turns of {options.steps} batches", COLUMNS, rows)
    return found


def kept(one: Contestant) -> dict[str, Any]:
    """The figures of a contestant as plain values."""
    plain = {key: value for key, value in vars(one).items() if key not in ("package", "batches", "way", "kernels")}
    return {**plain, "way": asdict(one.way), "kernels": None if one.kernels is None else asdict(one.kernels)}


def _names(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    every = [*TEXT_MODELS, *VISION_MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the fastest precision alone, 3 turns of 15 batches")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where figures and traces are kept")
    parser.add_argument("--models", type=_names, default=every, help=f"of {','.join(every)}")
    parser.add_argument(
        "--sizes", type=_names, help="of published,small-batches (default: both), toy (default on a CPU)"
    )
    parser.add_argument("--precisions", type=_names, help="of fp32,bf16; default: both")
    parser.add_argument("--compile", type=_names, default=["none"], help="of none,static,dynamic")
    parser.add_argument("--steps", type=int, help="batches per turn; default 40")
    parser.add_argument("--turns", type=int, help="turns that count, after one that does not; default 5")
    options = parser.parse_args(arguments)
    options.device = str(parse_device(options.device))
    options.sizes = options.sizes or (["toy"] if options.device == "cpu" else ["published", "small-batches"])
    for what, chosen, known in (("model", options.models, every), ("size", options.sizes, list(SIZES))):
        for name in chosen:
            if name not in known:
                parser.error(unknown_name(what, name, known))
    options.precisions = options.precisions or (
        [fastest_precision(options.device)] if options.quick else ["fp32", "bf16"]
    )
    options.steps = options.steps or (15 if options.quick else 40)
    options.turns = options.turns or (3 if options.quick else 5)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = environment()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    found = {
        size: [kept(one) for model in options.models for one in measure(model, size, options)] for size in options.sizes
    }
    figures = {"environment": machine, "figures": found}
    (options.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"figures and traces: {options.out}")


if __name__ == "__main__":
    keep_freed_memory()
    main()
