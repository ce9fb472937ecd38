"""A forward run on symbols (torch.fx) that know the rank and the type of what they stand for.

Sizes stay symbols, values too: a branch on them cannot be followed. A function outside of any module that has such
branches (the masks of ``transformers`` are made by some) stays whole, as a submodule does, and so does a
``torch.autograd.Function``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree

FLAG = "training_or_not"
"""The name of the submodule that tells the mode (:class:`pipeal.methods.cutting.piece.TrainingFlag`)."""

HELD = "held_"
"""Prefix of the attributes that hold arguments of functions which are neither tensors nor modules."""

NO_GRAD = "no_grad"
"""What the ``meta`` of a node has where the forward has turned gradients off."""

_MAKERS = ("arange", "empty", "eye", "full", "ones", "rand", "randn", "zeros")
"""Functions of torch that make tensors, of sizes that may be symbols, which they do not take."""

_LOCK = threading.RLock()

Place = tuple[dict[str, Any], str]
"""Where a function is called from: the globals of a module of Python, and its name there."""

Values = dict[fx.Node, Any]
"""What nodes stand for in some sample, as far as that is known."""


def trace(
    root: nn.Module, around: Collection[str], sample: Tree = None, known: Sequence[Any] = ()
) -> tuple[fx.Graph, Values]:
    """The graph of a forward with one argument, in the modes that the modules have.

    Args:
        root: The module.
        around: The submodules that are looked into; others stay whole.
        sample: An input for ``root``, to be run as the symbols are; None where none is known, and with it no rank.
        known: In its place, what the nodes of another graph of the same forward stand for, in order.

    Raises:
        Exception: Whatever the forward raises on symbols.
    """
    whole: list[Place] = [(vars(torch), name) for name in _MAKERS]
    while True:
        tracer = _Tracer(around, sample, known)
        try:
            with _alone(), _standing_for(whole, tracer), _functions_whole(tracer):
                return tracer.trace(root), tracer.values
        except Exception as error:
            place = _outermost_function(error.__traceback__)
            if place is None or any(place[0] is known and place[1] == name for known, name in whole):
                raise
            whole.append(place)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, around: Collection[str], sample: Tree, known: Sequence[Any]) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        self._around = around
        self._sample = sample
        self._known = known
        self._has_grad, self._autocast = torch.is_grad_enabled(), _autocast()
        self._computing = False  # real tensors, in submodules that fx has put its own __call__ into
        self._thread = threading.get_ident()  # as modules of other threads find it, which may be training meanwhile

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return bool(module_qualified_name) and module_qualified_name not in self._around

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        # One that the forward makes for itself, such as nn.ReLU()(x), is a step of it, and no submodule with a name.
        is_step = m not in self.submodule_paths and not any(True for _ in m.parameters())  # type: ignore[operator]
        return forward(*args, **kwargs) if self._computing or is_step else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        real = self._computing or threading.get_ident() != self._thread
        return attr_val if real else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        """Objects without symbols, such as a model's configuration, become attributes of the root."""
        if dataclasses.is_dataclass(a) and not isinstance(a, type) and not has_symbols(vars(a)):
            return self._hold(a)  # fx would make another each time, of its fields alone
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._hold(a)

    def _hold(self, a: Any) -> fx.Node:
        held = vars(self.root)
        name = next((key for key, value in held.items() if key.startswith(HELD) and value is a), None)
        if name is None:
            name = f"{HELD}{sum(key.startswith(HELD) for key in held)}"
            setattr(self.root, name, a)
        return self.create_node("get_attr", name, (), {})

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Proxy:
        if _autocast() != self._autocast:
            raise ConfigError(
                "between the cuts, the forward begins or ends torch.autocast, which its parts would not; put that into "
                "a submodule, or give the whole run its precision"
            )
        made = super().create_proxy(kind, target, args, kwargs, *more, **options)
        if self._has_grad and not torch.is_grad_enabled():
            made.node.meta[NO_GRAD] = True
        if self._sample is not None:
            self._compute(made.node)
        elif len(self.graph.nodes) <= len(self._known):
            self.values[made.node] = self._known[len(self.graph.nodes) - 1]
        return made

    def _compute(self, node: fx.Node) -> None:
        """Notes what a node stands for; where that raises, it is unknown, and the part it is in says so when tried."""
        inputs = node.all_input_nodes
        if any(one not in self.values and one.op != "get_attr" for one in inputs):
            return

        def value(one: fx.Node) -> Any:
            return self.values[one] if one in self.values else attrgetter(str(one.target))(self.root)

        self._computing = True  # parameters are asked for, too
        try:
            args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
            if node.op == "placeholder":
                self.values[node] = self._sample
            elif node.op == "get_attr":
                self.values[node] = attrgetter(str(node.target))(self.root)
            elif node.op == "call_module":
                self.values[node] = attrgetter(str(node.target))(self.root)(*args, **kwargs)
            elif node.op == "call_method":
                self.values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_function":
                self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # noqa: BLE001  see above
            self.values.pop(node, None)
        finally:
            self._computing = False


