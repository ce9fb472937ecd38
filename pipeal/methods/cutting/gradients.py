"""Which weights the gradients of a step reach, and where a cut would change that."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx, nn

from pipeal.core.errors import ConfigError
from pipeal.core.tree import tensors
from pipeal.methods.cutting.crossing import reads_shape
from pipeal.methods.cutting.symbols import FLAG, NO_GRAD
from pipeal.methods.cutting.tracing import Traced


def refuse_lost_gradients(traced: Traced) -> None:
    """Refuses a forward that keeps gradients from weights by ``torch.no_grad()``: its parts would train them.

    Raises:
        ConfigError: Between the cuts, it does so.
    """
    reached = set[fx.Node]()
    for node in traced.graph.nodes:
        if node.target == "detach" or reads_shape(node) or not _may_have(traced.values.get(node)):
            continue
        if _trained(node, traced.root) or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            if NO_GRAD in node.meta:
                raise ConfigError(
                    "between the cuts, the forward turns gradients off (torch.no_grad, set_grad_enabled), which its "
                    "parts would not; freeze the weights concerned (requires_grad_(False)), write x.detach() there, or put "
                    "that into a submodule"
                )


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
