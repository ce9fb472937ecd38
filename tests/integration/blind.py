"""A device whose values nobody can read, and the shipped models on it: what makes a GPU's host wait, raises here.

PyTorch's ``meta`` tensors have shapes and no values. An operator whose result the host has to know before it can go on
(``item``, ``bool``, ``nonzero``, a choice by a mask, a copy to the CPU) cannot work on them, so that a training that
comes through has none, in any thread. Copies from pageable memory, for which a host waits as well, do work on them:
:func:`uploads_refused` sees these, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeal import ALPackage
from pipeal.core.tree import Tree, map_tensors
from pipeal.engine.devices import Device, Ready
from pipeal.models import TEXT_MODELS, VISION_MODELS, TextDims, VisionDims, build_text, build_vision

Batches = list[tuple[Tensor, Tensor]]

TEXT_DIMS = TextDims(embedding=12, hidden=10, code=8, heads=2, dropout=0.3)
VISION_DIMS = VisionDims(size=16, hidden=10, code=8, width=0.05)
CLASSES = 5

MODELS = [(name, form) for name in (*TEXT_MODELS, *VISION_MODELS) for form in ("al", "bp")]


def build(name: str, form: str, **options: Any) -> ALPackage:
    """A small one of the shipped models."""
    torch.manual_seed(0)
    options = {"classes": CLASSES, "lr": 1e-2, **options}
    if name in TEXT_MODELS:
        return build_text(name, form, vocab_size=50, dims=TEXT_DIMS, **options)  # type: ignore[arg-type]
    return build_vision(name, form, dims=VISION_DIMS, **options)  # type: ignore[arg-type]


def batches(name: str, count: int = 6) -> Batches:
    """Lengths differ between batches and within, and the last batch is smaller."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        rows = 3 if number == count - 1 else 6
        if name in TEXT_MODELS:
            longest = 3 + number % 3
            x = torch.randint(2, 50, (rows, longest), generator=draw)
            x[torch.arange(longest) >= torch.randint(1, longest + 1, (rows, 1), generator=draw)] = 0
        else:
            x = torch.randn(rows, 3, 16, 16, generator=draw).contiguous(memory_format=torch.channels_last)
        made.append((x, torch.randint(CLASSES, (rows,), generator=draw)))
    return made


class _Passed:
    """A mark that the device has always come to."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class BlindDevice(Device):
    """``meta`` as a stage's device. Like a GPU it lags, so that the engine does what it does for one."""

    lags = True

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))

    def receive(self, tree: Tree, ready: Ready) -> Tree:
        return map_tensors(partial(torch.empty_like, device="meta"), tree)

    def mark(self) -> Any:
        return _Passed()

    def snapshot(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device="cpu")


@contextmanager
def uploads_refused() -> Iterator[None]:
    """Within it, on this thread, nothing on the CPU, be it one number, becomes a tensor on the blind device."""
    with _Constructors(), _Copies():
        yield


class _Copies(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "meta":
            copies = name.startswith(("aten._to_copy", "aten.copy_", "aten._copy_from"))
            if copies and any(isinstance(one, Tensor) and one.device.type == "cpu" for one in args):
                raise AssertionError(f"{name} copies from pageable memory")
        return result


class _Constructors(TorchFunctionMode):
    """``torch.tensor(values, device=…)``, which some versions of PyTorch dispatch no operator for on ``meta``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == "meta":
            data = args[0] if args else (kwargs or {})["data"]
            if not isinstance(data, Tensor) or data.device.type != "meta":
                raise AssertionError(f"torch.{func.__name__} copies from pageable memory")
        return result
