"""How a layer on the meta device becomes real: by itself, keyed, so that the order of layers makes no difference.

::

    on meta: shapes alone ──► memory, in the same objects ──► reset_parameters ──► init_weights ──► weights
                                                              what none of them fills is told by its name

Parameters stay the objects that they are: the optimizers that were made of them still hold them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, a_type, first_line
from pipeal.core.rng import keyed
from pipeal.core.tree import describe, one_of_each, shapes_of
from pipeal.core.weights import Weights

InitWeights: TypeAlias = Callable[[nn.Module], Any]
"""Fills a module's own parameters and buffers; what one gives to ``nn.Module.apply``."""


@dataclass(frozen=True)
class Origin:
    """What a layer's tensors are filled from, beside ``reset_parameters``; a layer has it as ``origin``.

    Attributes:
        weights: Of the network that it is a part of; None where that starts untrained.
        names: By the name of a tensor in the layer, its name among the weights.
        init_weights: Called with each module of the network, after all of them are reset.
        modules: What those are called in the layer.
    """

    weights: Weights | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    init_weights: InitWeights | None = None
    modules: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self  # what is copied is a layer, not the weights of all


def is_on_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer has no numbers yet."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@torch.inference_mode(False)  # or the weights could not learn
def materialize(layer: nn.Module, seed: int, number: int) -> None:
    """Makes what a layer has on the meta device real, on the CPU. Idempotent; what is real and has no weights keeps its
    numbers.

    The ``reset_parameters`` of its modules (or ``_reset_parameters``, as some of PyTorch's call it) draw by a key of
    ``seed`` and ``number``, and leave the default generator alone; that of a container is called after those of its
    children.

    Args:
        layer: Any module.
        seed: A whole number.
        number: The layer's.

    Raises:
        ConfigError: Nothing fills a parameter or buffer, or not whole; an optimizer has a state already; or a
            ``reset_parameters`` raises. The layer is on the meta device as before.
        DataError: The weights cannot be read any more.
    """
    origin = _origin_of(layer)
    if not is_on_meta(layer) and not origin.names:
        return
    check_fillable(layer, number)
    places = list(_on_meta(layer))
    # Where a module is reset for one of its tensors, what it has beside it is, too.
    tensors = (*layer.parameters(), *layer.buffers())
    real = [(one, one_of_each(one.detach()).clone()) for one in tensors if _has_numbers(one)]
    twins: list[tuple[Tensor, Tensor]] = []
    try:
        for place in places:
            twins.append((place.tensor, _give_memory(place, number)))
        with torch.device("cpu"), torch.no_grad(), keyed(seed, number, whole_default=True):
            _fill(layer, [place for place in places if place.name not in origin.names], number)
            _put_numbers_back(real)
            if origin.weights is not None:
                named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                origin.weights.fill((origin.names[name], named[name]) for name in origin.names if name in named)
    except BaseException:
        for place in places:
            place.put_back()
        for tensor, twin in twins:
            torch.utils.swap_tensors(tensor, twin)
        _put_numbers_back(real)
        raise
    if isinstance(getattr(layer, "origin", None), Origin):
        layer.origin = None  # type: ignore[assignment]  # with the last layer, the weights may go


