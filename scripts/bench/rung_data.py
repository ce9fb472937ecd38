"""What the rungs of ladder.py train: models and real data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from plain import adam_anew, answer_everywhere, write_plainly
from rungs import FORMS, TEXTS, Form, Setting
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pipeal.config import LanguageConfig, TextConfig, TextDataConfig, VisionConfig, find_config, load_config
from pipeal.core.options import EngineOptions
from pipeal.core.samples import pair_of
from pipeal.core.tree import move
from pipeal.data import WHOLE, BatchLoader, PlannedBatchSampler, Share
from pipeal.engine.devices.cpus import cores
from pipeal.methods.al import ALPackage
from pipeal.planning.placement import Placement
from pipeal.planning.planner import fit, place
from pipeal.run.build_language import language_experiment
from pipeal.run.build_text import text_experiment
from pipeal.run.build_vision import vision_experiment

_EVALUATED = 1_000
"""Test samples, or blocks, that the loss is taken on."""


@dataclass(frozen=True)
class Task:
    """A model, its data, and where it is trained.

    Attributes:
        model: One of :data:`MODELS`.
        device: Where.
        experiment: As its configuration has it, in our fastest form.
        evaluated: Batches that the loss is taken on.
        placements: The stages taken so far; see :meth:`placement`.
    """

    model: str
    device: torch.device
    experiment: Any
    evaluated: Sequence[Any]
    placements: dict[Setting, Placement] = field(default_factory=dict)

    def of(self, setting: Setting) -> Any:
        """The experiment that a setting trains."""
        config = self.experiment.config
        if self.model in TEXTS and not setting.by_length:
            batches = len(self.experiment.train_batches(0))
            samples = -(-len(self.experiment.train) // batches)  # as many batches of either kind
            batching = replace(config.data.batching, kind="fixed", batch_size=samples)
            config = replace(config, data=replace(config.data, batching=batching))
        if setting.batch is not None:
            config = replace(config, data=_of_samples(config.data, setting.batch))
        if not setting.ahead:
            helpers = "workers" if self.model == "resnet" else "prefetch"
            config = replace(config, data=replace(config.data, **{helpers: 0}))
        if self.model == "resnet":
            config = replace(config, model=replace(config.model, channels_last=setting.channels_last))
        elif self.model in TEXTS:
            updates = "touched" if setting.touched else "dense"
            config = replace(config, model=replace(config.model, embedding_updates=updates))
        return self.experiment.under(config)

    def package(self, setting: Setting, seed: int) -> ALPackage:
        """A new model."""
        package: ALPackage = self.of(setting).package(setting.form, seed)
        if setting.operators != "ours":
            write_plainly(package, joined=setting.operators == "joined")
        if not setting.folded:
            answer_everywhere(package)
        adam_anew(package, fused=setting.fused)
        return package

    def batches(self, setting: Setting, seed: int, share: Share = WHOLE, epoch: int | None = None) -> Iterator[Any]:
        """Those of one epoch, or of all."""
        found = self.of(setting).batches(seed, share)
        for number in count() if epoch is None else [epoch]:
            found.set_epoch(number)
            yield from found

    def loss(self, package: ALPackage) -> float:
        """The mean cross entropy of the evaluated samples, in float32."""
        package.eval().to(self.device)
        total = count = 0.0
        with torch.no_grad():
            for batch in self.evaluated:
                x, y = move(pair_of(batch), self.device)
                logits = package.infer(x)
                total += F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum").item()
                count += y.numel()
        return total / count

    def devices(self, setting: Setting) -> int:
        """How many GPUs a setting computes on; 1 on a CPU, whose cores are one device."""
        if self.device.type != "cuda":
            return 1
        return len(set(self.placement(setting).devices)) if setting.staged else setting.processes

    @cached_property
    def work(self) -> dict[Form, float]:
        """Operations of matrix products per token, or per image, that training needs in either form."""
        found: dict[Form, float] = {}
        for form in FORMS:
            # Of texts of one length an LSTM does work that PyTorch does not count; of others it packs them.
            setting = Setting(form, folded=True, by_length=self.model != "lstm")
            package, batch = self.package(setting, 0), next(self.batches(setting, 0))
            x, y = pair_of(batch)
            with FlopCounterMode(display=False) as counted:
                for layer in package:
                    x, y = layer(x, y)
                    layer.backward()
            found[form] = counted.get_total_flops() / (batch.tokens or len(batch))
        return found

    def placement(self, setting: Setting) -> Placement:
        """Where the layers go: as ``--devices auto`` has it, on the CPU or on all GPUs, as the other rungs.

        Of processes a stage for each, balanced by what the layers cost, as the commands do under torchrun.
        """
        if setting not in self.placements:
            package, batches = self.package(setting, 0), list(islice(self.batches(setting, 0), 8))
            ranks = setting.processes
            on_cpu = self.device.type == "cpu"
            if ranks > 1:
                threads = max(1, cores() // ranks) if on_cpu else 1
                options = EngineOptions(threads=threads, **setting.of_pipeline)
                devices = ["cpu"] * ranks if on_cpu else [f"cuda:{rank}" for rank in range(ranks)]
                sizes = fit(package, batches, "pipelined", [str(self.device)] * ranks, options).sizes
                found = Placement(devices, sizes, threads)
            else:
                where = ["cpu"] if on_cpu else None
                options = EngineOptions(**setting.of_pipeline)
                found = place(package, batches, "pipelined", options, devices=where, rounds=1)
            self.placements[setting] = found
        return self.placements[setting]


def task_of(model: str, device: torch.device, data_root: str) -> Task:
    """Reads a model's data.

    Raises:
        DataError: It is not there.
    """
    values = {"data": {"root": data_root, "download": False}, "engine": {"devices": [str(device)]}}
    if model == "charlm":
        path = find_config("shakespeare", f"charlm-{'gpu' if device.type == 'cuda' else 'cpu'}")
        text = language_experiment(load_config(LanguageConfig, path, values=values))
        config = text.config
        few = -(-_EVALUATED // config.data.batch_size)
        estimate = text.under(replace(config, data=replace(config.data, estimate_batches=few)))
        return Task(model, device, text, list(estimate.test_evaluation()))
    if model == "resnet":
        path = find_config("cifar10", model)
        images = vision_experiment(load_config(VisionConfig, path, values=values))
        test = images.dataset.test
        part = replace(images, dataset=replace(images.dataset, test=test.subset(spread(len(test)))))
        return Task(model, device, images, list(part.test_evaluation()))
    path = find_config("agnews", model)
    news = text_experiment(load_config(TextConfig, path, values=values))
    few_news = news.test.subset(spread(len(news.test)))
    sampler = PlannedBatchSampler(few_news.lengths, 16_384, shuffle=False)
    return Task(model, device, news, list(BatchLoader(few_news, sampler)))


def _of_samples(data: Any, samples: int) -> Any:
    """The same data in batches of so many samples; texts of similar length in each."""
    if isinstance(data, TextDataConfig):
        return replace(data, batching=replace(data.batching, kind="bucket", batch_size=samples))
    return replace(data, batch_size=samples)


def spread(samples: int) -> Any:
    """Some of so many, evenly."""
    return np.linspace(0, samples - 1, min(samples, _EVALUATED)).astype(np.int64)
