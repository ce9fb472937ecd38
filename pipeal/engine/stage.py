"""A stage: neighbouring layers on one device, and the three actions on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeal.core.errors import add_note
from pipeal.core.materialize import materialize
from pipeal.core.modules import module_of, scaler_of
from pipeal.core.options import EngineOptions
from pipeal.core.packet import Packet
from pipeal.core.protocols import UP, Path, TrainableLayer
from pipeal.core.thin import nearest, rounded, thin
from pipeal.core.tree import Tree, shapes_of
from pipeal.engine.devices import Device, Stamp
from pipeal.engine.runner.averaging import Together
from pipeal.engine.runner.before import cut_graphs
from pipeal.engine.runner.build import LayerRunner, Shared, build_runner
from pipeal.engine.runner.compile_gate import GATE, Abandoned
from pipeal.engine.runner.error_context import ErrorContext
from pipeal.engine.runner.keyed import Seeds
from pipeal.engine.runner.nonfinite import FiniteWatch, raise_first, refuse_given_up
from pipeal.engine.runner.precision import autocast, settings
from pipeal.engine.schedule import Action
from pipeal.engine.state.disk_offload import DiskOffload
from pipeal.engine.state.host_offload import SLOTS, HostOffload
from pipeal.engine.state.layer_state import layer_state
from pipeal.engine.state.mapped_file import MappedFile
from pipeal.engine.state.snapshot import LayerState, Snapshot
from pipeal.engine.trace import StageClock, Window


class Stage(Shared):
    """Runs the layers of one stage. Knows nothing of threads or of other stages.

    Args:
        number: The stage's number.
        layers: Its layers, by their number in the whole model, in order.
        device: The stage's own handle on its device; the layers are moved there.
        options: How they are run.
        seed: With the layer's and the batch's number, the key of all randomness.
        window: The batches whose spans are kept.
        last: The number of the model's last layer, which hands on to none; None for the last one here.
        files: Of layers offloaded to a disk, by their numbers.

    Attributes:
        runners: One for each layer, by its number, in order.
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
        last: int | None = None,
        files: Mapping[int, MappedFile] | None = None,
    ) -> None:
        super().__init__(
            device,
            options,
            StageClock(device, number, window),
            ErrorContext(number, dict(layers), device, options.on_oom),
            FiniteWatch(device, options.on_non_finite),
            Seeds(seed),
            layers[-1][0] if last is None else last,
        )
        self.number = number
        self.layers = list(layers)
        self._by_layer = options.within_stage == "layer"
        self._updates_last = False
        self._in_hand: Packet | None = None
        self._batch = -1
        self.runners: dict[int, LayerRunner] = {}
        modules = {index: module_of(layer) for index, layer in self.layers}

        def take(index: int) -> None:
            if not device.far and device.device.type != "meta":  # one at a time: there they may not fit here together
                materialize(modules[index], seed, index)
            device.take(modules[index])

        # Fewer layers would all be on the device at a time.
        from_host = options.offload == "host" and len(modules) > SLOTS and not device.far
        if from_host:
            self.offloaded = HostOffload(modules, device, self.clock, take)
        elif files:
            self.offloaded = DiskOffload(modules, files, options.offload_folder)
        for index, layer in self.layers:
            if not from_host:
                take(index)
            self.runners[index] = build_runner(index, layer, self)
        # Else there are waits between actions, which are not their time: for copies, the compiler, a loss.
        plain = self.offloaded is None and options.compile == "none"
        plain = plain and options.on_non_finite != "skip" and options.on_oom != "split"
        self.clock.times_whole = plain and device.lags and len(device.parts) == 1

    def learn_with(self, together: Together) -> None:
        """Has this stage learn from each batch with others; it then draws numbers of its own, but for updates."""
        self.seeds.replica = together.replica
        # An average is under way while the next layers are at work; but a layer that leaves memory leaves it updated.
        self._updates_last = self.offloaded is None
        self.clock.times_whole = False  # it waits for the others
        for runner in self.runners.values():
            runner.learn_with(together)

    def reset(self) -> None:
        """Forgets what an earlier, perhaps failed, life of the pipeline left behind."""
        self.drop_unlearnt()  # where a worker was left behind, this could not be done before
        self.abandoned.clear()
        self.finite.forget()
        for runner in self.runners.values():
            runner.forget()
        self.splits.clear()
        self.losses.take()
        self.clock.forget()

    def drop_unlearnt(self) -> None:
        """After a life, once the worker has ended: drops the graphs and gradients of an update that never came, and
        brings home what is offloaded.

        A second time does nothing: gradients that a state brings along before the next life stay.

        Raises:
            RuntimeError: A GPU takes no more work.
        """
        midway, self._in_hand = self._in_hand is not None, None
        for runner in self.runners.values():
            runner.gathered.forget(midway=midway)
            if midway:
                cut_graphs(module_of(runner.layer))  # with one, a layer cannot be copied
        if self.offloaded is not None:
            self.offloaded.rest()

    def take_splits(self) -> dict[int, int]:
        """By layer, how many batches were learnt from in parts; forgets them."""
        return {index: self.splits.pop(index, 0) for index in self.runners}

    def overflows(self) -> dict[int, int]:
        """By layer, how many updates fp16 has left out, as far as its state knows; waits for a GPU."""
        found = ((index, scaler_of(layer)) for index, layer in self.layers)
        return {index: 0 if scaler is None else scaler.overflows() for index, scaler in found}

    def abandon(self) -> None:
        """Ends a wait for the compiler: the pipeline is about to stop."""
        self.abandoned.set()

    def run(
        self, action: Action, packet: Packet | None = None, between: Callable[[int], None] = lambda _: None
    ) -> Packet | None:
        """Does one task; a forward takes a packet and returns the one to hand on.

        In the order ``stage`` it does one action on every layer. In the order ``layer`` a forward has all layers but
        the last one learn, too, and the others are of what is left (:mod:`pipeal.engine.schedule`).

        Args:
            action: What to do.
            packet: For a forward, the batch.
            between: Called where a layer of a forward has learnt, with the number of the next one; what it raises ends
                the forward there.
        """
        if action is Action.FORWARD:
            assert packet is not None
            return self._forward(packet, between)
        held = self._in_hand
        assert held is not None  # the executors keep the order F, B, U
        runners = list(self.runners.values())
        if self._by_layer and not (action is Action.UPDATE and self._updates_last):
            runners = runners[-1:]
        with self.device.active():
            begin = self._begin(held)
            self._do(action, runners, held)
            self._end(begin, action)
        if action is Action.UPDATE:
            self._in_hand = None
            self.device.end_batch()
        return None

    def _do(self, action: Action, runners: Sequence[LayerRunner], held: Packet) -> None:
        with settings(action, self.device, self.options.precision):
            for runner in runners:
                if action is Action.BACKWARD:
                    runner.backward(held)
                else:
                    runner.update(held)

    def _forward(self, packet: Packet, between: Callable[[int], None]) -> Packet:
        self._batch = packet.batch
        # Of the packet, later actions need no tensors; they may go.
        held = self._in_hand = replace(packet, x=None, y=None, ready=None)
        first, last = next(iter(self.runners)), next(reversed(self.runners))
        self.errors.had.clear()
        with self.device.active(), settings(Action.FORWARD, self.device, self.options.precision):
            try:
                self.device.limit_run_ahead()  # a GPU that has failed says so where it is waited for
                x, y = self.device.receive((packet.x, packet.y), packet.ready)
            except BaseException as error:
                shapes = shapes_of((packet.x, packet.y))
                self.errors.explain(error, Action.FORWARD, None, packet.batch, shapes)
                raise
            packet = held
            begin = self._begin(packet)
            for runner in self.runners.values():
                if self._by_layer and runner.index != first:
                    between(runner.index)
                self.errors.had[runner.index] = shapes_of((x, y))
                x, y = runner.forward(packet, x, y).onward
                if self._by_layer and runner.index != last:
                    self._do(Action.BACKWARD, [runner], held)
                    if not self._updates_last:
                        self._do(Action.UPDATE, [runner], held)
            self._end(begin, Action.FORWARD)
            return replace(packet, x=x, y=y, ready=self.device.mark_ready((x, y)))

    def _begin(self, packet: Packet) -> Stamp:
        """A stamp of a batch that is timed as a whole; None where its layers' actions are timed by themselves."""
        return None if self.clock.by_layer(packet.sequence) else self.device.stamp()

    def _end(self, begin: Stamp, action: Action) -> None:
        if begin is not None:
            # A forward has had layers learn, and a backward and an update are of the last one: in this order together.
            self.clock.add_whole(None if self._by_layer and len(self.runners) > 1 else action, begin)

    def save(self, snapshot: Snapshot, moved: Callable[[], None]) -> None:
        """Copies what the layers have learnt into a snapshot, between two batches; ``moved`` is called after each
        layer.

        What goes wrong is told to those who wait for the snapshot; training goes on. Whether losses that have yet to
        arrive from a GPU are finite is looked at there, too: nothing waits for them here.

        Raises:
            NonFiniteError: A loss that has arrived is not finite.
        """
        snapshot.look_at(self.finite.unsettled())
        for index, runner in self.runners.items():
            if not snapshot.is_open:
                return  # given up: the copies would not be read
            sources: list[Tensor] = []

            def copied(tensor: Tensor, sources: list[Tensor] = sources) -> Tensor:
                sources.append(tensor)
                return self.device.snapshot(tensor)

            home = nullcontext(copied) if self.offloaded is None else self.offloaded.copier(index, copied)
            try:
                # A worker's turn like an update's: nothing is compiled meanwhile.
                with runner.beside(), self.device.active():
                    begin = self.device.stamp()
                    with home as copy_tensor:
                        state = layer_state(runner.layer, copy_tensor)
                    losses = self.losses.so_far(index)
                    found = LayerState(state, None if losses is None else copied(losses), self.splits[index])
                    snapshot.add(index, found, self.device.mark(), sources)
                    self.clock.add_saving(begin)
            except Abandoned:
                raise
            except Exception as error:  # noqa: BLE001  handed on, whatever a user's module raises
                add_note(
                    error,
                    f"in the {snapshot}, of stage {self.number}, layer {index} ({type(runner.layer).__name__}), "
                    f"device {self.device}",
                )
                snapshot.give_up(error)
                return
            moved()

    def infer(self, index: int, path: Path, x: Tree, *, compiled: bool, abandoned: threading.Event | None) -> Tree:
        """Passes ``x`` through one block of a layer, compiled if that is wanted and the layer is compiled at all.

        What a layer gets from the one below is rounded as packets are, to the nearest.

        Raises:
            Abandoned: The event was set during a wait for the compiler.
        """
        runner, home = self.runners[index], self.offloaded

        def beside() -> AbstractContextManager[None]:
            return nullcontext() if runner.compiled is None else GATE.shared(abandoned)

        if path == UP and index and self.options.packet != "as_is":
            with beside():
                x = rounded(x, nearest(self.options.packet))
        if home is None:
            return _infer(runner, path, x, compiled=compiled, abandoned=abandoned)
        with beside():
            home.lend(index, path)
        try:
            return _infer(runner, path, x, compiled=compiled, abandoned=abandoned)
        finally:
            with beside():
                home.take_back(index)

    def thin(self, x: Tree) -> Tree:
        """What climbs from here to another stage in an inference, as it travels: rounded there, it is the same."""
        return thin(x, nearest(self.options.packet))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forwards, whatever the caller's is."""
        return autocast(self.device, self.options.precision)


def _infer(runner: LayerRunner, path: Path, x: Tree, *, compiled: bool, abandoned: threading.Event | None) -> Tree:
    if runner.compiled is None:
        return runner.layer.inference(x, path)
    return runner.compiled.inference(x, path, abandoned, compiled=compiled)


def bring_to_rest(stages: Sequence[Stage]) -> None:
    """Waits for all work given to their devices, and looks at all that was not waited for on the way.

    Raises:
        NonFiniteError: A loss is not finite, that of the first batch, whichever stage met it; or a layer has given up
            to learn in fp16.
        DataError: A disk has refused an offloaded layer.
    """
    for stage in stages:
        stage.device.synchronize()
        if stage.offloaded is not None:
            stage.offloaded.settle()
    raise_first(stage.finite.settle() for stage in stages)
    for stage in stages:
        if stage.finite.policy != "ignore":
            refuse_given_up(stage.layers, stage._batch)
