"""A stage: neighbouring layers on one device, and the three actions on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from pipeal.core.modules import module_of, scaler_of
from pipeal.core.options import EngineOptions
from pipeal.core.packet import Packet
from pipeal.core.protocols import Path, TrainableLayer
from pipeal.core.rng import key_seed, keyed, may_draw, updates_may_draw
from pipeal.core.tree import Tree, batch_size, shapes_of
from pipeal.engine.devices import Device, DeviceRow, Ready
from pipeal.engine.runner.accumulation import Accumulation
from pipeal.engine.runner.compile_gate import Abandoned
from pipeal.engine.runner.compiling import CompiledLayer
from pipeal.engine.runner.error_context import ErrorContext, add_note
from pipeal.engine.runner.forward import Passed, go_forward
from pipeal.engine.runner.losses import LossLog
from pipeal.engine.runner.nonfinite import FiniteWatch, cause_of, raise_first, refuse_given_up
from pipeal.engine.runner.precision import autocast, settings
from pipeal.engine.runner.split import BatchSplitter, LearnPart
from pipeal.engine.schedule import Action
from pipeal.engine.state.layer_state import layer_state
from pipeal.engine.state.snapshot import LayerState, Snapshot
from pipeal.engine.trace import RowClock, StageClock, Window


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packet between two stages.

    Attributes:
        sequence: The packet's place in this pipeline's life, counted from 0.
        packet: The packet.
        ready: When its tensors may be read.
    """

    sequence: int
    packet: Packet
    ready: Ready = None


class Together(Protocol):
    """Others that hold the same layers, and learn from other samples of each batch."""

    @property
    def replica(self) -> int:
        """Which of them this is."""
        ...

    def begin(self, index: int, layer: TrainableLayer, losses: list[Tensor] | None, samples: int, learnt: int) -> None:
        """Begins, after a layer's backward, to make its gradients, of so many ``learnt`` samples, those of all samples.

        Where they are of none, only losses are brought together: the layer does not update after this batch.
        """
        ...

    def finish(self, index: int) -> list[Tensor] | None:
        """Waits for that, before the layer's update; gives the losses of all samples."""
        ...


