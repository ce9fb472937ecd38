"""Backpropagation as a layer: a whole network with one end-to-end loss, so that baselines share the engine.

Of a network that is a row of blocks (the children of an ``nn.Sequential``; no graph is cut), the blocks may lie on
several devices, one after the other: naive model parallelism, in which one device works at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from pipeal.core.errors import ConfigError
from pipeal.core.modules import device_of
from pipeal.core.protocols import UP, Path, check_path, through_blocks
from pipeal.core.spread import handovers
from pipeal.core.tree import Tree, detach, move, tensors
from pipeal.methods.layer import LocalLayer
from pipeal.methods.network import Network
from pipeal.methods.optimizers import LearningRates, OptimizerFactory, follow_weights, one_rate, open_optimizer


class BP(LocalLayer):
    """A network trained by ordinary backpropagation, in the shape of one layer of a pipeline.

    Args:
        model: ``x -> prediction``.
        cri: ``(prediction, y) -> scalar``; cross entropy if None.
        lr: The learning rate.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
    """

    draws_from_default = False

    def __init__(
        self,
        model: nn.Module,
        cri: nn.Module | None = None,
        lr: float = 1e-3,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.cri = nn.CrossEntropyLoss() if cri is None else cri
        self.opt = open_optimizer(optimizer, model, lr)
        self._places: tuple[tuple[int, torch.device], ...] = ()  # of each block, where there are several devices

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Keeps the end-to-end loss; returns the prediction, detached, and ``y``, on the last device if on several."""
        prediction = self._climb(x)
        if self._places:
            y = move(y, self._places[-1][1])
        self.keep(self.cri(prediction, y))
        return detach(prediction), y

    @through_blocks
    def inference(self, x: Tree, path: Path) -> Tree:
        """``f`` is the network; ``b`` and ``h`` have nothing left to do."""
        check_path(path)
        return self._climb(x) if path == UP else x

    def blocks(self) -> dict[str, nn.Module]:
        """The network, as ``f``."""
        return {UP: self.model}

    def block_count(self) -> int:
        """The blocks of a network that takes its input through them in order; 1 for any other."""
        return len(self.model) if isinstance(self.model, nn.Sequential) and _is_row(self.model) else 1

    def row(self) -> list[nn.Module]:
        """The blocks, in order."""
        return _blocks(self.model)

    def parameters_by_device(self, sizes: Sequence[int]) -> list[int]:
        """How many parameters are in the first ``sizes[0]`` blocks, in the next ``sizes[1]``, and so on.

        Raises:
            ConfigError: The sizes are not those of the network's blocks, or two devices would share a parameter or a
                buffer.
        """
        if sum(sizes) != self.block_count():
            raise ConfigError(f"found {list(sizes)} blocks for {len(sizes)} devices, of {self.block_count()} blocks")
        owner: dict[int, int] = {}
        parameters = [0] * len(sizes)
        parts = [part for part, size in enumerate(sizes) for _ in range(size)]
        for part, block in zip(parts, self.row(), strict=True):
            for name, tensor in (*block.named_parameters(), *block.named_buffers()):
                parameters[part] += 0 if id(tensor) in owner else tensor.numel()
                if owner.setdefault(id(tensor), part) != part:
                    raise ConfigError(
                        f"blocks on devices {owner[id(tensor)]} and {part} share {name!r}, which can be on one device "
                        "alone; give sizes that keep these blocks together, or one device"
                    )
        return parameters

    def spread(self, devices: Sequence[torch.device], sizes: Sequence[int]) -> list[int]:
        """As :meth:`pipeal.core.spread.Spreads.spread`.

        Raises:
            ConfigError: As :meth:`parameters_by_device`, or there is not a size for each device.
        """
        if len(sizes) != len(devices):
            raise ConfigError(f"found {list(sizes)} blocks for {len(devices)} devices, of {self.block_count()} blocks")
        parameters = self.parameters_by_device(sizes)
        places = [(part, device) for part, device in enumerate(devices) for _ in range(sizes[part])]
        self.to(devices[-1])
        for (_, device), block in zip(places, self.row(), strict=True):
            block.to(device)
        follow_weights((self.opt,))
        self._places = tuple(places) if len(devices) > 1 else ()
        return parameters

    def _climb(self, x: Tree) -> Tree:
        """The network's answer; on several devices, what blocks hand on is moved within autograd."""
        if not self._places:
            return self.model(x)
        before = 0
        for (part, device), block in zip(self._places, _blocks(self.model), strict=True):
            if part != before:
                x = _hand_over(x, before, part, device)
                before = part
            with _current(device):
                x = block(x)
        return x

    def _home(self) -> torch.device:
        """The last device, if it is on several."""
        return self._places[-1][1] if self._places else device_of(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BP:
        """Forgets the devices of its blocks where the network was moved as a whole."""
        super()._apply(fn, recurse)
        own = zip(self._places, _blocks(self.model), strict=False)
        if any(tensor.device != device for (_, device), block in own for tensor in block.parameters()):
            self._places = ()
        return self


def make_layers(
    network: Network, lr: LearningRates, optimizer: OptimizerFactory | None, *, same_start: bool = False
) -> Iterator[BP]:
    """The whole network as a single layer; see :func:`pipeal.methods.make_layers`.

    Args:
        network: As there.
        lr: As there.
        optimizer: As there.
        same_start: Whether it begins with the weights with which layers and heads begin that local losses train with
            one start, of the same seed; see :mod:`pipeal.methods.lookahead`.

    Raises:
        ConfigError: With ``same_start``, the network is given its weights, or its head is not the linear map that such
            layers have.
    """
    rate = one_rate(lr, "BP")
    yield BP(_begun_as_parts(network) if same_start else network.whole(), network.criterion(), rate, optimizer)


def _begun_as_parts(network: Network) -> nn.Module:
    """The whole network, with the weights of parts that start alike; its units come first in it, and then its head."""
    if network.is_given:
        raise ConfigError(
            "bp with same_start: this network begins with weights that it is given; expected one that draws them: "
            "leave same_start out"
        )
    parts = list(network.parts(same_start=True))
    with parts[-1].alike():
        head = parts[-1].linear_head(network.outputs)
    drawn = [tensor for module in (*(part.f for part in parts), head) for tensor in module.state_dict().values()]
    model = network.whole()
    own = model.state_dict()
    if [tensor.shape for tensor in drawn] != [tensor.shape for tensor in own.values()]:
        raise ConfigError(
            "bp with same_start: this network ends in another head than local losses have; expected one linear map: "
            "leave same_start out"
        )
    model.load_state_dict(dict(zip(own, drawn, strict=True)))
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of a row in order; one that is called several times comes as often, unlike in ``children()``."""
    return list(model) if isinstance(model, nn.Sequential) else []


def _is_row(model: nn.Sequential) -> bool:
    """Whether its forward does nothing but call its blocks in order."""
    if "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks or model._backward_hooks:
        return False
    whose = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return whose is nn.Sequential or bool(vars(whose).get("calls_in_order", False))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """A kernel of Triton's, or a generator without a number, is of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _hand_over(x: Tree, before: int, part: int, device: torch.device) -> Tree:
    """Takes features from one part to the next, and reports it to the listener, now and in the backward."""
    heard_by = handovers() if torch.is_grad_enabled() else None
    if heard_by is None:
        return move(x, device)
    heard_by.left(before)
    arrived = move(x, device)
    heard_by.arrived(part)
    to, back = ([tensor for tensor in tensors(tree) if tensor.requires_grad] for tree in (arrived, x))
    if to:
        # Where they are the same tensors, hooks are called in this order.
        register_multi_grad_hook(to, lambda _: heard_by.left(part))
        register_multi_grad_hook(back, lambda _: heard_by.arrived(before))
    return arrived
