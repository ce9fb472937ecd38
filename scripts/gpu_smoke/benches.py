"""The benchmarks in short: schedules, stages on one GPU, and the ladder in bf16, each with a limit of its own."""

from __future__ import annotations

import os
import random
import struct
import sys
import zlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from gpu_smoke.commands import Command, Ended, read_json

_PRINTED = 6_000
"""Characters of what a benchmark printed that the page shows, from its end: there stand its tables."""


@dataclass(frozen=True)
class Benchmark:
    """A script and where it leaves its figures.

    Attributes:
        command: What to run.
        out: The folder in which it leaves a JSON.
    """

    command: Command
    out: Path


def benchmarks(root: Path, work: Path, data: Path, *, stand_in: bool) -> list[Benchmark]:
    """What to run, by what should be known first; of a stand-in a few batches, which show that it runs."""
    device = "cpu" if stand_in else "cuda:0"

    def one(name: str, limit_s: float, script: str, *arguments: str) -> Benchmark:
        out = work / name.replace(" ", "-")
        out.mkdir()
        to = ["--json", str(out / "figures.json")] if script == "schedules.py" else ["--out", str(out)]
        command = [sys.executable, str(root / "scripts" / "bench" / script), *arguments, *to]
        return Benchmark(Command(name, command, limit_s, {"COLUMNS": "160"}), out)

    def ladder(model: str, *arguments: str) -> Benchmark:
        own = ["--model", model, "--device", device, "--data-root", str(data), "--turns", "1"]
        return one(f"ladder of {model}", 90, "ladder.py", *own, *arguments)

    schedules, stages = ["--quick", "--stages", "2"], ["--quick", "--device", device]
    if stand_in:
        stages += ["--models", "transformer", "--turns", "1", "--steps", "1"]
        ladders = [ladder("resnet", "--batch", "2", "--ends", "--forms", "bp", "--steps", "3", "--without", "compiled")]
    else:
        schedules += ["4"]
        stages += ["--models", "transformer,resnet", "--sizes", "published", "--turns", "2"]
        # Without what compiles for a minute, and what no later rung builds on.
        short = ["--steps", "40", "--without", "compiled", "fp16", "batches to an update", "touched"]
        ladders = [ladder(model, *short) for model in ("transformer", "resnet")]
    return [
        one("schedules on virtual stages", 60, "schedules.py", *schedules),
        one("stages on one GPU", 120, "gpu.py", *stages),
        *ladders,
    ]


def found(benchmark: Benchmark, ended: Ended) -> dict[str, Any]:
    """What came of it, for the JSON; of a benchmark that was stopped what it had printed and written by then."""
    file = next(iter(sorted(benchmark.out.glob("*.json"))), None)
    figures, unread = (None, "") if file is None else read_json(file)
    return {
        "name": benchmark.command.name,
        "command": " ".join(["python", *benchmark.command.arguments[1:]]),
        "seconds": ended.seconds,
        "ended": "; ".join(filter(None, (ended.how, unread))),
        "printed": ended.output[-_PRINTED:],
        "figures": figures,
    }


def make_data(folder: Path, *, texts: int, images: int) -> None:
    """Random words and pixels in the published forms of AG News and CIFAR-10, for rates: losses on them mean nothing.

    Args:
        folder: Of all data sets.
        texts: To train on; as many as a tenth to test on.
        images: Likewise.
    """
    draw = random.Random(0)
    words = [f"w{number}" for number in range(40_000)]
    often = list(accumulate(1 / (rank + 10) for rank in range(len(words))))
    news = folder / "ag_news_csv"
    news.mkdir(parents=True)
    for name, count in (("train.csv", texts), ("test.csv", texts // 10)):
        rows = []
        for number in range(count):
            text = draw.choices(words, cum_weights=often, k=max(8, round(draw.gauss(38, 11))))
            rows.append(f'"{number % 4 + 1}","{" ".join(text[:7])}","{" ".join(text[7:])}"\n')
        (news / name).write_text("".join(rows), encoding="utf-8")
    for split, count in (("train", images), ("test", images // 10)):
        for number in range(count):
            path = folder / "cifar-10-images" / split / f"class{number % 10}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_png(32, os.urandom(3 * 32 * 32)))


def _png(side: int, pixels: bytes) -> bytes:
    """A picture of ``side × side`` pixels in red, green and blue."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = b"".join(b"\0" + pixels[row * 3 * side : (row + 1) * 3 * side] for row in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def has_data(folder: Path) -> bool:
    """Whether both data sets of the ladder lie there."""
    news, images = (folder / "ag_news_csv", folder), ("cifar-10-images", "cifar-10-batches-py", "cifar-10-images.zip")
    texts = any((one / f"train.csv{end}").is_file() for one in news for end in ("", ".gz"))
    return texts and any((folder / name).exists() for name in (*images, "cifar-10-python.tar.gz"))
