"""Every program in ``examples/`` runs, in under 80 lines, and says what its first lines promise."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "bert.py": ["the features of transformers: True"],
    "lightning_module.py": ["the weights of Pipeline.run: True"],
    "own_cnn.py": ["the same weights on one stage and on four: True"],
    "own_loop.py": [
        "layers by hand, the weights of Pipeline.run: True",
        "batches submitted, the weights of Pipeline.run: True",
    ],
    "own_method.py": ["the same weights on one stage and on four: True"],
    "resumed.py": ["resumed equals uninterrupted: True"],
    "vision_transformer.py": [
        "the same weights on one stage and on three: True",
        "exported, it answers the same: True",
    ],
}
NEEDS = {"bert.py": "transformers", "lightning_module.py": "lightning"}
QUICK = {"own_method.py", "own_loop.py"}


def test_each_example_has_words_to_look_for() -> None:
    assert {one.name for one in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_an_example_is_short(name: str) -> None:
    lines = [line for line in (EXAMPLES / name).read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) < 80


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SAYS]
)
def test_an_example_runs_and_says_what_it_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    needed = NEEDS.get(name)
    if needed is not None and find_spec(needed) is None:
        assert done.stderr.startswith(f"skipped: {needed} is not installed")
        pytest.skip(f"{needed} is not installed")
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
