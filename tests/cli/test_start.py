"""Help, mistyped names and the package itself answer before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import resolve_name
from typing import get_args

import pytest

from pipeal.core.names import BACKPROP_SCHEDULES, LANGUAGE, LAYER_SCHEDULES, TEXT, VISION, ScheduleName
from pipeal.engine import SCHEDULES
from pipeal.run import backprop_stage

RUN = """
import sys
from pkgutil import resolve_name
from typing import get_args
from pipeal.cli.{module} import main
try:
    main()
finally:
    print("loaded", *sorted({{"torch", "numpy", "matplotlib", "PIL", "pydantic"}} & set(sys.modules)))
"""
COMMANDS = ["train-vision", "train-text", "report", "runs", "generate", "plan"]


def answered(module: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output with what was loaded, and errors of a command in a process of its own."""
    code = RUN.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("text", ["--help"]),
        ("vision", ["--help"]),
        ("main", []),
        ("main", ["--version"]),
        *(("main", [command, "--help"]) for command in COMMANDS),
    ],
)
def test_help_needs_no_pytorch(module: str, arguments: list[str]) -> None:
    code, out, err = answered(module, *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "loaded"


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("text", ["agnwes", "lstm"], "unknown data set 'agnwes'; did you mean 'agnews'?"),
        ("text", ["agnews", "lsmt"], "unknown model 'lsmt'; did you mean 'lstm'?"),
        ("text", ["shakespear", "charlm"], "did you mean 'shakespeare'?"),
        ("text", ["agnews", "charml"], "did you mean 'charlm'? (known: charlm, hf:FOLDER, lstm, transformer)"),
        ("vision", ["cifar10", "resnet18"], "(known: hf:FOLDER, resnet, torchvision:NAME, vgg)"),
        ("vision", ["cifar11", "vgg"], "did you mean 'cifar10'?"),
        ("main", ["train-vision", "cifar10", "vg"], "did you mean 'vgg'?"),
        ("main", ["train-txt"], "No such command 'train-txt'"),
        ("text", ["agnews", "lstm", "--epoch", "2"], "No such option"),
    ],
)
def test_a_mistyped_name_is_told_without_pytorch(module: str, arguments: list[str], told: str) -> None:
    code, out, err = answered(module, *arguments)
    assert code == 2
    assert told in err
    assert out == "loaded\n"


def test_the_package_loads_pytorch_when_a_name_needs_it() -> None:
    code = (
        "import sys, pipeal\n"
        "assert issubclass(pipeal.ConfigError, pipeal.PipealError) and 'torch' not in sys.modules\n"
        "from pipeal import *\n"
        "assert all(name in globals() for name in pipeal.__all__) and 'torch' in sys.modules\n"
        "assert pipeal.Pipeline is Pipeline\n"
        "pipeal.Pipelin"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr.splitlines()[-1].startswith("AttributeError: module 'pipeal' has no attribute 'Pipelin'")


def test_names_known_without_their_code_are_those_of_the_code() -> None:
    assert get_args(ScheduleName) == (*SCHEDULES, *backprop_stage.SCHEDULES)
    assert tuple(SCHEDULES) == LAYER_SCHEDULES
    assert tuple(backprop_stage.SCHEDULES) == BACKPROP_SCHEDULES
    for names in (TEXT, VISION, LANGUAGE):
        assert all(callable(resolve_name(home).network) for home in names.models.values())
