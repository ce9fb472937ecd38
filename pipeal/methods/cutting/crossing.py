"""What crosses a cut of a graph, and how: values, shapes, and what is the same for all samples.

What depends on shapes alone is not handed on but computed again; where the tensor whose shape is read does not cross,
a number expanded to that shape does. What is the same for all samples crosses once for each, without a copy, and what
has its batch in another dimension crosses with it first, so that the rows of a packet can be chosen. An input called a
mask crosses every cut: the bridges average over words.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from pipeal.core.errors import ConfigError
from pipeal.core.tree import Tree, batch_size, map_tensors, tensors
from pipeal.methods.cutting.piece import may_draw_between
from pipeal.methods.cutting.probe import probing
from pipeal.methods.cutting.symbols import HELD
from pipeal.methods.cutting.tracing import LIST_INSTEAD, Traced

Kind: TypeAlias = Literal["value", "shape", "shared", "turned"]
"""How a value crosses: as it is, by its shape alone, as the same for all samples, or turned to have the batch first."""


_UNKNOWN = -1
"""The dimension of the batch where sizes follow it otherwise, as of all words of all texts in a row."""


def crossing_at(
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


def masks_of(traced: Traced) -> list[fx.Node]:
    """The inputs of the model that are masks, and what a submodule makes of the input that says that it gives one; all
    true on words: of a mask that is true on padding the opposite, which the graph gets a step for."""

    def is_mask(node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(traced.root.get_submodule(str(node.target)), "gives_mask", False))
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        place = node.args[1]  # a slice has no hash before Python 3.12
        return node.args[0].op == "placeholder" and isinstance(place, str | int) and place in traced.root.masks

    def on_words(node: fx.Node) -> fx.Node:
        if node.op == "call_module" or not traced.root.masks[node.args[1]]:  # type: ignore[index]
            return node
        with traced.graph.inserting_after(node):
            opposite = traced.graph.call_function(torch.logical_not, (node,))
        value = traced.values.get(node)
        if isinstance(value, Tensor):
            traced.values[opposite] = value.logical_not()
        return opposite

    return [on_words(node) for node in list(traced.graph.nodes) if is_mask(node)]


def answer_of(traced: Traced, masks: Sequence[fx.Node]) -> dict[fx.Node, Kind] | None:
    """What the last piece hands on where that is more than the answer: one at each word, and which are words."""
    answer = traced.graph.output_node().args[0]
    if not isinstance(answer, fx.Node):
        return None
    value = traced.values.get(answer)
    if not isinstance(value, Tensor) or value.dim() != 3:
        return None
    words = [node for node in masks if _has_shape(traced.values.get(node), value.shape[:2])]
    return {answer: "value", words[0]: "value"} if words else None


def batch_dims(traced: Traced, sample: Tree, nodes: Collection[fx.Node]) -> dict[fx.Node, tuple[int | None, ...]]:
    """Which dimension of the tensors of each of ``nodes`` is the batch's, None of those that are the same for all
    samples; found by what has other sizes for fewer samples, and without those of which nothing is known."""
    rows = batch_size(sample)
    if rows < 2 or not nodes:
        return {}
    graph_module = fx.GraphModule(traced.root, traced.graph)
    whole = fx.Interpreter(graph_module, garbage_collect_values=False, graph=traced.graph)

    def without_last(tensor: Tensor) -> Tensor:
        return tensor[:-1] if tensor.dim() and tensor.shape[0] == rows else tensor

    try:
        with probing(graph_module):
            whole.run(map_tensors(without_last, sample))
    except Exception:  # noqa: BLE001  batches of one size alone: then as many rows as the sample has are its samples
        values = {node: value for node in nodes if isinstance(value := traced.values.get(node), Tensor)}
        return {node: (0 if value.dim() and len(value) == rows else None,) for node, value in values.items()}

    def dim(of_all: Tensor, of_fewer: Tensor) -> int | None:
        if of_all.shape == of_fewer.shape:
            return None
        pairs = enumerate(zip(of_all.shape, of_fewer.shape, strict=True))
        return next((place for place, (size, fewer) in pairs if size == fewer + 1 == rows), _UNKNOWN)

    found: dict[fx.Node, tuple[int | None, ...]] = {}
    for node in nodes:
        of_all, of_fewer = tensors(traced.values.get(node)), tensors(whole.env.get(node))
        if of_all and [one.dim() for one in of_all] == [one.dim() for one in of_fewer]:
            found[node] = tuple(map(dim, of_all, of_fewer))
    return {node: dims for node, dims in found.items() if _UNKNOWN not in dims}


def is_free(node: fx.Node) -> bool:
    """Whether a value depends on shapes and constants alone, so that it costs next to nothing to compute it again."""
    if reads_shape(node):
        return True
    if node.op not in ("call_function", "call_method") or may_draw_between(node) or is_written_to(node):
        return False
    return all((one.op == "get_attr" and is_constant(one)) or is_free(one) for one in node.all_input_nodes)


def reads_shape(node: fx.Node) -> bool:
    """Whether a step asks a tensor for its sizes, type or device."""
    if node.op == "call_function":
        return node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op == "call_method" and node.target in ("size", "dim", "numel", "ndimension")


def is_constant(node: fx.Node) -> bool:
    """Whether it is a tensor that fx has made of what the forward wrote out, or an object that it holds."""
    return str(node.target).startswith(("_tensor_constant", HELD))


def is_written_to(node: fx.Node) -> bool:
    """Whether a step writes into what this one gave."""
    return any(writes(user) and user.args[:1] == (node,) for user in node.users)


def writes(node: fx.Node) -> bool:
    """Whether a step writes into its first argument."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_step = node.op in ("call_function", "call_method") and bool(node.args)
    return is_step and (target == "setitem" or (target.endswith("_") and not target.endswith("__")))


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
