"""Mutants: small changes that each make something false. How they are listed, and where in the code they apply.

They stand in ``scripts/mutants/*.yaml``; to add one, add an entry::

    - name: test-accuracy-from-training-texts
      breaks: test_acc of a run on texts is taken on the test set
      file: pipeal/run/build_text.py
      within: TextExperiment.test_evaluation
      old: return _in_order(self.test)
      new: return _in_order(self.train)
      tests: tests/integration/test_reported_numbers.py::test_accuracies_of_texts_are_those_of_their_splits

``breaks`` is what holds without it. ``old`` is text that occurs exactly once in the file, or in the function or class
that ``within`` names (which may be left out). Where the file has no such text any more, all of ``pipeal/`` is searched
for it. Further lines of ``old`` and ``new`` are indented as the line is that the first one stands in. Quotes keep YAML
from reading code as its own. ``tests`` are files or node ids of pytest: few, and quick.

Those in ``reader.yaml`` were chosen by a reader of the code who had not written its tests; where a test had not noticed
one, it was written then.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LISTS = "scripts/mutants"

_NODE = re.compile(r"(?P<file>[^:\[]+\.py)(::(?P<names>[\w.:]+))?(\[.*\])?")


class MutantsError(Exception):
    """A mistake in the list or in a call; exit code 2."""


@dataclass(frozen=True)
class Mutant:
    """A small change that makes something false, and the tests that should notice.

    Attributes:
        name: Unique, in words joined by hyphens.
        breaks: The one thing that holds without it, in a line.
        file: Where ``old`` is looked for first, from the root of the tree.
        old: The text that is replaced; must occur exactly once.
        new: What takes its place.
        tests: Files or node ids of pytest.
        within: The function or class, ``Class.method`` or a name alone, that holds ``old``; None for the whole file.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    within: str | None = None


@dataclass(frozen=True)
class Change:
    """A mutant on a tree: the file that changes, from the tree's root, and what it holds before and after."""

    file: str
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The change as ``diff -u`` prints it, with a line around it."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, self.file, self.file, n=1))


def read_mutants(root: Path) -> list[Mutant]:
    """All mutants that a tree lists, in the order of the files and of the entries in them.

    Raises:
        MutantsError: A file is not a list of mutants, or two have one name.
    """
    found: dict[str, Mutant] = {}
    for path in sorted((root / LISTS).glob("*.yaml")):
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise MutantsError(f"{path.name}: {' '.join(str(error).split())}; put code into quotes") from error
        if not isinstance(entries, list):
            raise MutantsError(f"{path.name}: found a {type(entries).__name__}, wanted a list of mutants")
        for number, entry in enumerate(entries, 1):
            mutant = _mutant(entry, f"{path.name}, entry {number}")
            if mutant.name in found:
                raise MutantsError(f"{path.name}: the name {mutant.name} is there twice; choose another")
            found[mutant.name] = mutant
    if not found:
        raise MutantsError(f"no mutants in {root / LISTS}/*.yaml")
    return list(found.values())


def _mutant(entry: Any, where: str) -> Mutant:
    known = {one.name for one in fields(Mutant)}
    if not isinstance(entry, Mapping) or not known - {"within"} <= set(entry) <= known:
        keys = sorted(entry) if isinstance(entry, Mapping) else entry
        raise MutantsError(f"{where}: found {keys!r:.200}, wanted {', '.join(sorted(known))} (within may be left out)")
    tests = entry["tests"]
    values = {**entry, "tests": tuple([tests] if isinstance(tests, str) else tests)}
    for key, value in values.items():
        texts = value if key == "tests" else [value]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise MutantsError(f"{where}: {key} is {value!r}, wanted text; put code into quotes")
    return Mutant(**values)


@dataclass(frozen=True)
class _Place:
    """Where a mutant's text occurs: in a file that holds ``source``, from ``begin``; and what each text is there."""

    path: Path
    source: str
    begin: int
    old: str
    new: str

    def shown(self, root: Path) -> str:
        """File and line."""
        return f"{self.path.relative_to(root)}:{self.source.count(chr(10), 0, self.begin) + 1}"


def change_of(mutant: Mutant, root: Path) -> Change:
    """What a mutant changes in the tree under ``root``; nothing is written.

    Raises:
        MutantsError: Its text is not there, or there twice; or what it leaves is no Python, or the same.
    """
    found = list(_places(mutant, root / mutant.file))
    if not found:
        others = (path for path in sorted((root / "pipeal").rglob("*.py")) if path != root / mutant.file)
        found = [place for path in others for place in _places(mutant, path)]
    if len(found) != 1:
        inside = f" within {mutant.within}" if mutant.within else ""
        places = ", ".join(place.shown(root) for place in found)
        how = f"is there {len(found)} times ({places})" if found else f"is neither in {mutant.file} nor in pipeal/"
        raise MutantsError(f"{mutant.name}: its text {mutant.old.splitlines()[0]!r}{inside} {how}; anchor it again")
    (place,) = found
    after = place.source[: place.begin] + place.new + place.source[place.begin + len(place.old) :]
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise MutantsError(f"{mutant.name}: what it leaves is no Python: {error}") from error
    if after == place.source:
        raise MutantsError(f"{mutant.name}: it changes nothing")
    return Change(place.path.relative_to(root).as_posix(), place.source, after)


def _places(mutant: Mutant, path: Path) -> Iterator[_Place]:
    if not path.is_file():
        return
    source = path.read_text(encoding="utf-8")
    first = mutant.old.strip("\n").splitlines()[0]
    if first not in source:
        return
    for low, high in [(0, len(source))] if mutant.within is None else _bodies(source, mutant.within):
        begin = source.find(first, low, high)
        while begin >= 0:
            line = source[source.rfind("\n", 0, begin) + 1 : begin]
            indent = line[: len(line) - len(line.lstrip(" "))]
            old, new = (_indented(text, indent) for text in (mutant.old, mutant.new))
            if source.startswith(old, begin):
                yield _Place(path, source, begin, old, new)
            begin = source.find(first, begin + 1, high)


def _indented(text: str, indent: str) -> str:
    first, *more = text.strip("\n").splitlines()
    return "\n".join([first, *(indent + line if line else line for line in more)])


def _bodies(source: str, name: str) -> Iterator[tuple[int, int]]:
    """Where the functions and classes of that name, alone or behind those of their classes, begin and end."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    wanted = name.split(".")

    def look(node: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler):
                continue
            names = above
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = (*above, child.name)
                if list(names[-len(wanted) :]) == wanted:
                    yield starts[child.lineno - 1], starts[child.end_lineno or child.lineno]
                    continue
            yield from look(child, names)

    yield from look(_parsed(source), ())


@lru_cache(maxsize=256)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def missing_tests(mutant: Mutant, root: Path) -> list[str]:
    """Those of its tests that are nowhere to be found, by their files' text alone; parameters are not looked at."""
    return [test for test in mutant.tests if not _is_there(test, root)]


def _is_there(test: str, root: Path) -> bool:
    parts = _NODE.fullmatch(test)
    if parts is None or not (root / parts["file"]).is_file():
        return False
    if parts["names"] is None or not Path(parts["file"]).name.startswith("test_"):
        return True  # a whole file, or a doctest of one
    source = (root / parts["file"]).read_text(encoding="utf-8")
    return any(True for _ in _bodies(source, parts["names"].replace("::", ".")))
