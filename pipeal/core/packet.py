"""What flows down the pipeline, and what a layer must be able to do to take part.

A training example becomes a :class:`Packet`. It visits the layers in order; each trains itself on it (three
actions: forward, backward, update) and hands on a detached packet. The engine knows only these two things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

# Private by name, but what torch's own pipelining, export and functorch share, and what users register
# their own containers with.
from torch.utils import _pytree as pytree

from pipeal.core.errors import ConfigError, DataError, LayerError

Tree: TypeAlias = Any
"""A tensor, or any nesting of tuples, lists, dicts and dataclasses of tensors and of plain values."""

Path: TypeAlias = Literal["f", "b", "h"]
"""A part of the way of an answer through a layer, by the letter of the AL block: ``f1 … fk, bk, hk … h1``."""

UP: Path = "f"
"""Up to the next layer: the forward block."""
TURN: Path = "b"
"""At the exit, from features to an answer: the bridge, or a classifier; nothing, if the features are the answer."""
DOWN: Path = "h"
"""Down again: the label decoder; nothing, for methods without a label side."""

WAY: tuple[Path, ...] = (UP, TURN, DOWN)


def check_path(path: str) -> None:
    """Asks whether it is a part of the way.

    Raises:
        ConfigError: It is none.
    """
    if path not in WAY:
        raise ConfigError(f"unknown inference path {path!r}; expected 'f', 'b' or 'h'")


T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Packet:
    """One batch on its way through the layers.

    Attributes:
        batch: The batch number, counted from the first batch the model was ever trained on; with the layer's
            number it keys the randomness of a forward.
        x: The input of the next layer, batch first.
        y: The target of the next layer, batch first.
        lr_scale: The factor on every layer's own learning rate for this batch. It travels with the packet, so
            that a change reaches each layer between the same two updates under every schedule.
        updates: Whether layers update after this batch, with what they have gathered since their last update; else
            they go on gathering.
    """

    batch: int
    x: Tree
    y: Tree
    lr_scale: float = 1.0
    updates: bool = True


@runtime_checkable
class TrainableLayer(Protocol):
    """What the engine trains. An ``nn.Module`` whose backward never leaves it; :class:`pipeal.AL` is one."""

    def __call__(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Forward: keeps the local losses, returns what the next layer gets, detached."""
        ...

    def backward(self) -> None:
        """Backward of the losses that the last forward kept."""
        ...

    def update(self) -> None:
        """Optimizer step, and the gradients cleared."""
        ...

    def loss(self) -> tuple[Tensor, ...] | None:
        """The local losses of the last forward, detached; None where a subclass keeps none."""
        ...

    def scale_lr(self, factor: float) -> None:
        """Sets every learning rate to ``factor`` times its base value."""
        ...

    def inference(self, x: Tree, path: Path) -> Tree:
        """Passes ``x`` through one block: on the way :data:`UP`, at the :data:`TURN`, or on the way :data:`DOWN`."""
        ...


def through_blocks(inference: Function) -> Function:
    """Marks an inference that does nothing but call, of ``blocks()``, the one of that letter, or nothing without one.

    A subclass with an inference of its own is not marked by it.
    """
    inference.through_blocks = True  # type: ignore[attr-defined]
    return inference


@runtime_checkable
class CutsOutputs(Protocol):
    """A layer that tells whether compiled graphs of its parts may end where it goes back through nothing more."""

    def cut_parts(self) -> Collection[nn.Module]:
        """The parts of which its forward takes ``(loss, output)``, and detaches the output."""
        ...


@runtime_checkable
class ScalesUpdates(Protocol):
    """What scales a layer's losses in fp16, and leaves out updates that overflow; an ``nn.Module``.

    Of methods alone: from Python 3.12 on, ``isinstance`` sees none of a module's buffers.
    """

    def overflows(self) -> int:
        """How many updates it has left out; waits for a GPU."""
        ...

    def at_first(self) -> Mapping[str, Tensor]:
        """Its ``state_dict()`` before the first update."""
        ...

    def gave_up(self) -> bool:
        """Whether gradients overflow however small the losses are made; waits for a GPU."""
        ...


@runtime_checkable
class ScalesLosses(Protocol):
    """A layer that can be trained in fp16.

    A :class:`ScalesUpdates` that it keeps as ``scaler`` is asked whether it gave up, and what it left out. States of
    the layer fit with and without it.
    """

    def scale_losses(self, wanted: bool = True) -> None:
        """Has its losses scaled from now on, against gradients too small for fp16, or no longer.

        Asked for what is so already, it changes nothing.
        """
        ...


