"""Memory over depth: backpropagation, with recomputation, and Associated Learning in both orders within a stage.

    python scripts/bench/memory.py [--depths 2 8 32] [--blocks charlm] [--turns 20] [--json FILE] [--plot FILE]
    python scripts/bench/memory.py --show FILE [--plot FILE]

1. Each depth of each form trains for two batches, the second with optimizer states, in a process of its own, on one
   thread. Two peaks are taken. *Activations*: what autograd saves for backwards, at any time, by
   ``saved_tensors_hooks``: each storage once, from when it is saved until its graph lets it go, parameters and buffers
   aside. *Resident*: physical memory beyond that of the same process after it has trained one block on two samples and
   dropped it; weights, gradients and optimizer states are part of it. A depth that is expected to take more memory or
   time than the limits is not run: its figures lie on the line through the two depths before, and are marked.
2. After that training, both orders of AL have to have the same weights and optimizer states, bit for bit.
3. Throughput: both orders train the same package on one stage, in turns in one process.
4. The fill of a pipeline, which ``layer`` makes longer: virtual stages of layers whose actions take a given time.

Recomputing is ``torch.utils.checkpoint`` with ``use_reentrant=True`` on every block: its other variant keeps what it
recomputes where no hook sees it. BP is trained by hand, AL by a pipeline. Batches are random numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeAlias

import torch
from memory_taken import Memory
from schedules import wake_on_time
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from virtual import VirtualLayer

from pipeal.core.modules import module_of
from pipeal.core.options import WithinStage
from pipeal.core.tree import Tree, tensors
from pipeal.engine import Pipeline
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.methods import Network, al, bp
from pipeal.methods.layer import LocalLayer
from pipeal.models.charlm import CharDims, CharLM
from pipeal.models.convolution import BasicBlock, ConvBN
from pipeal.models.text import TextDims, Transformer
from pipeal.models.vision import Resnet, VisionBP, VisionDims, _Block
from pipeal.reporting.environment import environment
from pipeal.reporting.figures import COLOURS, LEGEND, finish, new_figure, save
from pipeal.reporting.recorders import write_json
from pipeal.reporting.tables import Cell, print_table

FORMS = ("BP", "BP, recomputed", "AL by stage", "AL by layer")
ORDERS: tuple[WithinStage, ...] = ("layer", "stage")
MEASURED = ("activations", "resident", "weights", "optimizer")
"""Bytes."""

DEPTHS = (2, 8, 32, 128, 512)
THROUGHPUT_DEPTH = 8
MIB = 2**20
CHARACTERS, WORDS, CLASSES = 65, 30_000, 4

Found: TypeAlias = dict[str, Any]
"""All figures, as they stand in the JSON."""


@dataclass(frozen=True)
class Block:
    """A block that a network is made of, as often as is wanted.

    Attributes:
        what: What it is, and of what a batch consists.
        network: The network of so many blocks.
        batch: A batch of so many samples.
        samples: How many a batch has.
        turn: How many batches a turn of the throughput has.
    """

    what: str
    network: Callable[[int], Network]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int
    turn: int


def charlm(depth: int) -> Network:
    """The model of ``shakespeare-charlm-cpu.yaml``; the first AL layer has the embedding, too."""
    return CharLM.network(CHARACTERS, dims=CharDims(block=64, width=128, heads=4, layers=depth, dropout=0.0))


def transformer(depth: int) -> Network:
    """That of ``agnews-transformer.yaml``; the embedding of 30,000 words is an AL layer by itself."""
    return Transformer.network(WORDS, CLASSES, dims=TextDims(blocks=depth))


def residual(depth: int) -> Network:
    """A stem and the blocks of ResNet-18's first stage, on images of half its side; the stem is an AL layer by itself.

    Bridges and codes are as narrow as :meth:`pipeal.ALPackage.from_bp` makes codes: the published ones of ResNet-18
    have thirty times the weights of such a block.
    """

    class Residual(VisionBP):
        @staticmethod
        def _blocks(dims: VisionDims) -> list[_Block]:
            stem: nn.Module = ConvBN(dims.channels, 64, nn.ReLU)
            blocks = [stem, *(BasicBlock(64, 64, nn.ReLU) for _ in range(depth))]
            return [_Block(block, 64, dims.size) for block in blocks]

        _head = staticmethod(Resnet._head)

    return Residual.network(CLASSES, dims=VisionDims(size=16, hidden=128, code=128))


def characters(samples: int) -> tuple[Tensor, Tensor]:
    """``(B, 64)`` each."""
    text = torch.randint(CHARACTERS, (samples, 65))
    return text[:, :-1], text[:, 1:]


def texts(samples: int) -> tuple[Tensor, Tensor]:
    """``(B, 32)`` words without padding, and ``(B,)`` classes."""
    return torch.randint(2, WORDS, (samples, 32)), torch.randint(CLASSES, (samples,))


def images(samples: int) -> tuple[Tensor, Tensor]:
    """``(B, 3, 16, 16)``, and ``(B,)`` classes."""
    return torch.randn(samples, 3, 16, 16), torch.randint(CLASSES, (samples,))


BLOCKS = {
    "charlm": Block("charlm cpu block, width 128, 12 × 64 characters", charlm, characters, 12, turn=12),
    "transformer": Block("AG News transformer block, width 300, 64 × 32 words", transformer, texts, 64, turn=2),
    "residual": Block("residual block, 64 channels, 32 images of 16 × 16", residual, images, 32, turn=2),
}


class Recomputed(nn.Module):
    """A block that keeps its input alone, and goes forward again for its backward.

    Args:
        block: Of features, or of a tuple of features and a mask.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tree) -> Tree:
        """As the block's."""
        if isinstance(x, Tensor):
            return checkpoint(self.block, x, use_reentrant=True)
        features, mask = x  # the gradient of a tensor within a tuple would be lost
        return checkpoint(lambda inner: self.block((inner, mask))[0], features, use_reentrant=True), mask


