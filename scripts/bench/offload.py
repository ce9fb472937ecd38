"""Networks larger than memory: how deep each form can train within a limit, and what it costs to keep layers on a disk.

    python scripts/bench/offload.py [--limit-mib 160] [--threads 2] [--folder DIR] [--json FILE] [--quick]

Every training is a process of its own, which has trained one block before it joins a control group with the limit: what
it takes from then on counts, the page cache of its files included (cgroup.py; root and control groups of version 1).

1. *Deepest*: the most blocks with which two batches are learnt from, by doubling and bisection; a process that the
   kernel ends is a no. Of offloaded layers two depths are tried: four times that of BP with every block computed
   again, and one beyond. Where a batch is large next to a block's weights, the limit is twice as large.
2. *Larger*: blocks of width 512 whose weights and optimizer states are 8 times the limit. The offloaded training within
   the limit and the same one in memory, without a limit, take turns at each batch; large batches first, then smaller
   ones. After 50 batches all weights and optimizer states have to be equal bit for bit.
3. *Killed*: a process takes up what the offloaded one had saved, goes on, saves again, and is killed (``kill -9``) in
   the middle of a batch; a third takes that up. After 50 batches it has to have the same bits.
4. The rates of the disk, written and read a layer at a time as the engine does, and from these the break-even batch: of
   so many tokens that a layer is at work for as long as its reading and writing take.

A JSON that is there is gone on with, part by part.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep
from typing import Any, TypeAlias

from cgroup import MemoryGroup
from offload_work import LENGTH, EndedError, Trainer, Training, bytes_of_layers

from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import print_table

Found: TypeAlias = dict[str, Any]
"""Figures, as they stand in the JSON."""

FORMS = ("BP", "BP, recomputed", "AL", "AL offloaded")
SIZES = {
    "width 128, 768 tokens (charlm cpu)": (128, 12 * LENGTH, 256, 1),
    "width 512, 2,048 tokens": (512, 2048, 64, 1),
    "width 32, 49,152 tokens": (32, 768 * LENGTH, 256, 2),
}
"""Of blocks whose depth is looked for: width, tokens, how many offloaded ones are tried at most, and how many times the
limit they have."""

WIDTH, TIMES = 512, 8
"""Of the larger network: of its blocks, and how many times the limit it has."""

BATCHES = 50
PATIENCE_S = 600.0
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=160, help="of memory, above the idle process")
    parser.add_argument("--threads", type=int, default=2, help="intra-op")
    parser.add_argument("--turns", type=int, default=8, help="of the largest batches; half as many of the others")
    parser.add_argument("--folder", type=Path, help="on the disk that is meant  [default: the system's temporary one]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there, and go on from it")
    parser.add_argument("--quick", action="store_true", help="64 MiB, blocks of width 128, 8 batches: two minutes")
    options = parser.parse_args(arguments)
    if min(options.limit_mib, options.threads, options.turns) < 1:
        parser.error("expected numbers of at least 1")
    with TemporaryDirectory(dir=options.folder, prefix="offload-") as folder:
        Bench(options, Path(folder)).run()


class Bench:
    """All parts, kept as they are found.

    Args:
        options: Of the command line.
        folder: For layers, and for what is saved.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.limit = options.limit_mib * MIB
        self.width, self.batches = WIDTH, BATCHES
        self.sizes = dict(SIZES)
        self.tokens: tuple[int, ...] = (2048, 512, 128)
        if options.quick:
            self.limit, self.width, self.batches = 64 * MIB, 128, 8
            self.sizes = {"width 128, 128 tokens": (128, 128, 96, 1)}
            self.tokens, options.turns = (512, 128), 2
        self.found: Found = {}
        self.asked = {"limit": self.limit, "threads": options.threads, "width": self.width, "batches": self.batches}
        if options.json is not None and options.json.exists():
            self.found = json.loads(options.json.read_text(encoding="utf-8"))
            if self.found["asked"] != self.asked:
                raise SystemExit(
                    f"{options.json} is of {self.found['asked']}; expected {self.asked}: name another file"
                )
        self.found |= {"machine": environment(), "asked": self.asked}

    def run(self) -> None:
        """Each part that is not there yet; then prints all."""
        for name, part in (("disk", self.disk), ("deepest", self.depths), ("larger", self.larger)):
            if name not in self.found:
                load = os.getloadavg()[0]
                begin = perf_counter()
                self.found[name] = part()
                self.found.setdefault("load", {})[name] = [load, os.getloadavg()[0]]
                self.found.setdefault("seconds", {})[name] = perf_counter() - begin
                if self.options.json is not None:
                    write_json(self.options.json, self.found)
        show(self.found)

    def training(self, form: str, width: int, depth: int, tokens: int) -> Training:
        """Of a form; within a limit the heap is to have no holes."""
        offloaded = form == "AL offloaded"
        folder = str(self.folder) if offloaded else None
        return Training("AL" if offloaded else form, width, depth, tokens, self.options.threads, folder)

    def disk(self) -> Found:
        """Bytes per second, of 3 turns."""
        size = bytes_of_layers(self.training("AL", self.width, 2, 0))[1]
        written, read = zip(*(rates(self.folder, size, max(4, 512 * MIB // size)) for _ in range(3)), strict=True)
        return {"layer": size, "written": list(written), "read": list(read)}

    def depths(self) -> Found:
        """Of each size and form, the deepest that trains."""
        found: Found = {}
        for what, (width, tokens, most, limits) in self.sizes.items():
            limit = limits * self.limit
            rows = found[what] = {"width": width, "tokens": tokens, "limits": limits}
            for form in FORMS:
                made = replace(self.training(form, width, 1, tokens), threads=1)  # which take no memory
                if form == "AL offloaded":
                    first = 4 * max(1, rows["BP, recomputed"]["depth"])
                    tries = [trains(replace(made, depth=depth), limit) for depth in sorted({first, max(first, most)})]
                else:
                    # From half of what would fit without any activations.
                    first = max(1, limit // (2 * bytes_of_layers(replace(made, form="AL", depth=2))[1] * 4 // 3))
                    tries = list(searched(made, limit, first))
                depth = max((one["depth"] for one in tries if one["trains"]), default=0)
                rows[form] = {"depth": depth, "tries": tries}
                print(f"{what}, {form}: {depth} blocks", flush=True)
        return found

    def larger(self) -> Found:
        """Parts 2 and 3."""
        first, each = bytes_of_layers(self.training("AL", self.width, 2, 0))
        depth = 1 + -(-(TIMES * self.limit - first) // each)
        offloaded = self.training("AL offloaded", self.width, depth, self.tokens[0])
        in_memory = replace(offloaded, folder=None, keeps=True)
        found: Found = {"depth": depth, "bytes": first + (depth - 1) * each, "took": []}
        saved = self.folder / "saved"
        plan = list(batch_sizes(self.tokens, self.options.turns, self.batches))
        half = self.batches // 2
        with MemoryGroup(self.limit) as group:
            with Trainer(in_memory) as one, Trainer(offloaded, group) as other:
                found["idle"] = other.idle
                for number, tokens in enumerate(plan):
                    if number == half:
                        found["saving_s"] = other.do("save", saved)
                    took: Found = {"tokens": tokens}
                    pair = (("in memory", one), ("offloaded", other))
                    for name, trainer in pair[:: -1 if number % 2 else 1]:
                        (took[name],) = trainer.do("train", 1, tokens, timeout_s=PATIENCE_S)
                    found["took"].append(took)
                    print(number, took, f"load {os.getloadavg()[0]:.1f}", flush=True)
                found["sizes"] = {name: trainer.do("sizes") for name, trainer in pair}
                wanted = one.do("digest")
                found["equal"] = {"after": len(plan), "offloaded": wanted == other.do("digest")}
            found["killed"] = self.killed(offloaded, group, saved, plan)
            found["equal"]["killed"] = wanted == found["killed"].pop("digest")
        return found

    def killed(self, training: Training, group: MemoryGroup, saved: Path, plan: Sequence[int]) -> Found:
        """Goes on from what was saved, saves two batches later, is killed in the next batch but one, and goes on once
        more."""
        with Trainer(training, group, saved) as trainer:
            at = trainer.do("batch")
            took = [trainer.do("train", 1, plan[at + more])[0] for more in range(2)]
            trainer.do("save", saved)
            trainer.ask("begin", 2, plan[at + 2])
            while trainer.answer() < at + 3:
                pass
            sleep(0.5 * took[-1])
            trainer.kill()
        left = sorted(path.name for path in self.folder.iterdir())
        begin = perf_counter()
        with Trainer(training, group, saved) as trainer:
            again = trainer.do("batch")
            loading = perf_counter() - begin
            for tokens in plan[again:]:
                trainer.do("train", 1, tokens, timeout_s=PATIENCE_S)
            digest = trainer.do("digest")
        return {"in": at + 3, "taken_up_at": again, "files": left, "starting_s": loading, "digest": digest}


def batch_sizes(sizes: Sequence[int], turns: int, batches: int) -> Iterator[int]:
    """Tokens of each batch: two to warm up, then turns of each size, the largest first, and the smallest until the end.

    >>> list(batch_sizes([2048, 512], 2, 7))
    [2048, 2048, 2048, 2048, 512, 512, 512]
    """
    row = [sizes[0]] * (2 + turns)
    for size in sizes[1:]:
        row += [size] * max(2, turns // 2)
    yield from (row + [sizes[-1]] * batches)[:batches]


def trains(training: Training, limit: int) -> Found:
    """Whether it learns from two batches within a limit."""
    with MemoryGroup(limit) as group:
        try:
            with Trainer(training, group) as trainer:
                seconds = trainer.do("train", 2, training.tokens, timeout_s=PATIENCE_S)
                sizes = trainer.do("sizes")
                return {"depth": training.depth, "trains": True, "seconds": seconds[-1], **sizes}
        except (EndedError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}; out of memory {group.kills()} times"
            return {"depth": training.depth, "trains": False, "why": why}


def searched(training: Training, limit: int, first: int) -> Iterator[Found]:
    """Tries, by doubling and bisection, one of which is of the deepest that trains."""
    low, high, depth = 0, 0, first
    while not high or high - low > 1:
        one = trains(replace(training, depth=depth), limit)
        yield one
        low, high = (depth, high) if one["trains"] else (low, depth)
        depth = (low + high) // 2 if high else 2 * low


def rates(folder: Path, piece: int, pieces: int) -> tuple[float, float]:
    """Bytes per second that a file is written with, synced after each piece, and read with; nothing is cached."""
    data = os.urandom(piece)
    with TemporaryFile(dir=folder) as file:
        number = file.fileno()
        os.posix_fallocate(number, 0, piece * pieces)
        begin = perf_counter()
        for at in range(pieces):
            os.pwrite(number, data, at * piece)
            os.fdatasync(number)
        written = perf_counter() - begin
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        room = bytearray(piece)
        begin = perf_counter()
        for at in range(pieces):
            os.posix_fadvise(number, (at + 1) * piece, piece, os.POSIX_FADV_WILLNEED)
            os.preadv(number, [room], at * piece)
        read = perf_counter() - begin
    return piece * pieces / written, piece * pieces / read


def break_even(layer: int, written: float, read: float, times: dict[int, float], depth: int) -> float:
    """Tokens of a batch on which a layer works as long as it is read and written, one after the other.

    Args:
        layer: Its bytes.
        written: Bytes per second.
        read: Likewise.
        times: Seconds of a batch in memory, by its tokens.
        depth: Layers that these seconds are of.

    >>> round(break_even(100, 100.0, 100.0, {100: 1.2, 200: 2.2}, 1))
    180
    """
    few, many = min(times), max(times)
    each = (times[many] - times[few]) / (many - few) / depth
    return (layer / written + layer / read - times[few] / depth) / each + few


def show(found: Found) -> None:
    """Prints all of it."""
    asked, larger = found["asked"], found["larger"]
    print("  ".join(f"{key} {value}" for key, value in found["machine"].items()))
    print(
        "load average before and after: "
        + ", ".join(f"{name} {a:.1f}, {b:.1f}" for name, (a, b) in found["load"].items())
    )
    print("seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in found["seconds"].items()))
    print(
        f"limit M: {asked['limit'] / MIB:.0f} MiB above the idle process, which has {larger['idle'] / MIB:.0f} MiB "
        f"resident; {asked['threads']} threads, fp32\n"
    )
    rows: list[list[Any]] = []
    for what, forms in found["deepest"].items():
        base = forms["BP, recomputed"]["depth"]
        for form in FORMS:
            one = forms[form]
            last = next((each for each in one["tries"] if each["depth"] == one["depth"] and each["trains"]), None)
            more = "" if any(not each["trains"] for each in one["tries"]) else " or more"
            own = None if last is None else (last["weights"] + last["optimizer"]) / MIB
            limit = forms["limits"] * asked["limit"] / MIB
            over = f"{one['depth'] / base:.1f} ×" if base else None
            rows.append([what, f"{limit:.0f}", form, f"{one['depth']}{more}", over, own])
    heads = ["blocks", "within, MiB", "form", "deepest", "over BP, recomputed", "its weights and optimizer states, MiB"]
    print_table("deepest network that trains within a limit", heads, rows)
    times = {
        tokens: [one for one in larger["took"][2:] if one["tokens"] == tokens]
        for tokens in dict.fromkeys(one["tokens"] for one in larger["took"])
    }
    rows = []
    for tokens, ones in times.items():
        ratios = sorted(one["offloaded"] / one["in memory"] for one in ones)
        both = [f"{median(one[name] for one in ones):.2f}" for name in ("in memory", "offloaded")]
        rows.append([tokens, len(ones), *both, f"{median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
    state = (
        f"{larger['bytes'] / MIB:,.0f} MiB of weights and optimizer states, {larger['bytes'] / asked['limit']:.1f} × M"
    )
    print_table(
        f"\n{larger['depth']} blocks of width {asked['width']}: {state}; seconds per batch, in turns",
        ["tokens", "turns", "in memory", "offloaded within M", "ratio, median", "of each turn"],
        rows,
    )
    disk = found["disk"]
    written, read = median(disk["written"]), median(disk["read"])
    medians = {tokens: median(one["in memory"] for one in ones) for tokens, ones in times.items()}
    reading, writing = (1e3 * disk["layer"] / rate for rate in (read, written))
    print(
        f"\ndisk: written {written / 1e6:,.0f} MB/s ({_spread(disk['written'])}), read {read / 1e6:,.0f} MB/s "
        f"({_spread(disk['read'])}); a layer of {disk['layer'] / MIB:.1f} MiB is read in {reading:.0f} ms, written "
        f"in {writing:.0f}"
    )
    tokens = break_even(disk["layer"], written, read, medians, larger["depth"])
    print(f"break-even batch: {max(0, tokens):,.0f} tokens (a layer is at work as long as it is read and written)")
    killed, equal = larger["killed"], larger["equal"]
    print(f"equal bit for bit to memory after {equal['after']} batches: {equal['offloaded']}")
    print(
        f"killed in batch {killed['in']}, taken up at {killed['taken_up_at']}, left in the folder {killed['files']}; "
        f"equal bit for bit after {equal['after']} batches: {equal['killed']}"
    )
    print(f"saved in {larger['saving_s']:.1f} s; started again and loaded in {killed['starting_s']:.1f} s, within M")


def _spread(values: Sequence[float]) -> str:
    return f"{min(values) / 1e6:,.0f} to {max(values) / 1e6:,.0f}"


if __name__ == "__main__":
    main()
