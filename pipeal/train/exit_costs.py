"""What leaving at each exit costs, and what a training step does, in FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeal.errors import DataError
from pipeal.packet import TrainableLayer, Tree, batch_size, device_of, in_mode, layers_of, module_of, move


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
            with _counting() as counter:
                x = layer.inference(move(x, device_of(module_of(layer))), "f")
            climb.append(counter.get_total_flops() / size)
            with _counting() as counter:
                code = layer.inference(x, "b")
                for below in reversed(layers[:depth]):
                    code = below.inference(move(code, device_of(module_of(below))), "h")
            descent.append(counter.get_total_flops() / size)
    return ExitCosts(tuple(climb), tuple(descent))


def training_flops(model: nn.Module | Iterable[TrainableLayer], x: Tree, y: Tree) -> float:
    """Counts, per sample, what :func:`exit_costs` counts, of the forward and the backward of all losses of a batch.

    What is cheap beside products and convolutions is left out, and so is the step of the optimizers.

    Args:
        model: The layers, on one device; no weight is changed, but gradients gather.
        x: A batch of inputs there.
        y: Its targets.

    Raises:
        DataError: The batch is empty.
    """
    layers = layers_of(model)
    size = batch_size(x)
    if not size:
        raise DataError("the cost of training cannot be counted on an empty batch; pass a batch of inputs")
    with in_mode(map(module_of, layers), True), torch.enable_grad(), _counting() as counter:
        for layer in layers:
            x, y = layer(x, y)
            layer.backward()
    return counter.get_total_flops() / size


# Of a recurrent network's fused operators the counter of PyTorch knows nothing.
def _recurrent_flops(rows: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """Each matrix is applied once per step and sample."""
    return 2 * prod(rows[:-1]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _mkldnn_rnn_flops(x: Sequence[int], w_input: Sequence[int], w_hidden: Sequence[int], *_: Any, **__: Any) -> int:
    return _recurrent_flops(x, [w_input, w_hidden])


def _cudnn_rnn_flops(x: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    return _recurrent_flops(x, weights)


def _mkldnn_rnn_backward_flops(*arguments: Any, **_: Any) -> int:
    """Each matrix once for the gradient of what it was applied to, and once for its own."""
    return 2 * _mkldnn_rnn_flops(*arguments)


def _cudnn_rnn_backward_flops(*arguments: Any, **_: Any) -> int:
    return 2 * _cudnn_rnn_flops(*arguments)


_RECURRENT = {
    torch.ops.aten.mkldnn_rnn_layer: _mkldnn_rnn_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward_flops,
    torch.ops.aten._cudnn_rnn: _cudnn_rnn_flops,
    torch.ops.aten._cudnn_rnn_backward: _cudnn_rnn_backward_flops,
}


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    """Counts FLOPs; attention goes by plain products, which every version knows, not by fused operators."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False, custom_mapping=_RECURRENT) as counter,
        ):
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
