"""Models that are made from a configuration and a seed, and how they are configured to learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeal.config import GroupingConfig, LanguageConfig, TextConfig, VisionConfig, find_config, load_config
from pipeal.data import find_thresholds
from pipeal.run.build import rates
from pipeal.run.build_language import LanguageModels
from pipeal.run.build_text import TextModels, _thresholds
from pipeal.run.build_vision import VisionModels
from pipeal.run.opening import course_of
from pipeal.training.learning_rate import epoch_scale


@pytest.mark.parametrize(("cost", "power"), [("length", 1), ("square", 2)])
def test_layers_are_grouped_by_the_cost_that_is_configured(cost: Any, power: int) -> None:
    lengths = np.random.default_rng(2).integers(1, 60, 200)
    wanted = {power: find_thresholds(lengths, lambda length, power=power: length**power, 2) for power in (1, 2)}  # type: ignore[misc]
    assert wanted[1] != wanted[2], "else one could not be told from the other"
    assert _thresholds(lengths, GroupingConfig(thresholds=2, cost=cost)) == wanted[power]


@pytest.mark.parametrize(
    ("models", "config", "dataset", "blueprint"),
    [
        (
            TextModels,
            TextConfig,
            "toynews-lstm",
            {"vocab_size": 50, "classes": 4, "pad_index": 0, "thresholds": [], "pretrained": None},
        ),
        (VisionModels, VisionConfig, "toyimages-resnet", {"classes": 4}),
        (LanguageModels, LanguageConfig, "shakespeare-charlm", {"characters": 65}),
    ],
)
def test_first_weights_follow_from_the_seed_alone(
    models: Any, config: type[Any], dataset: str, blueprint: dict[str, Any]
) -> None:
    """Symptom: a process that torchrun starts, with one intra-op thread, began with other weights than a single one."""
    maker = models(load_config(config, find_config(*dataset.split("-", 1))), **blueprint)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(threads)
            found.append(maker.package("al", 3).state_dict())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, other = found
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_side_has_the_rate_that_is_configured() -> None:
    for given, wanted in (({}, 0.1), ({"ae": 0.01}, 0.01)):
        values: dict[str, Any] = {"train": {"lr": {"base": 0.1, **given}}}
        lr = load_config(TextConfig, values={"dataset": "toynews", "model": {"name": "lstm"}, **values}).train.lr
        assert rates(lr, "al") == {"enc": 0.1, "ae": wanted}
        assert rates(lr, "bp") == 0.1


@pytest.mark.parametrize(("end", "share"), [(None, 0.0), (0.01, 0.05)])
def test_a_rate_decays_from_its_base_to_its_end(end: float | None, share: float) -> None:
    lr = {"base": 0.2, "end": end, "decay": "cosine", "per": "batch", "warmup": 0}
    values = {"dataset": "toynews", "model": {"name": "lstm"}, "train": {"lr": lr, "epochs": 3}}
    course = course_of(load_config(TextConfig, values=values))
    scale = epoch_scale(course, epoch=2, batches=10, first_batch=20)
    assert scale(30) == pytest.approx(share), "after the last batch"
    assert scale(20) > scale(29) > share
