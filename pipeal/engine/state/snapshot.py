"""A snapshot between two batches: it travels with the packets, and each stage copies its layers as it comes by.

::

    caller ─► batch 8 ─ snapshot ─ batch 7 ─► [stage 0] ─► batch 6 ─► [stage 1] ─► …
                          └ after its update on batch 7 and before its forward on batch 8, a stage copies what its
                            layers have learnt, and hands the snapshot on; it waits for no other stage

Written by the stages' threads, waited for by any other, such as one that writes checkpoints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from pipeal.core.errors import StallError
from pipeal.engine.devices import Ready
from pipeal.engine.runner.nonfinite import Arriving, raise_first
from pipeal.engine.state.layer_state import State

_POLL_S = 1e-3


@dataclass(frozen=True)
class LayerState:
    """What a snapshot found of one layer; all tensors are on the CPU.

    Attributes:
        state: What the layer has learnt (:mod:`pipeal.engine.state.layer_state`).
        losses: Its local losses since the last report of the pipeline, ``(batches, losses)`` float32; None where there
            are none. A report of the batches from here on continues them.
        splits: How many batches it learnt from in parts since then.
        kept: Where another process has kept the state already, what it says of that; ``state`` is empty then.
    """

    state: State
    losses: Tensor | None
    splits: int = 0
    kept: Mapping[str, Any] | None = None


class Snapshot:
    """The states of all layers between two batches, as soon as every stage has come by.

    Args:
        batch: How many batches the model was trained on before it.
        layers: How many layers the model has, or the numbers of those that it is for.

    Attributes:
        batch: As given: the ``first_batch`` of a pipeline that goes on from here.
        number: Of the snapshots of its pipeline, from 1, where those are counted.
        note: What its caller tells those who keep what it finds; what JSON can hold.
        ended: Whether it was given up because the pipeline was ending.
    """

    def __init__(self, batch: int, layers: int | Iterable[int]) -> None:
        self.batch = batch
        self.number = 0
        self.note: Any = None
        self.ended = False
        self._layers = list(range(layers) if isinstance(layers, int) else layers)
        self._states: dict[int, LayerState] = {}
        self._copying: list[tuple[Ready, object]] = []
        self._losses: list[Arriving] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self, timeout_s: float | None = None) -> dict[int, LayerState]:
        """Waits until every stage has come by and its copies are on the CPU. Not on a thread that others wait for.

        Args:
            timeout_s: How long; None for as long as the pipeline runs.

        Returns:
            The states, by the layers' numbers. The snapshot keeps them as long as it lives.

        Raises:
            StallError: They were not there in time.
            ScheduleError: The pipeline was stopped before.
            NonFiniteError: A loss on a batch before it was not finite, which a GPU said only now.
            Exception: What a stage raised before, or what kept the states from being copied.
        """
        until = None if timeout_s is None else perf_counter() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open, timeout_s)
            if self._failure is not None:
                raise self._failure
            left = [layer for layer in self._layers if layer not in self._states]
            copying = list(self._copying)
        while not left and not all(ready is None or ready.query() for ready, _ in copying):
            if until is not None and perf_counter() > until:
                left = sorted(self._states)
                break
            time.sleep(_POLL_S)
        if left:
            raise StallError(
                f"the states of layers {left} before batch {self.batch} were not there after {timeout_s:g} s; give the "
                "stages more time, or see where they stand still"
            )
        with self._changed:
            self._copying = []
            # Copied before the states were, by the same stages: they are there as well.
            raise_first(found.first_error() for found in self._losses)
            return dict(sorted(self._states.items()))

    @property
    def is_open(self) -> bool:
        """Whether there are stages that have yet to come by."""
        return self._failure is None and len(self._states) < len(self._layers)

    def closes_within(self, timeout_s: float) -> bool:
        """Waits until every stage has come by, or it was given up; false if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_open, timeout_s)

    def look_at(self, losses: list[Arriving]) -> None:
        """Takes losses from before the snapshot along that have not been looked at; call it before :meth:`add`."""
        with self._changed:
            self._losses += losses

    def add(self, layer: int, state: LayerState, ready: Ready, sources: object) -> None:
        """Adds one layer's state.

        Args:
            layer: The layer's number.
            state: The state.
            ready: When the copies will have been made; None where they have.
            sources: What is copied; held until then.
        """
        with self._changed:
            if self.is_open:
                self._states[layer] = state
                self._copying.append((ready, sources))
                self._changed.notify_all()

    def give_up(self, error: BaseException, *, ended: bool = False) -> None:
        """Lets those who wait know that there will be no more; too late where all stages have come by.

        Args:
            error: Why.
            ended: Whether the pipeline is ending, which its caller learns anyway.
        """
        with self._changed:
            if self.is_open:
                self._failure, self.ended = error, ended
                self._states, self._copying = {}, []
                self._changed.notify_all()

    def __str__(self) -> str:
        return f"snapshot before batch {self.batch}"
