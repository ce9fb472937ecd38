"""What a line of stages loses over long links: pipeal, torch's own schedules, data parallel and local SGD side by side.

    sudo python scripts/bench/distance.py [--quick] [--methods pipeal 1f1b] [--delays 0 100] [--rates 1000] [--turns 3]

Four processes in four networks, joined by links with a delay and a rate (:mod:`long_line`; needs Linux and root).
Stages sleep 5 ms forward and 10 ms backward for each packet of 64 samples, 256 KB, so that any machine will do and
nothing but transport and schedule is compared. What is found is kept row by row in ``--json`` (by default
``results/distance.json`` beside this file): what is there is not measured again. The table and the figure are made of
all that is there.

pipeal updates after each packet; backpropagation after eight, in its best number of micro-batches, as does data
parallel; local SGD averages after 100 packets of each rank. Stages have 4 MB of weights each. Beside each row stands
what its schedule would take if nothing but steps, delays and rates took time, and beside pipelines what ``pipeal plan``
says of such devices and links.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import zmq
from distance_ideals import Step, backprop_s, drawn, pipelined_s
from distance_ranks import FLOATS, be_rank
from line_kills import free_ports
from long_line import Line, LinkKind, NoLineError, Passed, Started, check, long_line, started

from pipeal.engine.distributed import Launch
from pipeal.engine.schedule import SCHEDULES
from pipeal.planning.pure.forecast import RIVALS, forecast
from pipeal.planning.pure.hardware import Link, PlannedDevice, Setup
from pipeal.planning.pure.layer_cost import LayerCost
from pipeal.planning.pure.layout import best_layout
from pipeal.reporting.environment import environment
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

RESULTS = Path(__file__).with_name("results") / "distance.json"

STAGES, SAMPLES = 4, 64
STEP: Step = (0.005, 0.010)
PACKET_BYTES = SAMPLES * FLOATS * 4
RUNS = (1, 50, 400)
"""Batches: to open all connections, to warm up (the cold figure), and that count."""

PACKETS, PARTS, WEIGHTS_BYTES, LOCAL_STEPS = 8, (1, 2, 4, 8, 16, 32), 4 << 20, 100


def parts_of(method: str) -> list[int]:
    """The micro-batches that are tried; 1F1B wants no fewer than stages."""
    return [parts for parts in PARTS if method != "1f1b" or parts >= STAGES]


OURS = ("pipeal", "pipeal, CV 0.5", "pipeal, two ranks", "pipeal line", "pipeal line, CV 0.5")
METHODS = (*OURS, "gpipe", "1f1b", "data parallel", "local SGD")


def stages_of(method: str) -> int:
    """On so many machines."""
    return 2 if "two" in method else STAGES


LOOPBACK_MS = (15.0, 10.0, 7.5, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
"""Steps that four stages on one machine are tried with."""

BUSY = 0.95

_PORT = 29517
"""Where ranks meet in networks of their own."""


class RankError(Exception):
    """A rank failed, and has said with what."""


@dataclass(frozen=True)
class Row:
    """A method over links of a kind, once.

    Attributes:
        method: One of :data:`METHODS`.
        delay_ms: One way.
        mbit_s: Of each link, each way.
        turn: The number of the repeat.
        packet_ms: Per packet of 64 samples.
        ideal_ms: The same if only steps and delays took time.
        bound_ms: And the links' rate.
        busy: The share of the time in which a stage works, on average.
        sent: Bytes per packet over the busiest link, with IP's and TCP's heads.
        sent_back: And the other way.
        parts: Micro-batches of an update, where the method has some: of those tried, the best number.
        window: How many packets each stage might have on their way in the end.
        cold: The share of the ideal over the first 50 packets.
        slept: The share of the ideal for as long as the steps really took: sleepers wake late on a busy machine.
        open_s: Until all were connected and the first packet was through.
        load: The machine's load average.
        machine: The number of the machine, of those whose rows are in the file.
    """

    method: str
    delay_ms: float
    mbit_s: float
    turn: int
    packet_ms: float
    ideal_ms: float
    bound_ms: float
    busy: float
    sent: float
    sent_back: float
    parts: int | None = None
    window: Sequence[int] = ()
    cold: float | None = None
    slept: float | None = None
    open_s: float | None = None
    load: float = 0.0
    machine: int = 0

    @property
    def key(self) -> tuple[str, float, float, int]:
        """What tells it from all others."""
        return self.method, self.delay_ms, self.mbit_s, self.turn


def measure(line: Line, method: str, kind: LinkKind, turn: int) -> Row:
    """Measures a row.

    Raises:
        RankError: A rank failed.
    """
    line.set(kind)
    order: dict[str, Any] = {"step": STEP, "samples": SAMPLES}
    facts: dict[str, Any]
    if method.startswith("pipeal"):
        order |= {"method": "pipeal", "runs": RUNS, "cv": 0.5 if "CV" in method else 0.0, "seed": turn}
        with tempfile.TemporaryDirectory() as folder:
            if "line" in method:
                order |= of_links(folder, [line.address(rank) for rank in range(STAGES)])
            found = carried_out(order, stages_of(method), line)
        facts = of_line(found, order, kind)
    else:
        warm_ups, updates = (1, 2) if method == "local SGD" else (2, 5)
        order |= {"method": method, "packets": PACKETS, "parts": parts_of(method), "weights_bytes": WEIGHTS_BYTES}
        order |= {"local_steps": LOCAL_STEPS, "warm_ups": warm_ups, "updates": updates}
        found = carried_out(order, STAGES, line)
        facts = min((of_updates(one, order, kind) for one in found), key=lambda one: float(one["packet_ms"]))
    return Row(method, 1e3 * kind.delay_s, kind.bits_per_s / 1e6, turn, **facts, load=os.getloadavg()[0])


def of_links(folder: str, hosts: Sequence[str]) -> dict[str, Any]:
    """What an order over the links of ``pipeal line`` has beside that of one under ``torchrun``."""
    keys = [[key.decode() for key in zmq.curve_keypair()] for _ in hosts]
    return {"method": "line", "folder": folder, "keys": keys, "addresses": [f"{host}:29518" for host in hosts]}


def of_line(found: list[dict[str, Any]], order: Mapping[str, Any], kind: LinkKind) -> dict[str, Any]:
    """The facts of a row of pipeal."""
    *runs, last = found
    stages = last["stages"]
    whole = drawn(len(stages), sum(order["runs"]), order["step"], order["cv"], order["seed"])

    def of(first: int, batches: int) -> tuple[float, list[list[Step]], list[list[Step]]]:
        span = slice(first, first + batches)
        slept = [slept_steps(stage, span) for stage in stages]
        took = stages[-1]["ended"][first + batches - 1] - stages[0]["begun"][first]
        return took, [steps[span] for steps in whole], slept

    opened, cold, batches = order["runs"]
    cold_s, steps, _ = of(opened, cold)
    cold_share = pipelined_s(steps, kind.delay_s) / cold_s
    took, steps, slept = of(opened + cold, batches)
    carried = kind.payload_s(PACKET_BYTES)
    sent, back = _busiest(runs[-1]["passed"], batches)
    return {
        "packet_ms": 1e3 * took / batches,
        "ideal_ms": 1e3 * pipelined_s(steps, kind.delay_s) / batches,
        "bound_ms": 1e3 * pipelined_s(steps, kind.delay_s, carried) / batches,
        "busy": sum(map(sum, (map(sum, of_stage) for of_stage in slept))) / len(stages) / took,
        "sent": sent,
        "sent_back": back,
        "window": [stage["windows"][-1] for stage in stages[:-1]],
        "cold": cold_share,
        "slept": pipelined_s(slept, kind.delay_s, carried) / took,
        "open_s": runs[0]["open_s"],
    }


def slept_steps(stage: Mapping[str, Sequence[float]], span: slice) -> list[Step]:
    """How long a stage's steps really took. What it did between them, such as to send, is no part of one."""
    times = [stage[name][span] for name in ("begun", "turned", "went_back", "ended")]
    return [(turned - begun, ended - back) for begun, turned, back, ended in zip(*times, strict=True)]


