"""One small layer over CPU and CUDA: where a stage computes, how a packet comes to it, when things happened."""

from pipeal.engine.devices.base import Device, Lane, Ready, RemoteDevice, Stamp
from pipeal.engine.devices.cuda import CudaDevice, ready_now, take_over
from pipeal.engine.devices.named import (
    all_devices,
    ask_for_queues,
    device_names,
    fastest_precision,
    gpu_count,
    make_current,
    open_device,
    parse_device,
    share_gpus,
)
from pipeal.engine.devices.row import DeviceRow

__all__ = [
    "CudaDevice",
    "Device",
    "DeviceRow",
    "Lane",
    "Ready",
    "RemoteDevice",
    "Stamp",
    "all_devices",
    "ask_for_queues",
    "device_names",
    "fastest_precision",
    "gpu_count",
    "make_current",
    "open_device",
    "parse_device",
    "ready_now",
    "share_gpus",
    "take_over",
]
