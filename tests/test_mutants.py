"""The list of mutants: each applies to the code as it is, and its tests are there. What kills them is seen by running
``scripts/mutants.py``; and that, here, on a tree of one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mutants
import pytest
import yaml
from mutant_list import LISTS, ROOT, Mutant, MutantsError, change_of, missing_tests, read_mutants
from mutants import chosen, main

MUTANT = Mutant("one", "one is one", "pipeal/a.py", "one = 1", "one = 2", ("tests/test_a.py",))


@pytest.mark.slow
def test_every_mutant_applies_once_and_its_tests_are_there(collected: frozenset[str]) -> None:
    """Code that moves takes its mutants along; code that changes has to be given theirs again."""
    found = read_mutants(ROOT)
    for mutant in found:
        change_of(mutant, ROOT)
        assert missing_tests(mutant, ROOT) == [], mutant.name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
    # Parameters are known to pytest alone. Symptom: a test had been given another one, and the whole list ended there.
    # What this session has not collected, all where this file alone is run, takes a minute to look for.
    named = sorted({test for mutant in found for test in mutant.tests if "[" in test} - collected)
    if named:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
        asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stdout[-2000:] + asked.stderr[-2000:]
    assert len(found) >= 120
    readers = yaml.safe_load((ROOT / LISTS / "reader.yaml").read_text(encoding="utf-8"))
    assert len(readers) >= 60, "chosen by a reader who had not written the tests"


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes a small tree."""

    def make(**files: str) -> Path:
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        root = tmp_path / "tree"
        for name, text in {"pipeal/__init__.py": "", "pipeal/core/errors.py": "", **files}.items():
            path = root / name.replace("__slash__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return make


def test_a_mutant_is_found_by_its_text_wherever_it_has_moved(tree: Callable[..., Path]) -> None:
    root = tree(**{"pipeal/a.py": "", "pipeal/b/c.py": "zero = 0\none = 1\n"})
    change = change_of(MUTANT, root)
    assert (change.file, change.after) == ("pipeal/b/c.py", "zero = 0\none = 2\n")
    assert "-one = 1\n+one = 2\n" in change.diff


def test_lines_are_indented_as_the_first_one_is(tree: Callable[..., Path]) -> None:
    source = "def f(x):\n    if x:\n        a = 1\n        if a:\n            b = 2\n"
    root = tree(**{"pipeal/a.py": source})
    several = replace(MUTANT, old="a = 1\nif a:\n    b = 2\n", new="a = 2\nif x:\n    b = 3\n")
    assert change_of(several, root).after == source.replace("a = 1", "a = 2").replace("b = 2", "b = 3").replace(
        "if a", "if x"
    )


def test_within_a_function_a_text_is_told_from_others(tree: Callable[..., Path]) -> None:
    source = (
        "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n\ndef f():\n    return 1\n"
    )
    root = tree(**{"pipeal/a.py": source})
    mutant = replace(MUTANT, old="return 1", new="return 2")
    with pytest.raises(MutantsError, match=r"one: its text 'return 1' is there 3 times \(pipeal/a.py:3, "):
        change_of(mutant, root)
    with pytest.raises(MutantsError, match="within f is there 2 times"):
        change_of(replace(mutant, within="f"), root)
    assert change_of(replace(mutant, within="A.f"), root).after == source.replace("return 1", "return 2", 1)


@pytest.mark.parametrize(
    ("source", "new", "message"),
    [
        ("two = 2", "one = 2", "one: its text 'one = 1' is neither in pipeal/a.py nor in pipeal/; anchor it again"),
        ("one = 1", "one = (", "one: what it leaves is no Python"),
        ("one = 1", "one = 1", "one: it changes nothing"),
    ],
)
def test_a_mutant_that_does_not_apply_is_named(source: str, new: str, message: str, tree: Callable[..., Path]) -> None:
    with pytest.raises(MutantsError, match=re.escape(message)):
        change_of(replace(MUTANT, new=new), tree(**{"pipeal/a.py": source}))


def test_tests_that_are_not_there_are_found(tree: Callable[..., Path]) -> None:
    root = tree(**{"tests/test_a.py": "def test_b(): ...\n\nclass TestC:\n    def test_d(self): ...\n"})
    here = ("tests/test_a.py", "tests/test_a.py::test_b[x-1]", "tests/test_a.py::TestC::test_d")
    gone = ("tests/test_z.py", "tests/test_a.py::test_d2", "tests/test_a.py::TestC::test_b", "tests/test_a.py -k b")
    assert missing_tests(replace(MUTANT, tests=here + gone), root) == list(gone)


def test_a_draw_is_repeated_by_its_seed_and_names_are_checked() -> None:
    found = [replace(MUTANT, name=name) for name in ("one", "two", "three", "four")]
    assert chosen(found, [], 2, 7) == chosen(found, [], 2, 7)
    assert [one.name for one in chosen(found, ["three", "one"], None, 0)] == ["three", "one"]
    for options, message in (
        ((["thre"], None, 0), "no mutant thre; did you mean three?"),
        (([], 5, 0), "--random 5, but there are 4 mutants"),
    ):
        with pytest.raises(MutantsError, match=re.escape(message)):
            chosen(found, *options)


@pytest.mark.slow
def test_killed_survived_and_hanging_mutants_are_told_apart(
    tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, on a tree whose tests look at one of two lines."""
    root = tree(**{
        "pipeal/a.py": "import time\none = 1\ntwo = 2\n",
        "tests/test_a.py": "from pipeal import a\n\ndef test_1(): assert a.one == 1\ndef test_2(): assert a.one == 2\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "scripts/mutants/a.yaml": """
- {name: killed, breaks: one is one, file: pipeal/a.py, old: one = 1, new: one = 2, tests: "tests/test_a.py::test_1"}
- {name: lives, breaks: two is two, file: pipeal/a.py, old: two = 2, new: two = 1, tests: "tests/test_a.py::test_1"}
- {name: hangs, breaks: x, file: pipeal/a.py, old: two = 2, new: time.sleep(999), tests: "tests/test_a.py::test_1"}
- {name: wrong, breaks: x, file: pipeal/a.py, old: two = 2, new: two = 3, tests: "tests/test_a.py::test_2"}
""",
    })  # fmt: skip
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to import
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert main(["--only", "killed", "lives", "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"killed +killed +\d+\.\d s +test_a.py::test_1\n", out)
    assert re.search(r"lives +SURVIVED", out)
    assert "lives survived tests/test_a.py::test_1: no longer true is\n  two is two\n" in out
    assert "-two = 2\n+two = 1\n" in out
    assert "1 of 2 killed" in out
    monkeypatch.setattr(mutants, "PATIENCE_S", 0.0)
    assert main(["--only", "hangs"]) == 0
    assert re.search(r"hangs +killed +\d+\.\d s +by the clock", capsys.readouterr().out)
    assert main(["--only", "wrong"]) == 2
    assert "wrong: its tests do not pass (pytest ended with 1) without it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before, "the tree is as it was"