def layers_of_form(form: str, network: Network) -> Sequence[LocalLayer]:
    """Layers that train themselves, with fused Adam."""
    if form.startswith("AL"):
        return al.make_layers(network, 1e-3, None)
    layers = bp.make_layers(network, 1e-3, None)
    if form == "BP, recomputed":
        model = layers[0].model
        assert isinstance(model, nn.Sequential)
        for number in range(1, len(model) - 1):  # between the embedding, or stem, and the head
            model[number] = Recomputed(model[number])
    return layers


def train(form: str, layers: Sequence[LocalLayer], batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """One update of each batch."""
    if form.startswith("AL"):
        order: WithinStage = "layer" if form.endswith("layer") else "stage"
        with Pipeline(layers, ["cpu"], "sequential", threads=1, within_stage=order) as pipe:
            pipe.run(batches)
        return
    (layer,) = layers  # its dropout draws from the generator that recomputing sets back
    for x, y in batches:
        layer(x, y)
        layer.backward()
        layer.update()


class Saved:
    """What autograd has saved for backwards.

    Args:
        own: Tensors that are not counted: parameters and buffers.

    Attributes:
        now: Bytes of distinct storages.
        peak: The most that ``now`` has been.
    """

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        self.now = self.peak = 0
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._holders: Counter[int] = Counter()  # by the storage's address, which is its own while it is held

    @contextmanager
    def watching(self) -> Iterator[Saved]:
        """Counts graphs that this thread makes within."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Held(self, tensor), lambda held: held.tensor):
            yield self

    def add(self, tensor: Tensor) -> None:
        """A graph saves it."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._holders[storage.data_ptr()] += 1
            if self._holders[storage.data_ptr()] == 1:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)

    def drop(self, tensor: Tensor) -> None:
        """That graph lets it go."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._holders[storage.data_ptr()] -= 1
            if not self._holders[storage.data_ptr()]:
                del self._holders[storage.data_ptr()]
                self.now -= storage.nbytes()


class _Held:
    """A saved tensor; it ends with the graph that saved it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor.detach()  # itself would be a circle, of an output and its graph
        saved.add(self.tensor)

    def __del__(self) -> None:
        self.saved.drop(self.tensor)


