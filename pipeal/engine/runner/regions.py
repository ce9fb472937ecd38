"""A region: a function of a model that runs as one compiled graph, or not at all compiled.

Four things would let the past, or chance, change the result, and are kept away:

* Dynamo remembers compilations, their limit and which sizes changed per *code object*, which layers of one class
  share: what one layer compiles would depend on which layer came first. So each region has a code object of its own,
  and leaves no frame outside its one graph for dynamo to find. Sizes are all constants or all symbols, never what
  dynamo learns on the way. A region's past is then its layer's past.
* Inductor's CPU kernels hold the number of threads they were compiled for, which decides how reductions round. Each
  region is compiled once for every number of threads that it is run with.
* In its CPU kernels for what many places add to, as to the gradient of an embedding, threads add as they come. Such
  operators are left to PyTorch's own kernels, but for the gradient of interpolation, which comes in parts already.
* A graph for all sizes is found again, in PyTorch's caches on disk or elsewhere, by any sizes that it serves, and what
  was compiled for others rounds otherwise. Every process compiles such graphs for itself (the C++ of their kernels is
  not).

Where a function cannot be one graph (it prints, it draws from a generator of its own, …), nothing of it has run
when the compiler says so; its modules' children become regions in its place.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import first_line
from pipeal.core.tree import Tree

GRAPHS_MOST = 64
"""The graphs of one region: beyond it, shapes are not bounded, and compiling would never end."""


class CompileWarning(UserWarning):
    """A part of a model runs uncompiled, although compilation was asked for."""


@dataclass(eq=False)
class Region:
    """A function that runs as one compiled graph per set of shapes; or its parts do; or it runs as it is.

    Attributes:
        name: For messages.
        function: What is compiled: a module's forward, or a path of an inference.
        dynamic: Whether sizes are symbols in the graph.
        module: Whose forward it is; None for a function that has no parts.
        within: Whether it is a part of another region, which says for both what is not compiled.
    """

    name: str
    function: Callable[..., Any]
    _: KW_ONLY
    dynamic: bool
    module: nn.Module | None = None
    within: bool = False

    def __post_init__(self) -> None:
        self._own_forward = None if self.module is None else vars(self.module).get("forward")  # a user may have set one
        self._compiled: dict[int, Callable[..., Any]] = {}  # by the number of intra-op threads
        self._parts: list[Region] | None = None  # None: it is compiled as a whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function. Whatever it raises comes as its own type."""
        if self._parts is not None:
            return self.function(*args, **kwargs)
        # The compiler looks at the module, and must not meet this region in the place of its own forward.
        with _forwards([] if self.module is None else [(self.module, self._own_forward)]):
            try:
                return self._graphs()(*args, **kwargs)
            except _refusals() as found:
                refusal = found
            # Tracing has run nothing yet, so that nothing happens twice. An error of the function's own, such as a
            # wrong shape, shows again here, as itself, and leaves the region as it is.
            parts: list[Region] = []
            if self.module is not None:
                parts += regions(self.module, self.name, dynamic=self.dynamic, within=True)
            with installed(parts):
                result = self.function(*args, **kwargs)
        self._parts = parts
        self._compiled.clear()
        if not self.within:
            _warn(self, refusal)
        return result

    def in_force(self) -> Iterator[Region]:
        """This region, or, where it was refused, its parts as far as they are compiled."""
        if self._parts is None:
            yield self
        else:
            for part in self._parts:
                yield from part.in_force()

    def _graphs(self) -> Callable[..., Any]:
        threads = torch.get_num_threads()
        if threads not in self._compiled:
            self._compiled[threads] = compiled(self.function, threads, dynamic=self.dynamic)
        return self._compiled[threads]

    def uncompiled(self) -> Iterator[str]:
        """The names of what was refused, down to the smallest."""
        if self._parts is not None:
            if not self._parts:
                yield self.name
            for part in self._parts:
                yield from part.uncompiled()


def regions(
    module: nn.Module, name: str, *, dynamic: bool, within: bool = False, cut: Collection[nn.Module] = ()
) -> Iterator[Region]:
    """The regions of a module whose own forward is not one: its children, through containers that are not called.

    Operators of ``torch.nn`` are left out: alone, they are one kernel already.

    Args:
        module: The module.
        name: For messages.
        dynamic: Whether sizes are symbols in the graphs.
        within: Whether it is a part of a region that was refused.
        cut: Children that give ``(loss, output)``, whose output is gone back through by no one: their graphs detach it.
            What comes out of a graph attached has its gradient taken for zeros, which are made and carried back.
    """
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        if type(child).forward is nn.Module.forward:  # nn.ModuleList and its like
            yield from regions(child, path, dynamic=dynamic, within=within)
        elif next(child.children(), None) is not None or not type(child).__module__.startswith("torch.nn."):
            forward = partial(_cut, child.forward) if child in cut else child.forward
            yield Region(path, forward, dynamic=dynamic, module=child, within=within)


def _cut(forward: Callable[..., tuple[Tensor, Tree]], *args: Any, **kwargs: Any) -> tuple[Tensor, Tree]:
    loss, output = forward(*args, **kwargs)
    return loss, _detached(output)


