"""Puts the runner of a layer together: what is wrapped around it, and in what order.

::

    LayerRunner       says of what goes wrong around an action where it was
      Watched         looks whether the losses are finite
        Accumulated   gradients of several batches, losses for the report     (Averaged, with replicas)
          Skip        leaves out a batch of which Watched says so             (on_non_finite="skip" or on_oom="split")
            Split     learns from parts where memory is short ─────────┐      (on_oom="split")
              Compiled    the layer's turn at the compiler             │ parts: Compiled, Explained, Keyed, Plain
                Timed     stamps of the device                         │
                  Explained   says of all else where it was  ◄─────────┘
                    Keyed     all randomness from (seed, layer, batch, action, rows)
                      Plain   the layer itself

Outside of Timed, waiting for the compiler takes none of the layer's time; inside of Split, an error has become one of
memory that ran out before it is caught.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from pipeal.core.errors import NonFiniteError
from pipeal.core.modules import module_of
from pipeal.core.options import EngineOptions
from pipeal.core.packet import Packet
from pipeal.core.protocols import Path, TrainableLayer
from pipeal.core.tree import Tree, shapes_of
from pipeal.engine.devices import Device
from pipeal.engine.runner.accumulation import Accumulated, Accumulation
from pipeal.engine.runner.averaging import Averaged, Together
from pipeal.engine.runner.before import Before
from pipeal.engine.runner.compiling import Compiled, CompiledLayer
from pipeal.engine.runner.error_context import ErrorContext, Explained
from pipeal.engine.runner.keyed import Keyed, Seeds
from pipeal.engine.runner.layer import Plain, Runner
from pipeal.engine.runner.losses import LossLog
from pipeal.engine.runner.nonfinite import FiniteWatch, Watched
from pipeal.engine.runner.skip import Skip
from pipeal.engine.runner.split import Split
from pipeal.engine.runner.timing import Timed
from pipeal.engine.schedule import Action
from pipeal.engine.trace import RowClock, StageClock


@dataclass(frozen=True)
class Shared:
    """What the runners of a stage share.

    Attributes:
        device: The stage's own handle on its device.
        options: How its layers are run.
        clock: Times them.
        errors: Says where errors were.
        finite: Looks at their losses.
        seeds: The keys of their randomness.
        losses: Their losses, for the report.
        abandoned: When set, waits for the compiler end.
    """

    device: Device
    options: EngineOptions
    clock: StageClock | RowClock
    errors: ErrorContext
    finite: FiniteWatch
    seeds: Seeds
    losses: LossLog = field(default_factory=LossLog)
    abandoned: threading.Event = field(default_factory=threading.Event)


def build_runner(index: int, layer: TrainableLayer, shared: Shared) -> LayerRunner:
    """The runner of a layer that is on its device; see the drawing above for the order.

    Args:
        index: The layer's number in the whole model.
        layer: The layer.
        shared: With the options that say what is wrapped around it.
    """
    device, options = shared.device, shared.options
    module = module_of(layer)
    keyed = Keyed(Plain(layer), index, module, shared.seeds)
    explained: Runner = Explained(keyed, index, shared.errors)
    inner: Runner = Timed(explained, index, device, shared.clock)
    part = explained
    compiled: CompiledLayer | None = None
    if options.compile != "none":
        name = f"layer {index} ({type(layer).__name__})"
        compiled = CompiledLayer(layer, name, options.compile, draws=keyed.draws)
        inner = Compiled(inner, compiled, shared.abandoned)
        part = Compiled(explained, compiled, shared.abandoned)
    split: Split | None = None
    skip: Skip | None = None
    if options.on_non_finite == "skip" or options.on_oom == "split":
        before = Before(module)
        if options.on_oom == "split":
            inner = split = Split(inner, part, index, layer, device, options.precision, shared.clock, before)
        inner = skip = Skip(inner, index, module, shared.finite, before)
    return LayerRunner(index, layer, inner, shared, compiled, split, skip)


class LayerRunner:
    """One layer's forward, backward and update with all that is wrapped around them.

    Args:
        index: The layer's number in the whole model.
        layer: The layer.
        inner: What is within the accumulation of gradients.
        shared: That of the stage.
        compiled: The layer's compiled regions, if there are any.
        split: What learns in parts, if anything does.
        skip: What leaves batches out, if anything does.

    Attributes:
        index: As given.
        layer: As given.
        compiled: As given.
    """

    def __init__(
        self,
        index: int,
        layer: TrainableLayer,
        inner: Runner,
        shared: Shared,
        compiled: CompiledLayer | None,
        split: Split | None,
        skip: Skip | None,
    ) -> None:
        self.index = index
        self.layer = layer
        self.compiled = compiled
        self._shared = shared
        self._split = split
        self._skip = skip
        self._inner = inner
        self._gathered = Accumulation(module_of(layer))
        counts = None if skip is None else skip.counts
        self._whole = self._watched(Accumulated(inner, index, self._gathered, shared.losses, self.beside, counts))

    def learn_with(self, together: Together) -> None:
        """Has the layer learn from each batch with others."""
        assert self._skip is None  # refused with replicas
        shared, clock = self._shared, self._shared.clock
        self._whole = self._watched(
            Averaged(self._inner, self.index, self.layer, self._gathered, shared.losses, self.beside, together, clock)
        )

    def forward(self, packet: Packet, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Goes forward; what the next layer gets."""
        self._shared.errors.had[self.index] = shapes_of((x, y))
        try:
            return self._whole.forward(packet, x, y).onward
        except (MemoryError, RuntimeError, NonFiniteError) as error:
            self._shared.errors.explain_rest(error, Action.FORWARD, self.index, packet.batch)
            raise

    def backward(self, packet: Packet) -> None:
        """Goes back through what the last forward kept."""
        try:
            self._whole.backward(packet)
        except (MemoryError, RuntimeError, NonFiniteError) as error:
            self._shared.errors.explain_rest(error, Action.BACKWARD, self.index, packet.batch)
            raise

    def update(self, packet: Packet) -> None:
        """Ends the batch."""
        try:
            self._whole.update(packet)
        except (MemoryError, RuntimeError, NonFiniteError) as error:
            self._shared.errors.explain_rest(error, Action.UPDATE, self.index, packet.batch)
            raise

    def infer(self, path: Path, x: Tree, *, compiled: bool, abandoned: threading.Event | None) -> Tree:
        """Passes ``x`` through one block, compiled if that is wanted and the layer is compiled at all.

        Raises:
            Abandoned: The event was set during a wait for the compiler.
        """
        if self.compiled is None:
            return self.layer.inference(x, path)
        return self.compiled.inference(x, path, abandoned, compiled=compiled)

    def beside(self) -> AbstractContextManager[None]:
        """The layer's turn for what compiles nothing: at once, unless something is being compiled."""
        if self.compiled is None:
            return _AT_ONCE
        return self.compiled.after_forward(False, self._shared.abandoned)

    @property
    def splits(self) -> int:
        """How many batches were learnt from in parts since :meth:`take_splits`."""
        return 0 if self._split is None else self._split.splits

    def take_splits(self) -> int:
        """How many batches were learnt from in parts since the last call."""
        return 0 if self._split is None else self._split.take_splits()

    def forget(self) -> None:
        """Drops what an earlier, perhaps failed, life of the pipeline left behind."""
        if self._split is not None:
            self._split.forget()
        if self._skip is not None:
            self._skip.forget()

    def drop_unlearnt(self, *, midway: bool) -> None:
        """After a life, which may have ended ``midway`` in a batch: drops the gradients of an update that never came.

        A second time does nothing: gradients that a state brings along before the next life stay.
        """
        self._gathered.forget(midway=midway)

    def _watched(self, inner: Runner) -> Watched:
        return Watched(inner, self.index, module_of(self.layer), self._shared.finite)


_AT_ONCE = nullcontext()
