"""Where the configuration of a run on images becomes objects: images, batches, models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeal.config import VisionConfig, VisionModelConfig
from pipeal.core.artifacts import HF_FOLDER, IMAGES
from pipeal.core.errors import ConfigError
from pipeal.core.modules import module_of
from pipeal.core.names import HF, VISION, source_of
from pipeal.core.protocols import TrainableLayer
from pipeal.data import (
    WHOLE,
    EpochBatches,
    ImageBatches,
    ImageDataset,
    ImageSplit,
    Share,
    load_images,
)
from pipeal.engine.devices.cpus import cores
from pipeal.models import VisionDims, model_layers
from pipeal.models.hf_folder import save_config
from pipeal.models.imported import Imported
from pipeal.reporting import bars
from pipeal.reporting.recorders import write_json
from pipeal.run.build import (
    Experiment,
    Models,
    data_root,
    facts_of,
    hold_out,
    kept_in,
    looks_ahead,
    with_names,
)

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 512
"""Images per batch where nothing has to be kept for a backward, as published."""


@dataclass(frozen=True)
class VisionModels(Models):
    """Makes vision models.

    Attributes:
        config: Which, and how wide.
        classes: How many classes there are.
    """

    config: VisionConfig
    classes: int

    def imported(self, mode: str) -> tuple[Imported, dict[str, Any]]:
        """A model of another library, and what its :meth:`Imported.layers` are given for a method."""
        model = self.config.model
        assert model.bridges != "lookahead"  # refused where options are read
        of_al = {"hidden": model.x_hid, "labels": model.labels, "bridges": model.bridges, "code": model.y_hid}
        size = self.config.data.size
        network = Imported(model.name, self.classes, size=size, parts=model.parts, weights=model.weights)
        return network, {**of_al, **self.how(mode)}

    def build(self, mode: str) -> Iterator[TrainableLayer]:
        """See :meth:`Models.build <pipeal.run.build.Models.build>`."""
        model = self.config.model
        if source_of(model.name) is None:
            layers = model_layers(
                VISION,
                model.name,
                mode,
                self.classes,
                **self.how(mode),
                dims=_dims(model, self.config.data.size),
                one_by_one=True,
                weights=model.weights,
            )
        else:
            imported, options = self.imported(mode)
            layers = imported.layers(mode, **options)
        for layer in layers:
            if model.channels_last:
                module_of(layer).to(memory_format=torch.channels_last)
            yield layer


@dataclass(frozen=True)
class VisionExperiment(Experiment):
    """A data set of classified images and a model for it."""

    models: VisionModels
    train: ImageSplit
    held: ImageSplit | None
    test: ImageSplit
    dataset: ImageDataset

    def batches(self, seed: int, share: Share = WHOLE) -> EpochBatches:
        """Shuffled, augmented batches as configured."""
        data = self.config.data
        return self._batches(
            self.train,
            batch_size=data.batch_size,
            augmentation=data.augmentation,
            shuffle=True,
            seed=seed,
            workers=data.workers or 0,
            share=share,
        )

    def in_order(self, part: ImageSplit) -> EpochBatches:
        """The images as they are; without workers, which they do not need even beside a GPU."""
        return self._batches(part, batch_size=EVALUATION_BATCH, shuffle=False)

    def save(self, folder: Path) -> None:
        """Leaves ``images.json``: class names, and what pixels are normalised with; of ``hf:``, its configuration."""
        dataset = self.dataset
        facts = {"classes": dataset.classes, "size": self.config.data.size, "mean": dataset.mean, "std": dataset.std}
        write_json(IMAGES.at(folder), facts)
        if source_of(self.config.model.name) == HF:
            save_config(self.config.model.name, dataset.classes, HF_FOLDER.at(folder))

    def _batches(self, split: ImageSplit, **options: Any) -> ImageBatches:
        channels_last = self.config.model.channels_last
        mean, std = self.dataset.mean, self.dataset.std
        return ImageBatches(split, mean=mean, std=std, pin_memory=True, channels_last=channels_last, **options)


def vision_experiment(config: VisionConfig) -> VisionExperiment:
    """Reads the images.

    Args:
        config: What was asked for.

    Raises:
        DataError: The data is missing or malformed.
        ConfigError: The data set or the model is unknown, or a size does not fit.
    """
    config = with_names(config, VISION)
    dataset = config.dataset
    data = replace(config.data, workers=_workers(config))
    config = replace(config, data=data)
    if source_of(config.model.name) is None:
        _dims(config.model, data.size)  # sizes that do not fit are told before anything is read
    _log.info(f"reading {dataset}")
    with bars.downloads() as fetching, bars.decodings() as decoding:
        fetching.begin(f"reading {dataset}")

        def decoded(split: str, done: int, total: int | None) -> None:
            fetching.close()
            decoding(split, done, total)

        images = load_images(
            dataset,
            data_root(config),
            size=data.size,
            download=data.download,
            on_broken=data.on_broken,
            cache=Path(data.cache) if isinstance(data.cache, str) else data.cache and kept_in(config),
            threads=cores(),
            progress=fetching,
            decoding=decoded,
        )
    train, held = images.train, None
    if data.held_out:
        kept, out = hold_out(len(train), data.held_out)
        train, held = images.train.subset(kept), images.train.subset(out)
    broken = [*images.train.skipped, *images.test.skipped]
    if broken:
        _log.warning(f"left out {len(broken)} broken images, the first {broken[0]}")
    with bars.Steps("summing up the images"):
        facts = facts_of(len(images.classes), train, held, images.test) | {
            "skipped_images": len(broken),
            "pixels": data.size,
        }
    models = VisionModels(config, len(images.classes))
    return VisionExperiment(models, train, held, images.test, facts, images)


def _workers(config: VisionConfig) -> int:
    """Processes that prepare training batches; unless told, none beside a CPU that trains, which needs few images.

    Raises:
        ConfigError: So many that they would only fill the memory.
    """
    wanted, most = config.data.workers, max(8, 4 * cores())
    if wanted is None:
        devices = config.engine.devices
        on_gpu = torch.cuda.is_available() if devices == "auto" else "cuda" in "".join(devices)
        return min(4, cores() - 1) if on_gpu else 0
    if wanted > most:
        raise ConfigError(f"data.workers: {wanted} processes on {cores()} cores; expected at most {most}")
    return wanted


def _dims(model: VisionModelConfig, size: int) -> VisionDims:
    return VisionDims(
        size=size,
        hidden=model.x_hid,
        code=model.y_hid,
        width=model.width,
        activation=model.activation,
        bridges=model.bridges,
        labels=model.labels,
        parts=model.parts,
        ahead=looks_ahead(model),
    )
