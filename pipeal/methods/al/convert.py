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
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipeal.core.errors import ConfigError, check_named, first_line
from pipeal.core.modules import device_of
from pipeal.core.tree import Tree, batch_size, describe, map_tensors, move, shapes_of, tensors
from pipeal.methods.al.bridges import BridgeStyle, Pool
from pipeal.methods.al.codes import TASKS, LabelStyle, Task
from pipeal.methods.al.layers import AL
from pipeal.methods.al.place_codes import code_width, padding_of
from pipeal.methods.al.sides import EachPlace, Sides, WholeInput
from pipeal.methods.al.summary import LayerShapes
from pipeal.methods.cutting.calling import Answer, called, fields_of, packed
from pipeal.methods.cutting.cut import Part, cut, refuse_ties
from pipeal.methods.cutting.encoder import Encoder
from pipeal.methods.cutting.inplace import Harmless, leave_input_alone
from pipeal.methods.cutting.piece import Features, Piece
from pipeal.methods.cutting.probe import probing
from pipeal.methods.optimizers import LearningRates, OptimizerFactory

Network: TypeAlias = nn.Module | Sequence[nn.Module] | Encoder
OwnBlocks: TypeAlias = Mapping[int, Mapping[str, nn.Module]]
"""By the number of a layer, from 0, and the letter of a block: ``{2: {"b": my_bridge}}``."""
Pools: TypeAlias = Pool | Mapping[int, Pool]
"""For all layers, or by their number; each layer gets a copy of a module."""

PerPlace: TypeAlias = Literal["per-place"]

LETTERS = ("f", "b", "g", "h")

_POOLED_CODE = 128
_IGNORED = -100
"""The label of places that have none, as PyTorch and ``transformers`` have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How the blocks that a network lacks are built; the attributes are arguments of ``ALPackage.from_bp``.

    Raises:
        ConfigError: A size is no whole number above 0.
    """

    outputs: int
    task: Task | PerPlace = "classification"
    code: int | None = None
    hidden: int | None = None
    labels: LabelStyle = "inverse"
    bridges: BridgeStyle = "pooled"
    class_dim: int | None = None
    ignore_index: int | None = None
    pool: Pools | None = None
    blocks: OwnBlocks | None = None
    lr: LearningRates = 1e-3
    optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        for name in ("outputs", "code", "hidden"):
            size = getattr(self, name)
            if name != "outputs" and size is None:
                continue
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                none = "" if name == "outputs" else ", or None"
                raise ConfigError(f"{name} is {size!r}; expected a whole number, at least 1{none}")
        check_named("task", self.task, (*TASKS, "per-place"))
        if self.task in ("classification", "per-place") and self.outputs == 1:
            raise ConfigError("outputs is 1; expected two classes or more (for one label, pass task='multilabel')")
        if self.class_dim not in (None, 1, -1):
            raise ConfigError(f"class_dim is {self.class_dim!r}; expected 1, -1, or None to find it")
        if not isinstance(self.ignore_index, Integral | None):
            raise ConfigError(f"ignore_index is {self.ignore_index!r}; expected a whole number")
        per_place = {"class_dim": None, "ignore_index": None}
        whole = {"labels": "inverse", "bridges": "pooled"}
        for name, default in (whole if self.task == "per-place" else per_place).items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, which does nothing with task={self.task!r}; leave it out"
                )

    def layers(
        self, model: Network, sample: Tree, split: Sequence[str] | int | None = None
    ) -> tuple[list[AL], list[LayerShapes]]:
        """The AL layers of a network, and their shapes.

        Raises:
            ConfigError: See ``ALPackage.from_bp``.
        """
        parts = _parts(model, split, sample)
        own = self._own_blocks(len(parts))
        pools = self._pools(len(parts))
        parts = [replace(part, module=own[number].get("f", part.module)) for number, part in enumerate(parts)]
        refuse_ties(parts)
        tried: list[Harmless] = []
        for number, part in enumerate(parts):
            _check_trainable(number, part, self.optimizer)
            tried.append(_try_part(number, part, tried[-1].out if tried else sample))
        if isinstance(model, nn.Module) and all(isinstance(part.module, Piece) for part in parts):
            _check_same(model, sample, tried[-1].out)
        sides = self._sides(parts, tried, sample)
        layers, shapes = [], []
        for number, (part, f) in enumerate(zip(parts, tried, strict=True)):
            where = f"layer {number} ({part.name!r})"
            if "b" not in own[number] and number not in pools:
                _check_batch_first(where, f.out, sample)
            side = sides.label_side(number, own[number], _place(part.module, f.out))
            view = _view(part.module, f.out)
            out = view(f.out) if view else f.out
            enc = sides.encoder_side(number, where, f.module, view, out, own[number], pools.get(number))
            layers.append(AL(enc, side, self.lr, self.optimizer))
            shapes.append(LayerShapes(shapes_of(f.out), shapes_of(sides.below)))
        refuse_ties([Part(part.name, layer) for part, layer in zip(parts, layers, strict=True)])
        for f in tried:
            for module in f.writers:  # at last: a conversion that fails leaves the network as it was
                module.inplace = False  # type: ignore[assignment]
        return layers, shapes

    def _sides(self, parts: Sequence[Part], tried: Sequence[Harmless], sample: Tree) -> Sides:
        if self.task != "per-place":
            code = _POOLED_CODE if self.code is None else self.code
            rows = batch_size(sample)
            return WholeInput(
                self.task,
                self.outputs,
                code,
                hidden=self.hidden,
                labels=self.labels,
                bridges=self.bridges,
                rows=rows,
            )
        view = _view(parts[-1].module, tried[-1].out)
        return EachPlace(
            self.outputs,
            code_width(self.outputs) if self.code is None else self.code,
            hidden=self.hidden,
            answer=view(tried[-1].out) if view else tried[-1].out,
            class_dim=self.class_dim,
            ignore_index=_IGNORED if self.ignore_index is None else self.ignore_index,
            layers=len(parts),
        )

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


