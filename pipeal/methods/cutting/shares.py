"""Where to cut a network so that so many parts cost about the same, by counting what a sample takes.

Counted, not timed, so that the same network is cut the same everywhere: three times the FLOPs of a forward, for its
backward takes two products for each; and the memory that is gone through, which takes as long as ten FLOPs a byte:
activations three times, weights seven times, as Adam does. Counted for a batch of 64, however many rows the sample has:
else the cuts would move with them, and what was saved after one sample would not load after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from pipeal.core.errors import ConfigError, first_line
from pipeal.core.flops import counting
from pipeal.core.partition import balance
from pipeal.core.tree import Tree, batch_size, describe, map_tensors, shapes_of, tensors
from pipeal.methods.cutting.graph import all_train
from pipeal.methods.cutting.probe import brought, probing
from pipeal.methods.cutting.tracing import parents, trace_model

_FLOPS_PER_BYTE = 10
_FORWARDS = 3
_ROWS = 64
_ACTIVATIONS = 3
_WEIGHTS = 7


def names_for(model: nn.Module, count: int, sample: Tree, asked: str = "split") -> list[str]:
    """The submodules at which ``count`` parts of about equal cost begin, but for the first part.

    A part begins at a submodule that has a matrix of weights, and takes a batch: what has none (norms, activations)
    goes with the one before. A submodule that costs more than a part should is looked into, where its forward can be
    followed. Where some weights would not train, since a part hands on what they give beside the value that its head
    sees, places without such weights are taken instead, if there are enough of them: the inputs of DenseNet's blocks,
    not those of its layers, which take a list.

    Args:
        model: The network, on one device.
        count: How many parts.
        sample: A batch of inputs, the batch first.
        asked: The option that says how many.

    Raises:
        ConfigError: The forward cannot be followed, or does not take the sample, or there are fewer such submodules.
    """
    have = sum(_has_matrix(part.parameters(recurse=False)) for part in model.modules())
    if have < count:
        raise ConfigError(
            f"{asked} is {count}, but only {have} submodules have a matrix of weights for a layer to begin at"
        )
    around, costs, turned = _looked_into(model, count, sample)
    if len(costs) < count:
        found = ", ".join(name for name, _ in costs if name)
        why = f"; {turned[0]}, not the batch first (GRU, LSTM and attention take batch_first=True)" if turned else ""
        raise ConfigError(
            f"{asked} is {count}, but there are only {len(costs)} parts that a layer can be made of: {found}{why}"
        )
    begins = _begins(costs, count)
    trains = partial(all_train, trace_model(model, around, sample))
    if not all(map(trains, begins)):
        kept = _without([name for name, _ in costs if name and not trains(name)], costs)
        begins = _begins(kept, count) if len(kept) >= count else begins
    return begins


def _looked_into(model: nn.Module, count: int, sample: Tree) -> tuple[list[str], list[tuple[str, float]], list[str]]:
    """Looks into the dearest submodules until there are enough to begin parts at, none dearer than a part should be.

    Returns:
        The submodules that were looked into, and what :func:`_costs` finds with these.
    """
    around, closed = _with_sequences(model, ()), set[str]()
    costs, turned = _costs(model, around, sample)
    while dearest := _dearest(model, costs, count, closed):
        try:
            deeper = _with_sequences(model, (*around, dearest))
            found = _costs(model, deeper, sample)
        except ConfigError:  # it has branches of its own: it stays whole
            closed.add(dearest)
            continue
        if len(found[0]) < len(costs):  # nothing within it can begin a part
            closed.add(dearest)
        else:
            around, (costs, turned) = deeper, found
    return around, costs, turned


def _dearest(model: nn.Module, costs: Sequence[tuple[str, float]], count: int, closed: Collection[str]) -> str | None:
    """What is to be looked into next."""
    share = sum(cost for _, cost in costs) / count
    few = len(costs) < count
    large = {
        name: cost
        for name, cost in costs
        if name and name not in closed and (few or cost > share) and any(model.get_submodule(name).children())
    }
    return max(large, key=large.__getitem__, default=None)


def _begins(costs: Sequence[tuple[str, float]], count: int) -> list[str]:
    *starts, _ = accumulate(balance([cost for _, cost in costs], count))
    return [costs[start][0] for start in starts]


def _without(names: Collection[str], costs: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """With the costs of these added to what comes before them."""
    kept = [costs[0]]
    for name, cost in costs[1:]:
        if name in names:
            kept[-1] = (kept[-1][0], kept[-1][1] + cost)
        else:
            kept.append((name, cost))
    return kept


def grouped(modules: Sequence[nn.Module], count: int, sample: Tree) -> list[int]:
    """How many modules of a row each of ``count`` parts has; what has no matrix of weights goes with the one before.

    Args:
        modules: In the order in which a batch goes through them.
        count: How many parts.
        sample: A batch of inputs, the batch first.

    Raises:
        ConfigError: There are fewer modules with such a matrix.
    """
    sizes, costs, x = list[int](), list[float](), sample
    rows = batch_size(sample)
    for module in modules:
        weights = list(module.parameters())
        with probing(module):
            x = brought(x, module)
            cost, x = _cost(module, (x,), weights, rows)
        if not sizes or _has_matrix(weights):
            sizes.append(0)
            costs.append(0.0)
        sizes[-1] += 1
        costs[-1] += cost
    if len(sizes) < count:
        raise ConfigError(f"split is {count}, but only {len(sizes)} modules of the list have a matrix of weights")
    each = iter(sizes)
    return [sum(islice(each, units)) for units in balance(costs, count)]


def _of_two_rows(sample: Tree) -> Tree:
    """A sample of one row twice: in a batch of one, what all rows share, ``(1, T, D)``, passes for the batch."""
    if batch_size(sample) != 1:
        return sample
    return map_tensors(lambda one: torch.cat((one, one)) if one.dim() and len(one) == 1 else one, sample)


def _has_matrix(weights: Iterable[Tensor]) -> bool:
    return any(is_lazy(one) or one.dim() > 1 for one in weights)  # what is lazy has its sizes once a sample came by


def _costs(model: nn.Module, around: Iterable[str], sample: Tree) -> tuple[list[tuple[str, float]], list[str]]:
    """What can begin a part and what it costs up to the next, first, without a name, what comes before; and what could
    if what it takes had the batch first, with its shape."""
    given, sample = sample, _of_two_rows(sample)
    traced = trace_model(model, list(around), sample)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    whole = fx.GraphModule(traced.root, traced.graph)
    found: list[tuple[str, float]] = [("", 0.0)]
    turned: list[str] = []
    rows, of_rows = batch_size(sample), set[fx.Node]()

    class Counting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            weights: list[Tensor] = []
            if n.op == "call_module":
                weights = list(self.fetch_attr(str(n.target)).parameters())
                name = str(n.target).removeprefix("model.")
                known = name != n.target and called.count(n.target) == 1 and _has_matrix(weights)
                if known and n.all_input_nodes:  # none: a parametrization, which is given the weights within it
                    taken = traced.values.get(n.all_input_nodes[0])
                    # No head sees anything in numbers of words: of several look-ups, the first alone begins a part.
                    is_looked_up = not any(one.is_floating_point() or one.is_complex() for one in tensors(taken))
                    if batch_size(taken) == rows:
                        if len(found) == 1 or not is_looked_up:
                            found.append((name, 0.0))
                    elif taken is not None:
                        shape = describe(shapes_of(taken))
                        turned.append(f"{name!r} is given {shape} for a batch of {rows}")
            has_rows = n.op == "placeholder" or not of_rows.isdisjoint(n.all_input_nodes)
            # What comes of weights alone, such as codes of positions, costs the same for any batch.
            cost, out = _cost(super().run_node, (n,), weights, rows if has_rows else _ROWS)
            if has_rows and not isinstance(out, int | torch.Size):
                of_rows.add(n)
            found[-1] = (found[-1][0], found[-1][1] + cost)
            return out

    try:
        with probing(whole):
            Counting(whole, graph=traced.graph).run(brought(sample, whole))
    except Exception as error:  # whatever a user's forward raises
        raise ConfigError(
            f"{type(model).__name__} does not take the sample, {describe(shapes_of(given))}: {first_line(error)}; "
            "expected a batch of inputs, the batch first, without their targets"
        ) from error
    (_, before), *rest = found
    # What comes before the first of them is a part of it: a shape that is read, or a norm.
    return [(rest[0][0], rest[0][1] + before), *rest[1:]] if rest else found, turned


def _cost(run: Any, args: tuple[Any, ...], weights: Sequence[Tensor], rows: int) -> tuple[float, Any]:
    with counting() as counter:
        out = run(*args)
    made = tensors(out) if isinstance(out, Tensor | tuple | list | dict) else []
    by_row = _FORWARDS * counter.get_total_flops() + _FLOPS_PER_BYTE * _ACTIVATIONS * _bytes(made)
    # Whole numbers up to here, so that samples of all sizes give the same quotient, and the same ties.
    return by_row * _ROWS / max(rows, 1) + _FLOPS_PER_BYTE * _WEIGHTS * _bytes(weights), out


def _bytes(found: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def _with_sequences(model: nn.Module, around: Iterable[str]) -> list[str]:
    """These submodules, and the sequences among their children, whose forward is known."""
    named = dict(model.named_modules())
    looked = {"", *around}
    for name, module in named.items():  # from the outside in
        parent = next(iter(parents(name)), "")
        known = type(module).forward is nn.Sequential.forward if isinstance(module, nn.Sequential) else False
        if parent in looked and (known or isinstance(module, nn.ModuleList)):
            looked.add(name)
    return sorted(looked - {""})
