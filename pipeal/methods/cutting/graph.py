"""Cutting a module that is no list: the graph of its forward is cut into pieces, each a module.

What crosses a cut (:mod:`pipeal.methods.cutting.crossing`) is the packet of a layer: one value as it is, several as a
tuple that begins with what the named submodule takes::

                                   ┊                             ┊
    x ──► down ─┬─ skip ───────────┊─────────────────────────────┊──► cat ─► out ──►
                └─ pool ─ (pool,   ┊──► middle ─► up ─ (up,      ┊──► cat
                           skip)   ┊                    skip)    ┊               skip is handed on, detached
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree
from pipeal.methods.cutting.calling import Called
from pipeal.methods.cutting.crossing import Kind, answer_of, batch_dims, crossing_at, masks_of, reads_shape
from pipeal.methods.cutting.gradients import of_weights_alone, refuse_lost_gradients, unreached
from pipeal.methods.cutting.piece import (
    Piece,
    TrainingFlag,
    batch_back,
    batch_first,
    for_each_sample,
    of_one_sample,
    shape_alone,
)
from pipeal.methods.cutting.symbols import FLAG
from pipeal.methods.cutting.tracing import Traced, children_of, parents, trace_model


def cut_graph(model: nn.Module, split: Sequence[str], sample: Tree = None) -> list[tuple[str, Piece]]:
    """The pieces of a module's forward, each with the name of the submodule that it begins at.

    Args:
        model: See :func:`pipeal.methods.cutting.calling.called` for how its forward takes a sample; other arguments are
            left at their defaults.
        split: Names of submodules in the order of their calls, none within another.
        sample: A batch of inputs; None for one argument of which nothing is known.

    Raises:
        ConfigError: The forward cannot be traced between the cuts, a named submodule is not called just once, the
            order is another one, or nothing crosses a cut.
    """
    traced = trace_model(model, {parent for name in split for parent in parents(name)}, sample, split)
    refuse_lost_gradients(traced)
    graph, root = traced.graph, traced.root
    masks = masks_of(traced)
    piece_of = _assign(graph, split, root)
    numbers = sorted(set(piece_of.values()))
    crossing = {number: crossing_at(graph, piece_of, number, split[number - 1], masks) for number in numbers[1:]}
    every = {node for kinds in crossing.values() for node in kinds}
    dims = {} if sample is None else batch_dims(traced, sample, every)
    for kinds in crossing.values():
        for node in list(kinds)[1:]:  # the first is handed on as it is, for bridges to look at
            if kinds[node] == "value" and node in dims:
                kinds[node] = _kind(traced.values[node], dims[node])
    built = []
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        leaving = answer_of(traced, masks) if following is None else crossing[following]
        piece = _assemble(_extract(graph, piece_of, number, crossing.get(number), leaving, dims), root)
        if leaving is not None and len(leaving) > 1:
            piece.hands_on = tuple(map(_value_name, leaving))
            piece.unreached = unreached(traced, piece_of, number, leaving, masks)
            piece.mask_at = next((place for place, node in enumerate(leaving) if node in masks), None)
        built.append((split[number - 1] if number else _first_call(piece.graph), piece))
    return built


def all_train(traced: Traced, name: str) -> bool:
    """Whether all weights before a submodule would train if a part began at it, which it may not be able to."""
    piece_of = _assign(traced.graph, [name], traced.root)
    try:
        leaving = crossing_at(traced.graph, piece_of, 1, name, ())  # masks have no weights behind them
    except ConfigError:
        return False
    return not unreached(traced, piece_of, 0, leaving, ())


def out_of_order(called: Sequence[str], given: Sequence[str]) -> str:
    """The one line for names that are not in the order of their calls."""
    return f"split has {', '.join(given)}, but the forward calls them in another order; pass {', '.join(called)}"


def _kind(value: Any, dims: tuple[int | None, ...]) -> Kind:
    if isinstance(value, Tensor) and dims == (None,):
        return "shared"
    return "turned" if any(dims) and None not in dims else "value"


def _assign(graph: fx.Graph, split: Sequence[str], root: Called) -> dict[fx.Node, int]:
    """The number of the piece of each node that computes: 0 before the first named submodule.

    There is no piece 0 if no submodule is called there: what is done to the input first then belongs to piece 1.
    """
    begins = {f"model.{name}": name for name in split}
    called = [begins[node.target] for node in graph.nodes if node.op == "call_module" and node.target in begins]
    for name in split:
        if called.count(name) != 1:
            times = "not called" if name not in called else f"called {called.count(name)} times"
            part = root.model.get_submodule(name)
            within = f" ({children_of(part, name)})" if isinstance(part, nn.ModuleList | nn.ModuleDict) else ""
            raise ConfigError(
                f"{name!r} is {times} in the forward; a layer begins at a submodule that is called once{within}"
            )
    if called != list(split):
        raise ConfigError(out_of_order(called, split))
    calls = [node.target for node in graph.nodes if node.op == "call_module" and node.target != FLAG]
    piece_of, number = {}, int(calls[0] in begins)
    for node in graph.nodes:
        if node.op == "call_module" and node.target in begins:
            number = 1 + called.index(begins[node.target])
        if node.op.startswith("call_"):
            piece_of[node] = number
    movable = of_weights_alone(graph, root)
    for node in reversed(graph.nodes):
        if node in movable and node.users:  # what is handed on takes no gradient back
            piece_of[node] = min(piece_of.get(user, number) for user in node.users)
        if _is_flag(node):  # each has one user, and never crosses a cut: the user may be what begins the next piece
            piece_of[node] = piece_of.get(next(iter(node.users)), piece_of[node])
    return piece_of


def _is_flag(node: fx.Node) -> bool:
    """Whether a node gives the mode, or its opposite."""
    if node.target is operator.not_:
        return isinstance(node.args[0], fx.Node) and _is_flag(node.args[0])
    return node.op == "call_module" and node.target == FLAG


def _value_name(node: fx.Node) -> str:
    """What a user would call a value: the submodule or function that made it."""
    if node.op == "placeholder":
        return "the input"
    made_by = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if made_by == "getitem":
        return f"item {node.args[1]!r} of {_value_name(node.args[0])}"  # type: ignore[arg-type]
    if made_by == "getattr":
        return f"the {node.args[1]} of {_value_name(node.args[0])}"  # type: ignore[arg-type]
    return f"the result of {made_by.removeprefix('model.')!r}"


def _extract(
    graph: fx.Graph,
    piece_of: Mapping[fx.Node, int],
    number: int,
    entering: Mapping[fx.Node, Kind] | None,
    leaving: Mapping[fx.Node, Kind] | None,
    dims: Mapping[fx.Node, tuple[int | None, ...]],
) -> fx.Graph:
    """The graph of one piece, from what enters (None for the model's input) to what leaves (None for its result)."""
    part = fx.Graph()
    nodes = list(graph.nodes)
    x = part.placeholder("x")
    came: dict[fx.Node, fx.Node] = {}  # as it came, which is how it is handed on
    copies: dict[fx.Node, fx.Node] = {}
    if entering is None:
        copies[next(node for node in nodes if node.op == "placeholder")] = x
    else:
        for place, (node, kind) in enumerate(entering.items()):
            came[node] = x if len(entering) == 1 else part.call_function(operator.getitem, (x, place))
            if kind == "value":
                copies[node] = came[node]

    def copy_of(node: fx.Node, *, shape: bool = False) -> fx.Node:
        if shape and node in came and node not in copies:
            return came[node] if entering and entering[node] == "shape" else copy_of(node)
        if node not in copies and entering and entering.get(node) == "shared":
            copies[node] = part.call_function(of_one_sample, (came[node],))
        if node not in copies and entering and entering.get(node) == "turned":
            copies[node] = part.call_function(batch_back, (came[node], dims[node]))
        if node not in copies:  # a parameter or buffer, which each piece fetches, or what is computed again
            copies[node] = part.node_copy(node, partial(copy_of, shape=reads_shape(node)))
        return copies[node]

    def onward(node: fx.Node, kind: Kind) -> fx.Node:
        if node in came and entering and entering[node] == kind:
            return came[node]
        if kind == "shape":
            return part.call_function(shape_alone, (copy_of(node),))
        return copy_of(node)

    for node in nodes:
        if piece_of.get(node) == number:
            copies[node] = part.node_copy(node, partial(copy_of, shape=reads_shape(node)))
    if leaving is None:
        part.output(fx.node.map_arg(nodes[-1].args[0], copy_of))
        return part
    first, *others = leaving.items()
    found = [onward(*first)]
    for node, kind in others:
        found.append(onward(node, kind))
        came_so = entering is not None and entering.get(node) == kind
        if kind == "shared" and not came_so:
            found[-1] = part.call_function(for_each_sample, (found[-1], found[0]))
        if kind == "turned" and not came_so:
            found[-1] = part.call_function(batch_first, (found[-1], dims[node]))
    part.output(found[0] if len(found) == 1 else tuple(found))
    return part


def _assemble(part: fx.Graph, root: nn.Module) -> Piece:
    """A module of a graph; what it holds is called as in the model."""
    held: dict[str, Any] = {}
    unsaved = []
    for node in part.nodes:
        if node.op in ("call_module", "get_attr"):
            owner, _, field = node.target.rpartition(".")
            is_unsaved = node.target != FLAG and field in root.get_submodule(owner)._non_persistent_buffers_set
            found = TrainingFlag() if node.target == FLAG else operator.attrgetter(node.target)(root)
            node.target = _own_name(node.target)
            held[node.target] = found
            unsaved += [node.target] if is_unsaved else []
    piece = Piece(held, part)
    for name in unsaved:  # torch.fx makes a buffer of each tensor that it is given, one that is saved
        owner, _, field = name.rpartition(".")
        piece.get_submodule(owner)._non_persistent_buffers_set.add(field)
    for module in piece.modules():
        # What the model has not: the piece, its flag, and the empty modules that make up a dotted name.
        if isinstance(module, Piece | TrainingFlag) or type(module) is nn.Module:
            module.training = root.training
    return piece


def _own_name(target: str) -> str:
    name = target.removeprefix("model.")
    taken = hasattr(_EMPTY, name.partition(".")[0])  # a user's submodule may be called "graph"
    return target if taken else name


_EMPTY = fx.GraphModule({}, fx.Graph())


def _first_call(part: fx.Graph) -> str:
    called = (node.target for node in part.nodes if node.op == "call_module")
    return str(next(called, "input"))
