"""How a network learns without one backward through all of it: one room or file per method.

::

    pipeal.core.methods     a line per method: its name, its label, the names of its losses, whether it has exits
    pipeal.methods.layer    what the layers of all methods share: their losses, backward and update
    pipeal.methods.<name>   its layers, and ``make_layers``, a generator, which makes them of a network
    pipeal.models           the networks

A layer is any :class:`pipeal.core.protocols.TrainableLayer`: it trains itself on what the one before hands on, and its
``inference`` says how an answer goes up through it, turns there, and comes down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from pipeal.core.errors import ConfigError, name_of, unknown_name
from pipeal.core.methods import METHODS, Maker, Method, method_of
from pipeal.core.protocols import TrainableLayer
from pipeal.methods.layer import LocalLayer
from pipeal.methods.network import Network, Part, Unit
from pipeal.methods.optimizers import LearningRates, OptimizerFactory

__all__ = ["Network", "Part", "Unit", "make_layers"]


def make_layers(
    method: str | Maker,
    network: Network,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    **options: Any,
) -> Iterator[TrainableLayer]:
    """The layers that train a network by a method, each made when it is asked for.

    Args:
        method: A name of :data:`pipeal.core.methods.METHODS`, or a function as the ``make_layers`` of these.
        network: What is to learn; its blocks are made, in order, with weights of their own.
        lr: The learning rate; methods with a label side also take one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``, for each optimizer of each layer; fused Adam if
            None.
        options: The method's own, as its ``make_layers`` has them.

    Raises:
        ConfigError: The rate, the optimizer, an option or the network is none that the method can use.
    """
    # By name: a method is one line in pipeal.core.methods, and none is imported before it is asked for.
    known_as = method_of(method)
    make = _maker_of(known_as) if isinstance(method, str) else method
    name = known_as.name
    known = _options_of(make)
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in signature(make).parameters.values())
    for option in options:
        if option not in known and not takes_any:
            found = unknown_name(f"option of {name}", option, known) if known else f"{name} has no option {option!r}"
            raise ConfigError(found + _who_has(option))
    made = make(network, lr, optimizer, **options)
    if not isinstance(made, Iterable):
        raise ConfigError(f"the method {name} returned {name_of(made)}; expected a layer for each of network.parts()")
    return _told_losses(known_as, made)


def _options_of(make: Maker) -> list[str]:
    """The names of a method's own options: the arguments after the network, the rate and the optimizer."""
    own = [*signature(make).parameters.values()][3:]
    return [one.name for one in own if one.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]


def _who_has(option: str) -> str:
    """Which methods have an option, to end a message with; empty where none has."""
    others = [repr(other.name) for other in METHODS.values() if option in _known_options(other)]
    return f"; method={' or '.join(others)} has" if others else ""


def _known_options(method: Method) -> list[str]:
    """Those of a method that is listed; none where its module is not there yet."""
    try:
        return _options_of(_maker_of(method))
    except ConfigError:
        return []


def _maker_of(method: Method) -> Callable[..., Iterable[TrainableLayer]]:
    """The function of a method's module that makes layers."""
    name = f"{__name__}.{method.module}"
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # one that it imports
            raise
        raise ConfigError(f"the method {method.name} has no module {name}; expected one with make_layers()") from error
    if not callable(make := getattr(module, "make_layers", None)):
        raise ConfigError(f"{name}: found no make_layers(), which makes the layers of the method {method.name}")
    return make


def _told_losses(method: Method, layers: Iterable[TrainableLayer]) -> Iterator[TrainableLayer]:
    """The same layers, which know how many losses their method has names for, if it has any."""
    for layer in layers:
        if not callable(getattr(layer, "inference", None)):
            raise ConfigError(
                f"the method {method.name} made {name_of(layer)}; expected a layer that trains itself "
                "(pipeal.core.protocols.TrainableLayer)"
            )
        if isinstance(layer, LocalLayer):
            layer.most_losses = len(method.losses) or None
        yield layer
