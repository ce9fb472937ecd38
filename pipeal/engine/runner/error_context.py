"""Adds stage, layer, batch and device to errors; turns out-of-memory into advice."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeal.core.errors import (
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    PipealError,
    add_note,
    first_line,
)
from pipeal.core.modules import dtype_of, module_of
from pipeal.core.options import OnOom
from pipeal.core.outofmemory import bytes_asked, bytes_free, in_units, is_out_of_memory
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Shapes, Tree, describe
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Passed, Runner
from pipeal.engine.schedule import Action

_SMALLER = (
    "give it smaller batches (batch_size, budget_tokens, max_samples), place fewer layers on the device (more stages), "
    "use bf16"
)
_ADVICE: dict[OnOom, str] = {
    "split": _SMALLER,
    "raise": f"{_SMALLER}, or have such batches learnt from in parts (on_oom='split', without replicas; stages of "
    "backpropagation: more engine.micro_batches)",
}
_NAMES = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}


@dataclass
class ErrorContext:
    """Says of errors in a stage where they happened.

    Attributes:
        number: The stage's number.
        layers: Its layers, by their number in the whole model.
        device: Its device.
        on_oom: What happens on a batch that does not fit into memory.
        had: The shapes of the input of each layer that the batch in hand has come to.
    """

    number: int
    layers: dict[int, TrainableLayer]
    device: Device
    on_oom: OnOom
    had: dict[int, Shapes] = field(default_factory=dict)

    def explain_rest(self, error: BaseException, action: Action, index: int, batch: int) -> None:
        """For what goes wrong around an action: what goes wrong within it has been explained already."""
        if not isinstance(error, MemoryError | RuntimeError | NonFiniteError | DataError):
            return
        late = isinstance(error, NonFiniteError) and (error.layer, error.batch) != (index, batch)
        known = late or isinstance(error, OutOfMemoryError) or getattr(error, "__notes__", None)
        if not known:
            self.explain(error, action, index, batch)

    def explain(
        self, error: BaseException, action: Action, index: int | None, batch: int, had: Shapes | None = None
    ) -> None:
        """Adds to an error where it was; of one that says memory ran out, makes one that says what to do.

        Another rank was lost wherever it was: of that, this place says nothing.

        Raises:
            OutOfMemoryError: It was one of those.
        """
        if isinstance(error, PeerLostError):
            return
        kind = "" if index is None else f", layer {index} ({type(self.layers[index]).__name__})"
        where = f"in the {_NAMES[action]} of stage {self.number}{kind}, batch {batch}, device {self.device}"
        shapes = describe((had or []) if index is None else self.had[index])
        if is_out_of_memory(error) and not isinstance(error, PipealError):
            message = f"out of memory {where}: {self._amounts(error)}, the input is {shapes}; {_ADVICE[self.on_oom]}"
            raise OutOfMemoryError(message, self.number, index, batch) from error
        add_note(error, f"{where}; input {shapes}{self._on_types(error, index)}{_on_samples(error)}")

    def _amounts(self, error: BaseException) -> str:
        """How much memory was asked for and how much was free, as far as that is known."""
        asked, free = bytes_asked(error), bytes_free(error)
        if free is None:
            free = self.device.free_bytes()
        amounts = [f"{in_units(asked)} were asked for"] if asked is not None else []
        amounts += [f"{in_units(free)} were free"] if free is not None else []
        return " and ".join(amounts) or first_line(error)

    def _on_types(self, error: BaseException, index: int | None) -> str:
        """What to do where operators refuse the types of the input."""
        said = str(error)
        types = ("dtype", "scalar type", "Input type")
        if index is None or not isinstance(error, RuntimeError) or not any(word in said for word in types):
            return ""
        own = dtype_of(module_of(self.layers[index]))
        if all(dtype == own for _, dtype in self.had[index]):
            return ""
        return f"; the layer's weights are {str(own).removeprefix('torch.')}: convert what differs, as x.to({own}) does"


_ON_SAMPLES = {
    r"Class values must be|Target -?\d+ is out of bounds": "class numbers go from 0 to one less than the number of "
    "classes (outputs, of from_bp): look at y.min() and y.max()",
    "index out of range in self": "an embedding has fewer rows than the numbers that it is given: look at their max()",
    "Expected more than 1 value per channel": "batch norm learns nothing from one sample: leave a last batch that "
    "small out, as DataLoader(…, drop_last=True) does",
}
"""By what PyTorch says where it refuses the numbers in a batch, what to do."""


def _on_samples(error: BaseException) -> str:
    return next((f"; {advice}" for words, advice in _ON_SAMPLES.items() if re.search(words, str(error))), "")


@dataclass(eq=False)
class Explained(Runner):
    """Says of whatever goes wrong in a layer where it was.

    Attributes:
        index: The layer's number.
        explain: A method of the stage's :class:`ErrorContext`, given the error, the action, the layer and the batch.
    """

    index: int
    explain: Callable[[BaseException, Action, int, int], None]

    # Written out: a context manager would take some microseconds of each action, for what hardly ever happens; and a
    # generator ends up in a cycle with the error, which shall free its tensors at once.

    def forward(self, packet: Packet, x: Tree, y: Tree, rows: range | None = None) -> Passed:
        """As :meth:`Runner.forward`; an error that leaves it is explained, as those of the other actions."""
        try:
            return self.inner.forward(packet, x, y, rows)
        except BaseException as error:
            self.explain(error, Action.FORWARD, self.index, packet.batch)
            raise

    def backward(self, packet: Packet, rows: range | None = None) -> None:
        """As :meth:`Runner.backward`."""
        try:
            self.inner.backward(packet, rows)
        except BaseException as error:
            self.explain(error, Action.BACKWARD, self.index, packet.batch)
            raise

    def update(self, packet: Packet) -> None:
        """As :meth:`Runner.update`."""
        try:
            self.inner.update(packet)
        except BaseException as error:
            self.explain(error, Action.UPDATE, self.index, packet.batch)
            raise
