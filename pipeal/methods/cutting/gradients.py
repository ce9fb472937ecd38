"""Which weights the gradients of a step reach, and where a cut would change that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torch import fx, nn

from pipeal.core.errors import ConfigError
from pipeal.core.tree import tensors
from pipeal.methods.cutting.crossing import Kind, is_constant, is_free, is_written_to, reads_shape, writes
from pipeal.methods.cutting.piece import may_draw_between
from pipeal.methods.cutting.symbols import FLAG, NO_GRAD
from pipeal.methods.cutting.tracing import Traced


def refuse_lost_gradients(traced: Traced) -> None:
    """Refuses a forward that keeps gradients from weights by ``torch.no_grad()``: its parts would train them.

    Raises:
        ConfigError: Between the cuts, it does so.
    """
    reached, lost = set[fx.Node](), set[fx.Node]()
    for node in traced.graph.nodes:
        if node.target == "detach" or reads_shape(node) or not _may_have(traced.values.get(node)):
            continue
        if node.op not in ("output", "get_attr") and NO_GRAD in node.meta and not writes(node):
            if _trained(node, traced.root) or not (reached | lost).isdisjoint(node.all_input_nodes):
                lost.add(node)
            continue
        if not lost.isdisjoint(node.all_input_nodes) or (
            NO_GRAD in node.meta and writes(node) and not reached.isdisjoint(node.all_input_nodes)
        ):
            raise ConfigError(
                "between the cuts, the forward turns gradients off (torch.no_grad, set_grad_enabled), which its "
                "parts would not; freeze the weights concerned (requires_grad_(False)), write x.detach() there, or "
                "put that into a submodule"
            )
        if _trained(node, traced.root) or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)


def of_weights_alone(graph: fx.Graph, root: nn.Module) -> set[fx.Node]:
    """The steps on trained weights, and what is free, that nothing else uses: they can as well be computed where their
    values are used."""
    modules = [root.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module" and n.target != FLAG]
    elsewhere = {id(one) for module in modules for one in (*module.parameters(), *module.buffers())}
    uses = Counter(node.target for node in graph.nodes if node.op == "get_attr" for _ in node.users)
    found = set[fx.Node]()

    def is_weight(node: fx.Node) -> bool:
        if node.op != "get_attr" or is_constant(node):
            return node.op == "get_attr"
        alone = uses[node.target] == 1 and id(attrgetter(str(node.target))(root)) not in elsewhere
        return alone and not is_written_to(node)

    for node in graph.nodes:
        inputs = node.all_input_nodes
        if not node.op.startswith("call_") or node.op == "call_module" or may_draw_between(node) or is_written_to(node):
            continue
        if not is_free(node) and all(one in found or is_free(one) or is_weight(one) for one in inputs):
            found.add(node)
    trained = set[fx.Node]()
    for node in graph.nodes:
        if _trained(node, root) or (node in found and not trained.isdisjoint(node.all_input_nodes)):
            trained.add(node)
    return found & trained


def unreached(
    traced: Traced,
    piece_of: Mapping[fx.Node, int],
    number: int,
    leaving: Mapping[fx.Node, Kind],
    masks: Collection[fx.Node],
) -> tuple[str, ...]:
    """The weights behind what a piece hands on beside its first value: it is detached, and takes no gradient back."""
    first, *others = leaving
    values = [one for one in others if leaving[one] != "shape" and one not in masks]
    beside = [one for one in values if _may_have(traced.values.get(one))]

    def weights(ends: Iterable[fx.Node]) -> dict[str, None]:
        behind = set(ends)
        for node in reversed(traced.graph.nodes):
            if node in behind or (writes(node) and node.args[0] in behind):
                behind.update([node, *node.all_input_nodes] if piece_of.get(node) == number else [])
        own = [node for node in traced.graph.nodes if node in behind and piece_of.get(node, number) == number]
        return dict.fromkeys(name for node in own for name in _trained(node, traced.root))

    trained = weights([first])
    return tuple(name.removeprefix("model.") for name in weights(beside) if name not in trained)


def _may_have(value: Any) -> bool:
    """Whether a value, None where it is not known, is one that can have a gradient."""
    return value is None or any(one.is_floating_point() or one.is_complex() for one in tensors(value))


def _trained(node: fx.Node, root: nn.Module) -> list[str]:
    """The names of the weights that a step holds, without those that are frozen."""
    if node.op not in ("call_module", "get_attr") or node.target == FLAG:
        return []
    name = str(node.target)
    held = attrgetter(name)(root)
    if isinstance(held, nn.Module):
        return [f"{name}.{inner}" for inner, weight in held.named_parameters() if weight.requires_grad]
    return [name] if isinstance(held, nn.Parameter) and held.requires_grad else []
