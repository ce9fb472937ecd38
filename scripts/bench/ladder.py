"""What each technique brings to a training step: from plain PyTorch upwards, one at a time, in AL and in BP form.

    python scripts/bench/ladder.py --model transformer --device cpu --data-root DIR
    python scripts/bench/ladder.py --model charlm --device cuda:0 --data-root DIR

Begins with what anyone would write (plain.py): float32, the operators at hand, Adam as it comes, random batches padded
to their longest text, images as they lie in files, a loop on all cores. In each turn every rung trains a new model of
the turn's seed on real data for equally many batches; its first batches are not timed. Rates are medians of the turns,
losses their means: of one fixed part of the test samples, after those batches. A rung in brackets was tried, and the
next ones do without it. Real tokens count, padding does not. The share of the matrix rate is what real tokens or images
need in operations of matrix products, per second, over the most that this machine was seen to do in one large product
of any type.

The last rungs are the stages that ``--devices auto`` takes (AL), and data parallel under torchrun, one process for each
core or GPU; the latter come after all turns. Figures and a picture are kept in ``results/`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.figure import Figure
from memory_taken import Memory
from rung_data import Task, task_of
from rung_training import Clock, Counted, Measured, rise, timed, train
from rungs import FORMS, MODELS, ONE_THREAD, PLAIN, Form, Rung, Setting, rungs_of

from pipeal.data import Share
from pipeal.engine.device import parse_device
from pipeal.engine.distributed import DistributedPipeline, Launch, open_world, serve
from pipeal.engine.threads import cores
from pipeal.train.environment import environment
from pipeal.train.recorders import write_json
from pipeal.train.tables import Cell, print_table

STEPS = {"charlm": 150, "transformer": 12, "lstm": 6, "resnet": 8}
"""Batches of a turn: as many as let a model's whole ladder end within some six minutes on two cores."""

_COLOURS = {"al": "#0072B2", "bp": "#D55E00"}  # of Okabe and Ito
_ASIDE = "#BBBBBB"


def matrix_rates(device: torch.device) -> dict[str, float]:
    """The most operations per second seen in a product of large matrices, by type."""
    found = {}
    side = 8192 if device.type == "cuda" else 2048
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision("highest")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(side, side, device=device).to(dtype)
        seconds = []
        for _ in range(12):
            clock = Clock(device)
            torch.mm(a, a)
            seconds.append(clock.seconds())
        found[name] = 2 * side**3 / min(seconds)
    return found


def in_turns(task: Task, ladder: Sequence[Rung], turns: int, steps: int) -> dict[Setting, list[Measured]]:
    """All rungs, each turn with another seed; those of many processes after the others."""
    found: dict[Setting, list[Measured]] = {rung.setting: [] for rung in ladder}
    alone = [rung for rung in ladder if rung.setting.processes == 1]
    for turn in range(turns):
        for rung in alone:
            found[rung.setting].append(train(task, rung.setting, turn, steps))
            print(f"  turn {turn + 1}/{turns}: {rung.setting.form} {rung.name}: {found[rung.setting][-1]}", flush=True)
    for rung in ladder:
        if rung.setting.processes > 1:
            found[rung.setting] = in_processes(task, rung.setting, turns, steps)
            for one in found[rung.setting]:
                print(f"  {rung.setting.form} {rung.name}: {one}", flush=True)
    return found


def in_processes(task: Task, setting: Setting, turns: int, steps: int) -> list[Measured]:
    """All turns of a rung, in processes that torchrun starts."""
    with TemporaryDirectory() as folder:
        order, answer = Path(folder, "order.json"), Path(folder, "answer.json")
        what = {"model": task.model, "device": task.device.type, "root": task.experiment.config.data.root}
        write_json(order, {**what, "setting": asdict(setting), "turns": turns, "steps": steps, "answer": str(answer)})
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        subprocess.run([sys.executable, *command, __file__, "--rank", str(order)], check=True)
        return [Measured(**one) for one in json.loads(answer.read_text(encoding="utf-8"))]


def be_rank(order: dict[str, Any]) -> None:
    """One of those processes: rank 0 leads and measures, the others serve it."""
    launch = Launch.found()
    assert launch is not None
    gpu = order["device"] == "cuda"
    device = torch.device("cuda", launch.local_rank) if gpu else torch.device("cpu")
    task, setting = task_of(order["model"], device, order["root"]), Setting(**order["setting"])
    share, steps = Share(launch.rank, launch.size), order["steps"]
    found = []
    with open_world(launch, {}, replicas=launch.size, cuda=gpu) as world:
        for seed in range(order["turns"]):
            memory = Memory(device, keep=setting.keeps_memory)
            torch.set_float32_matmul_precision("high" if setting.tf32 else "highest")
            package = task.package(setting, seed)
            options: dict[str, Any] = {"seed": seed, "precision": setting.precision}
            if world.rank:

                def feed(*_: int, seed: int = seed) -> Iterator[Any]:
                    return task.batches(setting, seed, share)

                serve(package, world, str(device), feed=feed, **options)
                continue
            batches = Counted(task.batches(setting, seed, share))
            with DistributedPipeline(package, world, str(device), **options) as pipe:
                pipe.begin_feed(0)
                one = timed(device, batches, steps, lambda some, pipe=pipe: pipe.run(some, rise), memory)
            found.append({**asdict(one), "loss": task.loss(package)})
    if launch.rank == 0:
        write_json(Path(order["answer"]), found)


