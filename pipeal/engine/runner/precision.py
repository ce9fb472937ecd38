"""What decides how an action computes: settings of a thread, and one of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from pipeal.core.errors import ConfigError
from pipeal.core.modules import scaler_of
from pipeal.core.options import Matmul, Precision
from pipeal.core.protocols import ScalesLosses, TrainableLayer
from pipeal.engine.devices import Device
from pipeal.engine.schedule import Action

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: Precision, devices: Iterable[torch.device]) -> None:
    """Refuses devices that do not compute in a precision.

    Raises:
        ConfigError: One of them has no arithmetic in fp16.
    """
    if precision == "fp16" and any(device.type == "cpu" for device in devices) and not _cpu_has_fp16():
        raise ConfigError(
            "precision is fp16, but this CPU has no arithmetic of such numbers; use 'bf16' or 'fp32', or a GPU"
        )


def make_ready(layers: Iterable[TrainableLayer], precision: str) -> None:
    """Has layers do their part for a precision, as a pipeline does when it is opened to train them.

    Those that did theirs for another one do so no longer.

    Raises:
        ConfigError: A layer cannot be trained in it, or an open pipeline trains one in another; all are as they were.
    """
    with _LOCK:
        _make_ready(list(layers), precision)


@contextmanager
def ready(layers: Iterable[TrainableLayer], precision: str) -> Iterator[None]:
    """Within it, layers do their part for a precision, and are not made ready for another one.

    Raises:
        ConfigError: As :func:`make_ready`.
    """
    found = list(layers)
    with _LOCK:
        _make_ready(found, precision)
        for layer in found:
            _TRAINED_IN.setdefault(id(layer), []).append(precision)
    try:
        yield
    finally:
        with _LOCK:
            for layer in found:
                _TRAINED_IN[id(layer)].remove(precision)
                if not _TRAINED_IN[id(layer)]:
                    del _TRAINED_IN[id(layer)]  # another layer may get the id


def trained_in(layer: TrainableLayer) -> str | None:
    """The precision that an open pipeline trains a layer in; None where none does."""
    with _LOCK:
        return next(iter(_TRAINED_IN.get(id(layer), ())), None)


_LOCK = threading.RLock()  # a pipeline that was left open may be collected within it
_TRAINED_IN: dict[int, list[str]] = {}
"""By the layer's id, the precision of each open pipeline that trains it."""


def _make_ready(layers: Sequence[TrainableLayer], precision: str) -> None:
    for number, layer in enumerate(layers):
        held = trained_in(layer)
        if held is not None and (held == "fp16") != (precision == "fp16"):
            raise ConfigError(
                f"layer {number} ({type(layer).__name__}) is wanted in {precision}, but an open pipeline trains it in "
                f"{held}, and it scales its losses for both or for neither; close that one first"
            )
    if precision != "fp16":
        for layer in layers:
            if isinstance(layer, ScalesLosses):
                layer.scale_losses(False)
        return
    for number, layer in enumerate(layers):
        if not isinstance(layer, ScalesLosses):
            raise ConfigError(
                f"layer {number} ({type(layer).__name__}) has no scale_losses(), without which small gradients are "
                "lost in fp16; use precision='bf16' or 'fp32'"
            )
    with ExitStack() as undo:
        for layer in layers:
            assert isinstance(layer, ScalesLosses)
            if scaler_of(layer) is None:
                undo.callback(layer.scale_losses, False)
            layer.scale_losses()
        undo.pop_all()


def _cpu_has_fp16() -> bool:
    """Without it, casting costs more than is gained. Private, and so may be missing."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)())


@contextmanager
def matmul_precision(name: Matmul | None) -> Iterator[None]:
    """Within it, matrix products of the whole process have that precision; None leaves the one it has.

    Several may overlap in any order where all want the same; the last one to end leaves what was before the first.

    Raises:
        ConfigError: Another precision is wanted within one that has not ended.
    """
    if name is None:
        yield
        return
    with _LOCK:
        if _MATMULS and name != _MATMULS[0]:
            raise ConfigError(
                f"matmul is {name!r}, but another pipeline of this process is open with {_MATMULS[0]!r}, and matrix "
                "products have one precision for the whole process; close that one first, or ask for the same"
            )
        if not _MATMULS:
            _RESTORE.callback(_set_matmul(name))
        _MATMULS.append(name)
    try:
        yield
    finally:
        with _LOCK:
            _MATMULS.pop()
            if not _MATMULS:
                _RESTORE.close()


_MATMULS: list[Matmul] = []
"""The precision of matrix products, once for each that holds the process to it."""
_RESTORE = ExitStack()


def _set_matmul(name: Matmul) -> Callable[[], None]:
    """Sets the precision of the process; what gives back what was before."""
    of_backends = [(backend, backend.fp32_precision) for backend in _backends()]
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set backends to what none of these names says
        before = "highest"
    torch.set_float32_matmul_precision(name)  # sets the backends, too

    def restore() -> None:
        torch.set_float32_matmul_precision(before)
        for backend, own in of_backends:
            backend.fp32_precision = "none"  # what is set for all of them holds
            if backend.fp32_precision != own:
                backend.fp32_precision = own

    return restore


def _backends() -> list[Any]:
    """Those whose matrix products have a setting of their own, from torch 2.9 on."""
    found = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [backend for backend in found if hasattr(backend, "fp32_precision")]


def autocast(device: Device, precision: Precision) -> ExitStack:
    """The precision of forwards from here on, whatever the caller's is; ``with`` it at once.

    Without autocast's cache, which all threads of the process would share.
    """
    dtype = _HALF.get(precision)
    stack = ExitStack()
    for kind in device.types:
        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
    return stack


def settings(action: Action, device: Device, precision: Precision) -> AbstractContextManager[Any]:
    """All of it for an action, set from here on where it is not so already; ``with`` it at once."""
    found: list[AbstractContextManager[Any]] = []
    if action is Action.FORWARD and precision in _HALF:
        found.append(autocast(device, precision))
    else:  # the caller's
        found += [torch.autocast(kind, enabled=False) for kind in device.types if torch.is_autocast_enabled(kind)]
    if torch.is_inference_mode_enabled():  # whose tensors never learn, nor may those of an optimizer be changed later
        found.append(torch.inference_mode(False))  # with gradients enabled
    elif not torch.is_grad_enabled():  # a backward may add losses up first, and an update go forward once more
        found.append(torch.enable_grad())
    if action is Action.BACKWARD:
        # With autograd's own threads off, the backward of stages that share a GPU runs on their workers instead of on
        # the one thread that autograd has for that GPU, and the key, which is thread-local, holds there too.
        found.append(torch.autograd.set_multithreading_enabled(False))
    if len(found) < 2:  # mostly: asked for by every action
        return found[0] if found else _NOTHING
    stack = ExitStack()
    for one in found:
        stack.enter_context(one)
    return stack


_NOTHING = nullcontext()
