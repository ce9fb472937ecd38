"""Where the configuration of a run on images becomes objects: images, batches, models."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeal.config import RunConfig, VisionConfig, VisionModelConfig
from pipeal.core.artifacts import IMAGES
from pipeal.core.errors import ConfigError
from pipeal.core.names import VISION_MODELS, Augmentation, canonical_image_name, canonical_model
from pipeal.data import (
    WHOLE,
    EpochBatches,
    ImageBatches,
    ImageDataset,
    ImageSplit,
    Share,
    load_images,
)
from pipeal.engine import Pipeline
from pipeal.engine.devices.cpus import cores
from pipeal.methods.al import ALPackage
from pipeal.models import VisionDims, build_vision
from pipeal.reporting import bars
from pipeal.reporting.recorders import write_json
from pipeal.run.build import data_root, evaluated_part, from_seed, hold_out, kept_in, rates
from pipeal.run.stopping import StopRequest

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 512
"""Images per batch where nothing has to be kept for a backward, as published."""


@dataclass(frozen=True)
class VisionModels:
    """Makes vision models; see :class:`pipeal.run.build.Models`."""

    config: VisionConfig
    classes: int

    @from_seed
    def package(self, mode: str) -> ALPackage:
        """A new model of the configured name and widths."""
        model = self.config.model
        package = build_vision(
            model.name,
            mode,
            classes=self.classes,
            dims=_dims(model, self.config.data.size),
            lr=rates(self.config.train.lr, mode),
        )
        return package.to(memory_format=torch.channels_last) if model.channels_last else package

    def under(self, config: RunConfig) -> VisionModels:
        """Those of another configuration of the same data."""
        return replace(self, config=_of_images(config))


@dataclass(frozen=True)
class VisionExperiment:
    """An image data set and a model for it; see :class:`pipeal.run.build.Experiment`."""

    config: VisionConfig
    dataset: ImageDataset
    train: ImageSplit
    held: ImageSplit | None
    facts: dict[str, int | float | str]

    def package(self, mode: str, seed: int) -> ALPackage:
        """A new model of the configured name and widths."""
        return VisionModels(self.config, **self.blueprint).package(mode, seed)

    def under(self, config: RunConfig) -> VisionExperiment:
        """The same images, trained on otherwise."""
        return replace(self, config=_of_images(config))

    @property
    def blueprint(self) -> dict[str, Any]:
        """All that :class:`VisionModels` needs to know of the data."""
        return {"classes": len(self.dataset.classes)}

    @property
    def lengths(self) -> None:
        """Images have no length."""

    @property
    def criterion(self) -> None:
        """Images are classified: the accuracy tells."""

    def train_batches(self, seed: int, share: Share = WHOLE) -> EpochBatches:
        """Shuffled, augmented batches as configured."""
        data = self.config.data
        return self._batches(
            self.train,
            data.batch_size,
            augmentation=data.augmentation,
            shuffle=True,
            seed=seed,
            workers=data.workers or 0,
            share=share,
        )

    def save(self, folder: Path) -> None:
        """Leaves ``images.json``: class names, and what pixels are normalised with."""
        dataset = self.dataset
        facts = {"classes": dataset.classes, "size": self.config.data.size, "mean": dataset.mean, "std": dataset.std}
        write_json(IMAGES.at(folder), facts)

    def train_evaluation(self) -> EpochBatches:
        """The training images as they are, or a fixed random part of the configured size."""
        part = evaluated_part(len(self.train), self.config.train.train_accuracy_samples)
        return self._batches(self.train if part is None else self.train.subset(part))

    def held_out(self) -> EpochBatches | None:
        """The part of the training set that is not trained on."""
        return None if self.held is None else self._batches(self.held)

    def test_evaluation(self) -> EpochBatches:
        """The test set."""
        return self._batches(self.dataset.test)

    def afterword(self, pipe: Pipeline, stop: StopRequest) -> tuple[str, ...]:  # noqa: ARG002
        """Nothing."""
        return ()

    def _batches(
        self,
        split: ImageSplit,
        batch_size: int = EVALUATION_BATCH,
        *,
        augmentation: Augmentation = "none",
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,  # enough for images that are not augmented, even beside a GPU
        share: Share = WHOLE,
    ) -> ImageBatches:
        return ImageBatches(
            split,
            batch_size=batch_size,
            mean=self.dataset.mean,
            std=self.dataset.std,
            augmentation=augmentation,
            shuffle=shuffle,
            seed=seed,
            workers=workers,
            pin_memory=True,
            channels_last=self.config.model.channels_last,
            share=share,
        )


def vision_experiment(config: VisionConfig) -> VisionExperiment:
    """Reads the images.

    Args:
        config: What was asked for.

    Raises:
        DataError: The data is missing or malformed.
        ConfigError: The data set or the model is unknown, or a size does not fit.
    """
    dataset = canonical_image_name(config.dataset)
    name, _ = canonical_model(config.model.name, VISION_MODELS)
    data = config.data
    model = replace(config.model, name=name)
    config = replace(config, dataset=dataset, model=model, data=replace(data, workers=_workers(config)))
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
        facts: dict[str, int | float | str] = {
            "classes": len(images.classes),
            "train_samples": len(train),
            "held_out_samples": 0 if held is None else len(held),
            "test_samples": len(images.test),
            "skipped_images": len(broken),
            "pixels": data.size,
            "fingerprint": train.fingerprint,
            "test_fingerprint": images.test.fingerprint,
        }
        if held is not None:
            facts["held_out_fingerprint"] = held.fingerprint
    return VisionExperiment(config, images, train, held, facts)


def _of_images(config: RunConfig) -> VisionConfig:
    assert isinstance(config, VisionConfig)
    return config


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
    )
