"""Breaks the code on purpose, one small change at a time, and tells which changes no test notices.

    python scripts/mutants.py                          # all of them: about an hour on two cores
    python scripts/mutants.py --random 10              # a draw, with its seed printed; --seed repeats it
    python scripts/mutants.py --only train-and-test-accuracy-swapped
    python scripts/mutants.py --list

The mutants stand in ``scripts/mutants/*.yaml``; to add one, add an entry::

    - name: test-accuracy-from-training-texts
      breaks: test_acc of a run on texts is taken on the test set
      file: pipeal/cli/build_text.py
      within: TextExperiment.test_evaluation
      old: return _in_order(self.test)
      new: return _in_order(self.train)
      tests: tests/integration/test_reported_numbers.py::test_texts

``old`` is text that occurs exactly once in the file, or in the function or class that ``within`` names (which may be
left out). Where the file has no such text any more, all of ``pipeal/`` is searched for it. Further lines of ``old`` and
``new`` are indented as the line is that the first one stands in. Quotes keep YAML from reading code as its own.
``tests`` are files or node ids of pytest.

Each mutant is applied to a copy of the tree, never to the tree itself. Its tests must pass there without it (run once
for each set of tests), and fail with it: then it is killed. One that hangs is killed by the clock, and the table says
so. Exit code 0 if all were killed, 1 if any survived, 2 on a mistake: a text that is not there or is there twice, a
test that does not exist or fails by itself.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "scripts" / "mutants"

COPIED = ("pipeal", "tests", "scripts", "configs", "cvmain.py", "nlpmain.py", "pyproject.toml", "README.md")
"""What tests need of the tree, as far as it is there."""

PATIENCE_S = 60.0
"""The tests of a mutant may take so long, and five times as long as they take without it."""

_NODE = re.compile(r"(?P<file>[^:\[]+\.py)(::(?P<names>[\w.:]+))?(\[.*\])?")
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


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
    """A mutant on a tree: the file that changes, and what it holds before and after."""

    file: str
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The change as ``diff -u`` prints it, with a line around it."""
        lines = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(*lines, self.file, self.file, n=1))


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    killed: bool
    how: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """One call of pytest; ``code`` is None where it took too long."""

    code: int | None
    output: str
    seconds: float


# -- the list ----------------------------------------------------------------------------------------------------


def read_mutants(folder: Path | None = None) -> list[Mutant]:
    """All mutants, in the order of the files and of the entries in them.

    Raises:
        MutantsError: A file is not a list of mutants, or two have one name.
    """
    folder = folder or LISTS
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise MutantsError(f"{path.name}: {' '.join(str(error).split())}") from error
        if not isinstance(entries, list):
            raise MutantsError(f"{path.name}: found a {type(entries).__name__}, wanted a list of mutants")
        for number, entry in enumerate(entries, 1):
            mutant = _mutant(entry, f"{path.name}, entry {number}")
            if mutant.name in found:
                raise MutantsError(f"{path.name}: the name {mutant.name} is there twice; choose another")
            found[mutant.name] = mutant
    if not found:
        raise MutantsError(f"no mutants in {folder}/*.yaml")
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
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise MutantsError(f"{where}: {key} is {value!r}, wanted text")
    return Mutant(**values)


# -- a mutant on a tree ------------------------------------------------------------------------------------------


def change_of(mutant: Mutant, root: Path | None = None) -> Change:
    """What a mutant changes in the tree under ``root``, by default this one; nothing is written.

    Raises:
        MutantsError: Its text is not there, or there twice; or what it leaves is no Python.
    """
    root = root or ROOT
    found = list(_places(mutant, root, root / mutant.file))
    if not found:
        others = (path for path in sorted((root / "pipeal").rglob("*.py")) if path != root / mutant.file)
        found = [place for path in others for place in _places(mutant, root, path)]
    inside = f" within {mutant.within}" if mutant.within else ""
    if len(found) != 1:
        places = ", ".join(f"{path.relative_to(root)}:{line}" for path, line, *_ in found)
        how = f"is there {len(found)} times ({places})" if found else f"is neither in {mutant.file} nor in pipeal/"
        raise MutantsError(f"{mutant.name}: its text {mutant.old.splitlines()[0]!r}{inside} {how}; anchor it again")
    path, _, source, begin, end, new = found[0]
    after = source[:begin] + new + source[end:]
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise MutantsError(f"{mutant.name}: what it leaves is no Python: {error}") from error
    if after == source:
        raise MutantsError(f"{mutant.name}: it changes nothing")
    return Change(path.relative_to(root).as_posix(), source, after)


