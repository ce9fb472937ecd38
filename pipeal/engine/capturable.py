"""What a CUDA graph cannot hold, or would repeat wrongly: seen in the operators of an ordinary batch, before a capture.

A graph repeats kernels with the addresses and the numbers that they had. So nothing in it may wait for the GPU, copy to
or from the host, have a shape that depends on values, draw random numbers, or read a tensor that another one takes the
place of later. All this must be known beforehand: where a capture fails, PyTorch does not promise that its allocator
works on (until 2.12 it counts the capture as under way for ever, and frees no memory that two streams used). What is
not seen here, such as a wait within an operator of somebody's own, ends the run in the capture.

Nor is it seen here if the forward calls a function that its author gave to ``torch.compile``: under this mode it runs
uncompiled, and would be compiled within the capture. Such layers are for runs without graphs. (Modules that were
compiled are seen, by :class:`~pipeal.engine.alike.Makeup`.)
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal.random import redraw


class Watch(TorchDispatchMode):
    """Looks at the operators that run within it on this thread: a layer's forward, and then its backward.

    Args:
        device: Where the layer is.
        inputs: What it is given, which a replay finds again in memory of the graph's own.
        own: The layer's parameters and buffers, which a replay finds again where they were.

    Attributes:
        fault: The first thing that no graph can do, in words; None for none. A forward or a backward that gives the
            device no work at all is one: PyTorch warns of empty graphs.
        draws: How many random words were drawn by :meth:`words`, call by call.
        runs: Of the forward, and then of the backward, each operator and its arguments, in words: numbers as they are,
            and which of its own tensors it read.
    """

    def __init__(self, device: torch.device, inputs: Iterable[Tensor], own: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.fault: str | None = None
        self.draws: list[int] = []
        self.runs: list[list[str]] = []
        own = list(own)
        self._own = {_begin(tensor): f"own {i}" for i, tensor in enumerate(own) if tensor.layout is torch.strided}
        self._device = device
        self._drawing = self._worked = False
        self._known = {0}  # where a tensor has no memory
        self.know(inputs)
        self.know(own)

    def __enter__(self) -> Watch:
        """Begins the forward, or the backward."""
        self._worked = False
        self.runs.append([])
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it."""
        super().__exit__(kind, error, trace)
        if not self._worked:
            self.fault = self.fault or "its forward, or its backward, gives the device no work"

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Adds what a replay finds again."""
        self._known.update(_place(tensor) for tensor in tensors if tensor.layout is torch.strided)

    def words(self, count: int, device: torch.device) -> Tensor:
        """For :func:`pipeal.random.words_from`: draws, and takes note of it. A graph is given such words."""
        if device != self._device:
            self.fault = self.fault or f"it draws random numbers on {device}"
        self.draws.append(count)
        self._drawing = True
        try:
            return redraw(torch.empty(count, dtype=torch.int64, device=device))
        finally:
            self._drawing = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operator as it is."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors(result)
        if not self._drawing:
            self._worked = self._worked or _works(func, made)
            self.fault = self.fault or self._fault_of(func, args, kwargs, made)
            self.runs[-1].append(f"{func}{pytree.tree_map(self._told, (*args, kwargs) if kwargs else args)}")
        self.know(made)
        return result

    def _told(self, value: Any) -> _Told:
        if isinstance(value, Tensor):
            return _Told(self._own.get(_begin(value), "_") if value.layout is torch.strided else "_")
        # Others might say where they lie, or what is in them.
        return _Told(repr(value) if isinstance(value, _PLAIN) else type(value).__name__)

    def _fault_of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: list[Tensor]) -> str | None:
        name, given = str(func), _tensors((args, kwargs))
        if _draws(func, args, kwargs):
            return f"it draws random numbers with {name}; of what draws, graphs may hold pipeal.Dropout"
        if any(tensor.layout is not torch.strided for tensor in (*given, *made)):
            return f"{name} works on a sparse tensor"
        if _waits(func, args, kwargs):
            return f"the host waits for what {name} finds"
        # A number may be a tensor on the CPU, if nobody copies it.
        away = [tensor for tensor in (*given, *made) if tensor.device != self._device]
        if away and ("copy" in name or any(tensor.dim() for tensor in away)):
            return f"{name} works with a tensor that is not on {self._device}"
        if any(_place(tensor) not in self._known for tensor in given):
            return f"{name} reads a tensor that is no input, parameter or buffer of the layer"
        return None


class Batch:
    """What a watched batch did: a graph repeats it where like batches do the same.

    Numbers that a layer keeps in Python, and changes, are seen here: the graph would go on with those of its capture.

    Args:
        watch: Has seen its forward and its backward.
        gathered: Which parameters had no gradient before the backward: to others PyTorch adds, by an operator.
    """

    def __init__(self, watch: Watch, gathered: Hashable) -> None:
        self.draws = watch.draws
        self._gathered = gathered
        # Of the words their hashes: there may be many sets of shapes.
        self._runs = [array("q", map(hash, run)) for run in watch.runs]
        self._words = watch.runs

    def unlike(self, earlier: Sequence[Batch]) -> str | None:
        """How it differs from batches that are like it, in words; None for not at all. Then lets go of the words."""
        words, self._words = self._words, []
        for one in earlier:
            if one.draws != self.draws:
                return "it does not draw alike on batches that are alike"
            alike = zip(words, self._runs, one._runs, strict=True)
            for said, mine, before in list(alike)[: 2 if one._gathered == self._gathered else 1]:
                if mine != before:
                    at = next((i for i, (a, b) in enumerate(zip(mine, before, strict=False)) if a != b), len(before))
                    other = said[at] if at < len(said) else "fewer operators"
                    return (
                        f"it runs {other} where it did not on a batch that is alike; a graph would repeat one of them"
                    )
        return None


class _Told(str):
    """Shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_INDEXES = ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")
