"""An ordered set of self-training layers: how it trains, infers, reports and is placed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor, nn

from pipeal.al.layers import AL
from pipeal.errors import PlacementError
from pipeal.packet import TrainableLayer, Tree, device_of, layers_of, module_of, move


class ALPackage(nn.Module):
    """Layers that train themselves, in order.

    Called layer by layer it is the reference that every schedule of the engine must equal::

        package(x, y); package.backward(); package.update()

    A subclass may instead set its layers as attributes, as one writes any ``nn.Module``: each child is a layer,
    in the order of assignment.

    Args:
        layers: :class:`pipeal.AL` layers, or anything that fulfils :class:`pipeal.packet.TrainableLayer`.

    Raises:
        PlacementError: ``layers`` is empty.
    """

    draws_from_default = False

    def __init__(self, layers: Iterable[TrainableLayer] | None = None) -> None:
        super().__init__()
        given = [] if layers is None else [module_of(layer) for layer in layers]
        if layers is not None and not given:
            raise PlacementError("an ALPackage needs at least one layer, found none")
        if len(set(given)) < len(given):
            raise PlacementError("a layer is given twice; each layer learns once per batch, so pass distinct layers")
        for number, layer in enumerate(given):
            self.add_module(str(number), layer)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[AL]:
        return self.children()  # type: ignore[return-value]

    @overload
    def __getitem__(self, index: int) -> AL: ...
    @overload
    def __getitem__(self, index: slice) -> ALPackage: ...
    def __getitem__(self, index: int | slice) -> AL | ALPackage:
        """One layer, or a package that shares the layers of a slice."""
        if isinstance(index, slice):
            return ALPackage(list(self)[index])
        return list(self)[index]

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Takes a batch through all layers, each on its device, and returns the last ``f(x)`` and ``g(y)``."""
        for layer in self:
            device = device_of(layer)
            x, y = layer(move(x, device), move(y, device))
        return x, y

    def backward(self) -> None:
        """Backward of every layer's own losses."""
        for layer in self:
            layer.backward()

    def update(self) -> None:
        """Optimizer step of every layer."""
        for layer in self:
            layer.update()

    def losses(self) -> list[tuple[float, ...]]:
        """The local losses of the last forward, by layer. Waits for the devices: not for the hot path."""
        return [tuple(float(loss) for loss in layer.loss() or ()) for layer in self]

    def infer(self, x: Tree, exit_at: int | None = None) -> Tensor:
        """Infers along ``f1 … fk, bk, hk … h1``.

        Args:
            x: The input of the first layer.
            exit_at: How many layers to climb before the bridge, from 1 to ``len(self)``; None for all.

        Returns:
            What the first layer's ``h`` returns: for classification, logits ``(B, classes)``.

        Raises:
            PlacementError: There is no such exit.
        """
        depth = len(self) if exit_at is None else exit_at
        if not 1 <= depth <= len(self):
            raise PlacementError(f"exit {depth} does not exist; this package has exits 1 to {len(self)}")
        way = list(self)[:depth]
        for layer in way:
            x = layer.inference(move(x, device_of(layer)), "f")
        code = way[-1].inference(x, "b")
        for layer in reversed(way):
            code = layer.inference(move(code, device_of(layer)), "h")
        return code

    def set_lr(self, which: str | Iterable[str], lr: float) -> None:
        """Gives the named sides of every layer a new base learning rate."""
        sides = [which] if isinstance(which, str) else list(which)
        for layer in self:
            layer.set_lr(sides, lr)

    def scale_lr(self, factor: float) -> None:
        """Sets every layer's learning rates to ``factor`` times their base values."""
        for layer in self:
            layer.scale_lr(factor)

    def effective_parameters(self) -> int:
        """How many parameters a full inference uses."""
        return sum(layer.effective_parameters(last=layer is self[-1]) for layer in self)

    def affiliated_parameters(self) -> int:
        """How many parameters serve training alone."""
        return sum(layer.affiliated_parameters(last=layer is self[-1]) for layer in self)


def set_device(model: nn.Module, devices: Sequence[str | torch.device]) -> None:
    """Puts each layer of a model on its device.

    Args:
        model: An :class:`ALPackage`, or any module whose children are its layers.
        devices: One device per layer; devices may repeat.

    Raises:
        PlacementError: The lengths differ.
    """
    layers = layers_of(model)
    if len(devices) != len(layers):
        raise PlacementError(
            f"{len(devices)} devices for {len(layers)} layers of {type(model).__name__}; "
            "pass one device per layer (a device may repeat)"
        )
    for layer, device in zip(layers, devices, strict=True):
        module_of(layer).to(device)