class _Symbol(fx.Proxy):
    """Answers by itself what no batch changes."""

    def __getattr__(self, name: str) -> Any:
        value = self._value()
        if isinstance(value, Tensor):
            if name in ("ndim", "dtype"):
                return getattr(value, name)
            if name in ("dim", "ndimension", "is_floating_point", "is_complex"):
                return getattr(value, name)
            if name == "shape":  # a symbol of its own, and not yet to be called, as fx takes attributes to be
                return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __len__(self) -> int:
        value = self._value()
        return len(value) if isinstance(value, torch.Size) else super().__len__()

    def _value(self) -> Any:
        values = getattr(object.__getattribute__(self, "tracer"), "values", {})
        return values.get(object.__getattribute__(self, "node"))


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _outermost_function(at: TracebackType | None) -> Place | None:
    """The function, known by its name where it is called, that is called first on the way to an error."""
    while at is not None and at.tb_next is not None:
        names, entered = at.tb_frame.f_globals, at.tb_next.tb_frame.f_code
        if not str(names.get("__name__")).startswith(("torch.", "pipeal.")):
            inner: TracebackType | None = at.tb_next
            while inner is not None:  # a decorated function is entered by its wrapper, and has its name further in
                code = inner.tb_frame.f_code
                found = names.get(code.co_name)
                if inspect.isfunction(found):
                    own = (found.__code__, inspect.unwrap(found).__code__)
                    if entered in own and code in own:
                        return names, code.co_name
                inner = inner.tb_next
        at = at.tb_next
    return None


def has_symbols(tree: Tree) -> bool:
    """Whether there is one in it."""
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(tree))


@contextmanager
def _alone() -> Iterator[None]:
    """Within it no other thread traces: fx puts functions of its own into ``nn.Module``, and then back what it found.

    ``torch.compile`` traces as well, within a lock of its own. In PyTorch 2.6 a compiled layer of another thread
    refuses to run meanwhile.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with _LOCK, getattr(dynamo, "compile_lock", nullcontext()):
        yield


@contextmanager
def _standing_for(whole: Collection[Place], tracer: _Tracer) -> Iterator[None]:
    """Within it, calls of these functions with symbols become one node each."""
    before = [(names, name, names[name]) for names, name in whole]

    def standing_for(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not has_symbols((args, kwargs)):
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return call

    try:
        for names, name, function in before:
            names[name] = standing_for(function)
        yield
    finally:
        for names, name, function in before:
            names[name] = function


@contextmanager
def _functions_whole(tracer: _Tracer) -> Iterator[None]:
    """Within it, a ``torch.autograd.Function`` that is applied to symbols becomes one node, so that its backward stays:
    its forward runs without gradients. One that is given a function, as of ``torch.utils.checkpoint``, does not, since
    weights in that would go unseen."""
    before = vars(torch.autograd.Function)["apply"]
    applied = cache(_Applied)  # the same object wherever a graph calls one: fx tells names apart by that

    def apply(cls: type[torch.autograd.Function], *args: Any, **named: Any) -> Any:
        leaves = pytree.tree_leaves((args, named))
        given = [leaf for leaf in leaves if not isinstance(leaf, Tensor | fx.Proxy)]
        if not has_symbols(leaves) or any(map(callable, given)):
            return before.__get__(None, cls)(*args, **named)
        return tracer.create_proxy("call_function", applied(cls), args, named)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = before


@dataclass(frozen=True)
class _Applied:
    """What applies a function: fx wants one that has a name."""

    cls: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return self.cls.__name__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.cls.apply(*args, **named)
