"""Models that are made from a configuration and a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeal.cli.build_language import LanguageModels
from pipeal.cli.build_text import TextModels
from pipeal.cli.build_vision import VisionModels
from pipeal.config import LanguageConfig, TextConfig, VisionConfig, find_config, load_config


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
