"""Cutting a network into parts, each the ``f`` of one AL layer, at named submodules.

::

    split=["layer2", "head"]

    x ──► stem ─ layer1 ──┊── layer2 ─ layer3 ──┊── flatten ─ head ──►
          part 0          ┊   part 1            ┊   part 2            a part begins where its submodule is called

Submodules and parameters are taken, not copied: the parts are the network.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, a_type, did_you_mean
from pipeal.core.tree import Tree
from pipeal.methods.cutting.calling import called, why_not
from pipeal.methods.cutting.graph import cut_graph, out_of_order
from pipeal.methods.cutting.shares import grouped, names_for
from pipeal.methods.cutting.tracing import LIST_INSTEAD, children_of


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a network.

    Attributes:
        name: Where it begins in the network, for messages and tables.
        module: What it computes.
        hint: What may be behind an error of it, for messages.
    """

    name: str
    module: nn.Module
    hint: str = ""


def cut(
    model: nn.Module | Sequence[nn.Module], split: Sequence[str] | int | None = None, sample: Tree = None
) -> list[Part]:
    """The parts of a network, in order.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [len(part.module) for part in cut(net, split=["2", "4"])]
    [2, 2, 1]

    Args:
        model: A sequence of modules, each a part; an ``nn.Sequential``, of which each child is a part unless there is
            a ``split``; or any other module, with a ``split`` (see :mod:`pipeal.methods.cutting.graph` for how it is
            cut).
        split: Names of submodules, in the order of their calls; a new part begins at each. Or how many parts there
            are to be, of about equal cost (:mod:`pipeal.methods.cutting.shares`).
        sample: A batch of inputs; needed for a number of parts, and for forwards that take several arguments.

    Raises:
        ConfigError: A name does not exist, is repeated, lies within another one, or is out of order; the forward
            cannot be traced between the cuts, or nothing crosses one; or there is no ``split`` for a module that needs
            one, or it is too large a number; or the model or ``split`` is of another kind.
    """
    _check_kinds(model, split)
    split = [split] if isinstance(split, str) else split
    if isinstance(split, int):
        return _evenly(model, split, sample)
    if isinstance(model, nn.ModuleList) or not isinstance(model, nn.Module):
        return _of_list(list(model), split, sample=sample)
    if split:
        _check_names(model, split)
        if _is_plain(model) and not any("." in name for name in split):
            return _grouped(model, split)
        hint = "" if sample is None else why_not(called(model, sample))
        return [Part(name, piece, hint) for name, piece in cut_graph(model, split, sample)]
    if _is_plain(model):
        return _of_list(model._modules.values(), None, model._modules)
    raise ConfigError(
        f"{a_type(model)} is cut where its submodules begin: pass a number of layers (split=3), or "
        f"split=[...] with some of their names ({children_of(model)}), {LIST_INSTEAD}"
    )


