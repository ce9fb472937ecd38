"""Where the layers of a network on the meta device get their numbers from, once they become real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor, nn

from pipeal.core.errors import ConfigError, name_of
from pipeal.core.materialize import InitWeights, Origin, check_fillable
from pipeal.core.weights import Weights
from pipeal.methods.cutting.encoder import Encoder
from pipeal.methods.cutting.piece import Piece
from pipeal.methods.layer import LocalLayer

Model: TypeAlias = nn.Module | Sequence[nn.Module] | Encoder
"""A network as a user has it; :class:`pipeal.methods.network.Network` is one as methods take it."""


class Source:
    """Tells the layers that a network is cut into where their parts of it come from.

    Args:
        network: On the meta device.
        weights: Of all of it; None where it starts untrained.
        init_weights: See :class:`pipeal.core.materialize.Origin`.

    Raises:
        ConfigError: A weight is missing, superfluous, of another shape or kind of number, or another than that of a
            tensor that it is tied to; or ``init_weights`` cannot be called.
    """

    def __init__(self, network: nn.Module, weights: Weights | None, init_weights: InitWeights | None) -> None:
        if init_weights is not None and not callable(init_weights):
            raise ConfigError(
                f"init_weights is {name_of(init_weights)}; expected a function that is called with each module, as "
                "model.apply calls one"
            )
        self._weights, self._init_weights = weights, init_weights
        self._modules = {id(part) for part in network.modules()}
        self._name_of: dict[int, str] = {}
        if weights is None:
            return
        named: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
        named |= network.named_buffers(remove_duplicate=False)
        on_meta = [name for name in network.state_dict() if name in named and named[name].is_meta]
        weights.check(named, on_meta)
        self._name_of = {id(tensor): name for name, tensor in named.items() if name in weights}

    def give(self, layers: Sequence[LocalLayer]) -> None:
        """Tells each layer.

        Raises:
            ConfigError: One cannot become real.
        """
        for number, layer in enumerate(layers):
            tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
            layer.origin = Origin(
                self._weights,
                {name: self._name_of[id(tensor)] for name, tensor in tensors if id(tensor) in self._name_of},
                self._init_weights,
                frozenset(name for name, part in layer.named_modules() if self._is_of_network(part)),
            )
            check_fillable(layer, number)

    def _is_of_network(self, part: nn.Module) -> bool:
        """Also what stands for a module that is cut, and has its parameters."""
        return id(part) in self._modules or isinstance(part, Piece) or type(part) is nn.Module


def named_network(model: object) -> nn.Module | None:
    """One module that has all of a network, under the names of its weights; None of what is no network.

    Those of a list begin with the number of the item, those of an :class:`pipeal.Encoder` with ``embedding``,
    ``blocks.0`` and so on, and ``head``.
    """
    if isinstance(model, Encoder):
        parts = {"embedding": model.embedding, "blocks": nn.ModuleList(model.blocks), "head": model.head}
        return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Sequence) and all(isinstance(part, nn.Module) for part in model):
        return nn.ModuleList(model)
    return None


def network_mode(model: object) -> bool:
    """Whether a network, or some part of a list, is in training mode."""
    network = named_network(model)
    if network is None or network is model:
        return network is None or network.training
    return any(part.training for part in network.children())
