"""Adam for large embeddings: of a table, an update touches the rows that the batch looked up, and no others.

Adam as it is updates all 30,000 rows of a vocabulary for a batch that holds 3,000 of them, because a row that is not
looked up still moves by what is left of its momentum. Here such a row stays as it is, moments included, until a batch
looks it up again. That is another optimizer, not a faster way to the same weights: the two agree where every batch
looks up every row. It is what PyTorch's ``SparseAdam`` computes, in one pass, and beside dense parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from pipeal.core.errors import ConfigError


class TouchedAdam(torch.optim.Adam):
    """Fused Adam, and for parameters whose gradient is sparse, as of ``nn.Embedding(sparse=True)``, row by row.

    Bias corrections count all updates of a table, not those of a row.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        betas: How much of the moments is kept in an update.
        eps: Added to the root of the second moment.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates dense parameters as Adam does, then the rows of the others.

        Raises:
            ConfigError: The group of one of the others has ``weight_decay``, ``amsgrad`` or ``maximize``; nothing is
                updated then.
        """
        tables = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.grad.is_sparse
        ]
        for group, _, _ in tables:
            for name in ("weight_decay", "amsgrad", "maximize"):
                if group[name]:
                    raise ConfigError(f"found {name} in a group with sparse gradients; leave it out of that group")
        for _, parameter, _ in tables:
            parameter.grad = None  # which Adam passes over
        loss = super().step(closure)
        for group, parameter, gradient in tables:
            parameter.grad = gradient
            self._update_rows(group, parameter, gradient)
        return loss

    def _update_rows(self, group: dict[str, Any], table: Tensor, gradient: Tensor) -> None:
        state = self.state[table]
        if not state:  # under the names and of the types that fused Adam has
            state["step"] = torch.zeros((), dtype=torch.float32, device=table.device)
            state["exp_avg"] = torch.zeros_like(table)
            state["exp_avg_sq"] = torch.zeros_like(table)
        rows, summed = _by_row(gradient)
        whole = table, state["exp_avg"], state["exp_avg_sq"]
        weights, mean, square = (tensor.index_select(0, rows) for tensor in whole)
        adam(
            [weights],
            [summed],
            [mean],
            [square],
            [],
            [state["step"]],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        for tensor, part in zip(whole, (weights, mean, square), strict=True):
            tensor.index_copy_(0, rows, part)


def touch_rows(module: nn.Module) -> int:
    """Has the embeddings of a module give sparse gradients, which hold the rows that a batch looked up.

    Their ``padding_idx`` is taken away, to leave out which PyTorch reads every batch once more, and on a GPU waits for
    it: a module that pads has to see to it that no gradient comes to that row, as
    :class:`pipeal.models.features.TokenEmbedding` does.

    Returns:
        How many embeddings there are.

    Raises:
        ConfigError: One of them has options that a sparse gradient does not go with.
    """
    found = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    for part in found:
        if part.max_norm is not None or part.scale_grad_by_freq:
            raise ConfigError(
                "found an embedding with max_norm or scale_grad_by_freq; expected one without, or leave it dense"
            )
        part.sparse, part.padding_idx = True, None
    return len(found)


def _by_row(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse gradient and the sum for each; on a GPU, a row comes as often as it was looked up."""
    places, values = gradient._indices()[0], gradient._values()
    if gradient.device.type != "cpu":
        return places, _summed_everywhere(places, values, gradient.shape[0])
    rows, slots = torch.unique(places, return_inverse=True)
    return rows, _summed(values, slots, len(rows))


def _summed_everywhere(places: Tensor, values: Tensor, height: int) -> Tensor:
    """``(N, D)``: for each of the ``(N)`` places the sum of the values at it, and at its like.

    How many places are distinct only a GPU knows, and it is not waited for. So what stands at a row is computed as
    often as it was looked up, from the same numbers, and written there with the same result.
    """
    numbers = torch.arange(len(places), device=places.device)
    first = places.new_empty(height).scatter_reduce_(0, places, numbers, "amin", include_self=False)
    slots = first.index_select(0, places)
    return _summed(values, slots, len(places)).index_select(0, slots)


def _summed(values: Tensor, slots: Tensor, count: int) -> Tensor:
    """``(count, D)``: the sums of the ``(N, D)`` rows that go to each slot, always added up in the same order."""
    return torch.ops.aten.embedding_dense_backward(values, slots, count, -1, False)