def of_updates(one: dict[str, Any], order: Mapping[str, Any], kind: LinkKind) -> dict[str, Any]:
    """The facts of a row of another method."""
    method, stages, work = order["method"], STAGES, sum(order["step"])
    packets = order["packets"]
    if method in ("gpipe", "1f1b"):
        share = packets / one["parts"]
        step, which = (share * order["step"][0], share * order["step"][1]), ("gpipe", "1f1b").index(method)
        ideal = backprop_s(stages, one["parts"], step, kind.delay_s)[which]
        bound = backprop_s(stages, one["parts"], step, kind.delay_s, kind.payload_s(int(share * PACKET_BYTES)))[which]
    else:
        packets = order["local_steps"] * stages if method == "local SGD" else packets
        ideal = packets * work
        # A ring: each rank sends all weights twice, but for its own share.
        averaged = kind.payload_s(2 * (stages - 1) * order["weights_bytes"]) + 2 * (stages - 1) * kind.delay_s
        bound = ideal + averaged if method == "local SGD" else max(ideal, packets * work / 3 + averaged)
    seconds = median(one["seconds"])
    sent, back = _busiest(one["passed"], packets * len(one["seconds"]))
    return {
        "packet_ms": 1e3 * seconds / packets,
        "ideal_ms": 1e3 * ideal / packets,
        "bound_ms": 1e3 * bound / packets,
        "busy": packets * work / seconds,
        "sent": sent,
        "sent_back": back,
        "parts": one.get("parts"),
    }


