"""Whether what a layer has learnt is finite: only then is it worth keeping, and going back to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pipeal.core.errors import NonFiniteError
from pipeal.engine.state.layer_state import State
from pipeal.engine.state.snapshot import LayerState, Snapshot

_STATISTICS = ("running_mean", "running_var")
"""What normalization keeps of its inputs: learnt, though nothing trains it, and once infinite for ever."""


class FiniteCheck:
    """Looks whether what a training has learnt is finite, snapshot by snapshot; on any thread."""

    def __init__(self) -> None:
        self._sound: int | None = None  # the batches before which all was finite, when last looked at
        self._lock = threading.Lock()  # a training may look while its last checkpoint is written

    def __call__(self, snapshot: Snapshot, passed: Mapping[int, LayerState], step: int) -> None:
        """Raises for a layer whose state is not finite, and says what is known of the batch that did it.

        Args:
            snapshot: Where the states are from.
            passed: What it found, by layer.
            step: The batches of all turns.

        Raises:
            NonFiniteError: A layer's state is not finite.
        """
        names = ((number, _name_in(number, found)) for number, found in passed.items())
        broken = next(((number, name) for number, name in names if name is not None), None)
        with self._lock:
            if broken is not None:
                raise self._error(*broken, snapshot.batch - 1, step)
            self._sound = max(snapshot.batch, self._sound or 0)

    def _error(self, layer: int, name: str, last: int, step: int) -> NonFiniteError:
        is_to_blame = self._sound == last
        since = "" if self._sound is None else f", though it was before batch {self._sound}"
        which = "the update on that batch" if is_to_blame else "the update on that batch, or on one before it,"
        return NonFiniteError(
            f"layer {layer} is not finite after batch {last} (step {step}){since}: {name}; {which} made it so, with "
            "losses that were finite. Lower the learning rate, or train in fp32, and go on from the last checkpoint",
            layer,
            last,
            (),
            is_to_blame=is_to_blame,
        )


def not_finite_in(state: State) -> str | None:
    """The name of something in a layer's state that is not finite; None where there is nothing.

    Trained weights, their gradients, what an optimizer keeps for each of their numbers and running statistics must be
    finite. What else there is may be infinite, as masks of attention are, but not NaN. Reads every tensor once; they
    are on the CPU.
    """
    for name, value, may_be_infinite in _learnt(state):
        if not _is_sound(value, may_be_infinite):
            return name
    return None


def _name_in(number: int, found: LayerState) -> str | None:
    """What is not finite in a layer; where another rank has written its file, it has looked."""
    return not_finite_in(found.state) if found.kept is None else found.kept["not_finite"][str(number)]


def _learnt(state: State) -> Iterator[tuple[str, Tensor, bool]]:
    """Every tensor with its name, and whether it may be infinite."""
    weights = state["module"]
    trained = {
        name for optimizer in state["optimizers"].values() for group in optimizer["parameters"] for name in group
    }
    for name, value in weights.items():
        if isinstance(value, Tensor):
            yield name, value, name not in trained and name.rpartition(".")[2] not in _STATISTICS
    for name, value in state["gradients"].items():
        yield f"the gradient of {name}", value, False
    for title, optimizer in state["optimizers"].items():
        names = [name for group in optimizer["parameters"] for name in group]
        for index, values in optimizer["state"]["state"].items():
            if isinstance(index, int) and isinstance(values, dict):
                weight = weights[names[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        yield f"{key} of {names[index]} in {title}", value, value.shape != weight.shape


def _is_sound(value: Tensor, may_be_infinite: bool) -> bool:
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_floating_point() or not value.numel() or value.layout is not torch.strided:
        return True
    if value.element_size() == 1:  # of few operators for such types, none looks for the largest
        value = value.float()
    # One pass without a copy, unlike isfinite(); a NaN comes out at both ends.
    ends = torch.stack(torch.aminmax(value))
    return not bool((ends.isnan() if may_be_infinite else ~ends.isfinite()).any())