def _places(mutant: Mutant, root: Path, path: Path) -> Iterator[tuple[Path, int, str, int, int, str]]:
    """Where its text occurs in a file: path, line, the file's text, begin and end in it, and what comes there."""
    if not path.is_file():
        return
    source = path.read_text(encoding="utf-8")
    first, *more = mutant.old.strip("\n").splitlines()
    if first not in source:
        return
    for low, high in [(0, len(source))] if mutant.within is None else _bodies(source, mutant.within):
        begin = source.find(first, low, high)
        while begin >= 0:
            line = source.rfind("\n", 0, begin) + 1
            indent = re.compile(r" *").match(source, line).group()  # type: ignore[union-attr]  # it matches nothing, too
            old, new = (_indented(text, indent) for text in (mutant.old, mutant.new))
            if source.startswith(old, begin):
                yield path, source.count("\n", 0, begin) + 1, source, begin, begin + len(old), new
            begin = source.find(first, begin + 1, high)


def _indented(text: str, indent: str) -> str:
    first, *more = text.strip("\n").splitlines()
    return "\n".join([first, *(indent + line if line else line for line in more)])


def _bodies(source: str, name: str) -> Iterator[tuple[int, int]]:
    """Where a function or class of that name, alone or behind those of its classes, begins and ends."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def look(node: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            names = above
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = (*above, child.name)
                if list(names[-len(wanted) :]) == wanted:
                    yield starts[child.lineno - 1], starts[child.end_lineno or child.lineno]
                    continue
            yield from look(child, names)

    wanted = name.split(".")
    yield from look(_parsed(source), ())


@lru_cache(maxsize=256)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def missing_tests(mutant: Mutant, root: Path | None = None) -> list[str]:
    """Those of its tests that are nowhere to be found, by their files' text alone; parameters are not looked at."""
    return [test for test in mutant.tests if not _is_there(test, root or ROOT)]


def _is_there(test: str, root: Path) -> bool:
    parts = _NODE.fullmatch(test)
    if parts is None or not (root / parts["file"]).is_file():
        return False
    if parts["names"] is None or not Path(parts["file"]).name.startswith("test_"):
        return True  # a whole file, or a doctest of one
    source = (root / parts["file"]).read_text(encoding="utf-8")
    return any(True for _ in _bodies(source, parts["names"].replace("::", ".")))


# -- running -----------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Copies of the tree, and what the tests of mutants came to on them without any.

    Attributes:
        folders: Copies that nobody uses at the moment.
    """

    folders: SimpleQueue[Path]
    _without: dict[tuple[str, ...], Run] = field(default_factory=dict)
    _locks: dict[tuple[str, ...], threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _ended: bool = False

    def judge(self, mutant: Mutant) -> Verdict:
        """Runs the tests of a mutant with it.

        Raises:
            MutantsError: They do not pass without it, or do not run with it.
        """
        folder = self.folders.get()
        try:
            without = self._baseline(mutant, folder)
            change = change_of(mutant, folder)
            path = folder / change.file
            path.write_text(change.after, encoding="utf-8")
            try:
                run = self._pytest(folder, mutant.tests, PATIENCE_S + 5 * without.seconds)
            finally:
                path.write_text(change.before, encoding="utf-8")
        finally:
            self.folders.put(folder)
        if run.code is None:
            return Verdict(mutant, True, f"by the clock, after {run.seconds:.0f} s", run.seconds)
        if run.code < 0:
            return Verdict(mutant, True, f"by signal {-run.code}", run.seconds)
        if run.code not in (0, 1):
            raise MutantsError(f"{mutant.name}: pytest ended with {run.code}:\n{_tail(run.output)}")
        failed = _FIRST_FAILURE.search(run.output)
        return Verdict(mutant, run.code == 1, failed[1].rpartition("/")[2] if failed else "", run.seconds)

    def end(self) -> None:
        """Ends what runs; nothing begins any more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _baseline(self, mutant: Mutant, folder: Path) -> Run:
        with self._lock:
            lock = self._locks.setdefault(mutant.tests, threading.Lock())
        with lock:
            if mutant.tests not in self._without:
                self._without[mutant.tests] = self._pytest(folder, mutant.tests, 600.0)
        run = self._without[mutant.tests]
        if run.code != 0 or not re.search(r"\d+ passed", run.output):
            how = "take over ten minutes" if run.code is None else f"do not pass (pytest ended with {run.code})"
            raise MutantsError(f"{mutant.name}: its tests {how} without it:\n{_tail(run.output)}")
        return run

    def _pytest(self, folder: Path, tests: Sequence[str], timeout_s: float) -> Run:
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # of a file that changes twice in a second an old one might be taken
            "CI": "true",  # tests draw the same cases every time
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        with tempfile.TemporaryDirectory(prefix="pipeal-mutant-") as own:
            environment["TMPDIR"] = own  # what killed tests leave goes with it
            begin = perf_counter()
            with self._lock:
                if self._ended:
                    raise MutantsError("ended")
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                output, _ = process.communicate(timeout=timeout_s)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                _kill(process)
                output, code = process.communicate()[0], None
            finally:
                _kill(process)
                with self._lock:
                    self._running.discard(process)
        return Run(code, output, perf_counter() - begin)


