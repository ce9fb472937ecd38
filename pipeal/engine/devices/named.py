"""From the name of a device to what it is on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from pipeal.core.errors import PlacementError
from pipeal.core.options import Precision
from pipeal.engine.devices.base import RUN_AHEAD, RUN_AHEAD_SHARED, Device
from pipeal.engine.devices.cuda import CudaDevice

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def parse_device(name: str | int | torch.device) -> torch.device:
    """A device that exists here; a number is that of a GPU.

    Raises:
        PlacementError: The name is no device, the kind is not supported, or this machine has none such.
    """
    if isinstance(name, int):
        name = f"cuda:{name}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise PlacementError(f"{name!r} is not a device; expected 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise PlacementError(f"device {str(device)!r} is not supported; expected 'cpu', 'cuda' or 'cuda:N'")
    count = gpu_count()
    # Of the name: torch keeps eight bits of a number, and makes cuda:0 of 'cuda:256', and cuda:-25 of 'cuda:999'.
    index = int(str(name).partition(":")[2] or 0)
    if not 0 <= index < count:
        has = f"{count} CUDA device(s): cuda:0 to cuda:{count - 1}" if count else "no CUDA device; use 'cpu'"
        raise PlacementError(f"device 'cuda:{index}' does not exist; this machine has {has}")
    return torch.device("cuda", index)


def make_current(name: str | torch.device) -> torch.device:
    """Has a GPU be the calling thread's current one, before anything is put on any.

    What names no GPU would else come to be on the first one, with a context of half a gigabyte, from each process.

    Returns:
        The device, of whatever kind.

    Raises:
        PlacementError: As :func:`parse_device`.
    """
    device = parse_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def device_names(text: str | Sequence[str]) -> list[str]:
    """One name per stage out of what was typed, or of a sequence of them; whether such devices exist is not looked at.

    >>> device_names("cuda:0,cuda:1"), device_names("cpu*3")
    (['cuda:0', 'cuda:1'], ['cpu', 'cpu', 'cpu'])

    Raises:
        PlacementError: A count that is not a whole number above 0, or an empty name.
    """
    if not isinstance(text, str):
        return list(text)
    names: list[str] = []
    for part in text.split(","):
        name, star, count = (piece.strip() for piece in part.partition("*"))
        if not name or (star and not (count.isascii() and count.isdigit() and len(count) < 4 and int(count) > 0)):
            raise PlacementError(
                f"devices: found {text!r}, expected auto, or names such as cpu,cpu or cpu*4 or cuda:0,cuda:1"
            )
        names += [name] * (int(count) if star else 1)
    return names


def all_devices() -> list[str]:
    """All GPUs of this machine, or the CPU without any."""
    return [f"cuda:{number}" for number in range(gpu_count())] or ["cpu"]


def gpu_count() -> int:
    """How many GPUs this process sees; the first thing that is asked of CUDA."""
    ask_for_queues()
    return torch.cuda.device_count()


def ask_for_queues() -> None:
    """Has CUDA, if it has not begun, make as many hardware queues as it can, unless the user has said how many.

    By default it makes 8. A stage has streams for its work, its copies and the layers of its host, and in a process of
    its own one for each direction and for averages: those that share a queue wait for each other.

    Commands call it first of all. At a prompt it may be too late without a sign of that: ``torch.cuda.is_available()``
    asks the driver, which may take the number then, and CUDA counts as not initialised. Set the variable yourself
    there.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_QUEUES, "32")


def fastest_precision(*names: str | torch.device) -> Precision:
    """``bf16`` where all devices have instructions for matrices of it, which make products faster; else ``fp32``."""
    return "bf16" if all(_has_bf16(parse_device(name)) for name in names) else "fp32"


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # emulated before
    # Without such instructions a CPU spends what it gains in products on casting. With AVX512-BF16 steps of our models
    # were 1.5 to 2.2 times as fast on one thread of an AMD EPYC. Both questions are private, and so may be missing.
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, question, lambda: False)() for question in asked)


def open_device(name: str | torch.device) -> Device:
    """A stage's own handle on a device, with streams of its own where the device has streams."""
    device = parse_device(name)
    return CudaDevice(device) if device.type == "cuda" else Device(device)


def share_gpus(handles: Sequence[Device]) -> None:
    """Has stages on one GPU run less far ahead of it than one that has it alone.

    A GPU takes some thousand operators ahead. Who gives it one more is held up, together with all who want to give it
    anything, as long as its oldest work takes. But with less than 2 batches a stage's host would not run ahead at all:
    it would wait for its last batch to end before it gave any of the next.
    """
    for handle in handles:
        together = sum(other.lags and other.device == handle.device for other in handles)
        handle.run_ahead = RUN_AHEAD if together <= 1 else RUN_AHEAD_SHARED
