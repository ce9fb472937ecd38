"""A tree of tensors as a plain description, which JSON can hold, and its tensors: without pickle, in either direction.

::

    (tensor, {"mask": tensor}, 3)   <->   ["t", ["T"], ["d", ["mask", ["T"]]], 3]   and   [tensor, tensor]

What is done with the tensors is up to others: they are sent to another process (``engine.distributed``), or written to
the file of a layer (:mod:`pipeal.engine.state.layer_file`): to change the description is to change both.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeal.core.errors import DataError
from pipeal.core.tree import Tree

Form: TypeAlias = Any
"""What JSON can hold; every list in it begins with a letter that says what it stands for."""

_PLAIN = (type(None), bool, int, float, str)
_BOXES: dict[type, str] = {tuple: "t", list: "l", torch.Size: "s"}
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o"}


def taken_apart(tree: Tree) -> tuple[Form, list[Tensor]]:
    """The description of a tree, and its tensors in order.

    Raises:
        DataError: It holds something that cannot be sent.
    """
    found: list[Tensor] = []
    return _form(tree, found), found


def put_together(form: Form, tensors: Sequence[Tensor], *, plain: bool = False) -> Tree:
    """The tree that :func:`taken_apart` described.

    Args:
        form: The description.
        tensors: In the same order.
        plain: Refuse dataclasses, named tuples and registered containers: no code of theirs runs on a file's word.

    Raises:
        DataError: It holds a class that is not known here, or with ``plain`` any, or no type of numbers; or it is of
            another number of tensors.
    """
    left = iter(tensors)
    tree = _tree(form, left, _no_class_named if plain else _class_named)
    if next(left, None) is not None:
        raise DataError(f"found {len(tensors)} tensors, but the description is of fewer")
    return tree


def _form(tree: Any, found: list[Tensor]) -> Form:
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
        return ["T"]
    if kind in _PLAIN:
        return tree
    if kind in _BOXES:
        return [_BOXES[kind], *(_form(part, found) for part in tree)]
    if kind in _DICTS:
        return [_DICTS[kind], *([_form(key, found), _form(part, found)] for key, part in tree.items())]
    if dataclasses.is_dataclass(kind):
        fields = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(kind)]
        return ["r", _name_of(kind), *([name, _form(value, found)] for name, value in fields)]
    if kind is torch.dtype:
        return ["y", str(tree).removeprefix("torch.")]
    if kind is torch.device:
        return ["v", str(tree)]
    if kind is complex:
        return ["c", tree.real, tree.imag]
    if kind is bytes:
        return ["b", base64.b64encode(tree).decode("ascii")]
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return ["n", _name_of(kind), *(_form(part, found) for part in tree)]
    if kind in pytree.SUPPORTED_NODES:
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
        return ["p", _name_of(kind), _form(context, found), *(_form(part, found) for part in parts)]
    raise DataError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process; expected tensors, numbers, texts, "
        "None, and tuples, lists, dicts, dataclasses or registered containers of these"
    )


def _tree(form: Form, tensors: Iterator[Tensor], class_named: Callable[[str], Any]) -> Any:
    if not isinstance(form, list):
        return form

    def tree(part: Form) -> Any:
        return _tree(part, tensors, class_named)

    what, *parts = form
    if what == "T":
        found = next(tensors, None)
        if found is None:
            raise DataError("the description is of more tensors than there are")
        return found
    for kind, letter in _BOXES.items():
        if what == letter:
            return kind(tree(part) for part in parts)
    for kind, letter in _DICTS.items():
        if what == letter:
            return kind((tree(key), tree(part)) for key, part in parts)
    if what == "y":
        return dtype_named(parts[0])
    if what == "v":
        return torch.device(parts[0])
    if what == "c":
        return complex(*parts)
    if what == "b":
        return base64.b64decode(parts[0])
    cls = class_named(parts[0])
    if what == "r":
        return _record(cls, {name: tree(value) for name, value in parts[1:]})
    if what == "n":
        return cls(*(tree(part) for part in parts[1:]))
    context = tree(parts[1])
    return pytree.SUPPORTED_NODES[cls].unflatten_fn([tree(part) for part in parts[2:]], context)


def dtype_named(name: str) -> torch.dtype:
    """Not just any attribute of torch, on the word of another process or of a file."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DataError(f"{name!r} is no type of numbers that this version of torch knows")
    return found


def _record(cls: Any, values: dict[str, Any]) -> Any:
    """A dataclass with these values, as ``copy.copy`` would make it: its ``__init__`` has run where it came from."""
    made = cls.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _no_class_named(name: str) -> Any:
    raise DataError(f"a {name!r} is in it, where only tensors, numbers, texts and collections of them may be")


def _class_named(name: str) -> Any:
    """A container's class, looked up among what is imported here: nothing is imported on another process's word."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or hasattr(found, "_fields") or found in pytree.SUPPORTED_NODES
    )
    if not known:
        raise DataError(
            f"a packet holds a {name.replace(':', '.')}, a container that this process does not know; import its "
            "module on every rank, at its top level, before the pipeline opens"
        )
    return found
