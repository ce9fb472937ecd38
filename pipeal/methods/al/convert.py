"""From a network trained by backpropagation to layers of any method: its parts become ``f``, all else is built.

::

    network ──cut──► f0 │ f1 │ f2        one sample batch, run once, gives the shapes
                     b0 │ b1 │ b2        AL: bridges, by the shape of what each f gives
                  g0, h0 │ …  │ …            label sides, by the task
                  head0  │ …  │ …        others: what the method makes of the cut network
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pipeal.core.errors import ConfigError, first_line, listed
from pipeal.core.materialize import InitWeights, is_on_meta
from pipeal.core.messages import tell_once
from pipeal.core.modules import device_of
from pipeal.core.tree import Tree, batch_size, describe, map_tensors, move, shapes_of, tensors
from pipeal.core.weights import Given, Weights
from pipeal.methods import make_layers
from pipeal.methods.al.bridges import Pool
from pipeal.methods.al.conversion import Conversion
from pipeal.methods.al.cut_network import as_network
from pipeal.methods.al.place_codes import padding_of
from pipeal.methods.al.sides import POOLED_CODE, EachPlace, Forward, Places, Sides, WholeInput
from pipeal.methods.al.source import Model, Source, named_network
from pipeal.methods.al.summary import LayerShapes, find_shapes
from pipeal.methods.cutting.answers import Answer, fields_of, has_answer
from pipeal.methods.cutting.calling import called, packed
from pipeal.methods.cutting.cut import Part, cut, refuse_ties
from pipeal.methods.cutting.encoder import Encoder
from pipeal.methods.cutting.inplace import Harmless, leave_input_alone
from pipeal.methods.cutting.piece import Features, Piece
from pipeal.methods.cutting.probe import ShapesAlone, probing
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import OptimizerFactory

_META = torch.device("meta")
_SHOWN = 8


def convert(
    model: Model,
    sample: Tree,
    how: Conversion,
    split: Sequence[str] | int | None = None,
    weights: Given | None = None,
    init_weights: InitWeights | None = None,
) -> tuple[list[LocalLayer], list[LayerShapes], list[str]]:
    """The layers that train a network by a method, their shapes, and what a table of them has to say below.

    Raises:
        ConfigError: See ``ALPackage.from_bp``.
        DataError: So, too.
    """
    network = named_network(model)
    if network is None or not is_on_meta(network):
        if weights is not None or init_weights is not None:
            raise ConfigError(
                f"{'init_weights' if weights is None else 'weights'} is for a network on the meta device, and this one "
                "is real; give it its weights before it is converted (load_state_dict, apply)"
            )
        return _convert(model, sample, how, split, lambda _: None, on_meta=False)
    source = Source(network, None if weights is None else Weights(weights), init_weights)
    with ShapesAlone():
        return _convert(model, sample, how, split, source.give, on_meta=True)


def _convert(
    model: Model,
    sample: Tree,
    how: Conversion,
    split: Sequence[str] | int | None,
    say_origin: Callable[[list[LocalLayer]], None],
    *,
    on_meta: bool,
) -> tuple[list[LocalLayer], list[LayerShapes], list[str]]:
    parts = [_whole(model, sample)] if how.known.is_whole else _parts(model, split, sample)
    own, pools = how.own_blocks(len(parts)), how.pools(len(parts))
    parts = [replace(part, module=own[number].get("f", part.module)) for number, part in enumerate(parts)]
    refuse_ties(parts)
    tried: list[Harmless] = []
    for number, part in enumerate(parts):
        _check_trainable(number, part, how.optimizer)
        tried.append(_try_part(number, part, tried[-1].out if tried else sample, on_meta=on_meta))
    if not on_meta and isinstance(model, nn.Module) and all(isinstance(part.module, Piece) for part in parts):
        check_same(model, sample, tried[-1].out)
    pieces = [
        _piece(number, part, f, own[number], pools.get(number), on_meta=on_meta)
        for number, (part, f) in enumerate(zip(parts, tried, strict=True))
    ]
    for piece in pieces:
        if "b" not in piece.own and piece.pool is None:
            _check_batch_first(piece.where, piece.gives, sample)
    _tell_of_classifier(how, pieces[-1])
    _tell_of_unreached(parts)
    layers, shapes = _layers(how, pieces, sample, on_meta=on_meta)
    refuse_ties([Part(part.name, layer) for part, layer in zip(parts, layers, strict=True)])
    say_origin(layers)
    for f in tried:
        for module in f.writers:  # at last: a conversion that fails leaves the network as it was
            module.inplace = False  # type: ignore[assignment]
        f.module.zero_grad()  # what a training before has left would go into the first update
    return layers, shapes, _cuts(model, split, parts)


def _cuts(model: Model, split: Sequence[str] | int | None, parts: Sequence[Part]) -> list[str]:
    """Where a network was cut into a number of layers, as one would name it; nothing of others."""
    if not (isinstance(split, int) and isinstance(model, nn.Module) and len(parts) > 1):
        return []
    names = ", ".join(f'"{part.name}"' for part in parts[1:])
    return [f"cut at split=[{names}]"]


def _tell_of_classifier(how: Conversion, last: Forward) -> None:
    """Says where the last bridge of AL is given no more than the network's own answer: it learns late through that."""
    if not how.known.has_labels or how.task != "classification" or "b" in last.own:
        return
    width = last.out.shape[1] if isinstance(last.out, Tensor) and last.out.dim() == 2 else None
    if width == how.outputs and width < (how.code or POOLED_CODE):
        tell_once(
            f"layer {last.number} ({last.name!r}) gives {width} numbers, as many as there are classes, and the last "
            "bridge sees no more, through which the last exit learns late; if its last map is one to classes, put "
            "nn.Identity() in its place",
            logging.WARNING,
        )


