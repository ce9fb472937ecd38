"""One small layer over CPU and CUDA: where a stage computes, how a packet comes to it, when things happened."""

from pipeal.engine.device.base import Device, Precision, Ready, Stamp
from pipeal.engine.device.cuda import CudaDevice, ready_now, take_over
from pipeal.engine.device.far import FarDevice
from pipeal.engine.device.named import all_devices, device_names, fastest_precision, open_device, parse_device
from pipeal.engine.device.row import DeviceRow

__all__ = [
    "CudaDevice",
    "Device",
    "DeviceRow",
    "FarDevice",
    "Precision",
    "Ready",
    "Stamp",
    "all_devices",
    "device_names",
    "fastest_precision",
    "open_device",
    "parse_device",
    "ready_now",
    "take_over",
]