_TRUTHS = (torch.bool, torch.uint8)

# Of those that wait in some versions and sizes, or look whether they have failed, and have no tag that says so: whole
# families, since a wait that is not seen here ends the run, and one that is only thought of costs a graph.
_WAITING = (
    *("aten._linalg", "aten.linalg_", "aten.cholesky", "aten.geqrf", "aten.ormqr", "aten.lu_", "aten.triangular_solve"),
    *("aten.histc", "aten.mode.", "aten._ctc_loss", "aten._cudnn_ctc_loss"),
    *("aten._embedding_bag", "aten.embedding_bag", "aten.embedding_renorm"),
)
_NOT_WAITING = ("aten.linalg_vector_norm", "aten.linalg_cross")
_LOOKED_UP_MOST = 3072  # a table that was asked for more rows sorts them for its gradient


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _begin(tensor: Tensor) -> tuple[int, int]:
    """Where its memory begins, and it within; of two that have none, nobody can tell which is which."""
    return _place(tensor), int(tensor.storage_offset())


def _place(tensor: Tensor) -> int:
    """Where its memory begins; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers: attention and recurrent networks do so for their dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _waits(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name, tags = str(func), getattr(func, "tags", ())
    if name.startswith(_INDEXES):  # numbers give a shape that is known beforehand, truth values do not
        return any(tensor.dtype in _TRUTHS for tensor in _tensors(args[1:]))
    if name.startswith("aten.embedding_dense_backward"):
        by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
        return bool(by_frequency) or args[1].numel() > _LOOKED_UP_MOST
    tagged = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return tagged or (name.startswith(_WAITING) and not name.startswith(_NOT_WAITING))


def _works(func: Any, made: list[Tensor]) -> bool:
    """Whether an operator runs something on the device, and does not only allocate, or look at a part."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return True
    if str(func).startswith(("aten.empty", "aten.new_empty", "aten._unsafe_view")):
        return False
    return bool(made) and any(result.alias_info is None for result in schema.returns)