def _parts(model: Network, split: Sequence[str] | int | None, sample: Tree) -> list[Part]:
    if _is_packed(sample):
        raise packed("the sample is")
    if not isinstance(model, Encoder):
        return cut(model, split, sample)
    if split is not None:
        raise ConfigError("an Encoder is cut by its per_layer; leave split out")
    if type(sample) is tuple:
        model.check_masks()
    return [Part(name, module) for name, module in model.parts()]


def _is_packed(tree: Tree) -> bool:
    """Also where it is an item of a tuple, as ``nn.LSTM`` returns it."""
    return any(isinstance(part, PackedSequence) for part in (tree if type(tree) is tuple else (tree,)))


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
        tried = leave_input_alone(part.module, x)
    except Exception as error:  # whatever a user's block raises
        raise ConfigError(
            f"the sample does not fit layer {number} ({part.name!r}): given {describe(shapes_of(x))} it raises "
            f"{first_line(error)}{f'; {part.hint}' if part.hint else _hint(x, error)}"
        ) from error
    if _is_packed(tried.out):
        raise packed(f"what layer {number} ({part.name!r}) gives is")
    return tried


def _check_same(model: nn.Module, sample: Tree, out: Tree) -> None:
    """Asks whether the parts that a forward was cut into give together what it gives whole.

    They do not where it writes into a tensor that another part has a copy of, or into a constant, at which no cut can
    look. A model that gives something else each time is not asked: its random numbers differ, too.
    """
    whole = called(model, sample)

    def run() -> list[torch.Tensor]:
        return tensors(whole(map_tensors(torch.Tensor.clone, move(sample, _device(model, sample)))))

    with probing(model):
        try:
            wanted = run()
        except Exception:  # noqa: BLE001  whole it does not run here, as one of which each part is on its own device
            return
        found = tensors(out)[: len(wanted)]  # a mask may follow the answer
        if not _are_close(found, wanted) and _are_close(run(), wanted):
            raise ConfigError(
                f"{type(model).__name__}, cut so, gives other numbers for the sample than whole: between the cuts, its "
                "forward writes in place into a tensor that another part reads, or into a constant; write x = x * 2 "
                "there instead of x.mul_(2), or cut elsewhere"
            )


def _are_close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    try:
        torch.testing.assert_close(found, wanted, equal_nan=True)
    except AssertionError:
        return False
    return True


def _hint(x: Tree, error: Exception) -> str:
    """A hint at the usual cause of an error in a user's block."""
    message = str(error)
    if isinstance(error, TypeError) and "required" in message and "argument" in message:
        return "; a layer takes one argument (any nesting of tensors): wrap a module that takes more"
    if isinstance(x, tuple) or (isinstance(error, TypeError | AttributeError) and "tuple" in message):
        return "; where the module before returns a tuple, as nn.LSTM does, wrap it in one that returns its output only"
    return ""


def _view(module: nn.Module, out: Tree) -> nn.Module | None:
    """The module that picks what bridges see of a part's output; None if they see all of it."""
    if isinstance(module, Piece) and module.hands_on:
        features = Features(module.mask_at)
        return features if module.mask_at is None or padding_of(features(out)) is not None else Features()
    return None if fields_of(out) is None else Answer()


def _check_batch_first(where: str, out: Tree, sample: Tree) -> None:
    rows, wanted = batch_size(out), batch_size(sample)
    if rows != wanted:
        raise ConfigError(
            f"{where} gives {describe(shapes_of(out))} for a batch of {wanted}; expected the "
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
