"""What each technique brings to a training step: from plain PyTorch upwards, one at a time, in AL and in BP form.

    python scripts/bench/ladder.py --model transformer --device cpu --data-root DIR
    python scripts/bench/ladder.py --model charlm --device cuda:0 --data-root DIR

Begins with what anyone would write (plain.py): float32, the operators at hand, Adam as it comes, random batches padded
to their longest text, images as they lie in files, a loop on all cores. In each turn every rung trains a new model of
the turn's seed on real data for equally many batches; its first batches are not timed. Rates and memory are medians of
the turns, losses their means: of one fixed part of the test samples, after those batches. A rung in brackets was tried,
and the next ones do without it. Real tokens count, padding does not. The share of the matrix rate is what real tokens
or images need in operations of matrix products, per second, over the most that this machine was seen to do in one large
product of any type.

A rung's turn is short: some models answer as before it, with the loss of chance. ``--ends`` is for losses: the lowest
rung and the highest of one process and stage alone, for as many ``--steps`` as it takes to tell them from chance.

The last rungs are stages (AL): those that ``--devices auto`` takes, and of a process each, which torchrun starts anew
in each turn. Both are measured while all stages have work: a line of them fills at first and runs empty in the end,
which is most of so short a turn and nothing of a training. Their loss is of a training of its own, of as many batches
as all others. Then data parallel, also under torchrun, one process for each core or GPU. Memory is that of all devices,
or of all processes on the CPU, together.

Figures are written to ``--out`` as they come, and in the end a picture; what was worth keeping of them is in
``results/`` beside this file, which ladder_report.py prints again. Processes that fail lose their rung alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError

import torch
from ladder_ranks import in_processes
from ladder_report import Results, report
from rung_data import task_of
from rung_training import Clock, Measured, train
from rungs import FORMS, MODELS, TEXTS, Form, Rung, Setting, ends_of, rungs_of

from pipeal.core.errors import PipealError
from pipeal.engine.devices import parse_device
from pipeal.engine.devices.cpus import cores
from pipeal.planning.measure.layers import WARM_UP
from pipeal.reporting.environment import environment

STEPS = {"charlm": 150, "transformer": 12, "lstm": 6, "resnet": 8}
"""Batches of a turn: as many as let a model's whole ladder end within some ten minutes on two cores."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--without", nargs="*", default=[], help="leaves out rungs whose names have such a word")
    parser.add_argument("--turns", type=int, default=3, help="each with another seed")
    parser.add_argument("--steps", type=int, help=f"batches of a turn; the first {WARM_UP} are not timed")
    parser.add_argument("--batch", type=int, help="samples of every batch; charlm and resnet; default: as configured")
    parser.add_argument("--ends", action="store_true", help="the lowest and the highest rung alone, for long turns")
    parser.add_argument("--out", type=Path, default=Path("runs", "ladder"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.batch is not None and (options.model in TEXTS or options.batch < 1):
        parser.error(f"found --batch {options.batch}; expected at least 1, and a model whose samples are all as long")
    device = parse_device(options.device)
    forms: list[Form] = options.forms
    turns: int = options.turns
    usual = STEPS[options.model] * (5 if device.type == "cuda" else 1)
    steps: int = usual if options.steps is None else options.steps
    if turns < 1 or steps <= WARM_UP:
        parser.error(f"found {turns} turns of {steps} batches; expected at least 1 turn of {WARM_UP + 1}")
    try:
        ladders = [rungs_of(options.model, form, device, options.without, options.batch) for form in forms]
    except ValueError as error:
        parser.error(f"--without: {error}")
    if options.ends:
        ladders = [ends_of(ladder) for ladder in ladders]
    machine, rates = environment(), matrix_rates(device)
    print("  ".join(f"{key} {value}" for key, value in machine.items()))
    print("  ".join(f"{name} {rate / 1e9:,.0f} G operations/s" for name, rate in rates.items()), flush=True)
    task = task_of(options.model, device, options.data_root)
    options.out.mkdir(parents=True, exist_ok=True)
    of = "" if options.batch is None else f"-{options.batch}"
    ends = "-ends" if options.ends else ""
    figures = options.out / f"ladder-{options.model}{of}{ends}-{device.type}.json"
    samples = "" if options.batch is None else f" of {options.batch}"
    title = f"{options.model} on {device}, {steps} batches{samples}, {turns} turns"
    facts = {"title": title, "machine": machine, "matrix_rates": rates, "steps": steps}
    results = Results(task, ladders, {rung.setting: [] for ladder in ladders for rung in ladder}, facts)

    failed: dict[Setting, str] = {}
    for turn in range(turns):
        for rung in results.rungs:
            if rung.setting in failed:
                continue
            try:
                one = (in_processes if rung.setting.processes > 1 else train)(task, rung.setting, turn, steps)
            except (CalledProcessError, PipealError) as error:
                if rung.setting.processes == 1:
                    raise
                failed[rung.setting] = f"{rung.setting.form} {rung.name}, turn {turn + 1}: {_why(error)}"
                results.found[rung.setting].clear()  # its median would be of other seeds than those beside it
            else:
                results.found[rung.setting].append(one)
                say(f"turn {turn + 1}/{turns}", rung, one)
            kept = results.write(figures)

    report(kept, figures)
    if failed:
        raise SystemExit("\n".join(failed.values()))


def say(turn: str, rung: Rung, measured: Measured) -> None:
    print(f"  {turn}: {rung.setting.form} {rung.name}: {measured}", flush=True)


def _why(error: CalledProcessError | PipealError) -> str:
    if isinstance(error, PipealError):
        return str(error)
    return f"exit code {error.returncode}; its processes said why"


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


if __name__ == "__main__":
    main()
