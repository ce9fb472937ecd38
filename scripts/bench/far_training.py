"""A real line of four stages over long links: batches per second and bytes of the AG News transformer, by format.

    sudo python scripts/bench/far_training.py --data-root DIR [--packets as_is int8] [--batches 50] [--turns 2]
    sudo python scripts/bench/far_training.py --evaluation [--delay 100] [--rate 1000] [--turns 3]

Stages of ``pipeal line`` run in four networks of this machine (:mod:`long_line`; needs Linux and root): in turns over
links without delay or limit, and over links of a delay and a rate. What a link allows is its rate over the payload of a
batch; what the machine allows is the rate without delay or limit. Held against the smaller of the two is what was
reached. Counted are batches of the first epoch, as the last stage tells once a second, and the bytes of the link to it.

``--evaluation`` trains the embedded texts, and measures the seconds from one epoch's row to the next: training of an
epoch with the answers to all training, held-out and test texts. What distance adds to that is held against the bound
of one evaluation with a way back: a fill and a drain of the line, ``2 (S - 1) L``, its compute left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any, get_args

from line_kills import COMMAND, LOOK_S, command
from long_line import Line, LinkKind, NoLineError, Say, long_line

from pipeal.core.artifacts import ROWS_JSON
from pipeal.core.options import PacketFormat
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import print_table

STAGES = 4
PATIENCE_S = 600.0

Found = dict[str, Any]
"""What one run found."""


def be_stage(_: Say, folder: Path, number: int) -> None:
    """Becomes a stage's process, in the network that it was started in."""
    with open(folder / f"log-{number}.txt", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    line = ["line", "run", str(folder / "line.yaml"), "--stage", str(number)]
    os.execv(COMMAND[0], [*COMMAND, *line])


@contextmanager
def open_training(
    line: Line, kind: LinkKind, what: Sequence[str], settings: Sequence[str], epochs: int
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Stages that train over links of a kind: the line's folder, and what looks whether all are well.

    Args:
        line: The networks.
        kind: Of all links.
        what: Data and model, as options of ``pipeal line init``.
        settings: Further ones, ``KEY=VALUE``.
        epochs: To train.
    """
    line.set(kind)
    with tempfile.TemporaryDirectory() as made, ExitStack() as at_the_end:
        folder = Path(made) / "line"
        addresses = [word for rank in range(1, STAGES) for word in ("--stage", f"{line.address(rank)}:7001")]
        all_settings = [word for one in (*settings, "engine.threads=1") for word in ("--set", one)]
        command("line", "init", *what, *addresses, "--epochs", str(epochs), "--out", str(folder), *all_settings)
        started = [line.start(number, be_stage, folder, number) for number in range(STAGES)]
        for one in started:
            at_the_end.callback(one.process.join)
            at_the_end.callback(one.process.kill)

        def look() -> None:
            for number, one in enumerate(started):
                if one.process.exitcode:
                    log = (folder / f"log-{number}.txt").read_text(encoding="utf-8")
                    raise RuntimeError(f"stage {number} ended with {one.process.exitcode}: {log[-1000:]}")

        yield folder, look


def measure(line: Line, kind: LinkKind, packet: str, options: argparse.Namespace) -> Found:
    """Trains for some batches over links of a kind.

    Raises:
        RuntimeError: A stage failed, or did no batches in time.
    """
    what = ["--dataset", options.dataset, "--model", options.model, "--data-root", str(options.data_root.resolve())]
    settings = [f"engine.packet={packet}", f"train.precision={options.precision}"]
    with open_training(line, kind, what, settings, epochs=1000) as (folder, look):

        def batches() -> tuple[int, int]:
            """Those that the last stage has done, and those that have come to it."""
            look()
            with suppress(OSError, ValueError, KeyError):
                status = folder / f"stage-{STAGES - 1}" / "stage.json"
                own = json.loads(status.read_text(encoding="utf-8"))["stages"][str(STAGES - 1)]
                return int(own["batches"]), int(own["batches"]) + int(own["waiting"])
            return 0, 0

        def told(least: int) -> tuple[int, int, float, int]:
            """Once so many are told: how many are done and have come, when, and the bytes that had come."""
            until = monotonic() + PATIENCE_S
            now = before = batches()
            while now[0] < least or now == before:  # just told
                sleep(LOOK_S)
                if (found := batches()) != now:
                    now, until = found, monotonic() + PATIENCE_S
                if monotonic() > until:
                    raise RuntimeError(f"{now[0]} batches, and no other in {PATIENCE_S:.0f} s")
            return *now, monotonic(), line.passed()[STAGES - 2, STAGES - 1].bytes

        first, come, begin, size = told(options.warm_up)
        last, come_then, end, size_then = told(options.warm_up + options.batches)
        if rows_in(folder / "run"):
            raise RuntimeError(
                "an epoch ended meanwhile, whose answers went over the links as well; take fewer --batches"
            )
    return {
        "packet": packet,
        "link": str(kind),
        "far": kind.bits_per_s > 0,
        "batches": last - first,
        "per_s": (last - first) / (end - begin),
        "bytes": (size_then - size) / (come_then - come),
        "load": os.getloadavg()[0],
    }


def rows_in(run: Path) -> int:
    """How many epochs have a row."""
    path = ROWS_JSON.at(run)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def epoch_seconds(line: Line, kind: LinkKind, epochs: int) -> list[float]:
    """Seconds from each row of a training to the next.

    Raises:
        RuntimeError: A stage failed, or no row came in time.
    """
    what, came = ["--dataset", "toynews", "--model", "transformer"], list[float]()
    with open_training(line, kind, what, [], epochs) as (folder, look):
        until = monotonic() + PATIENCE_S
        while len(came) < epochs:
            look()
            if rows_in(folder / "run") > len(came):
                came.append(monotonic())
                until = monotonic() + PATIENCE_S
            if monotonic() > until:
                raise RuntimeError(f"{len(came)} rows, and no other in {PATIENCE_S:.0f} s")
            sleep(LOOK_S)
    return [later - row for row, later in pairwise(came)]


def show_evaluation(line: Line, far: LinkKind, turns: int, epochs: int, path: Path | None) -> None:
    """Measures in turns, near and far, and prints what distance adds to an epoch."""
    near, runs = LinkKind(0.0, far.bits_per_s), list[Found]()
    for _ in range(turns):
        for kind in (near, far):
            load = os.getloadavg()[0]
            runs.append(
                {"far": kind is far, "link": str(kind), "seconds": epoch_seconds(line, kind, epochs), "load": load}
            )
            print(runs[-1], flush=True)
            if path is not None:
                write_json(path, {"machine": environment(), "runs": runs})
    near_s, far_s = ([one for run in runs if run["far"] is way for one in run["seconds"]] for way in (False, True))
    bound = 2 * (STAGES - 1) * far.delay_s
    heads = ["links", "epochs", "median s", "of them, from", "to"]
    rows: list[list[Any]] = [
        [f"{kind}", len(taken), median(taken), min(taken), max(taken)] for kind, taken in ((near, near_s), (far, far_s))
    ]
    print_table(f"toynews transformer, {STAGES} stages, an epoch with its evaluation", heads, rows)
    added = median(far_s) - median(near_s)
    print(f"distance adds {added:+.2f} s to an epoch; a fill and a drain of the line are {bound:.2f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--dataset", default="agnews")
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--packets", nargs="+", default=["as_is", "int8"], choices=get_args(PacketFormat))
    parser.add_argument("--precision", default="fp32", help="in bf16, packets as they are have half the bytes")
    parser.add_argument("--delay", type=float, default=50.0, metavar="MS", help="one way")
    parser.add_argument("--rate", type=float, default=80.0, metavar="MBIT_S")
    parser.add_argument("--batches", type=int, default=50, help="of each run, after its first ones; all in one epoch")
    parser.add_argument("--warm-up", type=int, default=15, metavar="N", help="batches before those that count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--evaluation", action="store_true", help="what distance adds to an epoch, in place of the rest"
    )
    parser.add_argument("--epochs", type=int, default=8, help="of each training with --evaluation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args(arguments)
    far = LinkKind(options.delay / 1e3, 1e6 * options.rate)
    runs: list[Found] = []
    try:
        with long_line(STAGES) as line:
            if options.evaluation:
                show_evaluation(line, far, options.turns, options.epochs, options.json)
                return
            for _ in range(options.turns):
                for packet in options.packets:
                    for kind in (LinkKind(), far):
                        runs.append(measure(line, kind, packet, options))
                        print(runs[-1], flush=True)
                        if options.json is not None:
                            write_json(options.json, {"machine": environment(), "runs": runs})
    except (NoLineError, RuntimeError, subprocess.CalledProcessError) as error:
        parser.exit(1, f"far_training.py: {error}\n")
    print("  ".join(f"{key} {value}" for key, value in environment().items()))
    show(runs, far, f"{options.dataset} {options.model}")


def show(runs: Sequence[Found], far: LinkKind, what: str) -> None:
    """The table: medians of each packet."""
    rows: list[list[Any]] = []
    for packet in dict.fromkeys(run["packet"] for run in runs):
        own = [run for run in runs if run["packet"] == packet]
        near_per_s, far_per_s = (median(run["per_s"] for run in own if run["far"] is way) for way in (False, True))
        size = median(run["bytes"] for run in own if run["far"])
        full = median(run["bytes"] for run in runs if run["far"] and run["packet"] == runs[0]["packet"])
        allowed = far.bits_per_s / 8 / size
        reached = far_per_s / min(near_per_s, allowed)
        rows.append([packet, size / 1e6, f"{size / full:.3f}", near_per_s, allowed, far_per_s, f"{reached:.1%}"])
    heads = ["packet", "MB per batch", f"of {runs[0]['packet']}", "batches/s, no delay or limit", "the link allows"]
    print_table(f"{what}, {STAGES} stages, links of {far}", [*heads, "batches/s", "of the smaller"], rows)


if __name__ == "__main__":
    main()