def without_numbers(layer: nn.Module) -> None:
    """Moves a layer to the meta device, where its parameters stay the objects that its optimizers hold."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        twin: Tensor = torch.empty_like(tensor.detach(), device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        _swap(tensor, twin)


def check_fillable(layer: nn.Module, number: int) -> None:
    """Refuses a layer on the meta device that cannot become real, as far as that can be told before.

    Raises:
        ConfigError: A parameter or buffer is lazy, or has no weights and no ``reset_parameters`` around it; or an
            optimizer has made a state of parameters without numbers.
    """
    origin, parts = _origin_of(layer), dict(layer.named_modules())
    for place in _on_meta(layer):
        if is_lazy(place.tensor):
            raise ConfigError(
                f"layer {number}: {place.name!r} is lazy, so that on the meta device its sizes are not known; give "
                "its module its sizes"
            )
        reset = any(reset_of(parts[name]) for name in place.around())
        init = origin.init_weights is not None and not origin.modules.isdisjoint(place.owners)
        if place.name not in origin.names and not reset and not init:
            raise _unfilled(number, place)
    for part in parts.values():
        for optimizer in vars(part).values():
            if isinstance(optimizer, torch.optim.Optimizer) and any(_meta_states(optimizer)):
                raise ConfigError(
                    f"layer {number}: the optimizer {type(optimizer).__name__} has made its state of parameters on the "
                    "meta device, which have no numbers; take one that makes it at the first step, such as Adam, or "
                    "build the layer on a real device"
                )


@dataclass
class _Place:
    """A tensor on the meta device, and where in a layer it is held.

    Attributes:
        name: The first that it has.
        tensor: The object, which stays the same.
        owners: The names of the modules that hold it.
        held: How: in which of their dicts, and under which key.
        version: How often it had been written to before it was filled.
    """

    name: str
    tensor: Tensor
    owners: list[str] = field(default_factory=list)
    held: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list)
    version: int = 0

    def around(self) -> set[str]:
        """The names of the modules that hold it and of those around them; that of the layer is empty."""
        return {".".join(owner.split(".")[:end]) for owner in self.owners for end in range(len(owner.split(".")) + 1)}

    def empty(self) -> None:
        """Marks what nothing has written to, as far as its type can say so."""
        if _has_nan(self.tensor):
            self.tensor.fill_(nan)
        self.version = self.tensor._version

    def is_filled(self) -> bool:
        """Whether all of it has been written to since; takes over what has taken its place."""
        others = [now for held, key in self.held if (now := held.get(key)) is not self.tensor]
        self.put_back()
        for other in others:
            if other is None or other.is_meta or other.shape != self.tensor.shape:
                return False
            self.tensor.copy_(other)
        if _has_nan(self.tensor):
            return not bool(self.tensor.isnan().any())
        return self.tensor._version > self.version or not self.tensor.numel()

    def put_back(self) -> None:
        """Where ``reset_parameters`` has assigned another tensor."""
        for held, key in self.held:
            held[key] = self.tensor


def _on_meta(layer: nn.Module) -> Iterator[_Place]:
    found: dict[int, _Place] = {}
    for owner, part in layer.named_modules():
        dicts: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for held in dicts:
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    place = found.setdefault(id(tensor), _Place(f"{owner}.{key}".lstrip("."), tensor))
                    place.owners.append(owner)
                    place.held.append((held, key))
    yield from found.values()


def _give_memory(place: _Place, number: int) -> Tensor:
    """Has a tensor lie in memory; gives what has its past instead."""
    tensor = place.tensor
    twin: Tensor = torch.empty_like(tensor.detach(), device="cpu")
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, tensor.requires_grad)
        twin.__class__ = type(tensor)
    vars(twin).update(vars(tensor))  # attributes that a user gave it
    try:
        _swap(tensor, twin)
    except RuntimeError as error:
        raise ConfigError(
            f"layer {number}: {place.name!r} cannot become real: {first_line(error)} Nothing but modules and "
            "optimizers may hold what is on the meta device, such as a view or a graph"
        ) from error
    return twin


def _swap(tensor: Tensor, twin: Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError:
        gc.collect()  # tracing leaves cycles, and in one of them there may be a view of it
        torch.utils.swap_tensors(tensor, twin)


def _fill(layer: nn.Module, places: list[_Place], number: int) -> None:
    """Fills what has no weights, and what else is reset with it."""
    origin = _origin_of(layer)
    for place in places:
        place.empty()
    around = {name for place in places for name in place.around()}
    parts = [(name, part) for name, part in layer.named_modules() if name in around]
    parts.reverse()  # children before their parents, as they are constructed
    for name, part in parts:
        reset = reset_of(part)
        if reset is not None:
            _call(reset, (), number, name, part)
    for name, part in parts:
        if origin.init_weights is not None and name in origin.modules:
            _call(origin.init_weights, (part,), number, name, part)
    for place in places:
        if not place.is_filled():
            raise _unfilled(number, place)


def _call(function: Callable[..., Any], args: tuple[Any, ...], number: int, name: str, part: nn.Module) -> None:
    try:
        function(*args)
    except Exception as error:  # whatever a user's function raises
        what = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"layer {number}: {what} of {name or 'the layer'!r}, {a_type(part)}, raises {first_line(error)}"
        ) from error


def _origin_of(layer: nn.Module) -> Origin:
    found = getattr(layer, "origin", None)
    return found if isinstance(found, Origin) else Origin()


def reset_of(part: nn.Module) -> Callable[[], Any] | None:
    """What draws a module's own parameters; None where it has nothing that does."""
    found = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    return found if callable(found) else None


def _meta_states(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, Mapping) else ():
            yield isinstance(value, Tensor) and value.is_meta


@torch.no_grad()
def _put_numbers_back(real: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in real:
        one_of_each(tensor).copy_(value)  # what repeats its memory could not be written to as a whole


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.is_meta and not is_lazy(tensor)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _unfilled(number: int, place: _Place) -> ConfigError:
    return ConfigError(
        f"layer {number}: nothing fills {place.name!r}, {describe(shapes_of(place.tensor))}, which is on the meta "
        "device; give its module a reset_parameters() that does, pass init_weights or weights that do (a state_dict "
        "leaves out buffers that are not persistent), or build it on a real device, where it keeps its numbers"
    )