@dataclass(frozen=True)
class Case:
    """What a process of its own measures."""

    block: str
    form: str
    depth: int
    batches: int = 2


def measure(case: Case) -> Found:
    """Trains in this process, which should have done nothing before."""
    torch.set_num_threads(1)
    block = BLOCKS[case.block]
    train(case.form, layers_of_form(case.form, block.network(1)), [block.batch(2)])  # libraries wake up
    memory = Memory([torch.device("cpu")], keep=False)
    torch.manual_seed(0)
    layers = layers_of_form(case.form, block.network(case.depth))
    batches = [block.batch(block.samples) for _ in range(case.batches)]
    saved, begin = Saved(own_tensors(layers)), perf_counter()
    with saved.watching():
        train(case.form, layers, batches)
    seconds, resident = perf_counter() - begin, memory.peak()
    if resident is None:
        raise SystemExit("the peak of resident memory is not known here; this benchmark needs Linux's /proc")
    return {
        **asdict(case),
        "predicted": False,
        "activations": saved.peak,
        "resident": resident,
        "weights": bytes_of(parameter for layer in layers for parameter in module_of(layer).parameters()),
        "optimizer": bytes_of(states(layers)),
        "seconds": seconds,
        "digest": digest(chain(own_tensors(layers), states(layers))),
    }