def scaler_of(layer: TrainableLayer) -> ScalesUpdates | None:
    """What scales a layer's losses; None where nothing does, or the layer keeps it to itself."""
    found = getattr(layer, "scaler", None) if isinstance(layer, ScalesLosses) else None
    return found if isinstance(found, ScalesUpdates) else None


def module_of(layer: TrainableLayer) -> nn.Module:
    """The layer as the ``nn.Module`` that it also is."""
    if not isinstance(layer, nn.Module):
        raise LayerError(f"expected a layer that is an nn.Module, found {name_of(layer)}")
    return layer


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


def layers_of(model: nn.Module | Iterable[TrainableLayer]) -> list[TrainableLayer]:
    """The layers of a model in order: what it iterates over, or else its children.

    Raises:
        LayerError: It is neither a module nor something to iterate over.
    """
    if isinstance(model, type) or not isinstance(model, nn.Module | Iterable):
        raise LayerError(f"expected a model, or layers in order, found {name_of(model)}")
    return list(model) if isinstance(model, Iterable) else list(model.children())  # type: ignore[arg-type]


def name_of(given: object) -> str:
    """What was given in the place of something else, in words.

    >>> name_of(3.0), name_of(nn.Linear)
    ('float', 'the class Linear itself instead of Linear(…)')
    """
    if isinstance(given, type):
        return f"the class {given.__name__} itself instead of {given.__name__}(…)"
    return "None" if given is None else type(given).__name__


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """Applies ``function`` to every tensor of a tree and keeps its shape and other values.

    >>> map_tensors(lambda t: t + 1, (torch.tensor(1), {"n": 2}))
    (tensor(2), {'n': 2})
    """
    # The plain cases without pytree, which takes many times as long: this is called several times per batch.
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    if type(tree) is tuple:
        return tuple(map_tensors(function, part) for part in tree)  # type: ignore[attr-defined, return-value]
    if tree is None:
        return tree
    return pytree.tree_map(partial(_map_leaf, function), tree)


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if _is_record(leaf):
        parts = {field.name: map_tensors(function, getattr(leaf, field.name)) for field in dataclasses.fields(leaf)}
        return dataclasses.replace(leaf, **parts)
    _refuse_unknown(leaf)
    return leaf


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _refuse_unknown(leaf: Any) -> None:
    """A container that nobody can look into would carry its tensors along undetached."""
    if isinstance(leaf, Mapping | list | tuple | set):
        raise TypeError(
            f"a packet holds a {type(leaf).__name__}, which may hold tensors but cannot be looked into; use tuples, "
            "lists, dicts or dataclasses, or register it with torch.utils._pytree.register_pytree_node"
        )


def tensors(tree: Tree) -> list[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple:
        return [tensor for part in tree for tensor in tensors(part)]
    if tree is None:
        return []
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _is_record(leaf):
            found += [tensor for field in dataclasses.fields(leaf) for tensor in tensors(getattr(leaf, field.name))]
        else:
            _refuse_unknown(leaf)
    return found


def detach(tree: T) -> T:
    """The same tree, cut from every graph."""
    return map_tensors(Tensor.detach, tree)


def move(tree: T, device: torch.device) -> T:
    """The same tree with every tensor on ``device``.

    Does not wait for copies onto a GPU. It does for those onto the CPU, which would read them before they are there.
    """
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), tree)


Shapes: TypeAlias = list[tuple[torch.Size, torch.dtype]]


def shapes_of(tree: Tree) -> Shapes:
    """The shapes and types in a tree."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors(tree)]


def describe(shapes: Shapes) -> str:
    """Shapes and types in words, for messages.

    >>> describe(shapes_of((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))))
    '(2, 3) float32, (2,) int64'
    """
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes) or "no tensor"


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's first parameter, or PyTorch's default if it has none."""
    for parameter in module.parameters():  # next(…, default) cannot be compiled by PyTorch 2.8
        return parameter.dtype
    return torch.get_default_dtype()


