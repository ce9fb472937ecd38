"""What leaving at each exit costs, and what a training step does, in FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from pipeal.core.by_size import BySize
from pipeal.core.errors import CountingError, DataError, PipealError, first_line
from pipeal.core.flops import counting
from pipeal.core.modules import device_of, in_mode, layers_of, module_of
from pipeal.core.outofmemory import is_out_of_memory
from pipeal.core.protocols import DOWN, TURN, UP, Path, TrainableLayer
from pipeal.core.tree import Tree, batch_size, move

T = TypeVar("T")


@dataclass(frozen=True)
class ExitCosts:
    """FLOPs per sample (a multiplication and an addition are two), by exit.

    Attributes:
        climb: Of each layer's ``f``.
        descent: Of the way back from each exit: its ``b``, then every ``h`` below.
    """

    climb: tuple[float, ...]
    descent: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.climb)

    def alone(self, depth: int) -> float:
        """The cost of exit ``depth`` (from 1) when it is the only one tried."""
        return sum(self.climb[:depth]) + self.descent[depth - 1]

    def on_the_way(self, tried: Sequence[int]) -> list[float]:
        """The cost of leaving at each of the exits ``tried``, with every descent before it.

        >>> ExitCosts(climb=(10, 20, 30), descent=(1, 2, 3)).on_the_way([1, 3])
        [11.0, 64.0]
        """
        spent = 0.0
        costs = []
        for depth in tried:
            spent += self.descent[depth - 1]
            costs.append(sum(self.climb[:depth]) + spent)
        return costs


def exit_costs(model: nn.Module | Iterable[TrainableLayer], sample: Tree) -> ExitCosts:
    """Counts the products and convolutions of every block on one batch; what is cheap beside them is left out.

    Each layer is looked at by itself: an ``h`` costs as much with the code of its own ``b`` as with that of the layer
    above, which is alike.

    Args:
        model: The layers, on whatever devices they are; of an iterator, no more than one is here at a time.
        sample: A batch of inputs. Padded texts cost what their padded length costs.

    Raises:
        DataError: The batch is empty.
        CountingError: They cannot be counted.
    """
    if not batch_size(sample):
        raise DataError("the costs of exits cannot be counted on an empty batch; pass a batch of inputs")
    batches = BySize[Tree]()
    batches.add(sample, sample)
    return mean_exit_costs(model, batches)


def mean_exit_costs(model: nn.Module | Iterable[TrainableLayer], batches: BySize[Tree]) -> ExitCosts:
    """As :func:`exit_costs`, the mean over the samples of several batches of inputs."""
    climb, descent = [], []
    some = batches.some()
    sizes, down = [batch_size(x) for x in some], [0 for _ in some]
    for layer in model if isinstance(model, Iterator) else layers_of(model):
        up, back = [], []
        for number, size in enumerate(sizes):
            some[number], flops = inference_flops(layer, some[number])
            down[number] += flops[DOWN]
            up.append(flops[UP] / size)
            back.append((flops[TURN] + down[number]) / size)
        climb.append(batches.mean(up))
        descent.append(batches.mean(back))
    return ExitCosts(tuple(climb), tuple(descent))


def inference_flops(layer: TrainableLayer, x: Tree) -> tuple[Tree, dict[Path, int]]:
    """What a layer hands up of a batch, and the FLOPs of its blocks on it, each after the one before."""
    module, flops = module_of(layer), dict[Path, int]()
    found = x = move(x, device_of(module))
    with in_mode([module], False), torch.no_grad():
        for path in (UP, TURN, DOWN):
            found, flops[path] = _counted(partial(layer.inference, found, path))
            x = found if path == UP else x
    return x, flops


def training_flops(model: nn.Module | Iterable[TrainableLayer], x: Tree, y: Tree) -> float:
    """Counts, per sample, what :func:`exit_costs` counts, of the forward and the backward of all losses of a batch.

    What is cheap beside products and convolutions is left out, and so is the step of the optimizers.

    Args:
        model: The layers, on one device; no weight is changed, but gradients are gone.
        x: A batch of inputs there.
        y: Its targets.

    Raises:
        DataError: The batch is empty.
        CountingError: It cannot be counted.
    """
    size, flops = batch_size(x), 0
    if not size:
        raise DataError("the cost of training cannot be counted on an empty batch; pass a batch of inputs")
    for layer in layers_of(model):
        (x, y), own = learning_flops(layer, x, y)
        flops += own
    return flops / size


def learning_flops(layer: TrainableLayer, x: Tree, y: Tree) -> tuple[tuple[Tree, Tree], int]:
    """What a layer hands on of a batch, and the FLOPs of its forward and backward; its gradients are gone then."""

    def learn() -> tuple[Tree, Tree]:
        onward = layer(x, y)
        layer.backward()
        return onward

    with in_mode([module_of(layer)], True), torch.enable_grad():
        onward, flops = _counted(learn)
    for weight in module_of(layer).parameters():
        weight.grad = None
    return onward, flops


def _counted(work: Callable[[], T]) -> tuple[T, int]:
    """What some work of a layer gives, and its FLOPs.

    What stops it here need not have stopped a training: each operator goes through the counter, on few rows.

    Raises:
        CountingError: It goes without the counter alone.
    """
    try:
        with counting() as counter:
            found = work()
        return found, counter.get_total_flops()
    except Exception as error:  # whatever a layer raises
        if isinstance(error, PipealError) or is_out_of_memory(error):
            raise
        work()
        raise CountingError(f"FLOPs cannot be counted: {first_line(error)}") from error
