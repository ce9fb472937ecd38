"""Cutting a module that is no list: its forward is run once on symbols (torch.fx), and the graph is cut.

Only the modules around a named one are looked into, to find what lies between submodules (flattening, adding a
position code); all others stay whole, so their own control flow does not matter. What crosses a cut is the packet of a
layer: one value as it is, several as a tuple that begins with what the named submodule takes::

                                   ┊                             ┊
    x ──► down ─┬─ skip ───────────┊─────────────────────────────┊──► cat ─► out ──►
                └─ pool ─ (pool,   ┊──► middle ─► up ─ (up,      ┊──► cat
                           skip)   ┊                    skip)    ┊               skip is handed on, detached

What depends on shapes alone is not handed on but computed again; where the tensor whose shape is read does not cross,
a number expanded to that shape does. What is the same for all samples crosses once for each, without a copy, so that
the rows of a packet can be chosen. An input called a mask crosses every cut: the bridges average over words.

A forward that depends on ``self.training`` by a plain argument, as ``F.dropout(x, 0.5, self.training)`` does, keeps
doing so: it is run twice, once in each mode, and where the two differ by that alone, the part asks for its own mode.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree

from pipeal.core.errors import ConfigError, first_line
from pipeal.core.modules import in_mode
from pipeal.core.tree import Tree, batch_size, map_tensors
from pipeal.methods.cutting.calling import Called, called, why_not
from pipeal.methods.cutting.draws import may_draw_between
from pipeal.methods.cutting.piece import Piece, TrainingFlag, for_each_sample, of_one_sample, shape_alone
from pipeal.methods.cutting.probe import probing
from pipeal.methods.cutting.symbols import FLAG, HELD, Values, named, trace

LIST_INSTEAD = (
    "or pass a list of modules instead, each taking what the one before returns: "
    "from_bp([nn.Sequential(...), MyBlock(), ...], ...)"
)

Kind: TypeAlias = Literal["value", "shape", "shared"]
"""How a value crosses: itself, its shape alone, or one that is the same for all samples."""


@dataclass(frozen=True)
class Traced:
    """The graph of a model's forward.

    Attributes:
        graph: Of the whole forward, in training mode.
        root: What its names belong to.
        values: What its nodes stand for in the sample.
    """

    graph: fx.Graph
    root: Called
    values: Values = field(default_factory=dict)


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
    graph, root = traced.graph, traced.root
    piece_of = _assign(graph, split)
    numbers = sorted(set(piece_of.values()))
    masks = _masks(traced)
    crossing = {number: _crossing(graph, piece_of, number, split[number - 1], masks) for number in numbers[1:]}
    if sample is not None:
        shared = _shared(traced, sample, {node for kinds in crossing.values() for node in kinds})
        for kinds in crossing.values():
            # The first is handed on as it is: sizes of a batch that comes second look like those of no batch at all.
            for node in list(kinds)[1:]:
                if kinds[node] == "value" and node in shared:
                    kinds[node] = "shared"
    built = []
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        leaving = _answer(traced, masks) if following is None else crossing[following]
        piece = _assemble(_extract(graph, piece_of, number, crossing.get(number), leaving), root)
        if leaving is not None and len(leaving) > 1:
            piece.hands_on = tuple(map(_value_name, leaving))
            piece.mask_at = next((place for place, node in enumerate(leaving) if node in masks), None)
        built.append((split[number - 1] if number else _first_call(piece.graph), piece))
    return built


def parents(name: str) -> list[str]:
    """The modules around a submodule, from the nearest.

    >>> parents("encoder.layers.0")
    ['encoder.layers', 'encoder']
    """
    places = name.split(".")
    return [".".join(places[:end]) for end in range(len(places) - 1, 0, -1)]


def out_of_order(called: Sequence[str], given: Sequence[str]) -> str:
    """The one line for names that are not in the order of their calls."""
    return f"split has {', '.join(given)}, but the forward calls them in another order; pass {', '.join(called)}"


def trace_model(model: nn.Module, around: Collection[str], sample: Tree, split: Sequence[str] = ()) -> Traced:
    """The graph of a forward, in both modes.

    Args:
        model: Its forward.
        around: Names of the submodules that are looked into.
        sample: See :func:`cut_graph`.
        split: What the user named, for messages.

    Raises:
        ConfigError: The forward cannot be traced.
    """
    root = Called(model, None, {}) if sample is None else called(model, sample)
    root.training = model.training
    looked_into = {"model", *(f"model.{name}" for name in around)}
    try:
        with torch.random.fork_rng([]):
            with probing(model):
                evaluation, values = trace(root, looked_into, sample)
            torch.rand(1)  # what the forward draws by itself is to differ from what it just drew, or it goes unseen
            with in_mode([model], True):
                train, values = trace(root, looked_into, known=[values.get(node) for node in evaluation.nodes])
    except ConfigError:
        raise
    except Exception as error:  # a user's forward, on symbols, may raise anything
        why = why_not(root) or f"{_hint(model, split)}put what depends on values into a submodule, {LIST_INSTEAD}"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot be followed between the cuts: {first_line(error)}; {why}"
        ) from error
    return Traced(_both_modes(train, evaluation, root, _hint(model, split)), root, values)


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
            root.add_module(FLAG, TrainingFlag())
            with train.inserting_before(node):
                mode = train.call_module(FLAG)
                leaves[place] = mode if leaves[place] else train.call_function(operator.not_, (mode,))
        if differ:
            node.args, node.kwargs = pytree.tree_unflatten(leaves, shape)
    return train


def _same_target(node: fx.Node, other: fx.Node, root: nn.Module) -> bool:
    if node.target == other.target:
        return True
    # Tensors made in the forward are constants to fx, numbered anew each time.
    mine, theirs = (named(root, str(n.target)) if n.op == "get_attr" else None for n in (node, other))
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
    calls = [node.target for node in graph.nodes if node.op == "call_module" and node.target != FLAG]
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
    return node.op == "call_module" and node.target == FLAG


def _crossing(
    graph: fx.Graph, piece_of: Mapping[fx.Node, int], number: int, name: str, masks: Sequence[fx.Node]
) -> dict[fx.Node, Kind]:
    """What passes from the pieces below ``number`` to it and those above, first what the submodule ``name`` takes."""
    made = {node for node in graph.nodes if node.op == "placeholder" or piece_of.get(node, number) < number}
    kinds: dict[fx.Node, Kind] = {}

    def need(node: fx.Node, kind: Kind) -> None:
        if node.op == "get_attr":
            return  # each piece fetches what it uses
        if is_free(node):
            for one in node.all_input_nodes:
                need(one, "shape" if reads_shape(node) else "value")
        elif kinds.get(node) != "value":
            kinds[node] = kind

    for node in graph.nodes:
        if node.op == "output" or piece_of.get(node, -1) >= number:
            for one in node.all_input_nodes:
                if one in made:
                    need(one, "shape" if reads_shape(node) else "value")
    values = [node for node in graph.nodes if kinds.get(node) == "value"]
    begins = next(node for node in graph.nodes if node.target == f"model.{name}")
    first = next((node for node in begins.all_input_nodes if node in values), None) or next(reversed(values), None)
    if first is None:
        raise ConfigError(
            f"{name!r} cannot begin a layer: nothing crosses the cut, and a layer hands on one value or more; cut "
            f"where something passes, {LIST_INSTEAD}"
        )
    kinds.update(dict.fromkeys((node for node in masks if node in made), "value"))
    return {first: "value", **{node: kinds[node] for node in graph.nodes if node in kinds and node is not first}}


def is_free(node: fx.Node) -> bool:
    """Whether a value depends on shapes and constants alone, so that it costs next to nothing to compute it again."""
    if reads_shape(node):
        return True
    if node.op not in ("call_function", "call_method") or may_draw_between(node) or _is_written_to(node):
        return False
    return all((one.op == "get_attr" and _is_constant(one)) or is_free(one) for one in node.all_input_nodes)


def reads_shape(node: fx.Node) -> bool:
    """Whether a step asks a tensor for its sizes, type or device."""
    if node.op == "call_function":
        return node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op == "call_method" and node.target in ("size", "dim", "numel", "ndimension")


def _is_constant(node: fx.Node) -> bool:
    """Whether it is a tensor that fx has made of what the forward wrote out, or an object that it holds."""
    return str(node.target).startswith(("_tensor_constant", HELD))


def _is_written_to(node: fx.Node) -> bool:
    def writes(user: fx.Node) -> bool:
        target = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        return target == "setitem" or (target.endswith("_") and not target.endswith("__"))

    return any(writes(user) and user.args[:1] == (node,) for user in node.users)


def _masks(traced: Traced) -> list[fx.Node]:
    """The inputs of the model that are masks."""

    def is_mask(node: fx.Node) -> bool:
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        return node.args[0].op == "placeholder" and node.args[1] in traced.root.masks

    return [node for node in traced.graph.nodes if is_mask(node)]


def _answer(traced: Traced, masks: Sequence[fx.Node]) -> dict[fx.Node, Kind] | None:
    """What the last piece hands on where that is more than the answer: one at each word, and which are words."""
    answer = next(reversed(traced.graph.nodes)).args[0]
    value = traced.values.get(answer) if isinstance(answer, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 3:
        return None
    words = [node for node in masks if _has_shape(traced.values.get(node), value.shape[:2])]
    return {answer: "value", words[0]: "value"} if words else None


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def _shared(traced: Traced, sample: Tree, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Of some nodes those that are the same for all samples: tensors of as many rows for fewer samples, too."""
    rows = batch_size(sample)
    if rows < 2 or not nodes:
        return set()
    graph_module = fx.GraphModule(traced.root, traced.graph)
    fewer: dict[fx.Node, Any] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            if n in nodes:
                fewer[n] = found
            return found

    def without_last(tensor: Tensor) -> Tensor:
        return tensor[:-1] if tensor.dim() and tensor.shape[0] == rows else tensor

    try:
        with probing(graph_module):
            Noting(graph_module, garbage_collect_values=False, graph=traced.graph).run(
                map_tensors(without_last, sample)
            )
    except Exception:  # noqa: BLE001  batches of one size alone: then as many rows as the sample has are its samples
        return {node for node in nodes if _rows(traced.values.get(node)) not in (rows, None)}
    return {
        node
        for node in nodes
        if (found := _rows(traced.values.get(node))) is not None and found == _rows(fewer.get(node))
    }


def _rows(value: Any) -> int | None:
    """The first size of a tensor, -1 of one that has none; None of anything else."""
    if not isinstance(value, Tensor):
        return None
    return value.shape[0] if value.dim() else -1


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
        if kind == "shared" and found[-1] is not came.get(node):
            found[-1] = part.call_function(for_each_sample, (found[-1], found[0]))
    part.output(found[0] if len(found) == 1 else tuple(found))
    return part


def _assemble(part: fx.Graph, root: nn.Module) -> Piece:
    """A module of a graph; what it holds is called as in the model."""
    held: dict[str, Any] = {}
    for node in part.nodes:
        if node.op in ("call_module", "get_attr"):
            found = TrainingFlag() if node.target == FLAG else named(root, node.target)
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


def _first_call(part: fx.Graph) -> str:
    called = (node.target for node in part.nodes if node.op == "call_module")
    return str(next(called, "input"))
