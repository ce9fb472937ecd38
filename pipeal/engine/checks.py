"""What the layers of a pipeline must be: such as train themselves, with nothing in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pipeal.core.errors import LayerError, PlacementError
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer

_TRAINING = ("backward", "update", "loss", "scale_lr")


def refuse_untrainable(layers: Sequence[TrainableLayer]) -> None:
    """Refuses what cannot be trained by a pipeline.

    Raises:
        PlacementError: There is no layer.
        LayerError: One is no module, or does not train itself.
    """
    if not layers:
        raise PlacementError("found 0 layers in the model; expected at least one, such as a pipeal.AL")
    for number, layer in enumerate(map(module_of, layers)):
        missing = [name for name in _TRAINING if not callable(getattr(layer, name, None))]
        if missing:
            raise LayerError(
                f"layer {number} is of the class {type(layer).__name__}, which does not train itself: it has no "
                f"{missing[0]}(); expected layers such as pipeal.AL, in an ALPackage or a list ([layer], of one); "
                "ALPackage.from_bp(model, sample, outputs) makes them of a network"
            )


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
