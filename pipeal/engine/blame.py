"""What an error says of where it happened, and one of memory that ran out also of what to lower."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeal.engine.device import Device
from pipeal.errors import OutOfMemoryError, first_line
from pipeal.outofmemory import bytes_asked, bytes_free, in_units

OnOom: TypeAlias = Literal["raise", "split"]
"""What happens on a batch that does not fit into memory."""

ON_OOM: tuple[OnOom, ...] = ("raise", "split")


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]


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
    else_ = "" if policy == "split" else ", or have such batches learnt from in parts (on_oom='split')"
    return OutOfMemoryError(
        f"out of memory {where}: {' and '.join(amounts) or first_line(error)}, the input is {had}; give it smaller "
        "batches (batch_size, budget_tokens, max_samples), place fewer layers on the device (more stages), use "
        f"bf16{else_}",
        *place,
    )
