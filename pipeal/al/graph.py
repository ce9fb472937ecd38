"""Cutting a module that is no list: its forward is run once on symbols (torch.fx), and the graph is cut.

Only the modules around a named one are looked into, to find what lies between submodules (flattening, adding a
position code); all others stay whole, so their own control flow does not matter. One value crosses each cut: it is the
packet of a layer.

A forward that depends on ``self.training`` by a plain argument, as ``F.dropout(x, 0.5, self.training)`` does, keeps
doing so: it is run twice, once in each mode, and where the two differ by that alone, the part asks for its own mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

# As in pipeal.packet: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree

from pipeal.al.piece import Piece, TrainingFlag
from pipeal.errors import ConfigError, first_line
from pipeal.packet import in_mode

LIST_INSTEAD = (
    "or pass a list of modules instead, each taking what the one before returns: "
    "from_bp([nn.Sequential(...), MyBlock(), ...], ...)"
)
_FLAG = "training_or_not"


def cut_graph(model: nn.Module, split: Sequence[str]) -> list[tuple[str, Piece]]:
    """The pieces of a module's forward, each with the name of the submodule that it begins at.

    Args:
        model: Its forward takes one argument; others are left at their defaults.
        split: Names of submodules in the order of their calls, none within another.

    Raises:
        ConfigError: The forward cannot be traced between the cuts, a named submodule is not called just once, the
            order is another one, or not exactly one value crosses a cut.
    """
    graph, root = _trace(model, split)
    piece_of = _assign(graph, split)
    pieces = sorted(set(piece_of.values()))
    crossing: dict[int, fx.Node | None] = {pieces[0]: None}
    for number in pieces[1:]:
        crossing[number] = _crossing(graph, piece_of, number, split[number - 1])
    built = []
    for number, following in zip(pieces, [*pieces[1:], None], strict=True):
        leaving = None if following is None else crossing[following]
        piece = _assemble(_extract(graph, piece_of, number, crossing[number], leaving), root)
        built.append((split[number - 1] if number else _first_call(piece.graph), piece))
    return built


def out_of_order(called: Sequence[str], given: Sequence[str]) -> str:
    """The one line for names that are not in the order of their calls."""
    return f"split has {', '.join(given)}, but the forward calls them in another order; pass {', '.join(called)}"


class _Whole(nn.Module):
    """Calls the model with one argument: fx then sees no other, and their defaults keep their meaning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    """Looks only into the modules around a named one."""

    proxy_buffer_attributes = True

    def __init__(self, split: Sequence[str]) -> None:
        super().__init__()
        self._around = {"model"}
        for name in split:
            while "." in name:
                name = name.rpartition(".")[0]
                self._around.add(f"model.{name}")

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return module_qualified_name not in self._around


def _trace(model: nn.Module, split: Sequence[str]) -> tuple[fx.Graph, nn.Module]:
    """The graph of a forward, and the module that its names belong to."""
    root = _Whole(model)
    root.training = model.training
    try:
        with torch.random.fork_rng([]):
            with in_mode([model], True):
                train = _Tracer(split).trace(root)
            with in_mode([model], False):
                evaluation = _Tracer(split).trace(root)
    except Exception as error:  # a user's forward, on symbols, may raise anything
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot be followed between the cuts: {first_line(error)}; "
            f"{_hint(model, split)}put what depends on values into a submodule, {LIST_INSTEAD}"
        ) from error
    return _both_modes(train, evaluation, root, _hint(model, split)), root


def _hint(model: nn.Module, split: Sequence[str]) -> str:
    """What may help with this model."""
    if getattr(model, "aux_logits", False):
        return "build it with aux_logits=False: auxiliary heads work in training alone; or "
    lists = {name.rpartition(".")[0] for name in split if "." in name}
    found = sorted(name for name in lists if isinstance(model.get_submodule(name), nn.ModuleList))
    return f"pass list(model.{found[0]}), if they need nothing else; or " if found else ""


def _both_modes(train: fx.Graph, evaluation: fx.Graph, root: nn.Module, hint: str) -> fx.Graph:
    """The graph for training, asking for the mode where the one for evaluation has the other truth value."""
    refusal = ConfigError(
        "between the cuts, the forward does one thing in training and another in evaluation, or other things each time "
        f"(random numbers from outside a submodule); {hint}put that into a submodule, {LIST_INSTEAD}"
    )
    if len(train.nodes) != len(evaluation.nodes):
        raise refusal
    twin: dict[Any, Any] = {}
    for node, other in zip(list(train.nodes), evaluation.nodes, strict=True):
        twin[node] = other
        leaves, shape = pytree.tree_flatten((node.args, node.kwargs))
        others, other_shape = pytree.tree_flatten((other.args, other.kwargs))
        if (node.op, shape) != (other.op, other_shape) or not _same_target(node, other, root):
            raise refusal
        differ = [
            place
            for place, (leaf, its) in enumerate(zip(leaves, others, strict=True))
            if (twin[leaf] is not its if isinstance(leaf, fx.Node) else repr(leaf) != repr(its))
        ]
        for place in differ:
            if not (isinstance(leaves[place], bool) and isinstance(others[place], bool)):
                raise refusal
            root.add_module(_FLAG, TrainingFlag())
            with train.inserting_before(node):
                mode = train.call_module(_FLAG)
                leaves[place] = mode if leaves[place] else train.call_function(operator.not_, (mode,))
        if differ:
            node.args, node.kwargs = pytree.tree_unflatten(leaves, shape)
    return train


