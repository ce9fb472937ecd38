"""What a shell is told when somebody presses the tab key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from pipeal.cli.main import command


@pytest.mark.parametrize(
    ("before", "begun", "wanted"),
    [
        ([], "", {"train-vision", "train-text", "report", "runs"}),
        ([], "train-t", {"train-text"}),
        (["train-text"], "", {"agnews", "dbpedia", "imdb", "toynews"}),
        (["train-text"], "AG", {"agnews"}),
        (["train-text", "agnews"], "", {"lstm", "transformer"}),
        (["train-vision"], "ci", {"cifar10", "cifar100"}),
        (["train-vision", "cifar10"], "", {"vgg", "resnet"}),
        (["train-vision", "cifar10", "vgg", "--augmentation"], "s", {"strong"}),
        (["train-text", "agnews", "lstm", "--schedule"], "p", {"pipelined"}),
        (["train-text", "agnews", "lstm", "--mode"], "", {"al", "bp", "compare"}),
        (["train-text", "agnews", "lstm", "--method"], "g", {"greedy"}),
        (["train-text", "agnews", "lstm", "--methods"], "bp,g", {"bp,greedy"}),
        (["train-text", "agnews", "lstm"], "--res", {"--resume"}),
    ],
)
def test_names_are_offered(before: list[str], begun: str, wanted: set[str]) -> None:
    found = BashComplete(command, {}, "pipeal", "_PIPEAL_COMPLETE").get_completions(before, begun)
    assert {item.value for item in found} >= wanted
    assert begun == "" or len(found) == len(wanted)


@pytest.mark.slow
def test_the_command_speaks_to_shells(tmp_path: Path) -> None:
    """Through its entry point: errors are worded there, and completion must pass by."""
    script = tmp_path / "pipeal"
    script.write_text("from pipeal.cli.main import main\nmain()\n")

    def asked(**environment: str) -> str:
        done = subprocess.run(
            [sys.executable, script], env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    source = asked(_PIPEAL_COMPLETE="zsh_source")  # bash_source asks the bash at hand for its version
    assert "#compdef pipeal" in source
    assert asked(_PIPEAL_COMPLETE="bash_complete", COMP_WORDS="pipeal train-text dbp", COMP_CWORD="2") == (
        "plain,dbpedia\n"
    )
