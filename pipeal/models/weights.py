"""Starting weights out of safetensors files, checked by name and shape, for pipeal's networks and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError, first_line
from pipeal.core.messages import tell_once
from pipeal.core.tree import Tree
from pipeal.core.weights import Weights
from pipeal.methods.network import Network, Unit


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a file, by name, mapped into memory.

    Raises:
        DataError: It cannot be read as safetensors.
    """
    try:
        return load_file(path)
    except Exception as error:  # safetensors has an error of its own
        raise DataError(f"model.weights: {path}: {first_line(error)}; expected a .safetensors file") from error


def fill_network(model: nn.Module, path: str, classes: int) -> None:
    """Fills a network with the weights of a file, by the names of its ``state_dict()``.

    The tensors of an answer to another number of classes are left as they are, and told.

    Args:
        model: All of a network.
        path: Of the file.
        classes: How many the network has.

    Raises:
        DataError: The file cannot be read.
        ConfigError: A name is missing or superfluous, or a shape is another one.
    """
    found, named = read_weights(path), {**model.state_dict(keep_vars=True)}
    other = [name for name, tensor in found.items() if name in named and _answers_others(tensor, named[name], classes)]
    kept = {name: tensor for name, tensor in found.items() if name not in other}
    _check(kept, named, path, other)
    Weights(kept).fill((name, named[name]) for name in kept)
    if other:
        tell_once(f"model.weights: {path} answers other classes: {', '.join(other)} start at random")


def with_weights(network: Network, path: str) -> Network:
    """A network of pipeal's own that begins with the weights of a file, by the names of its BP form.

    The units of a network are, in order, what its BP form begins with; what follows there is its head, whose weights
    the file may lack, and which the layers of other methods do not have.

    Args:
        network: What is to begin so.
        path: Of the file.

    Raises:
        DataError: The file cannot be read.
        ConfigError: A name is missing or superfluous, or a shape is another one.
    """
    found = read_weights(path)
    with torch.device("meta"):
        whole = network.whole().state_dict(keep_vars=True)
        of_units = [[len(_tensors([module])) for module in unit.make()] for unit in network.units]
    names = list(whole)
    own = sum(map(sum, of_units))
    head = names[own:]
    _check(found, whole, path, [name for name in head if name not in found])
    if lacking := [name for name in head if name not in found]:
        tell_once(f"model.weights: {path} has no {', '.join(lacking)}: the head starts at random")
    starts = [0, *accumulate(map(sum, of_units))]

    def filled(modules: Sequence[nn.Module], wanted: Sequence[str]) -> None:
        tensors = _tensors(modules)
        if any(tensor.is_meta for tensor in tensors):
            return  # a layer that is elsewhere
        Weights(found).fill((name, tensor) for name, tensor in zip(wanted, tensors, strict=True) if name in found)

    def unit(number: int) -> Unit:
        plain = network.units[number]

        def make() -> Sequence[nn.Module]:
            modules = plain.make()
            filled(modules, wanted)
            return modules

        def same(features: Tree, width: float) -> tuple[nn.Module, Tree]:
            assert plain.fresh is not None
            copy, gives = plain.fresh(features, width)
            # One that reads features of another width draws its weights.
            if [tensor.shape for tensor in _tensors([copy])] == [whole[name].shape for name in wanted]:
                filled([copy], wanted)
            return copy, gives

        wanted = names[starts[number] : starts[number + 1]]
        return replace(plain, make=make, same=None if plain.fresh is None else same)

    def made_whole() -> nn.Module:
        model = network.whole()
        filled([model], names)
        return model

    units = [unit(number) for number in range(len(network.units))]
    return replace(network, units=units, whole=made_whole, is_given=True)


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in module.state_dict(keep_vars=True).values()]


def _answers_others(tensor: Tensor, own: Tensor, classes: int) -> bool:
    return own.shape[:1] == (classes,) != tensor.shape[:1] and tensor.shape[1:] == own.shape[1:]


def _check(found: Mapping[str, Tensor], named: Mapping[str, Tensor], path: str, left: Sequence[str]) -> None:
    """Asks that weights are those of a network, but for the names that are left out."""
    try:
        Weights(found).check(named, [name for name in named if name not in left])
    except ConfigError as error:
        raise ConfigError(f"model.weights: {path}: {error}") from error
