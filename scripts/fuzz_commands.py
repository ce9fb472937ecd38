"""Throws random command lines, configurations, data and damaged runs at the commands: each must run or be told off.

    python scripts/fuzz_commands.py [--count 2000] [--seed 0] [--limit 120] [--only N] [--spoilt SHARE]

What a case is, `fuzz_cases.py` says. Cases run one after the other in a process that has little memory and may not
stand still; what ends that process is a failure, and another one goes on with the next case. A case may end with

    0   a finished run, or what was asked to be shown
    2   one line on standard error, nothing on standard output, and no new run
    1   one line where nobody made a mistake: no memory, no room on the disk, a stall, a loss that is not finite

and leaves no thread, no process, and nothing half-written.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NoReturn

import torchvision  # noqa: F401  with torch, over 3 GiB of addresses, which a worker has before its memory is limited
from fuzz_cases import RUNS, Maker, write_images, write_news

from pipeal.cli import entry, text, vision
from pipeal.cli import main as group

COMMANDS = {"nlpmain.py": text.command, "cvmain.py": vision.command, "pipeal": group.command}
MEMORY = 3 * 2**30
"""Bytes of addresses that a worker may have beside those of its libraries."""

CASES_PER_WORKER = 100
GRACE_S = 60.0
"""How long threads and processes that were told to end may take, on a busy machine too."""

LONGEST_LINE = 2_500
NOBODYS_MISTAKE = (
    "memory",
    "a worker process",
    "stands still",
    "not finite",
    "this machine has no more",
    "not every checkpoint",
    "could not write",
    "make room",
    "out of the way",
)


class Observed:
    """What a case did.

    Attributes:
        code: The exit code.
        out: Standard output.
        err: Standard error.
        wrong: What it should not have done.
    """

    def __init__(self) -> None:
        self.code = -1
        self.out = self.err = ""
        self.wrong: list[str] = []

    def outcome(self) -> str:
        """In few words, to be counted."""
        if self.wrong:
            return "FAILURE"
        if self.code == 1:
            return f"1: {next(words for words in NOBODYS_MISTAKE if words in self.err)}"
        return "0" if self.code == 0 else "2"


def observe(command: str, arguments: list[str], folder: Path, limit_s: float) -> Observed:
    """Runs a command in a folder, in this process; what stands still for too long ends the process with its stacks."""
    seen, before, runs = Observed(), set(threading.enumerate()), set(folder.rglob("run.lock"))
    log = folder.with_suffix(".out"), folder.with_suffix(".err")
    os.chdir(folder)
    with _streams_to(*log):
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            entry.run(COMMANDS[command], list(arguments))
        except SystemExit as end:
            seen.code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  that is what is looked for
            seen.wrong.append(f"a traceback:\n{traceback.format_exc()}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    os.chdir("/")
    seen.out, seen.err = (path.read_text(encoding="utf-8", errors="surrogateescape") for path in log)
    if not seen.wrong:
        seen.wrong += _told(seen)
        training = bool({"files:", "going on"} & set(seen.out.split()))
        seen.wrong += _left(folder, runs, seen.code, named=arguments, training=training)
    seen.wrong += _alive(lambda: set(threading.enumerate()) - before, _children)
    return seen


def _told(seen: Observed) -> Iterator[str]:
    """What is wrong with what was said."""
    said = seen.err.removesuffix("\n").split("\n")
    told = [line for line in said if line.startswith("pipeal: ")]
    if "Traceback (most" in seen.err + seen.out:
        yield "a traceback is shown"
    if seen.code not in (0, 1, 2):
        yield f"exit code {seen.code}"
    if seen.code == 0:
        if told:
            yield "a complaint, but exit code 0"
        return
    if len(told) != 1:
        yield f"{len(told)} lines of complaint"
    elif seen.code == 1 and not any(words in seen.err for words in NOBODYS_MISTAKE):
        yield "exit code 1 for a mistake"
    elif seen.code == 2 and (not said[-1].startswith("pipeal: ") or len(told[0].splitlines()) > 1):
        yield "something follows the one line"
    elif seen.code == 2 and not told[0].isprintable():
        yield "the line cannot be printed"
    elif seen.code == 2 and len(told[0]) > LONGEST_LINE:
        yield f"a line of {len(told[0])} characters"
    if seen.code == 2 and seen.out:
        yield "a mistake, but something on standard output"


def _left(folder: Path, runs: set[Path], code: int, *, named: Sequence[str], training: bool) -> Iterator[str]:
    """What is wrong with what lies in the folder; what the arguments name is not left over, also with a dot."""
    own = {part for argument in named for part in Path(argument.partition("=")[2] or argument).parts} | {".lock"}
    hidden = [path.relative_to(folder) for path in folder.rglob(".*") if path.name not in own]
    if hidden:
        yield f"half-written files: {', '.join(map(str, hidden[:3]))}"
    for lock in set(folder.rglob("run.lock")) - runs:
        try:
            status = json.loads((lock.parent / "status.json").read_text())
        except (OSError, ValueError) as error:
            yield f"a run without a status, {lock.parent.name}: {error}"
            continue
        if code == 0 and training and status["status"] != "finished":
            yield f"a run that is {status['status']}"
        if code == 2:
            yield f"a mistake told when the run was under way ({status['status']}: {status['message']})"


def _alive(*kinds: Callable[[], set[Any]]) -> Iterator[str]:
    """Threads and processes that do not end."""
    until = monotonic() + GRACE_S
    while any(kind() for kind in kinds) and monotonic() < until:
        sleep(0.02)
    yield from (f"left alive: {found}" for kind in kinds for found in kind())


def _children() -> set[str]:
    """Processes that this one started, each with its command line."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            found.update(path.read_text().split())
    lines = {}
    for pid in found - {str(tracker)}:
        with contextlib.suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return {f"process {pid}: {line}" for pid, line in lines.items()}