class Stage:
    """Runs the layers of one stage. Knows nothing of threads or of other stages.

    Args:
        number: The stage's number.
        layers: Its layers, by their number in the whole model, in order.
        device: The stage's own handle on its device; the layers are moved there.
        options: How they are run.
        seed: With the layer's and the batch's number, the key of all randomness.
        window: The batches whose spans are kept.
    """

    def __init__(
        self,
        number: int,
        layers: Sequence[tuple[int, TrainableLayer]],
        device: Device,
        options: EngineOptions,
        *,
        seed: int,
        window: Window,
    ) -> None:
        self.number = number
        self.layers = list(layers)
        self.device = device
        self.seed = seed
        self.options = options
        self.clock: StageClock | RowClock
        if isinstance(device, DeviceRow):
            self.clock = RowClock(device, number, window)
        else:
            self.clock = StageClock(device, number, window)
        self.losses = LossLog()
        self.finite = FiniteWatch(device, options.on_non_finite)
        self._errors = ErrorContext(number, self.layers, device, options.on_oom)
        self._splitters: dict[int, BatchSplitter] = {}
        self._in_hand: Parcel | None = None
        self._batch = -1
        self._together: Together | None = None
        self._found: dict[int, tuple[list[Tensor] | None, int]] = {}
        self._gathered: dict[int, Accumulation] = {}
        self._draws: dict[int, dict[Action, bool]] = {}
        self._compiled: dict[int, CompiledLayer] = {}
        self._abandoned = threading.Event()
        for index, layer in self.layers:
            module = module_of(layer)
            device.take(module)
            self._gathered[index] = Accumulation(module)
            draws = may_draw(module)
            self._draws[index] = {
                Action.FORWARD: draws,
                Action.BACKWARD: draws,
                Action.UPDATE: updates_may_draw(module),
            }
            if options.on_non_finite == "skip" or options.on_oom == "split":
                splits = options.on_oom == "split"
                self._splitters[index] = BatchSplitter(index, layer, device, self.finite, splits=splits)
            if options.compile != "none":
                name = f"layer {index} ({type(layer).__name__})"
                self._compiled[index] = CompiledLayer(layer, name, options.compile, draws=draws)

    def learn_with(self, together: Together) -> None:
        """Has this stage learn from each batch with others; it then draws numbers of its own, but for updates."""
        self._together = together

    def reset(self) -> None:
        """Forgets what an earlier, perhaps failed, life of the pipeline left behind."""
        self.drop_unlearnt()  # where a worker was left behind, this could not be done before
        self._found.clear()
        self._abandoned.clear()
        self.finite.forget()
        for splitter in self._splitters.values():
            splitter.forget()
        self.losses.take()
        self.clock.forget()

    def drop_unlearnt(self) -> None:
        """After a life, once the worker has ended: drops the gradients of an update that never came.

        A second time does nothing: gradients that a state brings along before the next life stay.
        """
        midway, self._in_hand = self._in_hand is not None, None
        for gathered in self._gathered.values():
            gathered.forget(midway=midway)

    def take_splits(self) -> dict[int, int]:
        """By layer, how many batches were learnt from in parts; forgets them."""
        return {index: self._splitters[index].take_splits() if self._splitters else 0 for index, _ in self.layers}

    def overflows(self) -> dict[int, int]:
        """By layer, how many updates fp16 has left out, as far as its state knows; waits for a GPU."""
        found = ((index, scaler_of(layer)) for index, layer in self.layers)
        return {index: 0 if scaler is None else scaler.overflows() for index, scaler in found}

    def abandon(self) -> None:
        """Ends a wait for the compiler: the pipeline is about to stop."""
        self._abandoned.set()

    def run(self, action: Action, parcel: Parcel | None = None) -> Parcel | None:
        """Does one action on every layer; a forward takes a parcel and returns the one to hand on."""
        if action is Action.FORWARD:
            assert parcel is not None
            return self._forward(parcel)
        held = self._in_hand
        assert held is not None  # the executors keep the order F, B, U
        with self.device.active(), self._settings(action):
            for index, layer in self.layers:
                update = partial(_update, layer, held.packet.lr_scale)
                whole = partial(self._act, action, index, held, layer.backward if action is Action.BACKWARD else update)
                splitter = self._splitters.get(index)
                if self._together is not None:
                    self._act_together(self._together, action, index, layer, whole, held.packet)
                    continue
                if action is Action.BACKWARD and splitter is None:
                    whole()
                    continue
                with self._errors.around(action, index, held.packet.batch):
                    if action is Action.UPDATE:
                        self._learn(index, whole, updates=held.packet.updates)
                    elif splitter is not None:
                        splitter.backward(whole, self._part(action, index, layer, held))
        if action is Action.UPDATE:
            self._in_hand = None
            self.device.end_batch()
        return None

    def save(self, snapshot: Snapshot, moved: Callable[[], None]) -> None:
        """Copies what the layers have learnt into a snapshot, between two batches; ``moved`` is called after each
        layer.

                What goes wrong is told to whoever waits for the snapshot; training goes on. Whether losses that have
                yet to arrive from a GPU are finite is looked at there, too: nobody waits for them here.

                Raises:
                    NonFiniteError: A loss that has arrived is not finite.
        """
        snapshot.look_at(self.finite.unsettled())
        for index, layer in self.layers:
            if not snapshot.is_open:
                return  # given up: nobody would read the copies
            sources: list[Tensor] = []

            def copied(tensor: Tensor, sources: list[Tensor] = sources) -> Tensor:
                sources.append(tensor)
                return self.device.snapshot(tensor)

            try:
                # A worker's turn like an update's: nobody compiles meanwhile.
                with self._admitted(Action.UPDATE, index), self.device.active():
                    begin = self.device.stamp()
                    state = layer_state(layer, copied)
                    losses = self.losses.so_far(index)
                    splits = self._splitters[index].splits if self._splitters else 0
                    found = LayerState(state, None if losses is None else copied(losses), splits)
                    snapshot.add(index, found, self.device.mark(), sources)
                    self.clock.add_saving(begin)
            except Abandoned:
                raise
            except Exception as error:  # noqa: BLE001  handed on, whatever a user's module raises
                add_note(
                    error,
                    f"in the {snapshot}, of stage {self.number}, layer {index} ({type(layer).__name__}), "
                    f"device {self.device}",
                )
                snapshot.give_up(error)
                return
            moved()

    def _forward(self, parcel: Parcel) -> Parcel:
        self._batch = number = parcel.packet.batch
        # Of the packet, later actions need no tensors; they may go.
        self._in_hand = Parcel(parcel.sequence, replace(parcel.packet, x=None, y=None))
        self._errors.had.clear()
        self.device.limit_run_ahead()
        with self.device.active(), self._settings(Action.FORWARD):
            try:
                x, y = self.device.receive((parcel.packet.x, parcel.packet.y), parcel.ready)
            except BaseException as error:
                self._errors.explain(error, Action.FORWARD, None, number, shapes_of((parcel.packet.x, parcel.packet.y)))
                raise
            for index, layer in self.layers:
                self._errors.had[index] = shapes_of((x, y))
                x, y = self._climb(index, layer, parcel, x, y)
            return Parcel(parcel.sequence, replace(parcel.packet, x=x, y=y), self.device.mark_ready((x, y)))

    def _climb(self, index: int, layer: TrainableLayer, parcel: Parcel, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """One layer's forward, and what it leaves behind."""
        whole = partial(self._act, Action.FORWARD, index, parcel, partial(go_forward, layer, x, y), (x, y))
        splitter = self._splitters.get(index)
        passed: Passed
        with self._errors.around(Action.FORWARD, index, parcel.packet.batch):
            with self._admitted(Action.UPDATE, index):  # what is computed compiles nothing
                self._gathered[index].expect(batch_size((x, y)))
            if splitter is None:
                passed = whole()
            else:
                passed = splitter.forward(x, y, whole, self._part(Action.FORWARD, index, layer, parcel))
            if self._together is not None:
                self._found[index] = passed.losses, batch_size((x, y))
            elif passed.losses is not None:
                self.losses.add(index, passed.losses)
            if passed.losses is not None:
                cause = partial(cause_of, x, y, module_of(layer))
                self.finite.look(index, parcel.packet.batch, passed.losses, cause)
        return passed.onward

    def _learn(self, index: int, whole: Callable[[], None], *, updates: bool) -> None:
        """Ends a batch: it counts, or is left out; and where it ``updates``, so does what was gathered."""
        gathered, splitter = self._gathered[index], self._splitters.get(index)
        if splitter is None or splitter.counts():
            gathered.add()
        if updates and self._mean(index):
            whole()

    def _mean(self, index: int) -> int:
        """Of the gradients gathered; how many samples they are of."""
        with self._admitted(Action.UPDATE, index):
            return self._gathered[index].mean()

    def _act_together(
        self,
        together: Together,
        action: Action,
        index: int,
        layer: TrainableLayer,
        whole: Callable[[], Any],
        packet: Packet,
    ) -> None:
        """A backward or an update, with what all learn from in between."""
        if action is Action.BACKWARD:
            whole()
            self._gathered[index].add()
            losses, samples = self._found.pop(index)
            with self._errors.around(action, index, packet.batch):
                learnt = self._mean(index) if packet.updates else 0
            together.begin(index, layer, losses, samples, learnt)
            return
        with self.clock.waiting("join"):
            losses = together.finish(index)
        if losses is not None:
            self.losses.add(index, losses)
        if packet.updates:
            whole()

    def _part(self, action: Action, index: int, layer: TrainableLayer, parcel: Parcel) -> LearnPart:
        """What goes, within an action, forward and backward with some samples of a batch, under keys of their own."""

        def learn(x: Tree, y: Tree, rows: range) -> Passed:
            batch, begin = parcel.packet.batch, self.device.stamp()
            with self._settings(Action.FORWARD), self._admitted(Action.FORWARD, index, (x, y)):
                key = (3, rows.start, rows.stop)
                passed: Passed = self._do(Action.FORWARD, index, batch, key, partial(go_forward, layer, x, y))
            with self._settings(Action.BACKWARD), self._admitted(Action.BACKWARD, index):
                self._do(Action.BACKWARD, index, batch, (4, rows.start, rows.stop), layer.backward)
            self.clock.add(index, action, batch, parcel.sequence, begin)
            return passed

        return learn

    def infer(
        self,
        index: int,
        layer: TrainableLayer,
        path: Path,
        x: Tree,
        *,
        compiled: bool,
        abandoned: threading.Event | None,
    ) -> Tree:
        """Passes ``x`` through one block of a layer, compiled if that is wanted and the stage compiles at all.

        Raises:
            Abandoned: The event was set during a wait for the compiler.
        """
        found = self._compiled.get(index)
        if found is None:
            return layer.inference(x, path)
        return found.inference(x, path, abandoned, compiled=compiled)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forwards, whatever the caller's is."""
        return autocast(self.device, self.options.precision)

    def _settings(self, action: Action) -> AbstractContextManager[Any]:
        return settings(action, self.device, self.options.precision)

    def _admitted(self, action: Action, index: int, inputs: Tree = None) -> AbstractContextManager[None]:
        """The layer's turn to act: at once, unless something is being compiled or it may compile something itself."""
        compiled = self._compiled.get(index)
        if compiled is None:
            return _AT_ONCE
        if action is Action.FORWARD:
            return compiled.forward(inputs, self._abandoned)
        return compiled.after_forward(action is Action.BACKWARD, self._abandoned)

    def _act(
        self,
        action: Action,
        index: int,
        parcel: Parcel,
        work: Callable[[], Any],
        inputs: Tree = None,
    ) -> Any:
        """Waits for the layer's turn, carries an action out and times it."""
        with self._admitted(action, index, inputs):
            begin = self.device.stamp()
            result = self._do(action, index, parcel.packet.batch, _KEY[action], work)
            self.clock.add(index, action, parcel.packet.batch, parcel.sequence, begin)
        return result

    def _do(self, action: Action, index: int, batch: int, key: tuple[int, ...], work: Callable[[], Any]) -> Any:
        """Keys an action, and says where it was if it fails."""
        try:
            with keyed(self._seed_of(action), index, batch, *key, whole_default=self._draws[index][action]):
                return work()
        except BaseException as error:
            self._errors.explain(error, action, index, batch)
            raise

    def _seed_of(self, action: Action) -> int:
        """Replicas draw alike only where they must stay alike."""
        if self._together is None or self._together.replica == 0 or action is Action.UPDATE:
            return self.seed
        return key_seed(self.seed, self._together.replica)


def bring_to_rest(stages: Sequence[Stage]) -> None:
    """Waits for all work given to their devices, and looks at all that nobody waited for on the way.

    Raises:
        NonFiniteError: A loss is not finite, that of the first batch, whichever stage met it; or a layer has given up
            to learn in fp16.
    """
    for stage in stages:
        stage.device.synchronize()
    raise_first(stage.finite.settle() for stage in stages)
    for stage in stages:
        if stage.finite.policy != "ignore":
            refuse_given_up(stage.layers, stage._batch)


_AT_ONCE = nullcontext()

# A forward's key is (seed, layer, batch) alone: what anyone can redo by hand with :func:`pipeal.core.rng.keyed`.
_KEY: dict[Action, tuple[int, ...]] = {Action.FORWARD: (), Action.BACKWARD: (1,), Action.UPDATE: (2,)}


def _update(layer: TrainableLayer, lr_scale: float) -> None:
    layer.scale_lr(lr_scale)
    layer.update()