def device_of(module: nn.Module) -> torch.device:
    """Where the first parameter or buffer of a module lives; the CPU if it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def pair_of(batch: Any) -> tuple[Tree, Tree]:
    """The inputs and the targets of a batch: an object with attributes ``x`` and ``y``, or a pair.

    >>> pair_of((1, 2))
    (1, 2)

    Raises:
        DataError: It is something else.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if hasattr(batch, "x") and hasattr(batch, "y"):
        return batch.x, batch.y
    raise DataError(f"found {_in_words(batch)}")


class MapStyle(Protocol[T_co]):
    """A data set whose samples have numbers, as most ``torch.utils.data.Dataset`` are; it need not be iterable.

    Iterated over, it has ``len(dataset)`` samples, whatever it gives for numbers beyond. One without ``__len__`` ends
    where it raises ``IndexError``, as in a ``for`` loop.
    """

    def __getitem__(self, index: int, /) -> T_co:
        """A sample, by its number from 0."""
        ...


Samples: TypeAlias = Iterable[T] | MapStyle[T]
"""What a data set can be: an iterable, or map-style."""


def as_iterable(data: Samples[T], wrong: type[Exception], name: str = "dataset") -> Iterable[T]:
    """``data`` if it is an iterable, else one over its samples: a sequence if it has ``__len__``.

    Args:
        data: The data set.
        wrong: Is raised for anything else.
        name: What a message calls it.

    >>> class Squares:
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, index):
    ...         return index**2
    >>> list(as_iterable(Squares(), TypeError))
    [0, 1, 4]
    """
    kind = type(data)
    if isinstance(data, Iterable):
        return data
    if not hasattr(kind, "__getitem__"):
        raise wrong(
            f"{name} is a {kind.__name__}; wanted something to iterate over: an iterable, or a data set with "
            "__getitem__ and __len__"
        )
    return _Numbered(data) if hasattr(kind, "__len__") else _Unnumbered(data)


def iterate(batches: Samples[T]) -> Iterator[T]:
    """An iterator over batches, of an iterable or by their numbers.

    Raises:
        DataError: They are nothing to iterate over.
    """
    if not isinstance(batches, Iterable) and not hasattr(type(batches), "__getitem__"):
        call = "; call it" if callable(batches) else ""
        raise DataError(f"the batches are given as {name_of(batches)}; expected an iterable of pairs (x, y){call}")
    return iter(as_iterable(batches, DataError, "batches"))


def _in_words(batch: Any) -> str:
    """What it is, what was expected, and what to do.

    >>> _in_words({"text": torch.zeros(8, 5), "label": torch.zeros(8)})
    "a dict with 'text': (8, 5) float32, 'label': (8,) float32; expected a pair (x, y) of inputs and targets, or an \
object with attributes x and y: pass ((b['text'], b['label']) for b in batches)"
    """
    expected = "; expected a pair (x, y) of inputs and targets, or an object with attributes x and y"
    found, hint = name_of(batch), ""
    if isinstance(batch, Tensor):
        found, hint = f"tensor {_shape(batch)}", "zip(inputs, targets) joins batches of both; a single one is [(x, y)]"
    elif isinstance(batch, Mapping):
        found = f"{found} with {', '.join(f'{name!r}: {_shape(part)}' for name, part in batch.items())}"
        if len(batch) > 1:
            x, y, *_ = batch
            hint = f"pass ((b[{x!r}], b[{y!r}]) for b in batches)"
    elif isinstance(batch, tuple | list):
        found = f"{found} of {len(batch)}: {', '.join(map(_shape, batch[:4]))}{', …' if len(batch) > 4 else ''}"
        hint = "several inputs are joined as ((a, b), y)" if len(batch) > 2 else "the targets are missing"
    return f"a {found}{expected}{hint and f': {hint}'}"


def _shape(part: Any) -> str:
    return describe(shapes_of(part)) if isinstance(part, Tensor) else type(part).__name__


def batch_size(tree: Tree) -> int:
    """The length of the first dimension of the first tensor; 0 without one (a virtual packet)."""
    found = tensors(tree)
    return found[0].shape[0] if found and found[0].dim() else 0


class _Numbered(Sequence[T]):
    """A map-style data set as a sequence."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._data[index]

    def __iter__(self) -> Iterator[T]:
        # A Sequence would take an IndexError in the middle, such as that of a bug, for the end.
        return (self._data[index] for index in range(len(self._data)))


class _Unnumbered(Iterable[T]):
    """A map-style data set without ``__len__``, again and again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[T]:
        return iter(self._data)
