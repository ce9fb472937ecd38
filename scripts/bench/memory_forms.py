"""The networks of the memory benchmark, the forms that they train in, and what a training takes.

Recomputing is ``torch.utils.checkpoint`` with ``use_reentrant=True`` on every block: its other variant keeps what it
recomputes where no hook sees it. BP is trained by hand, AL by a pipeline, all on one thread; batches are random
numbers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

import torch
from memory_report import Found
from memory_taken import Memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeal.core.options import WithinStage
from pipeal.core.tree import Tree, tensors
from pipeal.engine import Pipeline
from pipeal.methods import Network, Unit, al, bp
from pipeal.methods.layer import LocalLayer
from pipeal.models.charlm import CharDims, CharLM
from pipeal.models.convolution import BasicBlock, ConvBN
from pipeal.models.text import TextDims, Transformer
from pipeal.models.vision import Resnet, VisionBP, VisionDims, image_units

CHARACTERS, WORDS, CLASSES = 65, 30_000, 4


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
        def units(dims: VisionDims) -> list[Unit]:
            def stem(before: int, after: int) -> list[nn.Module]:
                return [ConvBN(before, after, nn.ReLU)]

            def block(before: int, after: int) -> list[nn.Module]:
                return [BasicBlock(before, after, nn.ReLU)]

            return image_units(dims, [(stem, 64, 1), *[(block, 64, 1)] * depth])

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
        return list(al.make_layers(network, 1e-3, None))
    layers = list(bp.make_layers(network, 1e-3, None))
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
    """What a process of its own measures.

    Attributes:
        block: A name of :data:`BLOCKS`.
        form: Of :data:`FORMS`.
        depth: How many blocks.
        batches: How many it trains for.
        holes: Whether the C library has a heap for large blocks.
    """

    block: str
    form: str
    depth: int
    batches: int = 2
    holes: bool = True


def measure(case: Case) -> Found:
    """Trains in this process, which should have done nothing before."""
    torch.set_num_threads(1)
    block = BLOCKS[case.block]
    train(case.form, layers_of_form(case.form, block.network(1)), [block.batch(2)])  # libraries wake up
    memory = Memory([torch.device("cpu")], keep=False, holes=case.holes)
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
        "block": case.block,
        "form": case.form,
        "depth": case.depth,
        "batches": case.batches,
        "activations": saved.peak,
        "resident": resident,
        "weights": bytes_of(parameter for layer in layers for parameter in layer.parameters()),
        "optimizer": bytes_of(states(layers)),
        "seconds": seconds,
        "digest": digest(chain(own_tensors(layers), states(layers))),
        "predicted": [],
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