def _busiest(passed: Mapping[tuple[int, int], Passed], packets: int) -> tuple[float, float]:
    """Bytes per packet, of the link with most, and of that with most among those the other way."""
    up = max((one.bytes for (source, to), one in passed.items() if to > source), default=0)
    down = max((one.bytes for (source, to), one in passed.items() if to < source), default=0)
    return max(up, down) / packets, min(up, down) / packets


def carried_out(order: dict[str, Any], ranks: int, line: Line | None = None) -> list[dict[str, Any]]:
    """Has ranks carry out an order; what rank 0 says, with what passed over each link between a beginning and an end.

    Args:
        order: For :func:`distance_ranks.be_rank`.
        ranks: How many.
        line: The networks they are in; None for processes of one machine.

    Raises:
        RankError: A rank failed.
    """
    found: list[dict[str, Any]] = []
    before: dict[tuple[int, int], Passed] = {}
    port = _PORT if line else free_ports(1)[0]
    with ExitStack() as open_now:
        all_started: list[Started] = []
        for rank in range(ranks):
            if line is None:
                one = started(be_rank, order, Launch(rank, ranks, rank, ranks, "127.0.0.1", port))
            else:
                one = line.start(rank, be_rank, order, Launch(rank, ranks, 0, 1, line.address(0), port))
            open_now.callback(one.process.kill)
            all_started.append(one)
        begun = perf_counter()
        try:
            while True:
                fact = all_started[0].hear()
                if "begins" in fact:
                    before = line.passed() if line else {}
                    continue
                if "ended" in fact and line:
                    passed = line.passed()
                    fact["passed"] = {link: count - before.get(link, Passed()) for link, count in passed.items()}
                found.append(fact | {"open_s": perf_counter() - begun})
        except EOFError:
            pass
        if any(codes := [one.end() for one in all_started]):
            raise RankError(f"the ranks ended with {codes}; the order was {order}")
    return found


