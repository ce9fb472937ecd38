"""All that a layer has learnt, as plain values: what a checkpoint keeps of it, and the way back into a layer.

::

    {"module":     {"enc.f.0.weight": tensor, …},           its state_dict(): parameters, buffers, extra states
     "versions":   {"enc.f.0": {"version": 1}, …},          by which its modules know older states
     "gradients":  {"enc.f.0.weight": tensor, …},           those that wait for a later update; mostly none
     "optimizers": {"enc_opt": {"kind": "Adam", "parameters": [["enc.f.0.weight", …]], "state": {…}}, …},
     "others":     {"scheduler": {"kind": "StepLR", "state": {…}}, …}}

Optimizers, and others that say ``state_dict()`` and ``load_state_dict()`` (learning rate schedulers, gradient scalers)
or are a ``torch.Generator``, are found as attributes of the layer's modules, or in lists, tuples and dicts there. Other
attributes of a module are not kept: what a layer of your own changes while it trains belongs into a buffer, or into
what its ``get_extra_state()`` gives.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, DataError, PipealError, a_type, first_line
from pipeal.core.modules import module_of, scaler_of
from pipeal.core.protocols import ScalesLosses, TrainableLayer
from pipeal.core.tree import describe, shapes_of
from pipeal.engine.runner.precision import trained_in
from pipeal.engine.state.optimizer_state import laid_out_like, load_optimizer
from pipeal.engine.state.stateful import PLAIN, named_parameters, state_of, stateful, trained_by

State: TypeAlias = dict[str, Any]
"""A dict of tensors, numbers, texts, bytes, None, and of lists, tuples and dicts of these."""

States: TypeAlias = Sequence[State] | Mapping[int, State]
"""Of layers, by their numbers; each may be read as it is looked up."""

CopyTensor: TypeAlias = Callable[[Tensor], Tensor]

_PARTS = ("module", "versions", "gradients", "optimizers", "others")
_MISSING, _LAZY = "missing", "of any shape"
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
"""What fused optimizers keep for each number of a parameter, and write without a look at its size."""


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares nothing; waits for a GPU."""
    return tensor.detach().to("cpu", copy=True)


def layer_state(layer: TrainableLayer, copy_tensor: CopyTensor = copy_to_host) -> State:
    """Copies all that a layer has learnt, which nothing else may change meanwhile.

    Args:
        layer: The layer.
        copy_tensor: How to copy a tensor. It is called once for each, also where several names mean the same.

    Raises:
        ConfigError: The layer cannot be kept: an optimizer trains what is no parameter of the layer, a lazy parameter
            has no shape yet, or some state holds what is not plain.
    """
    with torch.no_grad():
        return _state_of(module_of(layer), _Copier(copy_tensor))


@torch.inference_mode(False)  # or what optimizers keep could not be written to later
def load_layer_state(layer: TrainableLayer, state: State) -> None:
    """Puts a state back into a layer of the same make, on whatever device it is; ``state`` is not held on to.

    Parameters and buffers are written in place. Optimizers get their options back as well, with the learning rates.
    What scales the layer's losses in fp16 begins at its first scale where the state is of another precision. A layer
    that has none gets it from a state of fp16, unless an open pipeline trains it in another precision; one that is
    opened later in another precision takes it away.

    Raises:
        DataError: The state is of another architecture; the layer is as it was.
    """
    module = module_of(layer)
    with ExitStack() as undo:
        state = _fitting(layer, state, undo)
        weights: OrderedDict[str, Any] = OrderedDict(
            (key, value if isinstance(value, Tensor) else copy.deepcopy(value))
            for key, value in state["module"].items()
        )
        weights._metadata = OrderedDict(copy.deepcopy(state["versions"]))  # type: ignore[attr-defined]
        try:
            module.load_state_dict(weights)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise DataError(f"{type(layer).__name__} does not take its state: {said}") from error
        undo.pop_all()
    for name, parameter in named_parameters(module, module.state_dict(keep_vars=True)):
        found = state["gradients"].get(name)
        parameter.grad = None if found is None else laid_out_like(parameter, found, parameter.device)
    optimizers, others = stateful(module)
    for name, optimizer in optimizers.items():
        load_optimizer(optimizer, state["optimizers"][name]["state"])
    for name, other in others.items():
        value = copy.deepcopy(state["others"][name]["state"])
        other.set_state(value) if isinstance(other, torch.Generator) else other.load_state_dict(value)


