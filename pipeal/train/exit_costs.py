"""What leaving at each exit costs, in FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
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


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Each query meets every key, and takes a share of each value. PyTorch 2.6 does not count that on a CPU."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


# Of a recurrent network's fused operators the counter of PyTorch knows nothing.
def _recurrent_flops(rows: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """Each matrix is applied once per step and sample."""
    return 2 * prod(rows[:-1]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _mkldnn_rnn_flops(x: Sequence[int], w_input: Sequence[int], w_hidden: Sequence[int], *_: Any, **__: Any) -> int:
    return _recurrent_flops(x, [w_input, w_hidden])


def _cudnn_rnn_flops(x: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    return _recurrent_flops(x, weights)


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    """Counts FLOPs; attention goes the way of training, whose operators are known, not the fused one of inference."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    mapping = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten.mkldnn_rnn_layer: _mkldnn_rnn_flops,
        torch.ops.aten._cudnn_rnn: _cudnn_rnn_flops,
    }
    try:
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
