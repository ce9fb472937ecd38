"""A device of which another process knows the rest."""

from __future__ import annotations

import torch

from pipeal.engine.devices.base import Device


class RemoteDevice(Device):
    """A device that another process works on.

    Args:
        name: What it is called there, for messages.
        device: Where this process keeps what belongs to it: ``meta`` for nowhere.
    """

    far = True

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(device)
        self.name = name

    def __str__(self) -> str:
        return self.name