@contextlib.contextmanager
def _streams_to(out: Path, err: Path) -> Iterator[None]:
    """Both standard streams into files, those of libraries and other processes too."""
    with contextlib.ExitStack() as open_now:
        for number, path, errors in ((1, out, "strict"), (2, err, "backslashreplace")):  # as Python opens them
            stream = open_now.enter_context(path.open("w", encoding="utf-8", errors=errors, buffering=1))
            kept = os.dup(number)
            open_now.callback(os.close, kept)
            open_now.callback(os.dup2, kept, number)
            os.dup2(stream.fileno(), number)
            redirect = contextlib.redirect_stdout if number == 1 else contextlib.redirect_stderr
            open_now.enter_context(redirect(stream))
        yield


def work(options: argparse.Namespace) -> None:
    """Observes cases, and writes a line about each to what was standard output; without any, makes the templates."""
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        if not options.cases:
            prepare(options.home / "templates", options.limit)
        base = _addresses()
        resource.setrlimit(resource.RLIMIT_AS, (base + MEMORY, base + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in options.cases:
            folder = options.home / f"case-{number}"
            command, arguments = make(options, number, folder, options.home / "templates")
            begin = perf_counter()
            seen = observe(command, arguments, folder, options.limit)
            found = {"number": number, "outcome": seen.outcome(), "wrong": seen.wrong, "err": seen.err[-3_000:]}
            results.write(json.dumps({**found, "seconds": perf_counter() - begin}) + "\n")
            results.flush()
            if _addresses() > base + MEMORY / 3:
                return  # a new process has all of its memory


def make(options: argparse.Namespace, number: int, folder: Path, templates: Path) -> tuple[str, list[str]]:
    """Makes the folder of a case; the command and its arguments."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Maker(random.Random(f"{options.seed} {number}"), folder, templates, options.spoilt).case()


def prepare(templates: Path, limit_s: float) -> None:
    """Makes the runs that are damaged later."""
    for command, arguments in RUNS.items():
        folder = templates / command
        folder.mkdir(parents=True)
        (write_news if command == "nlpmain.py" else write_images)(folder / "data")
        seen = observe(command, arguments, folder, limit_s)
        if seen.code != 0 or seen.wrong:
            raise SystemExit(f"{command} {shlex.join(arguments)}: {seen.wrong}\n{seen.err}")


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def results(options: argparse.Namespace, numbers: list[int], home: Path) -> Iterator[dict[str, Any]]:
    """What became of each case, in order."""
    left = list(numbers)
    while left:
        with _worker(options, home, "--cases", *map(str, left[:CASES_PER_WORKER])) as worker:
            assert worker.stdout is not None
            wanted = left[:CASES_PER_WORKER]
            while wanted:
                ready, _, _ = select.select([worker.stdout], [], [], options.limit + 60)
                line = worker.stdout.readline() if ready else b""
                if not line:
                    break
                yield json.loads(line)
                wanted.pop(0)
                left.pop(0)
            else:
                continue
            if ready and worker.wait() == 0:
                continue  # it had grown
            worker.kill()
            err = (home / f"case-{left[0]}.err").read_text(errors="replace") if ready else "no answer"
            wrong = [f"the process ended with {worker.wait()}:\n{err[-6_000:]}"]
            yield {"number": left.pop(0), "outcome": "FAILURE", "wrong": wrong, "err": err, "seconds": options.limit}


@contextlib.contextmanager
def _worker(options: argparse.Namespace, home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # nothing is fetched
    folders = {
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(home / "tmp"),
        "PYTHONIOENCODING": "utf-8",
        "OMP_WAIT_POLICY": "passive",
    }
    line = [
        sys.executable,
        __file__,
        f"--seed={options.seed}",
        f"--limit={options.limit}",
        f"--home={home}",
        *([] if options.spoilt is None else [f"--spoilt={options.spoilt}"]),
        *arguments,
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, **nowhere, **folders}) as worker:
        try:
            yield worker
        except BaseException:
            worker.kill()
            raise


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2_000, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--only", type=int, metavar="N", help="just this case")
    parser.add_argument("--spoilt", type=float, help="share of values that are wrong; drawn for each case by default")
    parser.add_argument("--home", type=Path, help="keep everything in this folder")
    parser.add_argument("--cases", type=int, nargs="*", help=argparse.SUPPRESS)  # what a worker is to do
    options = parser.parse_args()
    if options.cases is not None:
        work(options)
        sys.exit(0)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with contextlib.ExitStack() as open_now:
        home = options.home or Path(open_now.enter_context(tempfile.TemporaryDirectory(prefix="pipeal-fuzz-")))
        home = home.absolute()
        if home.exists() and not (home.is_dir() and not any(home.iterdir())):
            parser.error(f"--home: {home} is there, and no empty folder; name a new one")
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        sys.exit(drive(options, home))


def drive(options: argparse.Namespace, home: Path) -> int:
    """All cases, told about as they go; 1 if one of them failed."""
    with _worker(options, home, "--cases") as worker:
        if worker.wait():
            return 1
    numbers = list(range(options.count)) if options.only is None else [options.only]
    outcomes: Counter[str] = Counter()
    begin = perf_counter()
    for done, found in enumerate(results(options, numbers, home), 1):
        outcomes[found["outcome"]] += 1
        folder = home / f"case-{found['number']}"
        if found["wrong"]:
            command, arguments = make(options, found["number"], home / "again", home / "templates")
            print(f"\ncase {found['number']}: {command} {' '.join(map(_quoted, arguments))}")
            spoilt = "" if options.spoilt is None else f" --spoilt {options.spoilt}"
            print(f"again: {Path(__file__).name} --seed {options.seed}{spoilt} --only {found['number']} --home FOLDER")
            print("\n".join([*found["wrong"], "standard error:", found["err"]]), flush=True)
        elif options.only is not None:
            print(found["err"])
        if options.home is None or options.only is None:
            shutil.rmtree(folder, ignore_errors=True)
        if done % 100 == 0 or done == len(numbers):
            counts = ", ".join(f"{count} × {outcome}" for outcome, count in sorted(outcomes.items()))
            print(f"{done} of {len(numbers)} cases in {perf_counter() - begin:.0f} s: {counts}", flush=True)
    return 1 if outcomes["FAILURE"] else 0


def _quoted(argument: str) -> str:
    quoted = shlex.quote(argument) if argument.isprintable() else ascii(argument)
    return quoted if len(quoted) < 300 else f"{quoted[:100]}… ({len(quoted)} characters)"


if __name__ == "__main__":
    main()