def check_layer_states(layers: Sequence[TrainableLayer], states: States) -> None:
    """Asks whether states fit the layers of a model, which may be on the meta device; changes nothing.

    Raises:
        DataError: There are more or fewer of them, one is of another architecture, or it is no state.
    """
    if len(states) != len(layers):
        raise DataError(f"found the states of {len(states)} layers; the model has {len(layers)}")
    for number, layer in enumerate(layers):
        with _told_of(number), ExitStack() as undo:
            _fitting(layer, states[number], undo)


def load_layer_states(
    layers: Sequence[TrainableLayer],
    states: States,
    copier: Callable[[int], AbstractContextManager[CopyTensor]] = lambda _: nullcontext(copy_to_host),
    on_loaded: Callable[[int], None] = lambda _: None,
) -> None:
    """Puts states back into all layers of a model, or into none. Holds a copy of what the layers have, meanwhile.

    Args:
        layers: The model's.
        states: One for each; :func:`check_layer_states` finds most of what does not fit before anything is copied.
        copier: Within it, how to copy what a layer has, by its number.
        on_loaded: Called with the number of a layer that was given a state, or its own one back.

    Raises:
        DataError: One does not fit; all layers are as they were, but for parameters that had no shape yet.
    """
    with ExitStack() as undo:
        for number, layer in enumerate(layers):
            undo.callback(on_loaded, number)
            with copier(number) as copied:
                _keep(layer, undo, copied)
            with _told_of(number):
                load_layer_state(layer, states[number])
            on_loaded(number)
        undo.pop_all()


