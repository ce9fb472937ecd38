"""Every example in ``docs/`` runs as it stands there, and every name of pipeal in it is there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from pipeal.cli import generate, memory, text, vision
from pipeal.config import LanguageConfig, TextConfig, VisionConfig

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
EXAMPLES = [
    (page.name, number, example)
    for page in PAGES
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL))
]
CODE = sorted({code for page in PAGES for code in re.findall(r"`([^`\n]+)`", page.read_text("utf-8"))})
NAMES = sorted({name for code in CODE for name in re.findall(r"\bpipeal(?:\.[A-Za-z_]\w*)+", code)})
OPTIONS = sorted({name for code in CODE for name in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code)} - {"--nproc-per-node"})
KEYS = sorted({key for code in CODE for key in re.findall(r"--set (\w+\.[\w.]+)=", code)})


@pytest.mark.parametrize(("page", "number", "example"), EXAMPLES, ids=[f"{page}-{n}" for page, n, _ in EXAMPLES])
def test_an_example_runs(page: str, number: int, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, f"{page}, example {number}", "exec"), {"__name__": "example"})


def test_there_are_examples_and_names() -> None:
    assert len(EXAMPLES) >= 5
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name: str) -> None:
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_there(option: str) -> None:
    commands = (text.command, vision.command, generate.command, memory.command)
    assert any(option in parameter.opts for command in commands for parameter in command.params)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_configuration_is_there(key: str) -> None:
    found: list[type | None] = [TextConfig, VisionConfig, LanguageConfig]
    for part in key.split("."):
        found = [get_type_hints(schema).get(part) for schema in found if schema is not None]
    assert any(found)
