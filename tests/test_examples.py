"""Every program in ``examples/`` runs, in under 60 lines, and says what its first lines promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {"own_method.py": "the same weights on one stage and on four: True"}


def test_each_example_has_words_to_look_for() -> None:
    assert {one.name for one in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_is_short(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) < 60
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