class _Copier:
    """Copies trees of plain values; a tensor that comes twice is copied once."""

    def __init__(self, copy_tensor: CopyTensor) -> None:
        self._copy_tensor = copy_tensor
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the sources, whose ids must stay theirs

    def __call__(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if type(value) in PLAIN:
            return value
        if type(value) in (dict, OrderedDict) and all(isinstance(key, str | int) for key in value):
            return {key: self(part, f"{where}, {key!r}") for key, part in value.items()}
        if type(value) is list:
            return [self(part, where) for part in value]
        if type(value) in (tuple, torch.Size):
            return tuple(self(part, where) for part in value)
        if isinstance(value, Real):  # of numpy
            return int(value) if isinstance(value, Integral) else float(value)
        raise ConfigError(
            f"a layer's state holds {a_type(value)} ({where}), which no checkpoint keeps; expected tensors, "
            "numbers, texts, bytes, None, and lists, tuples or dicts of these"
        )

    def _tensor(self, tensor: Tensor, where: str) -> Tensor:
        if is_lazy(tensor):
            raise ConfigError(f"a lazy parameter has no shape yet ({where}); train a batch before its state is taken")
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, self._copy_tensor(tensor.detach())
        return self._copies[id(tensor)][1]


@contextmanager
def _told_of(number: int) -> Iterator[None]:
    """Says of which layer a state does not fit."""
    try:
        yield
    except DataError as error:
        raise DataError(f"layer {number}: {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, PipealError):
            raise
        raise DataError(f"layer {number}: found no state of a layer ({first_line(error)})") from error


def _keep(layer: TrainableLayer, undo: ExitStack, copy_tensor: CopyTensor) -> None:
    """Has ``undo`` make the layer what it is now, but for parameters that have no shape yet."""
    if not any(map(is_lazy, module_of(layer).parameters())):
        undo.callback(_put_back, layer, layer_state(layer, copy_tensor))
    if isinstance(layer, ScalesLosses) and scaler_of(layer) is None:
        undo.callback(layer.scale_losses, False)  # first, as the last that is pushed


def _put_back(layer: TrainableLayer, state: State) -> None:
    with suppress(DataError):  # a layer may refuse its own state, too, after its weights; the first error is told
        load_layer_state(layer, state)


def _fitting(layer: TrainableLayer, state: State, undo: ExitStack) -> State:
    """The state, with what scales losses just where the layer has it, or gets it here; it fits the layer."""
    if set(state) != set(_PARTS):
        raise DataError(f"found the parts {sorted(state)}; expected the state of a layer, with {sorted(_PARTS)}")
    if unsaved := _unsaved(module_of(layer)) & state["module"].keys():  # older states of cut networks have them
        state = {**state, "module": {name: one for name, one in state["module"].items() if name not in unsaved}}
    if isinstance(layer, ScalesLosses):
        state = {**state, "module": _scaled_as(layer, state["module"], undo)}
    _refuse_misfit(layer, state)
    return state


def _unsaved(module: nn.Module) -> set[str]:
    """The names of the buffers that are not persistent."""
    parts = module.named_modules()
    return {f"{name}.{field}" if name else field for name, part in parts for field in part._non_persistent_buffers_set}


def _scaled_as(layer: TrainableLayer, weights: Mapping[str, Any], undo: ExitStack) -> dict[str, Any]:
    """The weights of a state, with what scales losses in fp16 just where the layer has it, or gets it here."""
    assert isinstance(layer, ScalesLosses)
    own, before = "scaler.", getattr(layer, "scaler", None)
    if before is None and any(name.startswith(own) for name in weights):
        undo.callback(layer.scale_losses, False)
        try:
            layer.scale_losses()
        except ConfigError as error:
            raise DataError(f"the state is of fp16, in which the layer cannot be trained: {error}") from error
    scaler = scaler_of(layer)
    names = {} if scaler is None else {own + name: value for name, value in scaler.at_first().items()}
    if before is not None or not names:
        return names | dict(weights)
    if names.keys() <= weights.keys() and trained_in(layer) in (None, "fp16"):
        return dict(weights)
    layer.scale_losses(False)
    if names.keys() <= weights.keys():
        return {name: value for name, value in weights.items() if name not in names}
    return dict(weights)  # something of another layer's own, which does not fit


def _refuse_misfit(layer: TrainableLayer, state: State) -> None:
    module = module_of(layer)
    found, own = _outline(state), _outline(_state_of(module, lambda value, _: value))
    for name, gradient in state["gradients"].items():
        key = f"the gradient of {name!r}"
        found[key], own[key] = describe(shapes_of(gradient)), own.get(f"{name!r}", _MISSING)
    for title, optimizer in state["optimizers"].items():
        names = dict(enumerate(name for group in optimizer["parameters"] for name in group))
        for index, values in optimizer["state"]["state"].items():
            weight = state["module"].get(names.get(index))
            for kind in _SHAPED if isinstance(weight, Tensor) and isinstance(values, dict) else ():
                if isinstance(value := values.get(kind), Tensor):
                    key = f"{kind!r} of {names[index]!r} in optimizer {title!r}"
                    found[key], own[key] = str(tuple(value.shape)), str(tuple(weight.shape))
    differing = [
        key
        for key in dict.fromkeys((*own, *found))
        if found.get(key) != own.get(key) and not (key in found and own.get(key) == _LAZY)
    ]
    if differing:
        key = differing[0]
        more = f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise DataError(
            f"the state does not fit the layer ({type(layer).__name__}): {key} is {found.get(key, _MISSING)} in the "
            f"state and {own.get(key, _MISSING)} in the layer{more}; load it into a layer built as the one "
            "it is of, with a network's cuts at the same names"
        )


def _state_of(module: nn.Module, kept: Callable[[Any, str], Any]) -> State:
    """All that a module has learnt; ``kept`` says what is kept of each value, given it and where it is."""
    weights = module.state_dict(keep_vars=True)  # itself, not views of it: tied parameters are one tensor
    named = named_parameters(module, weights)
    names = {id(parameter): name for name, parameter in named}
    optimizers, others = stateful(module)
    return {
        "module": kept(weights, "module"),
        "versions": kept(getattr(weights, "_metadata", {}), "versions"),
        "gradients": {name: kept(p.grad, f"gradient of {name}") for name, p in named if p.grad is not None},
        "optimizers": {
            name: {
                "kind": type(optimizer).__name__,
                "parameters": trained_by(name, optimizer, names),
                "state": kept(optimizer.state_dict(), name),
            }
            for name, optimizer in optimizers.items()
        },
        "others": {
            name: {"kind": type(other).__name__, "state": kept(state_of(other), name)} for name, other in others.items()
        },
    }


def _outline(state: State) -> dict[str, str]:
    """What must be the same of a state and of the layer it is for, in words."""
    outline = {}
    for key, value in state["module"].items():
        lazy = isinstance(value, Tensor) and is_lazy(value)
        outline[f"{key!r}"] = (
            _LAZY if lazy else describe(shapes_of(value)) if isinstance(value, Tensor) else "no tensor"
        )
    for name, optimizer in state["optimizers"].items():
        outline[f"optimizer {name!r}"] = optimizer["kind"]
        for number, parameters in enumerate(optimizer["parameters"]):
            for place, parameter in enumerate(parameters):
                outline[f"parameter {place} of group {number} of optimizer {name!r}"] = repr(parameter)
        for number, group in enumerate(optimizer["state"]["param_groups"]):
            for option in group:
                if option == "initial_lr":  # a layer has it from its first batch at the latest
                    continue
                outline[f"option {option!r} of group {number} of optimizer {name!r}"] = "known"
        entries = sum(map(len, optimizer["parameters"]))
        for index in optimizer["state"]["state"]:
            if isinstance(index, int) and not 0 <= index < entries:
                outline[f"entry {index} of optimizer {name!r}"] = "known"
    for name, other in state["others"].items():
        outline[f"{name!r}"] = other["kind"]
    return outline
