"""How well ``pipeal memory`` forecasts: bytes by part, and physical memory above the idle process.

    PIPEAL_DATA=DIR python scripts/bench/memory_forecast.py --json scripts/bench/results/memory-forecast.json

Six models of the registry and ResNet-18 of torchvision (converted by ``ALPackage.from_bp``), each trained end to end,
with activation checkpointing on every block, and as AL by stage, by layer and offloaded, each in a fresh process. Of
offloaded layers the one at work counts (:class:`pipeal.planning.pure.memory.Parts`). What is forecast
comes from each block alone, on another batch than the one that is measured: of a quarter of the samples. Prints a line
for each, and ends with 1 if bytes by part miss by more than 5 % anywhere, or physical memory by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeal.core.options import DEFAULTS, EngineOptions
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Tree
from pipeal.methods.al import ALPackage
from pipeal.methods.bp import BP
from pipeal.planning.pure.memory import WAYS, Form
from pipeal.reporting.environment import environment
from pipeal.reporting.tables import print_table
from pipeal.run.memory_rows import Configured, Measured, Subject, forecast, measure
from pipeal.run.plan_costs import Wanted

PARTS = ("weights", "gradients", "optimizer", "activations", "peak", "resident")

SMALLER = 4
"""Blocks are looked at on a batch of so many times fewer samples."""


def resnet18_layers(form: Form, size: int) -> list[TrainableLayer]:
    """ResNet-18 of torchvision on images of that side; AL: the stem with the first block, and each other block; BP: the
    same, with a head."""
    from torchvision.models import resnet18

    net = resnet18(num_classes=10)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    blocks = [stem, *net.layer1, *net.layer2, *net.layer3, *net.layer4]
    if form == "whole":
        return [BP(nn.Sequential(*blocks, nn.Sequential(net.avgpool, nn.Flatten(), net.fc)))]
    return list(ALPackage.from_bp(nn.Sequential(*blocks), torch.randn(2, 3, size, size), outputs=10))


@dataclass(frozen=True)
class Torchvision:
    """ResNet-18 on images of 64 × 64 pixels."""

    device: str = "cpu"
    options: EngineOptions = field(default_factory=lambda: replace(DEFAULTS, threads=2))

    def layers(self, form: Form) -> Sequence[TrainableLayer]:
        """As :func:`resnet18_layers`."""
        torch.manual_seed(0)
        return resnet18_layers(form, 64)

    def batch(self) -> tuple[Tree, Tree]:
        """64 images."""
        drawn = torch.Generator().manual_seed(0)
        return torch.randn(64, 3, 64, 64, generator=drawn), torch.randint(0, 10, (64,), generator=drawn)


def configured(model: str, *overrides: str, dataset: str | None = None, preset: str | None = None) -> Configured:
    """A model of the registry."""
    return Configured(Wanted(dataset, model, preset, os.environ.get("PIPEAL_DATA", "data"), overrides))


CASES: dict[str, tuple[Callable[[], Subject], int]] = {
    "transformer": (lambda: configured("transformer", "engine.threads=2"), 1024),
    "lstm": (lambda: configured("lstm", "engine.threads=2"), 512),
    "vgg": (lambda: configured("vgg", "engine.threads=2"), 256),
    "resnet": (lambda: configured("resnet", "engine.threads=2"), 256),
    "charlm, cpu": (lambda: configured("charlm", "engine.threads=2", dataset="shakespeare", preset="cpu"), 192),
    "charlm, 12 blocks of 256": (
        lambda: configured(
            "charlm", "engine.threads=2", "model.layers=12", "model.width=256", "model.heads=4", "model.block=64",
            dataset="shakespeare",
        ),
        64,
    ),
    "resnet18 of torchvision": (Torchvision, 64),
}  # fmt: skip


def main() -> int:
    """Measures, prints, and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES), help="Some of them.")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="Some of them.")
    parser.add_argument("--json", type=Path, help="Where to keep all figures; others that are there stay.")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.json and given.json.exists():
        kept = json.loads(given.json.read_text())["rows"]
        rows = [row for row in kept if row["model"] not in given.only or row["way"] not in given.ways]
    for name in given.only:
        made, samples = CASES[name]
        subject = made()
        model = forecast(subject, samples // SMALLER)
        for way in (WAYS[chosen] for chosen in given.ways):
            said, found = model.parts(way, samples), measure(subject, way.name, samples)
            off = {part: getattr(said, part) / getattr(found.parts, part) - 1 for part in PARTS}
            rows.append(
                {"model": name, "samples": samples, "precision": subject.options.precision, "way": way.name,
                 "forecast": asdict(said), "measured": asdict(found), "off": off}
            )  # fmt: skip
            print(name, way.name, {part: f"{share:+.1%}" for part, share in off.items()}, _mib(found), flush=True)
    rows.sort(key=lambda row: (list(CASES).index(row["model"]), list(WAYS).index(row["way"])))
    worst = {part: max((row["off"][part] for row in rows), key=abs) for part in PARTS}
    print_table(
        "forecast over measured",
        ["model", "samples", "way", "peak, MiB", *PARTS],
        [
            [row["model"], row["samples"], row["way"], row["forecast"]["peak"] / 2**20]
            + [f"{row['off'][part]:+.1%}" for part in PARTS]
            for row in rows
        ],
    )
    print("worst:", {part: f"{share:+.1%}" for part, share in worst.items()})
    if given.json:
        given.json.write_text(json.dumps({"environment": environment(), "rows": rows, "worst": worst}, indent=1) + "\n")
    return int(abs(worst.pop("resident")) > 0.15 or any(abs(share) > 0.05 for share in worst.values()))


def _mib(found: Measured) -> str:
    sizes = found.parts.peak, found.parts.resident, found.resident_kept
    return "allocated {:.0f}, resident {:.0f}, with freed memory kept {:.0f} MiB".format(*(s / 2**20 for s in sizes))


if __name__ == "__main__":
    sys.exit(main())