def _tell_of_unreached(parts: Sequence[Part]) -> None:
    for number, part in enumerate(parts):
        names = part.module.unreached if isinstance(part.module, Piece) else ()
        if names:
            tell_once(
                f"layer {number} ({part.name!r}) has weights that will not train: {listed(names, _SHOWN)}; what they "
                "give is used after the cut alone, and gradients cross no cut; cut elsewhere, or compute it where it "
                "is used",
                logging.WARNING,
            )


def _piece(
    number: int, part: Part, f: Harmless, own: Mapping[str, nn.Module], pool: Pool | None, *, on_meta: bool
) -> Forward:
    view = _view(part.module, f.out, takes_all=pool is not None or "b" in own)
    # New blocks are of the device and type of what their f gives.
    dtypes = [tensor.dtype for tensor in tensors(f.out) if tensor.is_floating_point()]
    home = _META if on_meta else _device(part.module, f.out)
    return Forward(
        number=number,
        name=part.name,
        f=f.module,
        writers=f.writers,
        gives=f.out,
        view=view,
        out=f.out if view is None else view(f.out),
        own=own,
        pool=pool,
        device=home,
        dtype=dtypes[0] if dtypes else torch.get_default_dtype(),
    )


def _layers(
    how: Conversion, pieces: Sequence[Forward], sample: Tree, *, on_meta: bool
) -> tuple[list[LocalLayer], list[LayerShapes]]:
    """The layers, made one by one, and the shapes of what they give and of their codes or answers."""
    sides: Sides = WholeInput(how, batch_size(sample))
    places = None
    if how.task == "per-place":
        places = Places.of(how, pieces[-1].out)
        sides = EachPlace(how, places, batch_size(pieces[-1].out), len(pieces))
    network = as_network(how, sample, pieces, sides, places)
    has_labels = how.known.has_labels
    layers, shapes = list[LocalLayer](), list[LayerShapes]()
    made: Iterator[Any] = make_layers(how.method, network, how.lr, how.optimizer, **how.method_options)
    for piece in pieces:
        with ExitStack() as around:
            if on_meta or not has_labels:  # what makes label sides and bridges moves them there by itself
                around.enter_context(piece.device)
            if not has_labels:
                around.enter_context(_default_type(piece.dtype))
            layers += islice(made, 1)
        shapes.append(LayerShapes(shapes_of(piece.gives), shapes_of(sides.below)))
    if len(layers) != len(pieces) or next(made, None) is not None:
        raise ConfigError(
            f"the method {how.known.name} made {'more' if len(layers) == len(pieces) else len(layers)} layers of "
            f"{len(pieces)} parts; expected one for each of network.parts()"
        )
    return layers, shapes if has_labels else find_shapes(layers, sample)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _whole(model: Model, sample: Tree) -> Part:
    """All of a network as one part."""
    single = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
    parts = _parts([model] if single else model, None, sample)  # type: ignore[list-item]
    return parts[0] if len(parts) == 1 else Part(parts[0].name, nn.Sequential(*(part.module for part in parts)))


def _parts(model: Model, split: Sequence[str] | int | None, sample: Tree) -> list[Part]:
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


def _check_trainable(number: int, part: Part, optimizer: OptimizerFactory | None) -> None:
    where = f"layer {number} ({part.name!r})"
    sparse = (nn.Embedding, nn.EmbeddingBag)
    if optimizer is None and any(isinstance(m, sparse) and m.sparse for m in part.module.modules()):
        raise ConfigError(
            f"{where} has an embedding with sparse gradients, which Adam does not take; build it with sparse=False, or "
            "pass an optimizer that takes them"
        )


def _try_part(number: int, part: Part, x: Tree, *, on_meta: bool) -> Harmless:
    x = x if on_meta else move(x, _device(part.module, x))
    if not batch_size(x):
        raise ConfigError(f"the sample is {describe(shapes_of(x))}; expected a batch of inputs, batch first")
    try:
        tried = leave_input_alone(part.module, x)
    except Exception as error:  # whatever a user's block raises
        hint = f"; {part.hint}" if part.hint else _hint(x, error)
        if on_meta and "meta" in str(error).lower():
            hint = "; a forward on the meta device has shapes, and no numbers to look at: build the model on a real one"
        raise ConfigError(
            f"the sample does not fit layer {number} ({part.name!r}): given {describe(shapes_of(x))} it raises "
            f"{first_line(error)}{hint}"
        ) from error
    if _is_packed(tried.out):
        raise packed(f"what layer {number} ({part.name!r}) gives is")
    return tried


def check_same(model: nn.Module, sample: Tree, out: Tree) -> None:
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


def _view(module: nn.Module, out: Tree, *, takes_all: bool) -> nn.Module | None:
    """The module that picks what bridges see of a part's output; None if they see all of it, as the user's own may."""
    if isinstance(module, Piece) and module.hands_on:
        features = Features(module.mask_at)
        return features if module.mask_at is None or padding_of(features(out)) is not None else Features()
    if fields_of(out) is None or (takes_all and not has_answer(out)):
        return None
    return Answer()


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