def loopback(step_ms: float, batches: int = 300) -> float:
    """How busy four stages of one machine are, on average: of the time in which all have packets."""
    step = (1e-3 * step_ms / 3, 2e-3 * step_ms / 3)
    order = {"method": "pipeal", "step": step, "samples": SAMPLES, "runs": (1, 50, batches), "cv": 0.0, "seed": 0}
    *_, last = carried_out(order, STAGES)
    shares = []
    for stage in last["stages"]:
        steps = slept_steps(stage, slice(-batches, None))
        shares.append(sum(map(sum, steps)) / (stage["ended"][-1] - stage["begun"][-batches]))
    return sum(shares) / len(shares)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--delays", nargs="+", type=float, default=[0, 10, 50, 100], metavar="MS", help="one way")
    parser.add_argument("--rates", nargs="+", type=float, default=[1000, 80], metavar="MBIT_S")
    parser.add_argument("--turns", type=int, default=3, help="of each row, one after the other through all of them")
    parser.add_argument("--tcp", metavar="NAME", help="tcp_congestion_control of the networks; default: the system's")
    parser.add_argument("--loopback", action="store_true", help="also the smallest step that keeps stages busy")
    parser.add_argument("--quick", action="store_true", help="one row of pipeal, which is not kept: half a minute")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args(arguments)
    kept = Kept.read(options.json, options.tcp)
    others = {tcp for machine in kept.machines if (tcp := machine["tcp"].partition(",")[0]) != kept.tcp}
    if others and not options.quick:
        found = f"{options.json} has rows of {', '.join(sorted(others))}, not of {kept.tcp}"
        parser.error(f"{found}; name another file with --json")
    try:
        with long_line(STAGES, tcp=options.tcp) as line:
            if options.quick:
                print_rows([measure(line, "pipeal", LinkKind(0.05, 1e9), 0)])
                return
            kinds = [LinkKind(delay / 1e3, 1e6 * rate) for rate in options.rates for delay in options.delays]
            for kind in kinds:
                if str(kind) not in kept.links:
                    line.set(kind)
                    kept.add_link(str(kind), asdict(check(line)))
                    print(f"{kind}: {kept.links[str(kind)]}", flush=True)
            for turn in range(options.turns):
                for method in options.methods:
                    for kind in kinds:
                        if (method, 1e3 * kind.delay_s, kind.bits_per_s / 1e6, turn) in kept.rows:
                            continue
                        row = kept.add(measure(line, method, kind, turn))
                        print(f"turn {turn}, {method}, {kind}: {row.packet_ms:.2f} ms", flush=True)
    except (NoLineError, RankError) as error:
        parser.exit(1, f"distance.py: {error}\n")
    if options.loopback:
        for step_ms in LOOPBACK_MS:
            if str(step_ms) not in kept.loopback:
                kept.add_loopback(str(step_ms), loopback(step_ms))
                print(f"on one machine, steps of {step_ms:g} ms: {kept.loopback[str(step_ms)]:.1%} busy", flush=True)
    for number, machine in enumerate(kept.machines):
        print(f"machine {number}:", "  ".join(f"{key} {value}" for key, value in machine.items()))
    print_rows(kept.rows.values())
    if kept.loopback:
        busy = [float(step) for step, share in kept.loopback.items() if share >= BUSY]
        print(f"smallest step that keeps four stages of one machine {BUSY:.0%} busy: {min(busy, default=None)} ms")
    draw(kept.rows.values(), options.json.with_suffix(".png"))


class Kept:
    """What was found, in a file that is whole after each row."""

    def __init__(self, path: Path, figures: Mapping[str, Any], tcp: str | None) -> None:
        self.path = path
        self.here: dict[str, Any] = environment() | {"tcp": _tcp(tcp)}
        self.machines: list[dict[str, Any]] = list(figures.get("machines", []))
        self.links: dict[str, Any] = dict(figures.get("links", {}))
        self.loopback: dict[str, float] = dict(figures.get("loopback", {}))
        rows = [Row(**row) for row in figures.get("rows", [])]
        self.rows = {row.key: row for row in rows}

    @classmethod
    def read(cls, path: Path, tcp: str | None = None) -> Kept:
        """What a file holds, or nothing yet; ``tcp`` as for :func:`long_line.started`."""
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}, tcp)

    @property
    def tcp(self) -> str:
        """What keeps TCP from sending too much here."""
        return str(self.here["tcp"].partition(",")[0])

    def add(self, row: Row) -> Row:
        """Keeps a row, as one of this machine."""
        if self.here not in self.machines:
            self.machines.append(self.here)
        self.rows[row.key] = row = replace(row, machine=self.machines.index(self.here))
        self._write()
        return row

    def add_link(self, kind: str, checked: Mapping[str, float]) -> None:
        """Keeps what plain sockets found of a link."""
        self.links[kind] = checked
        self._write()

    def add_loopback(self, step_ms: str, busy: float) -> None:
        """Keeps how busy stages are on one machine."""
        self.loopback[step_ms] = busy
        self._write()

    def _write(self) -> None:
        rows = [asdict(row) for row in self.rows.values()]
        found = {"machines": self.machines, "links": self.links, "loopback": self.loopback, "rows": rows}
        write_json(self.path, found)


def _tcp(control: str | None) -> str:
    """How TCP keeps from sending too much, and how long its buffers may become."""
    folder = Path("/proc/sys/net/ipv4")
    names = ("tcp_congestion_control", "tcp_wmem", "tcp_rmem")
    found = {name: " ".join((folder / name).read_text(encoding="ascii").split()) for name in names}
    return ", ".join(f"{name} {value}" for name, value in (found | ({names[0]: control} if control else {})).items())


