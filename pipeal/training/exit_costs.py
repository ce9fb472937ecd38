"""What leaving at each exit costs, and what a training step does, in FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeal.core.errors import DataError
from pipeal.core.flops import counting
from pipeal.core.modules import device_of, in_mode, layers_of, module_of
from pipeal.core.protocols import DOWN, TURN, UP, TrainableLayer
from pipeal.core.tree import Tree, batch_size, move


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

    Args:
        model: The layers, on whatever devices they are.
        sample: A batch of inputs. Padded texts cost what their padded length costs.

    Raises:
        DataError: The batch is empty.
    """
    layers = layers_of(model)
    size = batch_size(sample)
    if not size:
        raise DataError("the costs of exits cannot be counted on an empty batch; pass a batch of inputs")
    climb, descent = [], []
    x = sample
    with in_mode(map(module_of, layers), False), torch.no_grad():
        for depth, layer in enumerate(layers, 1):
            with counting() as counter:
                x = layer.inference(move(x, device_of(module_of(layer))), UP)
            climb.append(counter.get_total_flops() / size)
            with counting() as counter:
                code = layer.inference(x, TURN)
                for below in reversed(layers[:depth]):
                    code = below.inference(move(code, device_of(module_of(below))), DOWN)
            descent.append(counter.get_total_flops() / size)
    return ExitCosts(tuple(climb), tuple(descent))


def training_flops(model: nn.Module | Iterable[TrainableLayer], x: Tree, y: Tree) -> float:
    """Counts, per sample, what :func:`exit_costs` counts, of the forward and the backward of all losses of a batch.

    What is cheap beside products and convolutions is left out, and so is the step of the optimizers.

    Args:
        model: The layers, on one device; no weight is changed, but gradients are gone.
        x: A batch of inputs there.
        y: Its targets.

    Raises:
        DataError: The batch is empty.
    """
    layers = layers_of(model)
    size = batch_size(x)
    if not size:
        raise DataError("the cost of training cannot be counted on an empty batch; pass a batch of inputs")
    with in_mode(map(module_of, layers), True), torch.enable_grad(), counting() as counter:
        for layer in layers:
            x, y = layer(x, y)
            layer.backward()
            for weight in module_of(layer).parameters():
                weight.grad = None  # of no layer but the one that is looked at
    return counter.get_total_flops() / size
