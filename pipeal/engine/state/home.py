"""Where the layers of a stage are between their visits to it.

In mapped files (:mod:`pipeal.engine.state.disk_offload`), or in the memory of a GPU's host
(:mod:`pipeal.engine.state.host_offload`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from pipeal.core.packet import Packet
from pipeal.core.protocols import Path
from pipeal.engine.state.layer_state import CopyTensor


class Home(ABC):
    """What a stage asks of it. On the stage's thread, with its device active, but for what is said otherwise."""

    @abstractmethod
    def begin(self, index: int, packet: Packet) -> None:
        """Before a layer's forward on a batch: brings it, and asks for the next one."""

    @abstractmethod
    def end(self, index: int) -> None:
        """After the layer's update, or where that is left out: sends it home, with all that it keeps by now."""

    @abstractmethod
    def lend(self, index: int, path: Path) -> None:
        """Before one step of an inference through a layer."""

    @abstractmethod
    def take_back(self, index: int) -> None:
        """After it, however it ended."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until all layers are at home: from now on others may read them, and change them. On any thread."""

    @abstractmethod
    def changed(self, index: int) -> None:
        """Takes note that others have changed a layer at home, such as by a loaded state."""

    @abstractmethod
    def copier(self, index: int, copied: CopyTensor) -> AbstractContextManager[CopyTensor]:
        """Within it, the layer may be copied by what it gives: ``copied``, or one that leaves copies elsewhere."""

    @abstractmethod
    def rest(self) -> None:
        """After the last visit, also one that an error has cut off: gives back what only visits need. On any thread."""
