"""Weights by name, from a mapping or from safetensors files, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from os import PathLike, fspath
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, DataError, first_line, listed, name_of, nearest
from pipeal.core.tree import describe, shapes_of

Given: TypeAlias = "Mapping[str, Tensor] | str | PathLike[str] | Iterable[str | PathLike[str]]"
"""A state dict; a safetensors file; or several, among which a large network is divided."""

_SHOWN = 4
"""How many names a message lists."""


class Weights:
    """Tensors by their names.

    Args:
        given: Of a mapping, values are asked for one at a time. Files are opened while something is read from them, and
            mapped: what is read is copied once, to where it is wanted.

    Raises:
        ConfigError: It is neither a mapping nor a path.
        DataError: A file cannot be read as safetensors, or two have a tensor of the same name.
    """

    def __init__(self, given: Given) -> None:
        self._mapping: Mapping[str, Tensor] = {}
        self._file_of: dict[str, str] = {}
        if isinstance(given, Mapping):
            self._mapping = given
            return
        paths = [given] if isinstance(given, str | PathLike) else given
        if isinstance(paths, Tensor) or not isinstance(paths, Iterable):
            raise ConfigError(
                f"weights is {name_of(given)}; expected a state dict, or the path of a .safetensors file or of several"
            )
        for path in (fspath(path) for path in paths):
            with ExitStack() as stack:
                for name in _open(path, stack).keys():  # noqa: SIM118  it is no mapping
                    if self._file_of.setdefault(name, path) != path:
                        raise DataError(f"{path} and {self._file_of[name]} both have the weights {name!r}; pass one")

    def __contains__(self, name: str) -> bool:
        return name in self._mapping or name in self._file_of

    def check(self, network: Mapping[str, Tensor], needed: Iterable[str]) -> None:
        """Compares them with what a network has, by names, shapes and types, and those of tied tensors with each other.

        Args:
            network: All parameters and buffers; one that has several names comes under each.
            needed: The names of those that must be there, under one of their names.

        Raises:
            ConfigError: One is missing, superfluous or of another shape or kind of number; or one tensor of the network
                has several names, and the weights of these differ.
        """
        has = {id(network[name]) for name in network if name in self}
        self._refuse("lack", [name for name in needed if id(network[name]) not in has], self._names())
        self._refuse("have", [name for name in self._names() if name not in network], list(network))
        first: dict[int, str] = {}
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for name in self._names():
                tensor = network[name]
                shape, dtype = self._form(name, files, stack)
                if not is_lazy(tensor):
                    _check_form(name, shape, dtype, tensor)
                before = first.setdefault(id(tensor), name)
                if before != name and not self._same(before, name, tensor.dtype, files, stack):
                    raise ConfigError(
                        f"weights: {before!r} and {name!r} are one tensor of the network, but the weights of the two "
                        "differ; pass one of them, or equal ones"
                    )

    def fill(self, wanted: Iterable[tuple[str, Tensor]]) -> None:
        """Copies weights into tensors, which may be on another device, or floating-point numbers of another width.

        Raises:
            ConfigError: One is of another shape or kind of number.
            DataError: A file is gone, or has changed.
        """
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for name, tensor in wanted:
                value = self._value(name, files, stack)
                _check_form(name, tuple(value.shape), value.dtype, tensor)
                with torch.no_grad():
                    tensor.copy_(value)

    def _names(self) -> list[str]:
        return [*self._mapping, *self._file_of]

    def _form(self, name: str, files: dict[str, Any], stack: ExitStack) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type, without the numbers."""
        if name in self._file_of:
            lies = _opened(self._file_of[name], files, stack).get_slice(name)
            shape = tuple(lies.get_shape())
            return shape, (lies[:0] if shape else self._value(name, files, stack)).dtype
        value = self._mapping[name]
        if not isinstance(value, Tensor) or value.is_meta:
            found = "on the meta device, without numbers" if isinstance(value, Tensor) else name_of(value)
            raise ConfigError(f"weights: {name!r} is {found}; expected a tensor of numbers")
        return tuple(value.shape), value.dtype

    def _value(self, name: str, files: dict[str, Any], stack: ExitStack) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            return self._mapping[name]
        try:
            value: Tensor = _opened(path, files, stack).get_tensor(name)
        except DataError:
            raise
        except Exception as error:  # safetensors has an error of its own
            raise DataError(f"{path} has changed: {name!r}: {first_line(error)}") from error
        return value

    def _same(self, one: str, other: str, dtype: torch.dtype, files: dict[str, Any], stack: ExitStack) -> bool:
        """Whether two are equal, byte for byte, once they are of a type."""
        values = [self._value(name, files, stack).detach() for name in (one, other)]
        if values[0].data_ptr() == values[1].data_ptr():
            return True
        return torch.equal(*(value.to("cpu", dtype).reshape(-1).view(torch.uint8) for value in values))

    def _refuse(self, verb: str, names: list[str], others: list[str]) -> None:
        if not names:
            return
        shown = listed([*map(repr, names)], _SHOWN)
        near = nearest(names[0], map(str, others), likeness=0.6) if verb == "lack" else None
        hint = f" (they have {near!r})" if near else ""
        what = "of the network's parameters and buffers" if verb == "lack" else "names that the network has not"
        raise ConfigError(
            f"weights {verb} {len(names)} {what}: {shown}{hint}; expected those of its own state_dict(), all of them"
        )


def _check_form(name: str, shape: tuple[int, ...], dtype: torch.dtype, tensor: Tensor) -> None:
    if shape != tuple(tensor.shape):
        raise ConfigError(
            f"weights: {name!r} has the shape {shape}, the network's is {describe(shapes_of(tensor))}; pass those of "
            "this network"
        )
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
        raise ConfigError(
            f"weights: {name!r} is of {dtype}, the network's of {tensor.dtype}; pass that type (only floating-point "
            "numbers of another width are converted)"
        )


def _opened(path: str, files: dict[str, Any], stack: ExitStack) -> Any:
    if path not in files:
        files[path] = _open(path, stack)
    return files[path]


def _open(path: str, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except Exception as error:  # safetensors has an error of its own
        raise DataError(f"weights: {path}: {first_line(error)}; expected a .safetensors file") from error
