"""Every example in ``docs/`` runs as it stands there; every name, option and key of pipeal in it is there."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
import torch
import torchvision

from pipeal.cli.main import command
from pipeal.config import LanguageConfig, TextConfig, VisionConfig

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
EXAMPLES = [
    (page.name, number, example)
    for page in PAGES
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL))
]
README = Path(__file__).parents[1] / "README.md"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def code_of(page: str) -> list[str]:
    """What stands in backticks, and the lines of blocks that are no Python, such as commands."""
    inline = re.findall(r"`([^`]+)`", FENCED.sub("", page))
    lines = [line for language, block in FENCED.findall(page) if not language for line in block.splitlines()]
    return [" ".join(code.split("#")[0].split()) for code in (*inline, *lines)]


CODE = sorted({code for page in (README, *PAGES) for code in code_of(page.read_text("utf-8"))})
NAMES = sorted({name for code in CODE for name in re.findall(r"\bpipeal(?:\.[A-Za-z_]\w*)+", code)})
OWN = [code for code in CODE if not re.search(r"\btorchrun |\bpip |\b(?!nlpmain|cvmain)\w+\.(?:py|sh) ", code)]
OF_TORCHRUN = {"--nproc-per-node", "--max-restarts"}
OPTIONS = sorted({name for code in OWN for name in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code)} - OF_TORCHRUN)
KEYS = sorted({key for code in CODE for key in re.findall(r"--set '?(\w+\.[\w.]+)=", code)})


def is_trained_and_saved(names: Mapping[str, Any]) -> None:
    assert names["report"].batches == 50
    assert Path("model.pipeal").is_file()
    assert names["logits"].shape == (16, 4)


def is_converted_and_exported(names: Mapping[str, Any]) -> None:
    assert len(names["package"]) == 4
    assert len(names["pipe"].stages) == 2
    trained = names["net"].state_dict()
    assert trained.keys() == torchvision.models.resnet18(num_classes=10).state_dict().keys()
    assert all(int(trained[key]) == 4 for key in trained if key.endswith("num_batches_tracked"))
    exported = torch.export.load("resnet18.pt2").module()
    names["package"].eval()
    torch.testing.assert_close(exported(names["images"]), names["package"].infer(names["images"]))


def leaves_at_exits(names: Mapping[str, Any]) -> None:
    assert names["answer"].logits.shape == (16, 4)
    assert set(names["answer"].exits.tolist()) <= {1, 2}


def stood_at_the_last_batch(names: Mapping[str, Any]) -> None:
    assert names["state"]["epoch"] == 1
    assert names["state"]["batch"] == len(names["sampler"])


def is_real_and_trained(names: Mapping[str, Any]) -> None:
    assert names["pipe"].next_batch == 1
    assert not any(parameter.is_meta for parameter in names["package"].parameters())


CHECKS: Mapping[tuple[str, int], Callable[[Mapping[str, Any]], None]] = {
    ("python.md", 0): is_trained_and_saved,
    ("python.md", 1): is_converted_and_exported,
    ("python.md", 2): leaves_at_exits,
    ("feed.md", 0): stood_at_the_last_batch,
    ("larger-than-memory.md", 1): is_real_and_trained,
}
"""What is true after an example, beside that it ran."""


@pytest.mark.parametrize(("page", "number", "example"), EXAMPLES, ids=[f"{page}-{n}" for page, n, _ in EXAMPLES])
def test_an_example_runs(page: str, number: int, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, f"{page}, example {number}", "exec"), names)
    if check := CHECKS.get((page, number)):
        check(names)


def test_there_are_examples_and_names() -> None:
    assert len(EXAMPLES) >= 5
    assert {(page, number) for page, number, _ in EXAMPLES} >= CHECKS.keys()
    assert len(OPTIONS) >= 20
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name: str) -> None:
    pkgutil.resolve_name(name)


def subcommands(one: click.Command) -> list[click.Command]:
    return list(one.commands.values()) if isinstance(one, click.Group) else []


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_there(option: str) -> None:
    commands = [one for top in command.commands.values() for one in (top, *subcommands(top))]
    assert any(option in parameter.opts for one in commands for parameter in one.get_params(click.Context(one)))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_configuration_is_there(key: str) -> None:
    found: list[type | None] = [TextConfig, VisionConfig, LanguageConfig]
    for part in key.split("."):
        found = [get_type_hints(schema).get(part) for schema in found if schema is not None]
    assert any(found)
