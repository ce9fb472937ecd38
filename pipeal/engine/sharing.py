"""What no two layers may share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipeal.errors import PlacementError
from pipeal.packet import TrainableLayer, module_of


def refuse_shared(layers: Sequence[TrainableLayer]) -> None:
    """Refuses a module, parameter or buffer of two layers: two stages would write to it at once.

    Raises:
        PlacementError: Two layers share one; it would have more than one layer's past.
    """
    owner: dict[int, int] = {}
    for number, layer in enumerate(layers):
        module = module_of(layer)
        own: list[tuple[str, nn.Module | Tensor]] = [("layer itself", module)]
        own += [*module.named_parameters(), *module.named_buffers()]
        for name, part in own:
            if owner.setdefault(id(part), number) != number:
                raise PlacementError(
                    f"layers {owner[id(part)]} and {number} share the {_kind(part)} {name!r}; every layer needs "
                    "its own (copy.deepcopy gives it some)"
                )


def _kind(part: nn.Module | Tensor) -> str:
    return "parameter" if isinstance(part, nn.Parameter) else "buffer" if isinstance(part, Tensor) else "module"
