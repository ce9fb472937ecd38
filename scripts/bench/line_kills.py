"""A line of stages that are killed again and again, held against the same training in one process.

    python scripts/bench/line_kills.py [--kills 100] [--stages 4] [--seed 0] [--json FILE]

Stages of ``pipeal line`` on one machine train the embedded texts. One of them, or at times two neighbours at once, is
ended by ``kill -9`` and started again, over and over. At the end weights, optimizer states and rows have to equal those
of one process, bit for bit. Printed for the restarts: seconds from a stage's word that it goes on, which follows
the imports, the reading of data and the making of layers, until it does a batch at all, and one that it had not done
before, as its status tells, which is written once a second; the batches that it did again; and the most that any stage
retained. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path
from statistics import median
from time import monotonic, sleep, time
from typing import Any

import torch
import yaml

from pipeal.config import document
from pipeal.core.tree import tensors
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.training.checkpoint.store import CheckpointStore

COMMAND = (sys.executable, "-c", "from pipeal.cli.main import main; main()")
LOOK_S = 0.02


@dataclass
class Stage:
    """A stage's process, started again whenever it was killed.

    Attributes:
        number: Of the stage.
        folder: Of the line.
        before: Batches that it had done when it was killed, as it had told.
        taken_up: Batches behind its snapshot, and when it said so; None until it has.
        started_at: When it was started, in seconds of Unix time.
        is_back: Whether it has done a batch since.
        kills: How often.
        first_s: Of each restart that came to a batch, the seconds.
        back_s: Of each restart that came to a new batch, the seconds.
        again: Of each, the batches done again.
        retained_mib: The most.
    """

    number: int
    folder: Path
    before: int = 0
    taken_up: tuple[int, float] | None = None
    started_at: float = 0.0
    is_back: bool = False
    kills: int = 0
    ended: bool = False
    first_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    retained_mib: float = 0.0

    def start(self) -> None:
        """Starts it."""
        self.log = self.folder / f"log-{self.number}.txt"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "line", "run", str(self.folder / "line.yaml"), "--stage", str(self.number)], stderr=log
            )
        self.taken_up, self.started_at, self.is_back = None, time(), False

    def kill(self) -> None:
        """Ends it without a word, and notes how far it was."""
        self.before = max(self.before, self._batches()[0])
        self.process.kill()
        self.process.wait()
        self.kills += 1

    def end(self) -> None:
        """Ends it, if it runs."""
        self.process.kill()

    def look(self) -> None:
        """Sees how it stands.

        Raises:
            RuntimeError: It has ended with an error.
        """
        code = self.process.poll()
        if code == 0:
            self.ended = True
            return
        if code is not None:
            raise RuntimeError(f"stage {self.number} ended with {code}: {self.log.read_text(encoding='utf-8')[-1000:]}")
        done, told_at = self._batches()
        if not self.kills:
            return
        if self.taken_up is None:
            for line in self.log.read_text(encoding="utf-8").splitlines():
                if "goes on after" in line:
                    self.taken_up = int(line.rsplit(maxsplit=4)[1]), monotonic()
            return
        if not self.is_back and done > self.taken_up[0] and told_at > self.started_at:
            self.first_s.append(monotonic() - self.taken_up[1])
            self.is_back = True
        if done > self.before:
            self.back_s.append(monotonic() - self.taken_up[1])
            self.again.append(self.before - self.taken_up[0])
            self.before, self.taken_up = done, None
            self.log.write_text("", encoding="utf-8")

    def _batches(self) -> tuple[int, float]:
        """How many it has done, as it told, and when it did."""
        with suppress(OSError, ValueError, KeyError):
            path = self.folder / f"stage-{self.number}" / "stage.json"
            own = json.loads(path.read_text(encoding="utf-8"))["stages"][str(self.number)]
            self.retained_mib = max(self.retained_mib, own["retained_mib"])
            return int(own["batches"]), float(own["at"])
        return 0, 0.0


def killed_line(folder: Path, stages: int, kills: int, seed: int, pause_s: tuple[float, float]) -> list[Stage]:
    """Runs the line to its end, and kills until there were so many, with pauses between these bounds."""
    rng = random.Random(seed)
    line = [Stage(number, folder) for number in range(stages)]
    with ExitStack() as at_the_end:
        for stage in line:
            stage.start()
            at_the_end.callback(stage.end)
        due = monotonic() + 5.0
        while not all(stage.ended for stage in line):
            sleep(LOOK_S)
            for stage in line:
                if not stage.ended:
                    stage.look()
            left = [stage for stage in line if not stage.ended]
            if sum(stage.kills for stage in line) < kills and monotonic() > due and len(left) == stages:
                first = rng.randrange(stages)
                chosen = line[first : first + (2 if rng.random() < 0.3 else 1)]
                for stage in chosen:
                    stage.kill()
                for stage in chosen:
                    stage.start()
                due = monotonic() + rng.uniform(*pause_s)
    return line


def differences(one: Path, other: Path) -> Iterator[str]:
    """What differs between two runs' last checkpoints and rows, times aside."""
    left, right = (CheckpointStore(run / "checkpoints").newest(print) for run in (one, other))
    if left is None or right is None:
        yield "a checkpoint is missing"
        return
    ours, theirs = left.layers(), right.layers()
    if [*ours] != [*theirs]:
        yield f"layers {[*ours]} and {[*theirs]}"
        return
    for number in ours:
        pairs = zip(tensors(ours[number]), tensors(theirs[number]), strict=True)
        if not all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs):
            yield f"layer {number}"
    if rows(one) != rows(other):
        yield "rows"


