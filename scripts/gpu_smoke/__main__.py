"""The first ten minutes with a GPU as one command.

    scripts/gpu_smoke.sh                                          # on a machine that has all that pipeal needs
    scripts/gpu_smoke.sh --fetch-wheels DIR --python 3.12 --torch 2.11    # where there is a network
    scripts/gpu_smoke.sh --wheels DIR                             # where there is none: torch, numpy and these
    scripts/gpu_smoke.sh --only predictions --predictions 1,2,7

One step after the other, each in processes of its own and with a limit of its own; what fails, hangs or crashes keeps
no later step from running. After each step what was found so far is written: gpu-smoke.json, gpu-smoke.md, and log.txt
with what the steps printed. Without a GPU the same runs on the CPU in its stead, at toy size, and tests no prediction.

Exit codes: 0, all steps ran and no test failed; 1, something failed or found no time; 2, a mistake in the call, or
something is missing here; 130, 143: Ctrl-C, SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from gpu_smoke import benches, suite, wheels
from gpu_smoke.commands import ROOT, Command, Ended, read_json, run
from gpu_smoke.page import page
from gpu_smoke.predictions import MEASUREMENTS, PREDICTIONS, Finding, Prediction

SECTIONS = ("predictions", "tests", "benchmarks")
TIME_LIMIT_S = 560.0
_SHARES = {"predictions": 0.5, "tests": 0.78, "benchmarks": 1.0}
"""Until which share of the time a section may run; what one leaves over, the next has as well."""
_NO_GPU = "there was no GPU"
_FACTS_S = 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for, and returns the exit code."""
    options = _options(arguments)
    if options.fetch_wheels is not None:
        return _fetch(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with closing(Smoke(options)) as smoke:
            try:
                smoke.run()
            except _Interrupted as interrupted:
                smoke.end(f"interrupted ({interrupted.name})")
                raise
            return 1 if smoke.failed else 0
    except _Interrupted as interrupted:
        return 128 + interrupted.number


class Smoke:
    """One run.

    Attributes:
        kept: What was found so far, as the JSON has it.
        failed: Whether a step failed, or a test, or found no time.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failed = False
        self._begin = monotonic()
        self._until = self._begin + options.time_limit
        self._log = self._open_log()
        self._aside = tempfile.TemporaryDirectory(prefix="gpu-smoke-")
        self._work = Path(self._aside.name)
        self._environment = self._environment_of_steps()
        self.kept: dict[str, Any] = {
            "format": "pipeal-gpu-smoke-1",
            "stand_in": False,
            "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "seconds": 0.0,
            "time_limit_s": options.time_limit,
            "ended": "",
            "facts": {},
            "predictions": [],
            "measurements": [],
            "tests": [],
            "benchmarks": [],
        }

    def run(self) -> None:
        """All sections, unless CUDA does not even say how many GPUs there are."""
        gpus = self._gpus()
        if gpus is None:
            return
        self.kept["stand_in"] = self.options.stand_in or not gpus
        if self.kept["stand_in"]:
            # Threads that wait for each other in loops would take most of the time where a machine is busy.
            self._environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
            self._say("there is no GPU here, or it is not to be used: the CPU stands in, and no prediction is tested")
        self._facts()
        for section in self.options.only:
            until = self._begin + _SHARES[section] * self.options.time_limit
            getattr(self, f"_{section}")(min(until, self._until))
        self.end("all steps came to their end" if not self.failed else "not all of it went well")

    def end(self, how: str) -> None:
        """Writes how it ended."""
        self.kept["ended"] = how
        self._write()
        self._say(f"{how}: {self.options.out / 'gpu-smoke.md'}")

    def close(self) -> None:
        """Removes what only the steps needed."""
        self._log.close()
        self._aside.cleanup()

    def _environment_of_steps(self) -> dict[str, str]:
        """What all steps have: where code is, and no folder of the user's to write to."""
        paths = [ROOT / "scripts", ROOT / "scripts" / "bench", ROOT]
        if self.options.wheels is not None:
            site = self._work / "site"
            try:
                unpacked = wheels.unpack(self.options.wheels, site)
            except (ValueError, OSError) as error:
                _leave(str(error))
            self._say(f"from wheels: {' '.join(unpacked) or 'nothing, all is installed'}")
            paths.append(site)
        inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        found = dict.fromkeys([*map(str, paths), *inherited])
        cache = self._work / "cache"
        cache.mkdir()
        return {"PYTHONPATH": os.pathsep.join(found), "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}

    def _open_log(self) -> Any:
        try:
            self.options.out.mkdir(parents=True, exist_ok=True)
            return (self.options.out / "log.txt").open("w", encoding="utf-8")
        except OSError as error:
            _leave(f"cannot write to {self.options.out}: {error.strerror}; choose another --out")

    def _gpus(self) -> int | None:
        """How many there are; None, which is written, where CUDA gave no answer in time.

        Leaves where torch or what pipeal needs cannot be imported.
        """
        answer = self._work / "gpus.json"
        (ended,) = self._steps(
            [self._probe("what is here", "gpu_smoke.probes.facts:gpus", answer, _FACTS_S)], self._until
        )
        if ended.code is None:
            self.failed = True
            self.end(f"CUDA did not answer in {ended.seconds:.0f} s" if ended.seconds else ended.how)
            return None
        found, why = read_json(answer)
        if why:
            missing = re.findall(r"No module named '([\w.]+)'", ended.output)
            what = f"{missing[-1]} is not installed" if missing else ended.last_line
            if missing and missing[-1] not in ("torch", "numpy"):
                what += "; --wheels DIR brings it"
            _leave(f"{sys.executable} cannot import pipeal: {what} ({ended.how or why})")
        return int(found)

    def _facts(self) -> None:
        answer = self._work / "facts.json"
        (ended,) = self._steps([self._probe("versions", "gpu_smoke.probes.facts:facts", answer, _FACTS_S)], self._until)
        found, why = read_json(answer)
        self.kept["facts"] = {**(found or {}), "commit": _commit()}
        if ended.code != 0 or why:
            self.failed = True
            self._say(f"versions: {ended.how or why}: {ended.last_line}")
        self._write()

    def _predictions(self, until: float) -> None:
        wanted = self.options.predictions
        chosen = [one for one in PREDICTIONS if wanted is None or one.number in wanted]
        self._findings("predictions", chosen, until)
        if wanted is None:
            self._findings("measurements", MEASUREMENTS, until)

    def _findings(self, kind: str, predictions: Sequence[Prediction], until: float) -> None:
        answers = [self._work / f"{kind}-{place}.json" for place in range(len(predictions))]
        steps = [
            self._probe(_name(one), one.probe, answer, one.limit_s)
            for one, answer in zip(predictions, answers, strict=True)
        ]
        # What stands in measures nothing: two at once disturb no one.
        with closing(self._steps(steps, until, jobs=2 if self.kept["stand_in"] else 1)) as under_way:
            for ended in under_way:
                place = steps.index(ended.command)
                one = predictions[place]
                row = finding_of(one, answers[place], ended, stand_in=self.kept["stand_in"])
                self.failed |= bool(row["failed"])
                self.kept[kind] = sorted([*self.kept[kind], row], key=lambda row: row["number"])
                self._write()
                verdict = {True: "true", False: "false", None: "not tested"}[row["verdict"]]
                told = row["failed"] or row["not_tested"] or row["figure"]
                self._say(f"{_name(one)}: {verdict}: {told} ({ended.seconds:.1f} s)")

    def _tests(self, until: float) -> None:
        stand_in = self.kept["stand_in"]
        folder = self._work / "tests"
        folder.mkdir()
        files = suite.commands(ROOT, folder, stand_in=stand_in, files=self.options.files)
        by_name = {file.name: file for file in files}
        jobs = 1 if stand_in else self.options.jobs
        with closing(self._steps([self._limited(file.command) for file in files], until, jobs)) as steps:
            for ended in steps:
                row = suite.found(by_name[ended.command.name], ended)
                self.failed |= bool(row["failed"] or row["ended"])
                self.kept["tests"].append(row)
                self._write()
                told = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
                self._say(f"{row['file']}: {told} {row['ended']} ({ended.seconds:.1f} s)")

    def _benchmarks(self, until: float) -> None:
        data, stand_in = self.options.data_root, self.kept["stand_in"]
        self.kept["facts"]["data"] = str(data)
        if data is None or not benches.has_data(data):
            data = self._work / "data"
            texts, images = (1_000, 100) if stand_in else (12_000, 4_000)
            benches.make_data(data, texts=texts, images=images)
            self.kept["facts"]["data"] = "made up: random words and pixels, for rates alone"
        found = benches.benchmarks(ROOT, self._work, data, stand_in=stand_in)
        with closing(self._steps([self._limited(one.command) for one in found], until)) as steps:
            for one, ended in zip(found, steps, strict=True):  # one at a time, and so in order
                row = benches.found(one, ended)
                self.failed |= bool(row["ended"])
                self.kept["benchmarks"].append(row)
                self._write()
                self._say(f"{row['name']}: {row['ended'] or 'ran'} ({ended.seconds:.1f} s)")

    def _probe(self, name: str, probe: str, answer: Path, limit_s: float) -> Command:
        command = [sys.executable, "-m", "gpu_smoke.probe", probe, str(answer)]
        return self._limited(Command(name, [*command, "--stand-in"] if self.kept["stand_in"] else command, limit_s))

    def _limited(self, command: Command) -> Command:
        limit_s = min(command.limit_s, self.options.step_limit or command.limit_s)
        return Command(command.name, command.arguments, limit_s, {**self._environment, **command.environment})

    def _steps(self, commands: Sequence[Command], until: float, jobs: int = 1) -> Generator[Ended, None, None]:
        with closing(run(commands, until, jobs)) as steps:
            for ended in steps:
                self._log.write(f"=== {ended.command.name}: {ended.how or 'ended well'} ({ended.seconds:.1f} s)\n")
                self._log.write(ended.output + "\n")
                self._log.flush()
                yield ended

    def _write(self) -> None:
        self.kept["seconds"] = round(monotonic() - self._begin, 1)
        texts = {"gpu-smoke.json": json.dumps(self.kept, indent=1) + "\n", "gpu-smoke.md": page(self.kept)}
        for name, text in texts.items():
            whole = self.options.out / f".{name}.tmp"
            whole.write_text(text, encoding="utf-8")
            whole.replace(self.options.out / name)

    def _say(self, what: str) -> None:
        print(f"{monotonic() - self._begin:6.1f} s  {what}", flush=True)


def finding_of(prediction: Prediction, answer: Path, ended: Ended, *, stand_in: bool) -> dict[str, Any]:
    """What came of a probe, for the JSON. Without a GPU, or where it failed, nothing is true or false."""
    found = Finding(None, "", "")
    if ended.code == 0:
        told, failed = read_json(answer)
        if not failed:
            found = Finding(**told)
    else:
        failed = f"{ended.how}: {ended.last_line}" if ended.code is not None else ended.how
    row = {"number": prediction.number, "text": prediction.text, **asdict(found)}
    row |= {"seconds": round(ended.seconds, 1), "failed": failed}
    why = _NO_GPU if stand_in else f"its probe failed: {failed}" if failed else ""
    if why or found.not_tested:
        row |= {"verdict": None, "not_tested": why or found.not_tested}
    if why:
        row |= {"affected": None}
    return row


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = {signal.SIGINT: "Ctrl-C"}.get(signal.Signals(number), signal.Signals(number).name)


def _interrupt(number: int, _: Any) -> NoReturn:
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # the steps end, and what was found is written
    raise _Interrupted(number)


def _name(prediction: Prediction) -> str:
    return f"prediction {prediction.number}" if prediction.number else prediction.text


def _commit() -> str | None:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or no repository: the code travels without one
        return None
    return found.stdout.strip() or None


def _fetch(options: argparse.Namespace) -> int:
    versions = {"python": options.python, "torch": options.torch, "machine": options.machine}
    try:
        code = wheels.fetch(options.fetch_wheels, ROOT / "pyproject.toml", **versions)
    except (ValueError, OSError) as error:
        _leave(str(error))
    except ModuleNotFoundError:
        _leave("--fetch-wheels needs Python 3.11 or newer, which reads pyproject.toml; set PYTHON")
    if code:
        _leave(f"pip ended with exit code {code}")
    found = list(options.fetch_wheels.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in found) / 2**20
    print(f"{len(found)} wheels, {size:.1f} MiB in {options.fetch_wheels}")
    return 0


def _leave(message: str) -> NoReturn:
    print(f"gpu_smoke: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_smoke.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = os.environ.get("OUT") or ROOT / "runs" / "gpu-smoke"
    data = os.environ.get("PIPEAL_DATA")
    jobs = min(4, max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="for what is found; default: $OUT, else runs/gpu-smoke"
    )
    parser.add_argument("--time-limit", type=_seconds, default=TIME_LIMIT_S, help="seconds for all of it (%(default)g)")
    parser.add_argument("--step-limit", type=_seconds, help="seconds that no step exceeds; default: of each its own")
    parser.add_argument("--stand-in", action="store_true", help="use the CPU, even if there is a GPU")
    parser.add_argument("--only", type=_some(SECTIONS), default=SECTIONS, help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--predictions", type=_numbers, help="numbers, such as 1,2,7: only these, and no measurements")
    parser.add_argument("--files", nargs="+", help="files of tests, by their names in the repository; default: all "
                        "that have tests marked cuda")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=jobs, help="files of tests at once (%(default)s)")
    parser.add_argument("--data-root", type=Path, default=None if data is None else Path(data),
                        help="AG News and CIFAR-10 for the ladder; default: $PIPEAL_DATA, else made up")  # fmt: skip
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that are not installed here")
    parser.add_argument("--fetch-wheels", type=Path, metavar="DIR", help="gather them, and do nothing else")
    parser.add_argument("--python", default="3.12", help="for which Python to gather (%(default)s)")
    parser.add_argument("--torch", default="2.11", help="for which torch (%(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="for which processor (%(default)s)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"found --jobs {options.jobs}; expected at least 1")
    for name in ("out", "wheels", "data_root"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, path.absolute())
    return options


def _seconds(text: str) -> float:
    if not (seconds := float(text)) > 0:
        raise ValueError
    return seconds


def _numbers(text: str) -> list[int]:
    known = [one.number for one in PREDICTIONS]
    found = [int(part) for part in text.split(",")]
    if strange := [number for number in found if number not in known]:
        raise argparse.ArgumentTypeError(f"found {strange[0]}; expected of {known[0]} to {known[-1]}")
    return found


def _some(known: Sequence[str]) -> Any:
    def chosen(text: str) -> list[str]:
        found = text.split(",")
        if strange := [one for one in found if one not in known]:
            raise argparse.ArgumentTypeError(f"found {strange[0]!r}; expected of {', '.join(known)}")
        return [one for one in known if one in found]

    return chosen


if __name__ == "__main__":
    sys.exit(main())
