"""What our AL vision models bring, and how fast vision models train, in turns in one process.

    python scripts/bench/vision.py defaults --data-root DIR            # accuracy: from the published settings to ours
    python scripts/bench/vision.py speed --device cuda:0 --batch-sizes 128,512

``defaults`` trains the AL form from the published settings to ours, one part at a time, for the same few epochs over
the same images, and the BP form beside them; it prints the accuracy of every exit and what it cost. ``speed`` measures
training images per second of both forms, on batches that lie ready on the device, for each batch size, precision and
with and without ``torch.compile``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipeal.core.names import Mode
from pipeal.data import ImageBatches, ImageDataset, load_images
from pipeal.engine import Pipeline
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.devices.cpus import cores
from pipeal.methods.al import ALPackage
from pipeal.models import VisionDims, build_vision
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table
from pipeal.training.evaluation import accuracy
from pipeal.training.learning_rate import epoch_scale


@dataclass(frozen=True)
class Settings:
    """How one contestant of ``defaults`` is trained; the values here are the published ones."""

    name: str
    form: str = "al"
    dims: VisionDims = field(default_factory=lambda: VisionDims(bridges="flat", labels="published"))
    base: float = 1e-4
    end: float = 1e-5
    warmup: int = 0
    batch_size: int = 128


@dataclass(frozen=True)
class Result:
    """What a training came to: accuracy by exit after each epoch, and seconds of training per epoch."""

    name: str
    exits: list[list[float]]
    seconds: list[float]
    parameters: int


def ladder() -> list[Settings]:
    """From the published settings to ours, one part at a time; then the BP form with our learning rates."""
    published = Settings("published settings")
    faster = replace(published, name="+ learning rate 1e-3, warm-up", base=1e-3, warmup=50)
    small = replace(faster, name="+ batches of 64", batch_size=64)
    pooled = replace(small, name="+ pooled bridges", dims=VisionDims(labels="published"))
    ours = replace(pooled, name="+ inverse label sides: our defaults", dims=VisionDims())
    return [published, faster, small, pooled, ours, replace(ours, name="BP form", form="bp")]


def train(settings: Settings, model: str, data: ImageDataset, epochs: int, seed: int) -> Result:
    torch.manual_seed(seed)
    form: Any = settings.form
    package = build_vision(model, form, classes=len(data.classes), dims=settings.dims, lr=settings.base)
    package.to(memory_format=torch.channels_last)

    def batches(split: Any, size: int, **how: Any) -> ImageBatches:
        return ImageBatches(split, batch_size=size, mean=data.mean, std=data.std, channels_last=True, **how)

    samples = batches(data.train, settings.batch_size, augmentation="basic", seed=seed)
    test = batches(data.test, 512, shuffle=False)
    exits, seconds = [], []
    precision = fastest_precision("cpu")
    with Pipeline(package, ["cpu"], "sequential", threads=cores(), precision=precision, seed=seed) as pipe:
        for epoch in range(epochs):
            samples.set_epoch(epoch)
            scale = epoch_scale(
                "cosine",
                "epoch",
                end_over_base=settings.end / settings.base,
                warmup=settings.warmup,
                epoch=epoch,
                epochs=epochs,
                batches=len(samples),
                first_batch=pipe.next_batch,
            )
            seconds.append(pipe.run(samples, lr_scale=scale).seconds)
            exits.append([accuracy(pipe, test, depth) for depth in range(1, len(package) + 1)])
            print(
                f"  {settings.name}: epoch {epoch + 1}/{epochs}, {exits[-1][-1]:.4f}, {seconds[-1]:.1f} s", flush=True
            )
    return Result(settings.name, exits, seconds, sum(p.numel() for p in package.parameters()))


def defaults(options: argparse.Namespace) -> dict[str, Any]:
    data = load_images(options.dataset, options.data_root, size=32)
    results = [
        train(settings, options.model, data, options.epochs, options.seed)
        for settings in ladder()
        if options.only is None or options.only in settings.name
    ]
    depth = max(len(result.exits[-1]) for result in results)
    rows = []
    for result in results:
        last = result.exits[-1]
        exits = ["" if number >= len(last) - 1 else f"{last[number]:.4f}" for number in range(depth - 1)]
        cost = [f"{sum(result.seconds) / options.epochs:.1f}", f"{result.parameters / 1e6:.0f} M"]
        rows.append([result.name, f"{last[-1]:.4f}", *exits, *cost])
    names = [f"exit {number}" for number in range(1, depth)]
    title = (
        f"{options.dataset} {options.model}, {len(data.train):,} images, after {options.epochs} epochs: test accuracy"
    )
    print_table(title, ["each line adds one part", "full path", *names, "s/epoch", "parameters"], rows)
    return {result.name: result.__dict__ for result in results}


@dataclass
class Runner:
    """A form of a model that trains on ready batches; its rates are collected turn by turn."""

    name: list[str]
    package: ALPackage
    batches: Iterator[tuple[Tensor, Tensor]]
    how: dict[str, Any]
    tf32: bool
    rates: list[float] = field(default_factory=list)

    def turn(self, steps: int) -> None:
        with _tf32(self.tf32), Pipeline(self.package, **self.how) as pipe:
            pipe.run(islice(self.batches, 3))  # compiles, and fills caches
            report = pipe.run(list(islice(self.batches, steps)))
        self.rates.append(report.samples / report.seconds)


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def speed(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    runners = []
    forms: tuple[Mode, ...] = ("bp", "al")
    for size, form, precision, compiled in product(options.batch_sizes, forms, options.precisions, options.compile):
        torch.manual_seed(0)
        package = build_vision(options.model, form, classes=200).to(memory_format=torch.channels_last)
        ready: list[tuple[Tensor, Tensor]] = []
        for _ in range(4):
            x = torch.randn(size, 3, 32, 32).to(device, memory_format=torch.channels_last)
            ready.append((x, torch.randint(200, (size,)).to(device)))
        stages = options.stages if form == "al" else 1
        how = {
            "devices": [str(device)] * stages,
            "schedule": "pipelined" if stages > 1 else "sequential",
            "precision": "bf16" if precision == "bf16" else "fp32",
            "compile": compiled,
        }
        name = [f"{size}", form.upper(), precision, compiled]
        runners.append(Runner(name, package, cycle(ready), how, precision == "tf32"))
    for turn in range(options.turns + 1):
        for runner in runners:
            runner.turn(options.steps)
            print(
                f"  turn {turn}/{options.turns}: {' '.join(runner.name)}: {runner.rates[-1]:,.0f} images/s", flush=True
            )
    rows = []
    for runner in runners:
        rates = runner.rates[1:]
        rows.append([*runner.name, f"{median(rates):,.0f}", f"{(max(rates) - min(rates)) / median(rates):.0%}"])
    title = f"{options.model} at 32 pixels on {device}, AL in {options.stages} stage(s), training"
    print_table(title, ["batch", "form", "precision", "compile", "images/s", "spread"], rows)
    return {" ".join(runner.name): runner.rates[1:] for runner in runners}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["defaults", "speed"])
    parser.add_argument("--model", choices=["resnet", "vgg"], default="resnet")
    parser.add_argument("--json", type=Path, help="also keep every figure here")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="of defaults: only lines whose name holds this")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--batch-sizes", type=_numbers, default=[128, 512])
    parser.add_argument("--precisions", type=_names, help="fp32, tf32 (CUDA), bf16; default: all that the device has")
    parser.add_argument("--compile", type=_names, default=["none", "static"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.precisions is None:
        options.precisions = ["fp32", "tf32", "bf16"] if options.device.startswith("cuda") else ["fp32", "bf16"]
    machine = environment()
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    figures = defaults(options) if options.table == "defaults" else speed(options)
    if options.json:
        options.json.write_text(json.dumps({"environment": machine, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
