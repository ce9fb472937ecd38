"""What the driver says of GPUs without a context of CUDA, which takes memory itself: NVML, by its C interface."""

from __future__ import annotations

import ctypes
from uuid import UUID


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(gpu: int) -> int:
    """Of the GPU to which CUDA gives that number in this process; NVML numbers all that the machine has.

    Raises:
        OSError: There is no driver, or it does not answer.
    """
    handle, memory = ctypes.c_void_p(), _Memory()
    nvml = _opened()
    uuid = _uuid(gpu)
    # An instance of a divided GPU has its own.
    if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        _check(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode(), ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    return int(memory.free)


def driver() -> str:
    """Its version; raises as :func:`free_bytes`."""
    text = ctypes.create_string_buffer(80)
    _check(_opened().nvmlSystemGetDriverVersion(text, len(text)))
    return text.value.decode()


def _uuid(gpu: int) -> UUID:
    """As CUDA's driver has it, which makes no context for that."""
    cuda, device, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), gpu),
        cuda.cuDeviceGetUuid_v2(ctypes.byref(found), device),
    ):
        if code:
            raise OSError(f"CUDA's driver answered with error {code}")
    return UUID(bytes=bytes(found))


def _opened() -> ctypes.CDLL:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2())
    return nvml


def _check(code: int) -> None:
    if code:
        raise OSError(f"NVML answered with error {code}")