def _detached(tree: Tree) -> Tree:
    """Of plain tuples; trees of other kinds, which the compiler may not see through, are left as they are."""
    if isinstance(tree, Tensor):
        return tree.detach() if tree.requires_grad else tree
    return tuple(map(_detached, tree)) if type(tree) is tuple else tree


def installed(parts: Iterable[Region]) -> AbstractContextManager[None]:
    """Within it, the modules of these regions run compiled; afterwards they are as they were."""
    return _forwards((part.module, part) for part in parts if part.module is not None)


@contextmanager
def _forwards(wanted: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Within it, each of these modules has that forward of its own; or, with None, that of its class."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in wanted:
            before.append((module, _put_forward(module, forward)))
        yield
    finally:
        for module, forward in reversed(before):
            _put_forward(module, forward)


def _put_forward(module: nn.Module, forward: Any) -> Any:
    """Sets, or with None removes, the forward of this one module; returns what was there."""
    own = vars(module)
    before = own.pop("forward", None)
    if forward is not None:
        own["forward"] = forward
    return before


def compiled(function: Callable[..., Any], threads: int, *, dynamic: bool) -> Callable[..., Any]:
    """A compiled form with a code object of its own, for a number of intra-op threads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        settings = {"cpp.threads": threads}
        if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in inputs):
            return compile_fx(graph, inputs, config_patches=settings)
        return compile_fx(
            graph, inputs, inner_compile=_in_one_order, config_patches=settings, decompositions=_decompositions()
        )

    own = types.FunctionType(call.__code__.replace(), call.__globals__, "region", None, call.__closure__)
    return torch.compile(own, backend=inductor, fullgraph=True, dynamic=dynamic)


def _in_one_order(*args: Any, **kwargs: Any) -> Any:
    """Inductor's own compiler of one graph, told to have no threads add to one place as they come."""
    from torch._inductor.compile_fx import compile_fx_inner

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # not of use_deterministic_algorithms, which alters more
    try:
        return compile_fx_inner(*args, **kwargs)
    finally:
        torch.set_deterministic_debug_mode(before)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """What inductor takes apart, without operators that are sums in one order and would be made of one that is not."""
    from torch._inductor.decomposition import select_decomp_table

    whole = _left_whole()
    return {operator: parts for operator, parts in select_decomp_table().items() if operator not in whole}


@cache
def _left_whole() -> tuple[Any, ...]:
    """Those operators, which inductor now calls where it meets them."""
    from torch._inductor.lowering import make_fallback

    aten = torch.ops.aten
    whole = (
        aten.embedding_dense_backward.default,
        aten.index_add.default,
        aten.col2im.default,
        aten.unfold_backward.default,
    )
    for operator in whole:
        make_fallback(operator, warn=False, override_decomp=True)
    return whole


@contextmanager
def compiler_settings(*, dynamic: bool) -> Iterator[None]:
    """What holds while an action runs alone. Newer versions of PyTorch keep it per thread.

    A backward computes views of what the forward keeps once more. Else it keeps them beside it, and what follows from
    them: of a feed-forward the truth values where ReLU was above zero, which a CPU writes slowly.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo_settings: Any = dynamo
    limits: dict[str, Any] = {"recompile_limit": GRAPHS_MOST}
    if not hasattr(dynamo, "recompile_limit"):  # as in PyTorch 2.6, which runs uncompiled beyond it and says nothing
        limits = {"cache_size_limit": GRAPHS_MOST, "fail_on_cache_limit_hit": True}
    with ExitStack() as stack:
        # One kernel at a time: more are compiled by processes that outlive the pipeline.
        stack.enter_context(inductor.patch(compile_threads=1))
        stack.enter_context(dynamo_settings.patch({**limits, "automatic_dynamic_shapes": False}))
        # Its cache would find graphs again by what they compute, but not by the order in which they add.
        stack.enter_context(
            functorch.patch(recompute_views=True, enable_autograd_cache=False, enable_remote_autograd_cache=False)
        )
        if dynamic:
            stack.enter_context(inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False))
        yield


@cache
def _refusals() -> tuple[type[Exception], ...]:
    """What the compiler raises, before it has run anything, for a function that it cannot make one graph of."""
    from torch._dynamo import exc

    names = ("TorchDynamoException", "FailOnRecompileLimitHit", "FailOnCacheLimitHit")  # the last one until 2.6
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def _warn(region: Region, refusal: Exception) -> None:
    reason = first_line(refusal)
    if "Limit" in type(refusal).__name__:
        reason = (
            f"more kinds of input than {GRAPHS_MOST} graphs are for, or a value that differs from batch to batch; "
            "compile='dynamic' has one graph for all sizes; a run that is taken up again may round otherwise"
        )
    runs = "uncompiled"
    if list(region.in_force()):
        without = ", ".join(region.uncompiled())
        runs = f"compiled in parts, without {without}" if without else "compiled in parts"
    warnings.warn(f"{region.name} runs {runs}: {reason}", CompileWarning, stacklevel=2)