def own_tensors(layers: Sequence[LocalLayer]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for layer in layers:
        yield from layer.parameters()
        yield from layer.buffers()


def states(layers: Sequence[LocalLayer]) -> Iterator[Tensor]:
    """The tensors of optimizers."""
    for layer in layers:
        for optimizer in layer.optimizers():
            yield from tensors([list(state.values()) for state in optimizer.state.values()])


def bytes_of(found: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in found)


def digest(found: Iterable[Tensor]) -> str:
    """Differs where any bit does."""
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in found:
        hashed.update(tensor.detach().contiguous().numpy().data)
    return hashed.hexdigest()


def in_fresh_process(function: Callable[..., Found], *arguments: Any) -> Found:
    """What a function gives in a process that begins with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def on_line(points: Sequence[tuple[int, float]], depth: int) -> float:
    """Where a line through the last two points is.

    >>> on_line([(2, 0.0), (8, 20.0), (32, 68.0)], 128)
    260.0
    """
    (before, low), (after, high) = points[-2:]
    return high + (high - low) / (after - before) * (depth - after)


def predicted(done: Sequence[Found], depth: int) -> Found:
    """A case that lies on the line through the two deepest of those that were measured."""
    found = {name: on_line([(one["depth"], one[name]) for one in done], depth) for name in (*MEASURED, "seconds")}
    whole = {name: round(found[name]) for name in MEASURED}
    same = {name: done[-1][name] for name in ("block", "form", "batches")}
    return same | {"depth": depth, "predicted": True, **whole, "seconds": found["seconds"], "digest": None}


def measure_depths(block: str, form: str, depths: Sequence[int], limit_bytes: float, limit_s: float) -> Iterator[Found]:
    """The cases of a form, from the shallowest on; once one is beyond a limit, all deeper ones are predicted."""
    done: list[Found] = []
    for depth in depths:
        expected = predicted(done, depth) if len(done) > 1 else None
        if expected is not None and (expected["resident"] > limit_bytes or expected["seconds"] > limit_s):
            yield expected
            continue
        found = in_fresh_process(measure, Case(block, form, depth))
        if expected is not None:  # how well a depth is predicted that was measured, too
            found["would_predict"] = {name: expected[name] for name in ("activations", "resident")}
        done.append(found)
        yield found


def throughput(block: str, turns: int, depth: int) -> Found:
    """Seconds of each turn of each order, on one stage; the order that begins changes, and one turn more warms up."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    one = BLOCKS[block]
    layers = al.make_layers(one.network(depth), 1e-3, None)
    batches = [one.batch(one.samples) for _ in range(one.turn)]
    seconds: dict[WithinStage, list[float]] = {order: [] for order in ORDERS}
    for turn in range(turns + 1):
        for order in ORDERS[:: -1 if turn % 2 else 1]:
            with Pipeline(layers, ["cpu"], "sequential", threads=1, within_stage=order) as pipe:
                took = pipe.run(batches).seconds
            if turn:
                seconds[order].append(took)
    return {"block": block, "depth": depth, "batches": one.turn, "seconds": seconds}


def ratios_of(found: Found) -> list[float]:
    """Of each turn, the throughput of ``layer`` as a multiple of that of ``stage``."""
    return [stage / layer for layer, stage in zip(*(found["seconds"][order] for order in ORDERS), strict=True)]


def interval(values: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Of the median, 95 % by bootstrap."""
    draw = Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


@dataclass(frozen=True)
class Virtual:
    """Equal virtual stages of equal layers.

    Attributes:
        stages: How many.
        layers: Of each stage.
        forward_s: Of each layer.
        learn_s: Its backward and update.
    """

    stages: int = 4
    layers: int = 4
    forward_s: float = 0.005
    learn_s: float = 0.010

    def seconds(self, order: WithinStage, batches: int) -> float:
        """Of a pipelined run, without any cost of the engine: the fill, then a batch at a time."""
        to_hand_on = self.layers * self.forward_s + (order == "layer") * (self.layers - 1) * self.learn_s
        return (self.stages - 1) * to_hand_on + batches * self.layers * (self.forward_s + self.learn_s)

    def measured(self, order: WithinStage, batches: int) -> float:
        """By the real executor."""
        layers = [VirtualLayer(self.forward_s, self.learn_s) for _ in range(self.stages * self.layers)]
        devices = ["cpu"] * self.stages
        with Pipeline(layers, devices, "pipelined", threads=1, within_stage=order) as pipe:
            return pipe.run([(None, None)] * batches).seconds


def fill(virtual: Virtual, batch_counts: Sequence[int], turns: int) -> list[Found]:
    """Medians of both orders, in turns."""
    wake_on_time()
    rows = []
    for batches in batch_counts:
        took: dict[WithinStage, list[float]] = {order: [] for order in ORDERS}
        for turn in range(turns):
            for order in ORDERS[:: -1 if turn % 2 else 1]:
                took[order].append(virtual.measured(order, batches))
        calculated = {order: virtual.seconds(order, batches) for order in ORDERS}
        measured = {order: median(seconds) for order, seconds in took.items()}
        rows.append({**asdict(virtual), "batches": batches, "measured": measured, "calculated": calculated})
    return rows


def cases_of(found: Found, block: str, form: str) -> list[Found]:
    return [one for one in found["cases"] if (one["block"], one["form"]) == (block, form)]


def show(found: Found) -> None:
    """Prints all of it."""
    machine = "  ".join(f"{key} {value}" for key, value in found["machine"].items())
    print(f"{machine}\nload average {found['load']:.1f} before, one thread, fp32\n")
    for block in dict.fromkeys(one["block"] for one in found["cases"]):
        show_block(found, block)
    if found["throughput"]:
        rows: list[list[Cell]] = []
        for one in found["throughput"]:
            ratios = ratios_of(one)
            low, high = interval(ratios)
            quarter, _, three_quarters = quantiles(ratios, n=4)
            of_order = [1e3 * median(one["seconds"][order]) / one["batches"] for order in ORDERS]
            rows.append(
                [
                    one["block"],
                    one["depth"],
                    *(f"{ms:.1f}" for ms in of_order),
                    f"{median(ratios):.3f}",
                    f"{quarter:.3f}-{three_quarters:.3f}",
                    f"{low:.3f}-{high:.3f}",
                    len(ratios),
                ]
            )
        heads = ["block", "depth", "layer, ms/batch", "stage, ms/batch", "layer / stage", "quartiles", "95 %", "turns"]
        print_table("throughput of AL on one stage, in turns", heads, rows)
    if found["fill"]:
        one = found["fill"][0]
        title = (
            f"\n{one['stages']} virtual stages of {one['layers']} layers, F {1e3 * one['forward_s']:g} ms, "
            f"B and U {1e3 * one['learn_s']:g} ms, pipelined; s"
        )
        heads = ["batches", "layer", "calculated", "stage", "calculated", "fill: layer - stage", "calculated"]
        rows = []
        for one in found["fill"]:
            pairs = [(one["measured"][order], one["calculated"][order]) for order in ORDERS]
            apart = [layer - stage for layer, stage in zip(*pairs, strict=True)]
            rows.append([one["batches"], *(f"{second:.3f}" for pair in (*pairs, apart) for second in pair)])
        print_table(title, heads, rows)


def show_block(found: Found, block: str) -> None:
    """Its table, and what is to be seen of it."""
    cases = {form: cases_of(found, block, form) for form in FORMS}
    depths = [one["depth"] for one in cases["AL by layer"]]
    rows: list[list[Cell]] = [
        [what, form, *(in_mib(one, what) for one in cases[form])]
        for what in ("activations", "resident")
        for form in FORMS
        if cases[form]
    ]
    both = {form: cases[form] for form in ("BP", "AL by layer") if cases[form]}
    for what, name in (("weights", "weights"), ("optimizer", "optimizer states")):
        rows += [[name, form[:2], *(in_mib(one, what) for one in ones)] for form, ones in both.items()]
    if len(both) == 2:
        pairs = zip(both["AL by layer"], both["BP"], strict=True)
        rows.append(["AL / BP", "", *(f"{more['weights'] / less['weights']:.2f}×" for more, less in pairs)])
    print_table(
        f"{BLOCKS[block].what}; peaks in MiB at each depth, ~ predicted",
        ["what", "form", *map(str, depths)],
        rows,
    )
    by_layer = [one for one in cases["AL by layer"] if not one["predicted"]]
    first, last = by_layer[0], by_layer[-1]
    print(
        f"AL by layer: activations at depth {last['depth']} are {last['activations'] / first['activations']:.3f} × "
        f"those at {first['depth']}"
    )
    pairs = zip(cases["AL by layer"], cases["AL by stage"], strict=True)
    same = {one["depth"]: one["digest"] == other["digest"] for one, other in pairs if one["digest"] and other["digest"]}
    print(f"AL by stage and by layer: weights and optimizer states equal bit for bit, by depth: {same}")
    errors = {
        what: [abs(one["would_predict"][what] / one[what] - 1) for one in found["cases"]
               if one["block"] == block and "would_predict" in one]
        for what in ("activations", "resident")
    }  # fmt: skip
    if errors["resident"]:
        told = ", ".join(f"{what} {max(shares):.1%}" for what, shares in errors.items())
        print(f"depths that were measured would have been predicted within: {told}")
    print()


def in_mib(one: Found, what: str) -> str:
    """With a mark where it is predicted.

    >>> in_mib({"predicted": True, "resident": 3 * 2**20}, "resident")
    '~3.0'
    """
    return f"{'~' if one['predicted'] else ''}{one[what] / MIB:,.1f}"


def draw(found: Found, path: Path) -> None:
    """A picture of both peaks over depth."""
    blocks = list(dict.fromkeys(one["block"] for one in found["cases"]))
    figure = new_figure(4.2 * len(blocks), 7.2, "Peak memory over depth (hollow: predicted)")
    panels = figure.subplots(2, len(blocks), squeeze=False, sharex=True)
    for row, (what, title) in enumerate((("activations", "saved activations"), ("resident", "resident memory"))):
        for panel, block in zip(panels[row], blocks, strict=True):
            for form, colour in zip(FORMS, COLOURS, strict=False):
                ones = cases_of(found, block, form)
                depths, sizes = [one["depth"] for one in ones], [one[what] / MIB for one in ones]
                panel.plot(depths, sizes, color=colour, linewidth=1.6, label=form, zorder=2)
                for hollow in (False, True):
                    dots = [place for place, one in enumerate(ones) if one["predicted"] is hollow]
                    at, high = [depths[place] for place in dots], [sizes[place] for place in dots]
                    panel.scatter(at, high, s=26, color="white" if hollow else colour, edgecolors=colour, zorder=3)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            shown = sorted({one["depth"] for one in found["cases"]})
            panel.set_xticks(shown, labels=list(map(str, shown)))
            panel.minorticks_off()
            what_it_is = BLOCKS[block].what.replace(", ", "\n", 1)
            finish(panel, what_it_is if row == 0 else "", "blocks" if row else "", f"{title}, MiB")
    panels[0][0].legend(**LEGEND)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--turns", type=int, default=20, help="of the throughput; 0 for none")
    parser.add_argument("--limit-gib", type=float, default=6.0, help="beyond which resident memory is predicted")
    parser.add_argument("--limit-s", type=float, default=300.0, help="likewise of two batches")
    parser.add_argument("--quick", action="store_true", help="depths 2, 8 and 32 of charlm, 4 turns: a minute")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print kept figures, and measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.depths, options.blocks, options.turns = [2, 8, 32], ["charlm"], 4
    depths: list[int] = options.depths
    if depths[0] < 1 or depths != sorted(set(depths)):
        parser.error(f"found --depths {depths}; expected growing numbers, at least 1")
    if options.turns < 0 or options.turns == 1:
        parser.error(f"found --turns {options.turns}; expected 0, or at least 2 to tell how they differ")
    if options.show is None:
        found = measured(options.blocks, depths, options)
    else:
        found = json.loads(options.show.read_text(encoding="utf-8"))
    show(found)
    if options.plot is not None:
        draw(found, options.plot)


def measured(blocks: Sequence[str], depths: Sequence[int], options: argparse.Namespace) -> Found:
    """Everything, kept in the JSON as far as it is known."""
    found: Found = {
        "machine": environment(),
        "load": os.getloadavg()[0],
        "blocks": {block: BLOCKS[block].what for block in blocks},
        "cases": [],
        "throughput": [],
        "fill": [],
    }

    def keep(kind: str, one: Found, told: str) -> None:
        found[kind].append(one)
        print(told, flush=True)
        if options.json is not None:
            write_json(options.json, found)

    for block in blocks:
        for form in FORMS:
            for one in measure_depths(block, form, depths, options.limit_gib * 2**30, options.limit_s):
                sizes = ", ".join(f"{what} {in_mib(one, what)} MiB" for what in ("activations", "resident"))
                keep("cases", one, f"{block}, {form}, depth {one['depth']}: {sizes}, {one['seconds']:.1f} s")
    if options.turns:
        for block in blocks:
            one = in_fresh_process(throughput, block, options.turns, THROUGHPUT_DEPTH)
            keep("throughput", one, f"{block}: layer / stage {median(ratios_of(one)):.3f}")
        for one in fill(Virtual(), (8, 32), 2 if options.quick else 5):
            keep("fill", one, f"virtual stages, {one['batches']} batches: {one['measured']}")
    return found


if __name__ == "__main__":
    main()