def middle(rows: Iterable[Row]) -> list[tuple[Row, list[float]]]:
    """Of each method and kind of link the row in the middle, of two the slower one, and all its times."""
    groups: dict[tuple[str, float, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.mbit_s, row.delay_ms), []).append(row)
    found = []
    for of_kind in groups.values():
        in_order = sorted(of_kind, key=lambda row: row.packet_ms)
        found.append((in_order[len(in_order) // 2], [row.packet_ms for row in in_order]))
    return sorted(found, key=lambda one: (METHODS.index(one[0].method), -one[0].mbit_s, one[0].delay_ms))


def planned_ms(row: Row) -> float | None:
    """What ``pipeal plan`` says of a pipeline: milliseconds per packet.

    Of uneven steps it knows how much they vary, not which they were.
    """
    ours = row.method in OURS
    if not ours and row.method not in ("gpipe", "1f1b"):
        return None
    stages = stages_of(row.method)
    parts, packets = (1, 1) if row.parts is None else (row.parts, PACKETS)
    share = packets / parts
    layer = LayerCost(share * STEP[0], share * STEP[1], out_bytes=int(share * PACKET_BYTES))
    kind = LinkKind(row.delay_ms / 1e3, 1e6 * row.mbit_s)
    near = Setup(
        (PlannedDevice(),) * stages, jitter=0.5 if "CV" in row.method else 0.0, batches=RUNS[-1], queue_depth=0
    )
    far = replace(near, link=Link(layer.out_bytes / kind.payload_s(layer.out_bytes), kind.delay_s))
    costs = {"cpu": (layer,) * stages}
    schedule = SCHEDULES["pipelined"] if ours else RIVALS[f"BP {row.method}"](parts)
    return 1e3 * forecast(row.method, schedule, costs, far, best_layout(costs, near)).batch_s / packets


def print_rows(rows: Iterable[Row]) -> None:
    """The table."""
    heads = ["method", "Mbit/s", "ms one way", "ms per packet", "of the turns", "ideal", "of it", "with the rate"]
    heads += [
        "of it",
        "of steps as slept",
        "pipeal plan",
        "off by",
        "cold",
        "samples/s",
        "busy",
        "KB",
        "KB back",
        "windows",
        "parts",
        "open s",
        "machine",
    ]

    def share(part: float | None) -> Cell:
        return None if part is None else f"{100 * part:.1f} %"

    print_table(
        f"{STAGES} stages of {1e3 * STEP[0]:g} + {1e3 * STEP[1]:g} ms, packets of {SAMPLES} samples, "
        f"{PACKET_BYTES >> 10} KB",
        heads,
        [
            [
                row.method,
                f"{row.mbit_s:g}",
                f"{row.delay_ms:g}",
                row.packet_ms,
                f"{min(turns):.2f} to {max(turns):.2f}",
                row.ideal_ms,
                share(row.ideal_ms / row.packet_ms),
                row.bound_ms,
                share(row.bound_ms / row.packet_ms),
                share(row.slept),
                (planned := planned_ms(row)),
                None if planned is None else f"{planned / row.packet_ms - 1:+.1%}",
                share(row.cold),
                round(1e3 * SAMPLES / row.packet_ms),
                share(row.busy),
                round(row.sent / 1024),
                round(row.sent_back / 1024),
                " ".join(map(str, row.window)) or None,
                row.parts,
                None if row.open_s is None else round(row.open_s, 1),
                row.machine,
            ]
            for row, turns in middle(rows)
        ],
    )


def draw(rows: Iterable[Row], path: Path) -> None:
    """Samples per second over the delay: what was measured, and what the schedule allows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = [row for row, _ in middle(rows) if stages_of(row.method) == STAGES]
    rates = sorted({row.mbit_s for row in found}, reverse=True)
    if not rates:
        return
    size = 5.2 * len(rates), 4.8
    figure, axes = plt.subplots(1, len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, rate in zip(axes[0], rates, strict=True):
        for number, method in enumerate(METHODS):
            of_method = [row for row in found if row.mbit_s == rate and row.method == method]
            if not of_method:
                continue
            delays, color = [row.delay_ms for row in of_method], f"C{number}"
            axis.plot(delays, [1e3 * SAMPLES / row.packet_ms for row in of_method], "o-", color=color, label=method)
            axis.plot(delays, [1e3 * SAMPLES / row.bound_ms for row in of_method], ":", color=color)
        axis.set_title(f"{rate:g} Mbit/s")
        axis.set_xlabel("delay, ms one way")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("samples per second")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    figure.suptitle("Four stages of 5 + 10 ms; dotted: only steps, delays and rates take time", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
