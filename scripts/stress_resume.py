"""Kills training runs at random moments until they finish, and compares what they leave with untouched runs.

    python scripts/stress_resume.py [--kills 20] [--cases lstm-plan transformer-stream resnet-2-workers …]

Each case is one command. It runs once without disturbance; then, in another folder, the same command is started again
and again and its process (with the processes it started) killed with SIGKILL, a quarter of the times at any moment of
its beginning, else soon after it has saved, until it has been killed as often as asked, or has come to its end, and is
left alone. Weights, buffers, optimizer states, and all that epochs.csv says (its times aside, which are those of a
clock) must be equal, bit for bit. Counted are kills of the run that is compared; those after it had its folder are told
as often as it was taken up again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from left_behind import kill, left_behind, same, start, written
from rich.progress import track

from pipeal.reporting.page.rows import read_rows
from pipeal.reporting.tables import print_table
from pipeal.run.run_folder import last_told

TEXT = (
    "--epochs=3",
    "--devices=cpu*2",
    "--set=model.x_hid=32",
    "--set=model.y_hid=16",
    "--set=data.batching.budget_tokens=2048",
    "--set=train.checkpoint.every=5",
    "--set=train.train_accuracy_samples=200",
)
IMAGES = (
    "--epochs=3",
    "--devices=cpu*2",
    "--set=model.width=0.125",
    "--set=train.checkpoint.every=3",
    "--set=train.train_accuracy_samples=100",
)
QUICK = ("--epochs=1", "--set=model.embedding_dim=12", "--set=model.n_heads=2", "--set=model.x_hid=8")
CASES: dict[str, list[str]] = (
    {
        f"{model}-{kind}": ["nlpmain.py", "toynews", model, f"--set=data.batching.kind={kind}", *TEXT]
        for model in ("lstm", "transformer")
        for kind in ("plan", "stream")
    }
    | {
        f"resnet-{workers}-workers": ["cvmain.py", "toyimages", "resnet", f"--set=data.workers={workers}", *IMAGES]
        for workers in (0, 2)
    }
    | {"transformer-compare": ["nlpmain.py", "toynews", "transformer", "--mode=compare", *TEXT]}
)

ATTEMPTS = 10
"""So often a run may be over before it is killed, as where this process wakes up late; then another is begun."""


def finish(arguments: list[str], out: Path) -> float:
    """Lets a run come to its end; its seconds."""
    begin = perf_counter()
    process = start(arguments, out)
    try:
        code = process.wait()
    except BaseException:
        kill(process)
        raise
    if code:
        raise SystemExit(f"{' '.join(arguments)} ended with {code}:\n{(out / 'log.txt').read_text()[-3000:]}")
    return perf_counter() - begin


def disturb(
    name: str, arguments: list[str], out: Path, kills: int, seconds: float, trained: float, draw: random.Random
) -> int:
    """Kills a run so often, unless it comes to its end before, and then lets it; how often it was killed.

    Untouched, it takes ``seconds``, ``trained`` of them to train.
    """
    for done in track(range(kills), description=name, transient=True):
        before = written(out)
        process = start(arguments, out)
        if draw.random() < 0.25:  # while it reads and chooses, or begins
            moment = perf_counter() + draw.uniform(0.0, 0.5) * seconds
        else:  # while it trains: so soon after a checkpoint that many kills fall into one run
            while process.poll() is None and not written(out) - before:
                sleep(0.01)
            moment = perf_counter() + draw.uniform(0.0, 0.5) * trained / kills
        while process.poll() is None and perf_counter() < moment:
            sleep(0.005)
        ended = process.poll()
        kill(process)
        if ended:
            raise SystemExit(f"{name} ended by itself, with {ended}:\n{(out / 'log.txt').read_text()[-3000:]}")
        if ended == 0 or _status_in(out).get("status") == "finished":  # or was killed as it left
            return done + (ended is None)
    finish(arguments, out)
    return kills


def _left_in(out: Path) -> tuple[dict[tuple[int, int], Any], list[dict[str, str]]]:
    """The layers and the rows of a run; of all its forms, if it compares some."""
    runs = [path for path in out.iterdir() if path.is_dir() and not path.name.startswith(".")]
    if len(runs) != 1:
        raise SystemExit(f"the same command began anew: {', '.join(sorted(path.name for path in runs))}")
    forms = sorted(path.parent for path in runs[0].glob("*/checkpoints")) or runs
    found = [left_behind(form) for form in forms]
    layers = {(place, number): layer for place, (own, _) in enumerate(found) for number, layer in own.items()}
    return layers, [row for _, rows in found for row in rows]


def _status_in(out: Path) -> dict[str, Any]:
    """How the run stands; nothing before it has a folder."""
    return next((last_told(path.parent) for path in out.glob("[!.]*/status.json")), {})


def _trained(out: Path) -> float:
    return sum(read_rows(path)[0][-1].train_time for path in out.glob("**/epochs.csv"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--quick", action="store_true", help="one epoch, a narrower model")
    options = parser.parse_args()
    table, wrong = [], []
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="pipeal-stress-") as folder:
            untouched = Path(folder) / "untouched"
            untouched.mkdir()
            command = [*CASES[name], *(QUICK if options.quick else ())]
            seconds = finish(command, untouched)
            draw = random.Random(f"{options.seed} {name}")
            for attempt in range(ATTEMPTS):
                disturbed = Path(folder) / f"disturbed-{attempt}"
                disturbed.mkdir()
                kills = disturb(name, command, disturbed, options.kills, seconds, _trained(untouched), draw)
                if resumes := _status_in(disturbed)["resumes"]:
                    break
            (layers, rows), (layers_again, rows_again) = map(_left_in, (untouched, disturbed))
            equal = same(layers, layers_again), rows == rows_again
            table.append([name, f"{seconds:.1f}", kills, resumes, *("equal" if e else "DIFFERENT" for e in equal)])
            wrong += [] if all(equal) else [f"{name}: not the same"]
            wrong += [] if resumes else [f"{name}: never killed once it had its folder"]
    columns = ["case", "s untouched", "kills", "taken up again", "weights, optimizers", "csv"]
    print_table("runs killed at random moments", columns, table)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
