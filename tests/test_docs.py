"""Every example in ``docs/`` runs as it stands there; every name, option and key of pipeal in it is there."""

from __future__ import annotations

import pkgutil
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
import torch
import torchvision

from pipeal.cli import text, vision
from pipeal.cli.main import command
from pipeal.config import LanguageConfig, TextConfig, VisionConfig

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def examples(page: str) -> list[str]:
    """A page's programs: a block that does not begin with an import goes on with the one before."""
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return re.split(r"\0(?=(?:import|from) )", "\0".join(blocks)) if blocks else []


EXAMPLES = [
    (page.relative_to(DOCS).as_posix(), number, example.replace("\0", "\n"))
    for page in PAGES
    for number, example in enumerate(examples(page.read_text("utf-8")))
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
OF_OTHERS = {"--nproc-per-node", "--max-restarts", "-m", "-k"}  # of torchrun, Python and pytest
OPTIONS = sorted({name for code in OWN for name in re.findall(r"(?<!\S)--?[a-z][a-z-]*", code)} - OF_OTHERS)
KEYS = sorted({key for code in CODE for key in re.findall(r"--set '?(\w+\.[\w.]+)=", code)})


def is_trained_and_saved(names: Mapping[str, Any]) -> None:
    assert names["report"].batches == 50
    assert Path("model.pipeal").is_file()
    assert names["logits"].shape == (16, 4)


def is_converted_and_exported(names: Mapping[str, Any]) -> None:
    assert len(names["package"]) == 4
    assert len(names["pipe"].stages) == 2
    trained = names["net"].state_dict()
    whole = torchvision.models.resnet18().state_dict()
    assert list(trained) == [name for name in whole if not name.startswith("fc.")]
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


def is_the_same(names: Mapping[str, Any]) -> None:
    assert names["same"]
    assert len(names["one"]) == len(names["three"]) > 0


def is_as_by_backpropagation(names: Mapping[str, Any]) -> None:
    assert names["same"]
    assert names["pipe"].next_batch == len(names["batches"]) == 20


def has_learned_and_left(names: Mapping[str, Any]) -> None:
    images, labels = names["held_out"][0]
    exported = torch.export.load("net.pt2").module()(images)
    assert (exported.argmax(1) == labels).float().mean() > 0.5  # of four classes
    assert names["pipe"].next_batch == 7 * len(names["train"])  # six epochs before it was saved, one after
    assert (names["answers"] == labels).float().mean() > 0.5
    assert names["smoothed"].next_batch == len(names["train"])


def is_drawn(names: Mapping[str, Any]) -> None:
    assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")
    assert {span.batch for span in names["pipe"].spans()} == set(range(2, 10))


def is_pipelined_bp(names: Mapping[str, Any]) -> None:
    data = names["data"]
    assert (data.classes, len(data.train), len(data.test)) == (("bad", "good"), 8, 2)


CHECKS: Mapping[tuple[str, int], Callable[[Mapping[str, Any]], None]] = {
    ("python.md", 0): is_trained_and_saved,
    ("python.md", 1): is_converted_and_exported,
    ("concepts.md", 0): is_the_same,
    ("concepts.md", 1): is_as_by_backpropagation,
    ("how-to/early-exits.md", 0): leaves_at_exits,
    ("tutorials/own-model.md", 0): has_learned_and_left,
    ("tutorials/timeline.md", 0): is_drawn,
    ("feed.md", 0): stood_at_the_last_batch,
    ("larger-than-memory.md", 1): is_real_and_trained,
    ("your-own-data.md", 0): is_pipelined_bp,
}
"""What is true after an example, beside that it ran."""


SLOW = {"tutorials/own-model.md"}
"""Pages that train for seconds."""


@pytest.mark.parametrize(
    ("page", "number", "example"),
    [
        pytest.param(*example, id=f"{example[0]}-{example[1]}", marks=[pytest.mark.slow] if example[0] in SLOW else [])
        for example in EXAMPLES
    ],
)
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
    assert len(TRAINING) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there(name: str) -> None:
    pkgutil.resolve_name(name)


def commands_of(page: str) -> list[str]:
    """The commands that train, each on one line."""
    blocks = "\n".join(block for language, block in FENCED.findall(page) if not language).replace("\\\n", " ")
    return re.findall(r"^python (?:nlpmain|cvmain)\.py .*?(?=$|  +#|; do$)", blocks, flags=re.MULTILINE)


LINES = sorted({" ".join(line.split()) for page in PAGES for line in commands_of(page.read_text("utf-8"))})
TRAINING = [line for line in LINES if " hf:" not in line]  # folders that are not here


@pytest.mark.parametrize("line", TRAINING)
def test_a_command_that_trains_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options and keys, with their values, become a configuration; nothing is trained."""
    asked: list[Any] = []
    monkeypatch.setattr("pipeal.run.train.carry_out", lambda _, config, *given, **named: asked.append(config))
    monkeypatch.chdir(DOCS.parent)
    _, program, *arguments = shlex.split(line)
    {"nlpmain.py": text, "cvmain.py": vision}[program].command.main(arguments, standalone_mode=False)
    assert len(asked) == 1


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
