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

from collections.abc import Iterable, Mapping, Sequence
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
        known: What a replay finds again where it was: the inputs, the layer's parameters and buffers.

    Attributes:
        fault: The first thing that no graph can do, in words; None for none. A forward or a backward that gives the
            device no work at all is one: PyTorch warns of empty graphs.
        draws: How many random words were drawn by :meth:`words`, call by call.
    """

    def __init__(self, device: torch.device, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.fault: str | None = None
        self.draws: list[int] = []
        self._device = device
        self._drawing = self._worked = False
        self._known = {0}  # where a tensor has no memory
        self.know(known)

    def __enter__(self) -> Watch:
        """Begins the forward, or the backward."""
        self._worked = False
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
        self.know(made)
        return result

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
