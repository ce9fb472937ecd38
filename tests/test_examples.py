"""Every program in ``examples/`` runs, in under 80 lines, and says what its first lines promise."""

from __future__ import annotations

import runpy
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
QUICK = {"own_method.py", "own_loop.py", "resumed.py"}


def test_each_example_has_words_to_look_for() -> None:
    assert {one.name for one in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_an_example_is_short(name: str) -> None:
    lines = [line for line in (EXAMPLES / name).read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) < 80


def test_a_method_of_ones_own_is_as_short_as_its_page_says() -> None:
    """It had 63 lines, blank ones included, where the page says under 60."""
    lines = (EXAMPLES / "own_method.py").read_text("utf-8").splitlines()
    page = (EXAMPLES.parent / "docs" / "your-own-method.md").read_text("utf-8")
    assert "nothing in under 60 lines" in page
    assert len(lines) < 60


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SAYS]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of other libraries
def test_an_example_runs_and_says_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    """In this process, which has imported torch: half of what each of them takes."""
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        if name not in NEEDS or find_spec(NEEDS[name]) is not None:
            raise
        pytest.skip(str(end))
    said = capsys.readouterr().out
    for words in SAYS[name]:
        assert words in said
