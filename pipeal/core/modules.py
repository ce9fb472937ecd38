"""Layers and models as the ``nn.Module`` that they are: their order, mode, device and type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeal.core.errors import LayerError, name_of
from pipeal.core.protocols import ScalesLosses, ScalesUpdates, TrainableLayer


def layers_of(model: nn.Module | Iterable[TrainableLayer]) -> list[TrainableLayer]:
    """The layers of a model in order: what it iterates over, or else its children.

    Raises:
        LayerError: It is neither a module nor something to iterate over.
    """
    if isinstance(model, type) or not isinstance(model, nn.Module | Iterable):
        raise LayerError(f"expected a model, or layers in order, found {name_of(model)}")
    return list(model) if isinstance(model, Iterable) else list(model.children())  # type: ignore[arg-type]


def module_of(layer: TrainableLayer) -> nn.Module:
    """The layer as the ``nn.Module`` that it also is."""
    if not isinstance(layer, nn.Module):
        raise LayerError(f"expected a layer that is an nn.Module, found {name_of(layer)}")
    return layer


def held(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value by its dotted path, or what a container directly holds: where the optimizers of a layer may be.

    >>> [*held("opts", [3, 4])], [*held("opt", 3)]
    ([('opts.0', 3), ('opts.1', 4)], [('opt', 3)])
    """
    if isinstance(value, Mapping):
        yield from ((f"{path}.{key}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}.{number}", part) for number, part in enumerate(value))
    else:
        yield path, value


def scaler_of(layer: TrainableLayer) -> ScalesUpdates | None:
    """The loss scaler of a layer; None if it has none, or does not show it as ``scaler``."""
    found = getattr(layer, "scaler", None) if isinstance(layer, ScalesLosses) else None
    return found if isinstance(found, ScalesUpdates) else None


@contextmanager
def in_mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Training or evaluation mode, and afterwards each part in the mode it had: a user may have frozen some."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for part, _ in before:
            part.training = training
        yield
    finally:
        for part, mode in before:
            part.training = mode


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's first parameter, or PyTorch's default if it has none."""
    for parameter in module.parameters():  # next(…, default) cannot be compiled by PyTorch 2.8
        return parameter.dtype
    return torch.get_default_dtype()


def device_of(module: nn.Module) -> torch.device:
    """Where the first parameter or buffer of a module lives; the CPU if it has none."""
    for parameter in module.parameters():  # one after the other: a row of both would walk the whole module
        return parameter.device
    for buffer in module.buffers():
        return buffer.device
    return torch.device("cpu")