def _same_target(node: fx.Node, other: fx.Node, root: nn.Module) -> bool:
    if node.target == other.target:
        return True
    # Tensors made in the forward are constants to fx, numbered anew each time.
    mine, theirs = (_named(root, str(n.target)) if n.op == "get_attr" else None for n in (node, other))
    return isinstance(mine, Tensor) and isinstance(theirs, Tensor) and torch.equal(mine, theirs)


def _assign(graph: fx.Graph, split: Sequence[str]) -> dict[fx.Node, int]:
    """The number of the piece of each node that computes: 0 before the first named submodule.

    There is no piece 0 if no submodule is called there: what is done to the input first then belongs to piece 1.
    """
    begins = {f"model.{name}": name for name in split}
    called = [begins[node.target] for node in graph.nodes if node.op == "call_module" and node.target in begins]
    for name in split:
        if called.count(name) != 1:
            times = "not called" if name not in called else f"called {called.count(name)} times"
            raise ConfigError(f"{name!r} is {times} in the forward; a layer begins at a submodule that is called once")
    if called != list(split):
        raise ConfigError(out_of_order(called, split))
    calls = [node.target for node in graph.nodes if node.op == "call_module" and node.target != _FLAG]
    piece_of, number = {}, int(calls[0] in begins)
    for node in graph.nodes:
        if node.op == "call_module" and node.target in begins:
            number = 1 + called.index(begins[node.target])
        if node.op.startswith("call_"):
            piece_of[node] = number
    for node in reversed(graph.nodes):
        if _is_flag(node):  # each has one user, and never crosses a cut: the user may be what begins the next piece
            piece_of[node] = piece_of.get(next(iter(node.users)), piece_of[node])
    return piece_of


def _is_flag(node: fx.Node) -> bool:
    """Whether a node gives the mode, or its opposite."""
    if node.target is operator.not_:
        return isinstance(node.args[0], fx.Node) and _is_flag(node.args[0])
    return node.op == "call_module" and node.target == _FLAG


def _crossing(graph: fx.Graph, piece_of: Mapping[fx.Node, int], number: int, name: str) -> fx.Node:
    """The one value that passes from the pieces below ``number`` to it and those above."""

    def above(node: fx.Node) -> bool:
        return node.op == "output" or piece_of[node] >= number

    below = [node for node in graph.nodes if node.op == "placeholder" or piece_of.get(node, number) < number]
    found = [node for node in below if any(map(above, node.users))]
    if len(found) == 1:
        return found[0]
    values = " and ".join(map(_value_name, found[:4])) if found else "nothing"
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    raise ConfigError(
        f"{name!r} cannot begin a layer: {values}{more} cross{'' if found else 'es'} the cut, and a layer hands on one "
        f"value; cut where one value passes, {LIST_INSTEAD}"
    )


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
    entering: fx.Node | None,
    leaving: fx.Node | None,
) -> fx.Graph:
    """The graph of one piece: from its one input (None for the model's) to its one result (None for the model's)."""
    part = fx.Graph()
    nodes = list(graph.nodes)
    start = next(node for node in nodes if node.op == "placeholder") if entering is None else entering
    copies = {start: part.placeholder("x")}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter or buffer; each piece fetches what it uses
            copies[node] = part.node_copy(node)
        return copies[node]

    for node in nodes:
        if piece_of.get(node) == number:
            copies[node] = part.node_copy(node, copy_of)
    part.output(fx.node.map_arg(nodes[-1].args[0], copy_of) if leaving is None else copy_of(leaving))
    return part


def _assemble(part: fx.Graph, root: nn.Module) -> Piece:
    """A module of a graph; what it holds is called as in the model."""
    held: dict[str, Any] = {}
    for node in part.nodes:
        if node.op in ("call_module", "get_attr"):
            found = TrainingFlag() if node.target == _FLAG else _named(root, node.target)
            node.target = _own_name(node.target)
            held[node.target] = found
    piece = Piece(held, part)
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


def _named(root: nn.Module, target: str) -> Any:
    found: Any = root
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _first_call(part: fx.Graph) -> str:
    called = (node.target for node in part.nodes if node.op == "call_module")
    return str(next(called, "input"))