def rows(run: Path) -> list[dict[str, Any]]:
    """An epoch each, without times."""
    lines = (run / "epochs.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "time" not in k and "per_s" not in k} for line in lines]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with ExitStack() as open_now:
        found = [open_now.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def command(*words: str) -> None:
    """Runs pipeal.

    Raises:
        CalledProcessError: It failed.
    """
    subprocess.run([*COMMAND, *words], check=True, capture_output=True)


def measure(
    folder: Path,
    stages: int,
    kills: int,
    epochs: int,
    seed: int,
    snapshot_s: float,
    pause_s: tuple[float, float],
) -> Mapping[str, Any]:
    """The whole of it."""
    begin, load = monotonic(), getloadavg()[0]
    ports = free_ports(stages - 1)
    addresses = [word for port in ports for word in ("--stage", f"127.0.0.1:{port}")]
    line = folder / "line"
    command(
        *("line", "init", "--dataset", "toynews", "--model", "transformer", "--epochs", str(epochs), *addresses),
        *("--set", "engine.threads=1", "--out", str(line)),
    )
    settings = document.parse((line / "line.yaml").read_text(encoding="utf-8"), source="line.yaml")
    (line / "line.yaml").write_text(yaml.safe_dump({**settings, "snapshot_s": snapshot_s}), encoding="utf-8")
    found = killed_line(line, stages, kills, seed, pause_s)
    took_s = monotonic() - begin
    chosen = yaml.safe_load((line / "run" / "config.yaml").read_text(encoding="utf-8"))
    layers = sum(chosen["engine"]["sizes"])
    command(
        *("train-text", "toynews", "transformer", "--config", str(line / "run" / "config.yaml"), "--devices", "cpu"),
        *("--set", f"engine.sizes=[{layers}]", "--out", str(folder / "runs")),
    )
    (alone,) = (folder / "runs").iterdir()
    first_s = [seconds for stage in found for seconds in stage.first_s]
    back_s = [seconds for stage in found for seconds in stage.back_s]
    again = [count for stage in found for count in stage.again]
    return {
        "machine": environment(),
        "load": [load, getloadavg()[0]],
        "stages": stages,
        "epochs": epochs,
        "snapshot_s": snapshot_s,
        "seed": seed,
        "pauses": list(pause_s),
        "kills": [stage.kills for stage in found],
        "seconds": took_s,
        "differences": [*differences(line / "run", alone)],
        "restarts that came to a batch": len(first_s),
        "seconds from its word to a batch, median": median(first_s) if first_s else None,
        "restarts that came to a new batch": len(back_s),
        "seconds from its word to a new batch, median": median(back_s) if back_s else None,
        "the most": max(back_s, default=None),
        "batches done again, median": median(again) if again else None,
        "retained by a stage, most, MiB": max(stage.retained_mib for stage in found),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot-s", type=float, default=60.0, help="how often stages save; default: as usual")
    parser.add_argument(
        "--pause", type=float, nargs=2, default=(0.5, 6.0), metavar="S", help="seconds between kills, from and to"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder),
            options.stages,
            options.kills,
            options.epochs,
            options.seed,
            options.snapshot_s,
            tuple(options.pause),
        )
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json is not None:
        write_json(options.json, found)
    parser.exit(1 if found["differences"] else 0)


if __name__ == "__main__":
    main()
