"""FLOPs of operators, counted by PyTorch's counter: taught what it does not know, kept from ways that it cannot see.

Those of a model's training and exits are summed in :mod:`pipeal.training.exit_costs` and ``run.form_costs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Counts the FLOPs of products, convolutions, attention and recurrences on this thread, each product as two.

    Attention goes by plain products, which every version of PyTorch counts, and not by fused operators.
    Both switches are process-wide: meanwhile attention in other threads, a training's included, takes plain products,
    too, and may round otherwise.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    counter = FlopCounterMode(display=False, custom_mapping=_RECURRENT)
    counter.mod_tracker = _Untracked()
    try:
        with sdpa_kernel(SDPBackend.MATH), counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class _Untracked(ModuleTracker):
    """No sums by module are asked for, and without gradients the tracker's hooks fail on a view of a weight."""

    def __enter__(self) -> _Untracked:
        return self

    def __exit__(self, *_: object) -> None: ...


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
