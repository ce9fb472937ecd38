"""What the layers of a pipeline must be: such as train themselves, with nothing in common."""

from __future__ import annotations

from collections.abc import Sequence

from pipeal.core.errors import LayerError, PlacementError
from pipeal.core.modules import module_of
from pipeal.core.protocols import TrainableLayer

_TRAINING = ("backward", "update", "loss", "scale_lr")


def require_layers(layers: Sequence[object]) -> None:
    """Refuses a model without layers.

    Raises:
        PlacementError: It has none.
    """
    if not layers:
        raise PlacementError("found 0 layers in the model; expected at least one, such as a pipeal.AL")


def check_layers(layers: Sequence[TrainableLayer]) -> None:
    """Refuses layers that do not train themselves, or that share what they train: two stages would write to it at once.

    Raises:
        PlacementError: There is no layer; or two share a module, a parameter or a buffer, which would have the past of
            more than one layer.
        LayerError: One is no module, or does not train itself.
    """
    require_layers(layers)
    owner: dict[int, int] = {}
    for number, layer in enumerate(map(module_of, layers)):
        missing = [name for name in _TRAINING if not callable(getattr(layer, name, None))]
        if missing:
            raise LayerError(
                f"layer {number} is of the class {type(layer).__name__}, which does not train itself: it has no "
                f"{missing[0]}(); expected layers such as pipeal.AL, in an ALPackage or a list ([layer], of one); "
                "ALPackage.from_bp(model, sample, outputs) makes them of a network"
            )
        own = {
            "module": [("layer itself", layer)],
            "parameter": layer.named_parameters(),
            "buffer": layer.named_buffers(),
        }
        for kind, parts in own.items():
            for name, part in parts:
                if owner.setdefault(id(part), number) != number:
                    raise PlacementError(
                        f"layers {owner[id(part)]} and {number} share the {kind} {name!r}; every layer needs its own "
                        "(copy.deepcopy gives it some)"
                    )
