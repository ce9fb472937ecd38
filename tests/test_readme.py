"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(EXAMPLES[0])
    assert names["report"].batches == 50
    assert Path("model.pipeal").is_file()
    assert names["logits"].shape == (16, 4)


def test_a_model_of_ones_own_is_trained_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len([line for line in EXAMPLES[1].splitlines() if line.strip()]) <= 12
    before = dict(torchvision.models.resnet18(num_classes=10).state_dict())
    names = run(EXAMPLES[1])
    assert len(names["package"]) == 4
    assert len(names["pipe"].stages) == 2
    trained = names["net"].state_dict()
    assert trained.keys() == before.keys()
    assert all(int(trained[key]) == 4 for key in trained if key.endswith("num_batches_tracked"))
    exported = torch.export.load("resnet18.pt2").module()
    names["package"].eval()
    torch.testing.assert_close(exported(names["images"]), names["package"].infer(names["images"]))


def test_the_feed_stands_alone() -> None:
    names = run(EXAMPLES[2])
    assert names["state"]["epoch"] == 1
    assert names["state"]["batch"] == len(names["sampler"])


def test_a_network_larger_than_memory_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(torchvision.models.resnet18().state_dict(), "net.safetensors")
    (example,) = [example for example in EXAMPLES if 'torch.device("meta")' in example]
    names = run(example)
    assert names["pipe"].next_batch == 1
    assert not any(parameter.is_meta for parameter in names["package"].parameters())


def test_the_commands_are_there() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
