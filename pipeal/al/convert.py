"""From a network trained by backpropagation to AL layers: its parts become ``f``, and the other blocks are built.

::

    network ──cut──► f0 │ f1 │ f2        one sample batch, run once, gives the shapes
                     b0 │ b1 │ b2        bridges, by the shape of what each f gives
                  g0, h0 │ …  │ …        label sides, by the task
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipeal.al.bridges import BridgeStyle, Pool, bridge_for
from pipeal.al.codes import LabelStyle, Task, recode_side, target_side
from pipeal.al.cut import Part, cut, refuse_ties
from pipeal.al.encoder import Encoder
from pipeal.al.inplace import Harmless, leave_input_alone
from pipeal.al.layers import AE, AL, ENC, LearningRates
from pipeal.al.optimizers import OptimizerFactory
from pipeal.al.probe import probing
from pipeal.al.summary import LayerShapes
from pipeal.errors import ConfigError, first_line
from pipeal.packet import Tree, batch_size, describe, device_of, move, shapes_of, tensors

Network: TypeAlias = nn.Module | Sequence[nn.Module] | Encoder
OwnBlocks: TypeAlias = Mapping[int, Mapping[str, nn.Module]]
"""By the number of a layer, from 0, and the letter of a block: ``{2: {"b": my_bridge}}``."""
Pools: TypeAlias = Pool | Mapping[int, Pool]
"""For all layers, or by their number; each layer gets a copy of a module."""

LETTERS = ("f", "b", "g", "h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How the blocks that a network lacks are built; the attributes are arguments of ``ALPackage.from_bp``.

    Raises:
        ConfigError: A size is no whole number above 0.
    """

    outputs: int
    task: Task = "classification"
    code: int = 128
    hidden: int | None = None
    labels: LabelStyle = "inverse"
    bridges: BridgeStyle = "pooled"
    pool: Pools | None = None
    blocks: OwnBlocks | None = None
    lr: LearningRates = 1e-3
    optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("outputs", "code", "hidden"):
            size = getattr(self, name)
            if name == "hidden" and size is None:
                continue
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                none = ", or None" if name == "hidden" else ""
                raise ConfigError(f"{name} is {size!r}; expected a whole number, at least 1{none}")
        if self.task == "classification" and self.outputs == 1:
            raise ConfigError("outputs is 1; expected two classes or more (for one label, pass task='multilabel')")

    def layers(
        self, model: Network, sample: Tree, split: Sequence[str] | None = None
    ) -> tuple[list[AL], list[LayerShapes]]:
        """The AL layers of a network, and their shapes.

        Raises:
            ConfigError: See ``ALPackage.from_bp``.
        """
        parts = _parts(model, split)
        own = self._own_blocks(len(parts))
        pools = self._pools(len(parts))
        parts = [replace(part, module=own[number].get("f", part.module)) for number, part in enumerate(parts)]
        refuse_ties(parts)
        for number, part in enumerate(parts):
            _check_trainable(number, part, self.optimizer)
        layers, shapes, writers = [], [], []
        below = torch.zeros(2, self.outputs)  # the target stands where later layers have the code of the one before
        x = sample
        for number, part in enumerate(parts):
            f = _try_part(number, part, x)
            x = f.out
            place = _place(part.module, x)
            side, below = self._label_side(number, own[number], below.to(**place))
            if "b" not in own[number] and number not in pools:
                _check_batch_first(number, part, x, sample)
            bridge = self._bridge(number, part, own[number].get("b"), pools.get(number), x, below, batch_size(sample))
            layers.append(AL(ENC(f.module, bridge), side, self.lr, self.optimizer))
            shapes.append(LayerShapes(shapes_of(x), shapes_of(below)))
            writers += f.writers
        refuse_ties([Part(part.name, layer) for part, layer in zip(parts, layers, strict=True)])
        for module in writers:  # at last: a conversion that fails leaves the network as it was
            module.inplace = False  # type: ignore[assignment]
        return layers, shapes

    def _label_side(self, number: int, own: Mapping[str, nn.Module], below: Tensor) -> tuple[AE, Tensor]:
        """``g`` and ``h`` of a layer, and what codes look like above it; ``below`` is ``(2, width)``."""
        width = self.code
        if "g" in own:
            width = _try_block(number, "g", own["g"].to(below.device), below).shape[-1]
        if number == 0:
            side = target_side(self.task, self.outputs, width, style=self.labels)
        else:
            side = recode_side(below.shape[-1], width, style=self.labels)
        side.to(device=below.device, dtype=below.dtype)
        side.g, side.h = own.get("g", side.g), own.get("h", side.h).to(below.device)
        above = _try_block(number, "g", side.g, below)
        _try_block(number, "h", side.h, above, wanted=below.shape)
        return side, above

    def _bridge(
        self, number: int, part: Part, own: nn.Module | None, pool: Pool | None, out: Tree, code: Tensor, rows: int
    ) -> nn.Module:
        if own is not None:
            _try_block(number, "b", own.to(code.device), out, wanted=(rows, code.shape[-1]))
            return own
        try:
            bridge = bridge_for(
                out, code.shape[-1], hidden=self.hidden, style=self.bridges, labels=self.labels, pool=pool
            )
        except ConfigError as error:
            raise ConfigError(f"layer {number} ({part.name!r}): {error}") from error
        bridge.to(device=code.device, dtype=code.dtype)
        if pool is not None:
            _try_block(number, "b, after the pool,", bridge, out, wanted=(rows, code.shape[-1]))
        return bridge

    def _own_blocks(self, layers: int) -> list[Mapping[str, nn.Module]]:
        given = {} if self.blocks is None else self.blocks
        _check_numbers("blocks", given, layers)
        for number, own in given.items():
            if not isinstance(own, Mapping):
                raise ConfigError(f"blocks of layer {number} is a {type(own).__name__}; expected a mapping, {{'b': …}}")
            for letter, block in own.items():
                if letter not in LETTERS or not isinstance(block, nn.Module):
                    raise ConfigError(
                        f"blocks of layer {number}: {letter!r} is a {type(block).__name__}; expected 'f', 'b', 'g' or "
                        "'h', each a torch.nn.Module"
                    )
        return [given.get(number, {}) for number in range(layers)]

    def _pools(self, layers: int) -> Mapping[int, Pool]:
        if self.pool is None:
            return {}
        given = self.pool if isinstance(self.pool, Mapping) else dict.fromkeys(range(layers), self.pool)
        _check_numbers("pool", given, layers)
        # A module in two bridges would be trained by two layers, in whatever order.
        return {number: deepcopy(pool) if isinstance(pool, nn.Module) else pool for number, pool in given.items()}