@contextmanager
def bench(jobs: int) -> Iterator[Bench]:
    """Copies of the tree for so many tests at once; they are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="pipeal-mutants-", ignore_cleanup_errors=True) as parent:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            folder = Path(parent, str(number))
            if number:
                shutil.copytree(Path(parent, "0"), folder)
            else:
                copy_tree(ROOT, folder)
            folders.put(folder)
        one = Bench(folders)
        try:
            yield one
        finally:
            one.end()


def copy_tree(root: Path, folder: Path) -> None:
    """Copies what tests need, and compiles it, such that a file that changes is compiled again.

    Raises:
        MutantsError: Python would import another pipeal there.
    """
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    folder.mkdir(parents=True)
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=ignored)
        elif (root / name).is_file():
            shutil.copy2(root / name, folder / name)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "pipeal"]
    subprocess.run(compiled, cwd=folder, check=True)
    imported = subprocess.run(
        [sys.executable, "-c", "import pipeal.errors; print(pipeal.errors.__file__)"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(imported).resolve().is_relative_to(folder.resolve()):
        raise MutantsError(f"Python imports {imported}, and not the copy in {folder}; nothing would be tested")


def _kill(process: subprocess.Popen[str]) -> None:
    """A test session, and what it started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-15:])


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """The verdicts, as they come; raises as :meth:`Bench.judge`."""
    jobs = min(jobs, len(mutants))
    with bench(jobs) as one, ThreadPoolExecutor(jobs) as pool:
        begun = [pool.submit(one.judge, mutant) for mutant in mutants]
        try:
            for done in as_completed(begun):
                yield done.result()
        finally:
            one.end()
            pool.shutdown(cancel_futures=True)


# -- the command -------------------------------------------------------------------------------------------------


def chosen(mutants: Sequence[Mutant], only: Iterable[str], count: int | None, seed: int) -> list[Mutant]:
    """Those that are named, or so many drawn.

    Raises:
        MutantsError: There is no mutant of a name, or fewer than so many.
    """
    names = list(only)
    by_name = {mutant.name: mutant for mutant in mutants}
    if unknown := [name for name in names if name not in by_name]:
        near = difflib.get_close_matches(unknown[0], by_name, 1)
        raise MutantsError(f"no mutant {unknown[0]}{f'; did you mean {near[0]}?' if near else ''}")
    found = [by_name[name] for name in names] if names else list(mutants)
    if count is None:
        return found
    if not 1 <= count <= len(found):
        raise MutantsError(f"--random {count}, but there are {len(found)} mutants; expected from 1 to as many")
    return random.Random(seed).sample(found, count)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these alone")
    parser.add_argument("--random", type=int, metavar="N", help="so many, drawn")
    parser.add_argument("--seed", type=int, help="of the draw; printed where none is given")
    parser.add_argument("--list", action="store_true", help="print them, and check where they apply; run nothing")
    parser.add_argument("--jobs", type=int, default=_cores(), metavar="J", help="so many at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    try:
        if options.jobs < 1:
            raise MutantsError(f"--jobs {options.jobs}; expected at least 1")
        mutants = chosen(read_mutants(), options.only, options.random, seed)
        for mutant in mutants:
            change_of(mutant)
            if missing := missing_tests(mutant):
                raise MutantsError(f"{mutant.name}: there is no test {missing[0]}")
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name}\n    without it: {mutant.breaks}\n    {' '.join(mutant.tests)}")
            print(f"{len(mutants)} mutants")
            return 0
        if options.random is not None:
            print(f"{len(mutants)} mutants, drawn with --seed {seed}", flush=True)
        return _report(mutants, options.jobs)
    except MutantsError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2


def _report(mutants: Sequence[Mutant], jobs: int) -> int:
    begin, survived = perf_counter(), []
    width = max(len(mutant.name) for mutant in mutants)
    for number, verdict in enumerate(judge_all(mutants, jobs), 1):
        said = "killed  " if verdict.killed else "SURVIVED"
        line = f"{number:>4}/{len(mutants)}  {verdict.mutant.name:<{width}}  {said}  {verdict.seconds:5.1f} s  {verdict.how}"
        print(line.rstrip(), flush=True)
        if not verdict.killed:
            survived.append(verdict.mutant)
    for mutant in survived:
        print(f"\n{mutant.name} survived {' '.join(mutant.tests)}: no longer true is\n  {mutant.breaks}")
        print(change_of(mutant).diff)
    print(f"{len(mutants) - len(survived)} of {len(mutants)} killed in {(perf_counter() - begin) / 60:.1f} minutes")
    return 1 if survived else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
