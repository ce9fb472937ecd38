"""The graph of a model's forward (torch.fx), which asks for the mode where training and evaluation differ.

Only the modules around a named one are looked into, to find what lies between submodules (flattening, adding a
position code); all others stay whole, so their own control flow does not matter.

A forward that depends on ``self.training`` by a plain argument, as ``F.dropout(x, 0.5, self.training)`` does, keeps
doing so: it is run twice, once in each mode, and where the two differ by that alone, the part asks for its own mode.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn

# As in pipeal.core.tree: private by name, but what fx itself stands on.
from torch.utils import _pytree as pytree

from pipeal.core.errors import ConfigError, first_line, listed
from pipeal.core.modules import in_mode
from pipeal.core.tree import Tree
from pipeal.methods.cutting.calling import Called, called, why_not
from pipeal.methods.cutting.draws import with_draws
from pipeal.methods.cutting.piece import TrainingFlag
from pipeal.methods.cutting.probe import probing
from pipeal.methods.cutting.symbols import FLAG, Values, has_symbols, trace

LIST_INSTEAD = (
    "or pass a list of modules instead, each taking what the one before returns: "
    "from_bp([nn.Sequential(...), MyBlock(), ...], ...)"
)


_SHOWN = 16
"""How many names a message lists."""


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
    held = _Held({"": model, **{name: model.get_submodule(name) for name in around}})
    try:
        with held, torch.random.fork_rng([]):
            with probing(model):
                evaluation, values = trace(root, looked_into, sample)
                held.after(evaluation)
            torch.rand(1)  # what the forward draws by itself is to differ from what it just drew, or it goes unseen
            with in_mode([model], True), torch.enable_grad():
                known, found = [values.get(node) for node in evaluation.nodes], dict[fx.Graph, Values]()

                def follow() -> fx.Graph:
                    graph, its_values = trace(root, looked_into, known=known)
                    held.after(graph)
                    found[graph] = its_values
                    return graph

                train, decides = with_draws(follow)
    except ConfigError:
        raise
    except Exception as error:  # a user's forward, on symbols, may raise anything
        why = why_not(root) or f"{_hint(model, split)}put what depends on values into a submodule, {LIST_INSTEAD}"
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot be followed between the cuts{_place(error.__traceback__)}: "
            f"{first_line(error)}; {why}"
        ) from error
    if decides:
        raise ConfigError(
            "between the cuts, the forward draws random numbers from outside a submodule (as layer drop does), which "
            f"its parts would not draw again; {_hint(model, split)}put that into a submodule, {LIST_INSTEAD}"
        )
    return Traced(_both_modes(train, evaluation, root, _hint(model, split)), root, found[train])


class _Held:
    """What modules hold: after a forward on symbols, which may assign some of it, it is as it was.

    Args:
        modules: By name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._before: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (name, held, dict(held)) for name, module in modules.items() for held in (vars(module), module._buffers)
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def after(self, graph: fx.Graph) -> None:
        """After a forward: puts back what was. What it merely keeps, or makes once and keeps, is computed each time.

        Raises:
            ConfigError: One replaced a tensor that the next batch would need.
        """
        read = {node.target for node in graph.nodes if node.op == "get_attr"}
        for module, held, before in self._before:
            is_of_buffers = "_buffers" not in before
            for key in [key for key, value in held.items() if value is not before.get(key)]:
                name = f"{module}.{key}" if module else key
                was_tensor = isinstance(before.get(key), Tensor) and has_symbols(held[key])
                if (is_of_buffers and (was_tensor or before.get(key) is None)) or (
                    was_tensor and f"model.{name}" in read
                ):
                    raise ConfigError(
                        f"between the cuts, the forward assigns to {name!r}, which would be lost after the batch; "
                        f"write into a tensor that is there (self.{key}.add_(1), self.{key}.copy_(...)), or put that "
                        "into a submodule"
                    )
        self._put_back()

    def _put_back(self) -> None:
        for _, held, before in self._before:
            held.clear()
            held.update(before)


def parents(name: str) -> list[str]:
    """The modules around a submodule, from the nearest.

    >>> parents("encoder.layers.0")
    ['encoder.layers', 'encoder']
    """
    places = name.split(".")
    return [".".join(places[:end]) for end in range(len(places) - 1, 0, -1)]


def children_of(module: nn.Module, path: str = "") -> str:
    """Names for a message; of many, the first."""
    names = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
    if not names:
        return f"{path or type(module).__name__!r} has no submodules"
    return f"the submodules of {path or type(module).__name__}: {listed(names, _SHOWN)}"


def _place(at: TracebackType | None) -> str:
    """The line of a model's own code at which it raised, for a message."""
    found = ""
    for frame, line in walk_tb(at):
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("torch", "pipeal"):
            found = f", at {Path(frame.f_code.co_filename).name}:{line}"
    return found


def _hint(model: nn.Module, split: Sequence[str]) -> str:
    """A hint for the message, by the kind of model."""
    if getattr(model, "aux_logits", False):
        return "build it with aux_logits=False: auxiliary heads work in training alone; or "
    encoders = [name for name, part in model.named_modules() if isinstance(part, nn.TransformerEncoder)]
    if any(name.startswith(f"{encoder}.") for name in split for encoder in encoders):
        return f"call the modules of model.{encoders[0]}.layers one after the other in the forward of your own; or "
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
    # Tensors made in the forward are constants to fx, with new numbers each time.
    mine, theirs = (operator.attrgetter(str(n.target))(root) if n.op == "get_attr" else None for n in (node, other))
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return False
    return mine.shape == theirs.shape and (mine.is_meta or theirs.is_meta or torch.equal(mine, theirs))