def _parts(model: Network, split: Sequence[str] | None) -> list[Part]:
    if not isinstance(model, Encoder):
        return cut(model, split)
    if split is not None:
        raise ConfigError("an Encoder is cut by its per_layer; leave split out")
    return [Part(name, module) for name, module in model.parts()]


def _check_numbers(argument: str, given: Mapping[int, Any], layers: int) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{argument} is a {type(given).__name__}; expected a mapping by the number of a layer")
    for number in given:
        if number not in range(layers):
            raise ConfigError(f"{argument} names layer {number!r}; this model has layers 0 to {layers - 1}")


def _check_trainable(number: int, part: Part, optimizer: OptimizerFactory | None) -> None:
    where = f"layer {number} ({part.name!r})"
    if any(tensor.is_meta for tensor in (*part.module.parameters(), *part.module.buffers())):
        raise ConfigError(f"{where} is on the meta device, which holds no numbers; build the model on a real one")
    sparse = (nn.Embedding, nn.EmbeddingBag)
    if optimizer is None and any(isinstance(m, sparse) and m.sparse for m in part.module.modules()):
        raise ConfigError(
            f"{where} has an embedding with sparse gradients, which Adam does not take; build it with sparse=False, or "
            "pass an optimizer that takes them"
        )


def _try_part(number: int, part: Part, x: Tree) -> Harmless:
    x = move(x, _device(part.module, x))
    if not batch_size(x):
        raise ConfigError(f"the sample is {describe(shapes_of(x))}; expected a batch of inputs, batch first")
    try:
        return leave_input_alone(part.module, x)
    except Exception as error:  # whatever a user's block raises
        raise ConfigError(
            f"the sample does not fit layer {number} ({part.name!r}): given {describe(shapes_of(x))} it raises "
            f"{first_line(error)}{_hint(x, error)}"
        ) from error


def _hint(x: Tree, error: Exception) -> str:
    """What often is behind an error of a user's block."""
    message = str(error)
    if isinstance(error, TypeError) and "required" in message and "argument" in message:
        return "; a layer takes one argument (any nesting of tensors): wrap a module that takes more"
    if isinstance(x, tuple) or (isinstance(error, TypeError | AttributeError) and "tuple" in message):
        return "; where the module before returns a tuple, as nn.LSTM does, wrap it in one that returns its output only"
    return ""


def _try_block(number: int, letter: str, block: nn.Module, x: Tree, wanted: Sequence[int] | None = None) -> Tensor:
    """What a bridge or a block of a label side gives: a matrix of floats, of the shape wanted."""
    given = describe(shapes_of(x))
    try:
        with probing(block):
            out = block(x)
    except Exception as error:  # whatever a user's block raises
        raise ConfigError(f"{letter} of layer {number}, given {given}, raises {first_line(error)}") from error
    found = tuple(out.shape) if isinstance(out, Tensor) and out.dim() == 2 and out.is_floating_point() else None
    if found is None or (wanted is not None and found != tuple(wanted)):
        shape = "floats (B, K)" if wanted is None else f"floats {tuple(wanted)}"
        raise ConfigError(
            f"{letter} of layer {number}, given {given}, gives {describe(shapes_of(out))}; expected {shape}"
        )
    return out


def _check_batch_first(number: int, part: Part, out: Tree, sample: Tree) -> None:
    rows, wanted = batch_size(out), batch_size(sample)
    if rows != wanted:
        raise ConfigError(
            f"layer {number} ({part.name!r}) gives {describe(shapes_of(out))} for a batch of {wanted}; expected the "
            "batch first (many modules have batch_first=True); or pass a pool or a bridge for it"
        )


def _device(module: nn.Module, x: Tree) -> torch.device:
    """Where a part is; one without parameters and buffers computes where its input is."""
    if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
        return next((tensor.device for tensor in tensors(x)), torch.device("cpu"))
    return device_of(module)


def _place(module: nn.Module, out: Tree) -> dict[str, Any]:
    """The device and type of a layer's new blocks: those of what its ``f`` gives."""
    kinds = [tensor.dtype for tensor in tensors(out) if tensor.is_floating_point()]
    return {"device": _device(module, out), "dtype": kinds[0] if kinds else torch.get_default_dtype()}