def rows_of(
    task: Task, ladder: Sequence[Rung], found: dict[Setting, list[Measured]], work: float, most: float
) -> list[list[Cell]]:
    """A form's part of the table, from the work per token or image and the most operations per second of a device."""
    plain = step_rate(found[ladder[0].setting])
    before = plain
    rows: list[list[Cell]] = []
    for rung in ladder:
        turns = found[rung.setting]
        rate = step_rate(turns)
        rates = [each_rate(turn) for turn in turns]
        tokens = median(turn.tokens_per_s for turn in turns)
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        losses = [turn.loss for turn in turns]
        rows.append(
            [
                rung.setting.form,
                rung.name,
                f"{1e3 * median(turn.step_s for turn in turns):,.1f}",
                f"{median(turn.samples_per_s for turn in turns):,.0f}",
                f"{tokens:,.0f}" if tokens else None,
                f"{rate / plain:.2f}×",
                f"{rate / before:.2f}×",
                f"{(max(rates) - min(rates)) / rate:.0%}",
                f"{rate * work / (most * task.devices(rung.setting)):.1%}",
                f"{max(peaks) / 2**20:,.0f}" if peaks else None,
                f"{fmean(losses):.3f}",
                f"{stdev(losses):.3f}" if len(losses) > 1 else None,
            ]
        )
        if not rung.aside:
            before = rate
    return rows


COLUMNS = [
    "form", "technique", "ms/step", "samples/s", "tokens/s", "× plain", "× before", "spread", "of matrix rate",
    "peak MiB", "loss", "± seeds",
]  # fmt: skip


def gains_of_processes(ladders: Sequence[Sequence[Rung]], found: dict[Setting, list[Measured]]) -> dict[Form, float]:
    """How much more samples per second data parallel learns from than one process with one thread, by form."""
    gains: dict[Form, float] = {}
    for ladder in ladders:
        alone = [rung.setting for rung in ladder if ONE_THREAD in rung.name]
        many = [rung.setting for rung in ladder if rung.setting.processes > 1]
        for one, all_of_them in zip(alone, many, strict=False):
            rates = [median(turn.samples_per_s for turn in found[setting]) for setting in (one, all_of_them)]
            gains[one.form] = rates[1] / rates[0]
    return gains


def each_rate(turn: Measured) -> float:
    """Tokens per second, or images."""
    return turn.tokens_per_s or turn.samples_per_s


def step_rate(turns: Sequence[Measured]) -> float:
    """The median of the turns."""
    return median(map(each_rate, turns))


def draw(ladders: Sequence[Sequence[Rung]], found: dict[Setting, list[Measured]], path: Path, title: str) -> None:
    """A bar for each rung, as long as its rate; the ends of a line are the turns' extremes."""
    figure = Figure(figsize=(11, 0.9 + 0.34 * max(map(len, ladders))), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    for axes, ladder in zip(figure.subplots(1, len(ladders), squeeze=False)[0], ladders, strict=True):
        form = ladder[0].setting.form
        plain = step_rate(found[ladder[0].setting])
        for place, rung in enumerate(ladder):
            rates = [each_rate(turn) / plain for turn in found[rung.setting]]
            middle = median(rates)
            axes.barh(place, middle, 0.65, color=_ASIDE if rung.aside else _COLOURS[form])
            axes.plot([min(rates), max(rates)], [place, place], color="#222222", linewidth=1)
            axes.annotate(
                f"{middle:.2f}×", (max(rates), place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(range(len(ladder)), [rung.name for rung in ladder])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(f"{form.upper()}, over plain PyTorch", loc="left", fontsize=10.5)
        axes.tick_params(labelsize=9)
        axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--without", nargs="*", default=[], help="does without rungs whose names have such a word")
    parser.add_argument("--turns", type=int, default=3, help="each with another seed")
    parser.add_argument("--steps", type=int, help="batches of a turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        be_rank(json.loads(options.rank.read_text(encoding="utf-8")))
        return
    if options.model is None:
        parser.error("--model: expected one of " + ", ".join(MODELS))
    if any(word in PLAIN for word in options.without):
        parser.error(f"--without: expected no word that is in {PLAIN!r}, what all rungs are held against")
    device = parse_device(options.device)
    forms: list[Form] = options.forms
    steps = options.steps or STEPS[options.model] * (5 if device.type == "cuda" else 1)
    machine, rates = environment(), matrix_rates(device)
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print("  ".join(f"{name} {rate / 1e9:,.0f} G operations/s" for name, rate in rates.items()), flush=True)
    task = task_of(options.model, device, options.data_root)
    ladders = [rungs_of(options.model, form, device, options.without) for form in forms]
    found = in_turns(task, [rung for ladder in ladders for rung in ladder], options.turns, steps)
    most = max(rates.values())
    title = f"{options.model} on {device}, {steps} batches, {options.turns} turns"
    rows = [
        row
        for form, ladder in zip(forms, ladders, strict=True)
        for row in rows_of(task, ladder, found, task.work[form], most)
    ]
    print_table(title, COLUMNS, rows)
    for form, gain in gains_of_processes(ladders, found).items():
        print(f"{form.upper()}: data parallel is {gain:.2f}× as fast per sample as one process with one thread")
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.out / f"ladder-{options.model}-{device.type}"
    kept = [
        {
            "name": rung.name,
            "aside": rung.aside,
            "setting": asdict(rung.setting),
            "turns": [asdict(one) for one in found[rung.setting]],
        }
        for ladder in ladders
        for rung in ladder
    ]
    facts = {
        "data_parallel_over_one_thread": gains_of_processes(ladders, found),
        "machine": machine,
        "matrix_rates": rates,
        "work_per_token_or_image": task.work,
        "steps": steps,
    }
    write_json(name.with_suffix(".json"), {**facts, "columns": COLUMNS, "table": rows, "rungs": kept})
    draw(ladders, found, name.with_suffix(".png"), title)
    print(f"figures: {name}.json, picture: {name}.png")


if __name__ == "__main__":
    main()