def _evenly(model: nn.Module | Sequence[nn.Module], count: int, sample: Tree) -> list[Part]:
    """As many parts as asked for, of about equal cost."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return cut([model] if count == 1 else model, names_for(model, count, sample) if count > 1 else None, sample)
    modules = [part.module for part in _of_list(list(model), None)]
    ends = [0, *accumulate(grouped(modules, count, sample))]
    return [
        Part(str(start), modules[start] if end == start + 1 else nn.Sequential(*modules[start:end]))
        for start, end in pairwise(ends)
    ]


def refuse_ties(parts: Sequence[Part]) -> None:
    """Parts may not share a parameter: with one optimizer each, its past would be that of neither.

    Raises:
        ConfigError: Two parts share a parameter or a buffer.
    """
    owner: dict[int, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        named: list[tuple[str, Tensor]] = [*part.module.named_parameters(), *part.module.named_buffers()]
        for name, tensor in named:
            before, its_name = owner.setdefault(id(tensor), (number, name))
            if before != number:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ConfigError(
                    f"layers {before} and {number} would share a {kind} ({its_name!r} and {name!r}); each layer trains "
                    "its own: cut elsewhere so that both lie in one layer, or give the second its own copy"
                )


def _check_kinds(model: object, split: object) -> None:
    found = f"{a_type(model)}"
    wrapped = {"module": nn.DataParallel | nn.parallel.DistributedDataParallel, "_orig_mod": object}
    for name, kind in wrapped.items():
        if isinstance(model, nn.Module) and isinstance(model, kind) and hasattr(model, name):
            raise ConfigError(f"the model is wrapped in {found}; pass what it holds, model.{name}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"the model is {found}: what is scripted cannot be cut; pass the module it was made from")
    if not isinstance(model, nn.Module) and (isinstance(model, Mapping | str) or not isinstance(model, Iterable)):
        raise ConfigError(f"the model is {found}; expected a torch.nn.Module, a list of them, or an Encoder")
    if isinstance(model, nn.Sequential) and (model._forward_hooks or model._forward_pre_hooks):
        raise ConfigError(f"the model, {found}, has forward hooks, which its layers would lose; hook a child instead")
    if split is None or isinstance(split, str):
        return
    if isinstance(split, int):
        if isinstance(split, bool) or split < 1:
            raise ConfigError(f"split is {split!r}; expected a whole number, at least 1, or names of submodules")
        return
    if not isinstance(split, Sequence) or not all(isinstance(name, str) for name in split):
        raise ConfigError(
            f"split is {split!r}; expected a list of the names of submodules, as strings, or a number of layers"
        )
    if not split:
        raise ConfigError("split is empty; name a submodule, or pass [model] to make one layer of it")


def _is_plain(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _of_list(
    given: Iterable[nn.Module | None],
    split: Sequence[str] | None,
    names: Iterable[str] | None = None,
    sample: Tree = None,
) -> list[Part]:
    modules = list(given)
    if split is not None:
        raise ConfigError(
            "split names submodules of one module, but the model is a list, of which each item is one layer; "
            "leave split out and group items with nn.Sequential"
        )
    if not modules:
        raise ConfigError("the model is empty; expected at least one module")
    parts = []
    for name, module in zip(map(str, range(len(modules))) if names is None else names, modules, strict=True):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"item {name} of the model is {a_type(module)}; expected a torch.nn.Module")
        # A model of its own, which may take several arguments, or return more than its answer.
        whole = called(module, sample) if len(modules) == 1 and sample is not None else None
        needed = whole is not None and (whole.names is not None or whole.given)
        parts.append(Part(name, whole, why_not(whole)) if whole is not None and needed else Part(name, module))
    return parts


def _grouped(model: nn.Module, split: Sequence[str]) -> list[Part]:
    """Children of an ``nn.Sequential`` in groups that keep their names."""
    names = list(model._modules)
    places = [names.index(name) for name in split]
    if places != sorted(places):
        raise ConfigError(out_of_order(sorted(split, key=names.index), split))
    starts = sorted({0, *places})
    children = list(model._modules.items())
    return [
        Part(names[start], nn.Sequential(OrderedDict(children[start:end])))  # type: ignore[arg-type]
        for start, end in zip(starts, [*starts[1:], len(names)], strict=True)
    ]


def _check_names(model: nn.Module, split: Sequence[str]) -> None:
    known = dict(model.named_modules())
    for name in split:
        if name not in known or not name:
            hint = did_you_mean(name, filter(None, known))
            # Of the longest part of the name that does exist, the children are what was meant.
            parent = name
            while parent not in known:
                parent = parent.rpartition(".")[0]
            raise ConfigError(f"unknown submodule {name!r}{hint} ({children_of(known[parent], parent)})")
    for number, name in enumerate(split):
        if name in split[:number]:
            raise ConfigError(f"split names {name!r} twice; name each beginning of a layer once")
        for other in split:
            if name.startswith(f"{other}."):
                raise ConfigError(
                    f"split names {other!r} and {name!r}, which lies within it; to cut {other!r} itself, name the "
                    f"first of its submodules that is called instead ({children_of(known[other], other)})"
                )
