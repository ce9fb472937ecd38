"""What the driver says of GPUs without a context of CUDA, which takes memory itself: NVML, by its C interface."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(gpu: int) -> int:
    """Of the GPU of that number, whichever ones this process sees.

    Raises:
        OSError: There is no driver, or it does not answer.
    """
    handle, memory = ctypes.c_void_p(), _Memory()
    nvml = _opened()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    return int(memory.free)


def driver() -> str:
    """Its version; raises as :func:`free_bytes`."""
    text = ctypes.create_string_buffer(80)
    _check(_opened().nvmlSystemGetDriverVersion(text, len(text)))
    return text.value.decode()


def _opened() -> ctypes.CDLL:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2())
    return nvml


def _check(code: int) -> None:
    if code:
        raise OSError(f"NVML answered with error {code}")
