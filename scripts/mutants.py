"""Breaks the code on purpose, one small change at a time, and tells which changes no test notices.

    python scripts/mutants.py                          # all of them: an hour or two on two cores
    python scripts/mutants.py --random 10              # a draw, whose seed is printed; --seed repeats it
    python scripts/mutants.py --only train-and-test-accuracy-swapped
    python scripts/mutants.py --list

The mutants stand in ``scripts/mutants/*.yaml``; ``scripts/mutant_list.py`` says how to add one. Each is applied to a
copy of the tree, never to the tree itself. Its tests must pass there without it (run once for each set of tests), and
fail with it: then it is killed. One that hangs is killed by the clock, and the table says so.

Exit code 0 if all were killed, 1 if any survived, 2 on a mistake: a text that is not there or is there twice, a test
that does not exist or fails by itself.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

from mutant_list import ROOT, Mutant, MutantsError, change_of, missing_tests, read_mutants

COPIED = ("pipeal", "tests", "scripts", "configs", "cvmain.py", "nlpmain.py", "pyproject.toml", "README.md", "docs")
"""What tests need of the tree, as far as it is there."""

PATIENCE_S = 60.0
"""The tests of a mutant may take so long, and five times as long as they take without it."""

_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: whether it was killed, and by what."""

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

    @property
    def tail(self) -> str:
        """The last lines of what it said."""
        return "\n".join(self.output.splitlines()[-15:])


@dataclass
class Bench:
    """Runs tests on copies of the tree, with a mutant and without; several threads may ask.

    Attributes:
        folders: Copies that are not in use.
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
            raise MutantsError(f"{mutant.name}: with it pytest ended with {run.code}:\n{run.tail}")
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
            raise MutantsError(f"{mutant.name}: its tests {how} without it:\n{run.tail}")
        return run

    def _pytest(self, folder: Path, tests: Sequence[str], timeout_s: float) -> Run:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryDirectory(prefix="pipeal-mutant-", ignore_cleanup_errors=True) as own:
            environment = {
                **os.environ,
                "PYTHONPATH": str(folder),
                "PYTHONDONTWRITEBYTECODE": "1",  # of a file that changes twice in a second an old one might be taken
                "HYPOTHESIS_PROFILE": "unshrunk",  # the same cases every time, the first that fails is enough
                "OMP_NUM_THREADS": "1",
                "TMPDIR": own,  # what killed tests leave goes with it
            }
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
                _copy_tree(ROOT, folder)
            folders.put(folder)
        one = Bench(folders)
        try:
            yield one
        finally:
            one.end()


def _copy_tree(root: Path, folder: Path) -> None:
    """Copies what tests need, and compiles it, such that a file that changes is compiled again."""
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
        [sys.executable, "-c", "import pipeal.core.errors; print(pipeal.core.errors.__file__)"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(imported).resolve().is_relative_to(folder.resolve()):
        raise MutantsError(f"Python imports {imported}, and not the copy in {folder}: nothing would be tested")


def _kill(process: subprocess.Popen[str]) -> None:
    """A session of tests, and what it started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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


def chosen(mutants: Sequence[Mutant], only: Iterable[str], count: int | None, seed: int) -> list[Mutant]:
    """Those that are named, or so many drawn.

    Raises:
        MutantsError: There is no mutant of a name, or fewer than so many.
    """
    names = list(dict.fromkeys(only))
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
    parser.add_argument(
        "--jobs", type=int, default=_cores(), metavar="J", help="so many at once (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    try:
        if options.jobs < 1:
            raise MutantsError(f"--jobs {options.jobs}; expected at least 1")
        mutants = chosen(read_mutants(ROOT), options.only, options.random, seed)
        if options.random is not None:
            print(f"{len(mutants)} mutants, drawn with --seed {seed}", flush=True)
        for mutant in mutants:
            change_of(mutant, ROOT)
            if missing := missing_tests(mutant, ROOT):
                raise MutantsError(f"{mutant.name}: there is no test {missing[0]}")
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name}\n    without it: {mutant.breaks}\n    {' '.join(mutant.tests)}")
            print(f"{len(mutants)} mutants")
            return 0
        return _report(mutants, options.jobs)
    except MutantsError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2


def _report(mutants: Sequence[Mutant], jobs: int) -> int:
    begin, survived = perf_counter(), []
    width = max(len(mutant.name) for mutant in mutants)
    for number, verdict in enumerate(judge_all(mutants, jobs), 1):
        name, said = verdict.mutant.name, "killed  " if verdict.killed else "SURVIVED"
        line = f"{number:>4}/{len(mutants)}  {name:<{width}}  {said}  {verdict.seconds:5.1f} s  {verdict.how}"
        print(line.rstrip(), flush=True)
        if not verdict.killed:
            survived.append(verdict.mutant)
    for mutant in survived:
        print(f"\n{mutant.name} survived {' '.join(mutant.tests)}: no longer true is\n  {mutant.breaks}")
        print(change_of(mutant, ROOT).diff)
    print(f"{len(mutants) - len(survived)} of {len(mutants)} killed in {(perf_counter() - begin) / 60:.1f} minutes")
    return 1 if survived else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every ``finally``: nothing is left behind
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
