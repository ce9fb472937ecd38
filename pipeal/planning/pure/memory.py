"""What training holds at its worst moment, for any depth and batch, out of what each block alone was seen to hold.

Each form of training is a row of moments; what is alive at each is a sum over blocks, and a peak is the largest::

    BP                   F1 F2 F3 B3 B2 B1 U         graphs of all blocks, then gradients of all
    BP, checkpointed     F1 F2 F3 R3 B3 R2 B2 …      inputs of all blocks, the graph of one (R: forward again)
    AL by stage          F1 F2 F3 B1 B2 B3 U         as BP
    AL by layer          F1 B1 U1 F2 B2 U2 …         the graph and the gradients of one layer
    AL offloaded         F1 B1 U1 F2 B2 U2 …         its weights, and in its update its optimizer states, alone, too

No torch: what is fed in is measured by :mod:`pipeal.planning.measure.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from pipeal.core.options import EngineOptions, WithinStage
from pipeal.planning.pure.layer_cost import repeated


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """One layer, or one block of a network for backpropagation, on a batch; all in bytes.

    What comes and goes is counted once, by whom keeps it: a packet that a graph keeps is part of it.

    Attributes:
        weights: Parameters and buffers.
        gradients: Those of the parameters, after the backward.
        optimizer: What its optimizers keep.
        comes: The packet that comes, input and target.
        comes_kept: What the graph keeps of it.
        goes: What is new in the packet that goes.
        goes_kept: What the graph keeps of that.
        graph: All that is new and that the graph keeps, ``goes_kept`` included.
        forward: The most beside what was there when the forward began.
        forward_alone: The same of a forward that keeps nothing for a backward.
        backward: The most beside gradients and what was there when the backward began.
        backward_whole: The most with gradients.
        update: The most beside what was there when the update began.
        untouched: What of the graph is allocated, but not written to by the forward: the system has no pages for it.
        filled: What of that an operator of its backward writes to, at most.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    comes: int = 0
    comes_kept: int = 0
    goes: int = 0
    goes_kept: int = 0
    graph: int = 0
    forward: int = 0
    forward_alone: int = 0
    backward: int = 0
    backward_whole: int = 0
    update: int = 0
    untouched: int = 0
    filled: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """The most that each part takes, in bytes; as not all are largest at the same moment, ``peak`` may be less than
    their sum.

    Of offloaded layers, the one at work counts, as a process has no other in its memory: what the page cache has of
    others is the kernel's, which takes it back when it needs to.

    Attributes:
        weights: Parameters and buffers.
        gradients: Of the parameters.
        optimizer: What optimizers keep.
        activations: All else: graphs, packets, the batch, what an operator needs for a moment.
        peak: The most of all parts at once.
        resident: The same in physical memory: without what is never written to, and with kernels
            (:attr:`Model.kernels`).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    resident: int


Form = Literal["layers", "whole"]
"""Layers that train themselves, or a network with one backward through all of it."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train; a further one is an entry of :data:`WAYS`.

    Attributes:
        name: As tables have it.
        form: Which form of the model it trains.
        moments: What is held at each moment, beside weights and what optimizers keep, as a row of :class:`_Moment`.
        within_stage: The order of its layers.
        checkpointed: Whether its blocks are under activation checkpointing.
        offloaded: Whether layers that are not at work are on a disk; the moments then say what of the others is there.
    """

    name: str
    form: Form
    moments: Callable[[Sequence[BlockMemory]], Iterator[_Moment]]
    within_stage: WithinStage = "stage"
    checkpointed: bool = False
    offloaded: bool = False

    def options(self, options: EngineOptions) -> EngineOptions:
        """Those of a pipeline that trains by it."""
        return replace(options, within_stage=self.within_stage, offload="disk" if self.offloaded else "none")

    def parts(self, blocks: Sequence[BlockMemory]) -> Parts:
        """What training these blocks takes on one device.

        >>> block = BlockMemory(weights=10, gradients=10, optimizer=20, graph=100, forward=120, backward=40)
        >>> for way in WAYS.values():
        ...     print(way.name, way.parts([block] * 8).activations)
        BP 840
        BP, checkpointed 140
        AL by stage 840
        AL by layer 140
        AL offloaded 140
        """
        found = list(self.moments(blocks))
        of_all = max if self.offloaded else sum
        weights, optimizer = of_all(block.weights for block in blocks), of_all(block.optimizer for block in blocks)
        always = 0 if self.offloaded else weights + optimizer
        return Parts(
            weights,
            max(moment.gradients for moment in found),
            optimizer,
            max(moment.activations for moment in found),
            always + max(moment.at_once for moment in found),
            always + max(moment.at_once - moment.untouched for moment in found),
        )


@dataclass(frozen=True, slots=True)
class _Moment:
    gradients: int
    activations: int
    at_once: int
    untouched: int = 0


def _forward(held: int, most: int, untouched: int) -> _Moment:
    return _Moment(0, held + most, held + most, untouched)


def _backward(block: BlockMemory, held: int, gradients: int, untouched: int) -> _Moment:
    """Of a backward that finds so many gradients of other blocks."""
    at_once = held + gradients + max(block.backward_whole, block.backward)
    return _Moment(gradients + block.gradients, held + block.backward, at_once, untouched - block.filled)


def _by_layer(blocks: Sequence[BlockMemory]) -> Iterator[_Moment]:
    for number in range(len(blocks)):
        yield from _visit(blocks, number)


def _visit(blocks: Sequence[BlockMemory], number: int) -> Iterator[_Moment]:
    """The forward, the backward and the update of one layer."""
    batch, block = blocks[0].comes, blocks[number]
    yield _forward(batch + (block.comes if number else 0), block.forward, block.untouched)
    kept = block.graph + (block.comes_kept if number else 0) + _unkept(block)
    yield _backward(block, batch + kept, 0, block.untouched)
    held = batch + block.goes + block.update
    yield _Moment(block.gradients, held, block.gradients + held)


def _offloaded(blocks: Sequence[BlockMemory]) -> Iterator[_Moment]:
    """Of the layer at work, pages come as they are used: those of its optimizer states in its update."""
    for number, block in enumerate(blocks):
        forward, backward, update = _visit(blocks, number)
        for moment, own in ((forward, 0), (backward, 0), (update, block.optimizer)):
            yield replace(moment, at_once=moment.at_once + block.weights + own)


def _by_stage(blocks: Sequence[BlockMemory], *, down: bool = False) -> Iterator[_Moment]:
    """All forwards, all backwards, all updates; ``down`` has the last block go backward first, as one graph does."""
    batch, held, untouched = blocks[0].comes, 0, 0
    graphs = []
    before = BlockMemory()
    for block in blocks:
        untouched += block.untouched
        yield _forward(batch + held + _unkept(before), block.forward, untouched)
        graphs.append(block.graph + _taken_over(before, block))
        held += graphs[-1]
        before = block
    onward, gradients = _unkept(before), 0
    row = list(zip(blocks, graphs, strict=True))
    for block, graph in reversed(row) if down else row:
        yield _backward(block, batch + held + onward, gradients, untouched)
        held -= graph
        untouched -= block.untouched
        gradients += block.gradients
    # One optimizer has the whole network, and what it needs for a moment is of all its weights.
    update = (sum if down else max)(block.update for block in blocks)
    held = batch + before.goes + update
    yield _Moment(gradients, held, gradients + held)


def _end_to_end(blocks: Sequence[BlockMemory]) -> Iterator[_Moment]:
    return _by_stage(blocks, down=True)


def _checkpointed(blocks: Sequence[BlockMemory]) -> Iterator[_Moment]:
    batch, inputs = blocks[0].comes, 0
    before = BlockMemory()
    for block in blocks:
        inputs += before.goes
        yield _forward(batch + inputs, block.forward_alone, 0)
        before = block
    onward, gradients = before.goes, 0
    for number, block in reversed(list(enumerate(blocks))):
        held = batch + inputs + onward
        # The gradient of what it hands on is there while it goes forward again; the last block's is yet to come.
        again = held + block.forward + (block.goes if number < len(blocks) - 1 else 0)
        yield _Moment(gradients, again, gradients + again, block.untouched)
        yield _backward(block, held + block.graph, gradients, block.untouched)
        gradients += block.gradients
        inputs -= blocks[number - 1].goes if number else 0
    held = batch + onward + sum(block.update for block in blocks)
    yield _Moment(gradients, held, gradients + held)


def _unkept(block: BlockMemory) -> int:
    """What of a packet only the one who takes it holds."""
    return block.goes - block.goes_kept


def _taken_over(before: BlockMemory, block: BlockMemory) -> int:
    """What a graph keeps of its packet that the graph before does not keep anyway; batches are counted apart."""
    return max(0, min(block.comes_kept, before.goes) - before.goes_kept)


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("BP", "whole", _end_to_end),
        Way("BP, checkpointed", "whole", _checkpointed, checkpointed=True),
        Way("AL by stage", "layers", _by_stage),
        Way("AL by layer", "layers", _by_layer, within_stage="layer"),
        Way("AL offloaded", "layers", _offloaded, within_stage="layer", offloaded=True),
    )
}
"""By name, in the order of tables."""


def way_of_layers(within_stage: WithinStage | None, *, offloaded: bool = False) -> Way:
    """The way of layers that train themselves, in that order; None for that of ``sequential`` and ``pipelined``.

    >>> way_of_layers("stage").name, way_of_layers(None).name, way_of_layers("layer", offloaded=True).name
    ('AL by stage', 'AL by layer', 'AL offloaded')
    """
    return WAYS["AL offloaded" if offloaded else f"AL by {within_stage or 'layer'}"]


@dataclass(frozen=True)
class Model:
    """A model whose blocks were measured on two batches: for batches of any size, and as if of any depth.

    Attributes:
        sizes: The samples of the two, the smaller first.
        al: For each of the two, the layers of the AL form.
        bp: For each, the blocks of the BP form; those beside the layers are a head, which comes once.
        kernels: Bytes of what libraries generate for the shapes of a batch and keep, of the AL form and of the BP form:
            once for all layers that are alike, and of about one size whatever that of the batch.
    """

    sizes: tuple[int, int]
    al: tuple[Sequence[BlockMemory], Sequence[BlockMemory]]
    bp: tuple[Sequence[BlockMemory], Sequence[BlockMemory]]
    kernels: tuple[int, int] = (0, 0)

    @property
    def depth(self) -> int:
        """Its layers."""
        return len(self.al[0])

    def parts(self, way: Way, samples: int, depth: int | None = None) -> Parts:
        """What it takes on a batch of so many samples, as if it had so many layers (None: as it is).

        Raises:
            PlacementError: A model of one layer has none to repeat.
        """
        small, large = self.al if way.form == "layers" else self.bp
        rows = [_between(one, other, self.sizes, samples) for one, other in zip(small, large, strict=True)]
        parts = way.parts(rows if depth is None else repeated(rows, depth, of=self.depth))
        return replace(parts, resident=parts.resident + self.kernels[way.form == "whole"])

    def largest_batch(self, way: Way, limit: int, depth: int, most: int) -> int:
        """The most samples, at most ``most``, with which so many layers take no more than so many bytes; 0 for none."""
        return _last(lambda samples: self.parts(way, samples, depth).peak <= limit, most)

    def greatest_depth(self, way: Way, samples: int, limit: int, most: int) -> int:
        """The most layers, at most ``most``, that take no more than so many bytes on so many samples; 0 for none."""
        return _last(lambda depth: self.parts(way, samples, depth).peak <= limit, most)


def _between(small: BlockMemory, large: BlockMemory, sizes: tuple[int, int], samples: int) -> BlockMemory:
    """On the line through both: a peak is the largest of sums that each grow evenly with the samples, so beyond the
    larger one it may be steeper, never flatter."""
    share = (samples - sizes[1]) / (sizes[1] - sizes[0])
    found = {}
    for known in fields(BlockMemory):
        one, other = getattr(small, known.name), getattr(large, known.name)
        found[known.name] = max(0, round(other + (other - one) * share))
    # Whether a page is new depends on what was freed before: too much chance for a slope.
    for name in ("untouched", "filled"):
        found[name] = getattr(large, name) * samples // sizes[1]
    return BlockMemory(**found)


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all below one that fits do; 0 for none.

    >>> [_last(lambda number: number <= limit, 100) for limit in (0, 1, 37, 100, 1000)]
    [0, 1, 37, 100, 100]
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
