"""Puts the runner of a layer together: what is wrapped around it, and in what order.

::

    LayerRunner       says of what goes wrong around an action where it was (Thinned within it, with thin packets,
      Watched         looks whether the losses are finite                    Visited within that, with an offload)
        Accumulated   gradients of several batches, losses for the report     (Averaged, with replicas)
          Skip        leaves out a batch of which Watched says so             (on_non_finite="skip" or on_oom="split")
            Split     learns from parts where memory is short ─────────┐      (on_oom="split")
              Compiled    the layer's turn at the compiler             │ parts: Compiled, Explained, Keyed, Plain
                Timed     stamps of the device                         │
                  Explained   says of all else where it was  ◄─────────┘
                    Keyed     all randomness from (seed, layer, batch, action, rows)
                      Recomputed  keeps of blocks their inputs            (recompute="blocks")
                        Plain     the layer itself

A new wrapper is a file beside this one, with a subclass of :class:`~pipeal.engine.runner.layer.Runner` that overrides
what it changes; a line in :func:`build_runner`, which says when it is there and where; and a field of
:class:`~pipeal.core.options.EngineOptions`, whose ``check_layout`` says what it excludes. For ``--set`` that needs a
key of the same name in :class:`pipeal.config.schema.EngineConfig`. What the wrappers of several layers of a stage have
in common is an attribute of :class:`Shared`.

Outside of Timed, waiting for the compiler takes none of the layer's time; inside of Split, an error has become one of
memory that ran out before it is caught. What is a layer's own part of an action belongs within Compiled: in its turn at
the compiler, and in the parts of a batch, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from pipeal.core.modules import module_of
from pipeal.core.options import EngineOptions, PacketFormat
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.devices import Device
from pipeal.engine.runner.accumulation import Accumulated, Accumulation
from pipeal.engine.runner.averaging import Averaged, Together
from pipeal.engine.runner.before import Before
from pipeal.engine.runner.compile_gate import GATE
from pipeal.engine.runner.compiling import Compiled, CompiledLayer
from pipeal.engine.runner.error_context import ErrorContext, Explained
from pipeal.engine.runner.keyed import Keyed, Seeds
from pipeal.engine.runner.layer import Plain, Runner
from pipeal.engine.runner.losses import LossLog
from pipeal.engine.runner.nonfinite import FiniteWatch, Watched
from pipeal.engine.runner.offload import Visited
from pipeal.engine.runner.recompute import Recomputed, parts_of
from pipeal.engine.runner.skip import Skip
from pipeal.engine.runner.split import Split
from pipeal.engine.runner.thinned import Thinned
from pipeal.engine.runner.timing import Timed
from pipeal.engine.state.home import Home
from pipeal.engine.trace import StageClock


@dataclass(eq=False)
class Shared:
    """What the runners of a stage share: what it is but for its layers.

    Attributes:
        device: The stage's own handle on its device.
        options: How its layers are run.
        clock: Times them.
        errors: Says where errors were.
        finite: Looks at their losses.
        seeds: The keys of their randomness.
        last: The number of the model's last layer.
        losses: Their losses, for the report.
        splits: By layer, how many batches were learnt from in parts since the last report.
        offloaded: Where its layers are between their visits; None on the device.
        abandoned: When set, waits for the compiler end.
    """

    device: Device
    options: EngineOptions
    clock: StageClock
    errors: ErrorContext
    finite: FiniteWatch
    seeds: Seeds
    last: int
    losses: LossLog = field(default_factory=LossLog)
    splits: Counter[int] = field(default_factory=Counter)
    offloaded: Home | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)


def build_runner(index: int, layer: TrainableLayer, shared: Shared) -> LayerRunner:
    """The runner of a layer that is on its device; see the drawing above for the order.

    Args:
        index: The layer's number in the whole model.
        layer: The layer.
        shared: With the options that say what is wrapped around it.
    """
    device, options, module = shared.device, shared.options, module_of(layer)
    plain: Runner = Plain(layer)
    if options.recompute == "blocks":
        plain = Recomputed(plain, parts_of(layer, device))
    keyed = Keyed(plain, index, module, shared.seeds)
    part: Runner = Explained(keyed, index, shared.errors.explain)
    inner: Runner = Timed(part, index, device, shared.clock)
    compiled: CompiledLayer | None = None
    if options.compile != "none":
        name = f"layer {index} ({type(layer).__name__})"
        compiled = CompiledLayer(layer, name, options.compile, draws=keyed.draws)
        inner, part = (Compiled(one, compiled, shared.abandoned) for one in (inner, part))
    if options.on_non_finite == "skip" or options.on_oom == "split":
        before = Before(module)
        if options.on_oom == "split":
            inner = Split(inner, part, index, module, device, options.precision, shared.clock, before, shared.splits)
        inner = Skip(inner, index, module, shared.finite, before)
    return LayerRunner(index, layer, inner, shared, compiled)


class LayerRunner(Explained):
    """One layer's forward, backward and update with all that is wrapped around them.

    Args:
        index: The layer's number in the whole model.
        layer: The layer.
        within: What is within the accumulation of gradients.
        shared: That of the stage.
        compiled: The layer's compiled regions, if there are any.

    Attributes:
        layer: As given.
        compiled: As given.
        gathered: Its gradients between two updates.
    """

    def __init__(
        self, index: int, layer: TrainableLayer, within: Runner, shared: Shared, compiled: CompiledLayer | None
    ) -> None:
        self.layer, self.compiled = layer, compiled
        self.gathered = Accumulation(module_of(layer))
        self._within, self._shared = within, shared
        accumulated = Accumulated(within, index, self.gathered, shared.losses, self.beside)
        super().__init__(self._watched(index, accumulated), index, shared.errors.explain_rest)

    def learn_with(self, together: Together) -> None:
        """Has the layer learn from each batch with others. Options that leave batches out are refused with them."""
        shared, mine = self._shared, (self.index, self.gathered, self._shared.losses, self.beside, self.layer)
        self.inner = self._watched(self.index, Averaged(self._within, *mine, together, shared.clock))

    def beside(self) -> AbstractContextManager[None]:
        """The layer's turn for what compiles nothing: at once, unless something is being compiled."""
        if self.compiled is None:
            return _AT_ONCE
        return GATE.shared(self._shared.abandoned)

    def _watched(self, index: int, inner: Runner) -> Runner:
        shared = self._shared
        found: Runner = Watched(inner, index, module_of(self.layer), shared.finite)
        if shared.offloaded is not None:
            found = Visited(found, index, shared.offloaded, self.beside)
        if shared.options.packet == "as_is":
            return found
        kind: PacketFormat = "as_is" if index == shared.last else shared.options.packet
        return Thinned(found, index, kind, shared.seeds, shared.errors, shared.device, shared.clock, self.beside)


_AT_ONCE = nullcontext()
