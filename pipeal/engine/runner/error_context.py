"""Adds stage, layer, batch and device to errors; turns out-of-memory into advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeal.core.errors import NonFiniteError, OutOfMemoryError, PeerLostError, PipealError, first_line
from pipeal.core.modules import dtype_of, module_of
from pipeal.core.options import OnOom
from pipeal.core.outofmemory import bytes_asked, bytes_free, in_units, is_out_of_memory
from pipeal.core.packet import Packet
from pipeal.core.protocols import TrainableLayer
from pipeal.core.tree import Shapes, describe
from pipeal.engine.devices import Device
from pipeal.engine.runner.layer import Around
from pipeal.engine.schedule import Action

_NAMES = {Action.FORWARD: "forward", Action.BACKWARD: "backward", Action.UPDATE: "update"}


class ErrorContext:
    """Says of errors in a stage where they happened.

    Args:
        number: The stage's number.
        layers: Its layers, by their number in the whole model.
        device: Its device.
        on_oom: What happens on a batch that does not fit into memory.

    Attributes:
        had: The shapes of the input of each layer that the batch in hand has come to.
    """

    def __init__(
        self, number: int, layers: Sequence[tuple[int, TrainableLayer]], device: Device, on_oom: OnOom
    ) -> None:
        self.had: dict[int, Shapes] = {}
        self._number = number
        self._layers = layers
        self._device = device
        self._on_oom = on_oom

    def explain_rest(self, error: BaseException, action: Action, index: int, batch: int) -> None:
        """For what goes wrong around an action: what goes wrong within it has been explained already."""
        if not isinstance(error, MemoryError | RuntimeError | NonFiniteError):
            return
        late = isinstance(error, NonFiniteError) and (error.layer, error.batch) != (index, batch)
        known = late or isinstance(error, OutOfMemoryError | PeerLostError) or getattr(error, "__notes__", None)
        if not known:
            self.explain(error, action, index, batch)

    def explain(
        self, error: BaseException, action: Action, index: int | None, batch: int, had: Shapes | None = None
    ) -> None:
        """Adds to an error where it was; of one that says memory ran out, makes one that says what to do.

        Raises:
            OutOfMemoryError: It was one of those.
        """
        kind = "" if index is None else f", layer {index} ({type(dict(self._layers)[index]).__name__})"
        where = f"in the {_NAMES[action]} of stage {self._number}{kind}, batch {batch}, device {self._device}"
        shapes = describe((had or []) if index is None else self.had[index])
        if is_out_of_memory(error) and not isinstance(error, PipealError):
            place = self._number, index, batch
            raise does_not_fit(error, where, shapes, self._device, self._on_oom, place) from error
        add_note(error, f"{where}; input {shapes}{self._on_types(error, index)}")

    def _on_types(self, error: BaseException, index: int | None) -> str:
        """What to do where operators refuse the types of the input."""
        said = str(error)
        if index is None or not isinstance(error, RuntimeError) or not ("dtype" in said or "scalar type" in said):
            return ""
        own = dtype_of(module_of(dict(self._layers)[index]))
        if all(dtype == own for _, dtype in self.had[index]):
            return ""
        return f"; the layer's weights are {str(own).removeprefix('torch.')}: convert what differs, as x.to({own}) does"


@dataclass(eq=False)
class Explained(Around):
    """Says of whatever goes wrong in a layer where it was.

    Attributes:
        index: The layer's number.
        explain: A method of the stage's :class:`ErrorContext`, given the error, the action, the layer and the batch.
    """

    index: int
    explain: Callable[[BaseException, Action, int, int], None]

    def around(self, action: Action, packet: Packet, rows: range | None) -> _OnError:  # noqa: ARG002
        """Has an error that leaves it explained."""
        return _OnError(lambda error: self.explain(error, action, self.index, packet.batch))


class _OnError:
    """Not a generator, which would end up in a cycle with the error: that shall free its tensors at once."""

    def __init__(self, explain: Callable[[BaseException], None]) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._explain(error)


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def does_not_fit(
    error: BaseException, where: str, had: str, device: Device, policy: OnOom, place: tuple[int, int | None, int]
) -> OutOfMemoryError:
    """What a person needs to know of memory that ran out.

    Args:
        error: What the device or the layer said.
        where: The action, stage, layer, batch and device, in words.
        had: The input, in words.
        device: The stage's device.
        policy: What happens then.
        place: The numbers of the stage, the layer and the batch.
    """
    asked, free = bytes_asked(error), bytes_free(error)
    if free is None:
        free = device.free_bytes()
    amounts = [f"{in_units(asked)} were asked for"] if asked is not None else []
    amounts += [f"{in_units(free)} were free"] if free is not None else []
    else_ = (
        "" if policy == "split" else ", or have such batches learnt from in parts (on_oom='split', without replicas)"
    )
    return OutOfMemoryError(
        f"out of memory {where}: {' and '.join(amounts) or first_line(error)}, the input is {had}; give it smaller "
        "batches (batch_size, budget_tokens, max_samples), place fewer layers on the device (more stages), use "
        f"bf16{else_}",
        *place,
    )
