"""Layers in the memory of the host: on the GPU are the one at work, the next one, and the last one on its way back.

::

    compute    layer 3: F B U ─────────►   layer 4: F B U ─────────►      of one batch; then layer 0 follows the last
    bring      4 into slot b ──────►       5 into slot c ──────►          beside it, on a stream of its own
    send       2 out of slot c ──►         3 out of slot a ──►            as well

    slot a     3 at work                   3 leaves
    slot b     4 arrives                   4 at work
    slot c     2 leaves                    5 arrives

At home a layer lies in one stretch of locked memory, and at work in one of three slots of the GPU, both laid out alike,
so that it is brought, and sent, by a single copy. Its parameters and buffers, what its optimizers keep, and gradients
that wait for a later update stay the objects that they are: ``.data`` leads to the slot during a visit, else home. What
waits for what, all of it on the GPU:

* work on a layer for the copy that brings it;
* the copy that sends it for that work;
* a copy into a slot for the copy that sent the layer before out of it; and the copy that brings a layer again for the
  one that sent it home.

The slots are made once, as large as the largest layer, and kept: memory that one stream gives back while another still
copies (``record_stream``) is not there again before the GPU has come so far, and its host may be a batch ahead, so that
there would be a whole model of it. What lies elsewhere at the end of a visit, such as gradients of several batches or a
buffer that was replaced, is copied to its place in the slot, if there is room.

The host waits where a layer outgrows its slot, which is at its first update; where others are to read or to change what
is at home (:meth:`HostOffload.settle`); and in a snapshot, for what is on its way there. Gradients are memory of the
allocator from the backward to the update. What is not strided stays on the GPU, and what an optimizer keeps on the CPU
stays there. A tensor that a module has as a plain attribute over the memory of a weight does not move with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeal.core.errors import PlacementError
from pipeal.core.packet import Packet
from pipeal.core.protocols import DOWN, UP, Path
from pipeal.engine.devices import Device, Ready
from pipeal.engine.state.home import Home
from pipeal.engine.state.layer_state import CopyTensor
from pipeal.engine.state.optimizer_state import load_optimizer
from pipeal.engine.state.stateful import stateful, tensors_kept_by
from pipeal.engine.state.stretch import Memory, Plan, gather, moves
from pipeal.engine.trace import StageClock, Way

SLOTS = 3
"""Layers on a GPU at a time. With two, a layer could only be brought after another has been sent."""


class HostOffload(Home):
    """The layers of a stage in the memory of its GPU's host.

    Args:
        layers: By their numbers, in the order in which they work; more than :data:`SLOTS`.
        device: The stage's.
        clock: Keeps the copies of traced batches.
        take: Brings one to the device, from where it goes home before the next one is brought.

    Raises:
        PlacementError: The host refuses so much locked memory.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], device: Device, clock: StageClock, take: Callable[[int], None]
    ) -> None:
        self._device, self._clock = device, clock
        self._layers: dict[int, _Layer] = {}
        order = list(layers)
        self._next = dict(zip(order, order[1:] + order[:1], strict=True))
        self._in, self._out = device.lane(), device.lane()
        self._slots = [_Slot() for _ in range(SLOTS)]  # in the order of their last use
        self._visit: _Visit | None = None
        self._met: set[int] = set()  # since the layers were at rest
        self._batch: int | None = None  # if it is traced
        self._largest = self._largest_weights = 0  # of all plans so far
        self._lent = threading.Lock()  # a snapshot is taken between two inferences as well, on another thread
        device.follow_caller()
        for index, module in layers.items():
            with device.active():
                take(index)
                self._layers[index] = _Layer(module, device)
                self._send(index, None)
        device.give_memory_back()

    def begin(self, index: int, packet: Packet) -> None:
        """As :meth:`Home.begin`."""
        self._batch = packet.batch if self._clock.traces(packet.sequence) else None
        self._open(index, whole=True)
        self._slot_with(self._next[index], whole=True)

    def end(self, index: int) -> None:
        """As :meth:`Home.end`.

        Raises:
            PlacementError: The host refuses more locked memory.
        """
        assert self._visit is not None
        self._send(index, self._visit.slot)
        self._visit = None

    def lend(self, index: int, path: Path) -> None:
        """As :meth:`Home.lend`; brings only what an inference reads, and asks for what is next on the way."""
        self._lent.acquire()
        try:
            self._batch = None
            self._open(index, whole=False)
            following = {UP: index + 1, DOWN: index - 1}.get(path, index)
            if following != index and following in self._layers:
                self._slot_with(following, whole=False)
        except BaseException:
            self._lent.release()
            raise

    def take_back(self, index: int) -> None:
        """As :meth:`Home.take_back`. Buffers go home, which may have been written to unseen, and weights if changed."""
        try:
            self._take_back(index)
        finally:
            self._lent.release()

    def _take_back(self, index: int) -> None:
        visit, layer = self._visit, self._layers[index]
        assert visit is not None
        mark = self._device.mark()
        size = layer.plan.buffers_size if layer.plan.versions() == visit.versions else layer.plan.weights_size
        if size:
            mark = layer.sent = self._copy(Way.SEND, index, size, visit.slot, mark)
        for tensor, piece in layer.plan.weights():
            if visit.slot.memory.holds(tensor, piece):
                tensor.data = layer.home.tensor(piece)
            else:
                self._met.discard(index)  # and is looked at before its next visit
        visit.slot.mark = mark
        self._visit = None

    def settle(self) -> None:
        """As :meth:`Home.settle`."""
        for lane in (self._in, self._out):
            lane.synchronize()
        for slot in self._slots:
            slot.holder = None  # at home it may be changed now
        self._met.clear()

    def changed(self, index: int) -> None:  # noqa: ARG002
        """As :meth:`Home.changed`; what does not lie at home is sent there before its next visit."""
        self.settle()

    @contextmanager
    def copier(self, index: int, copied: CopyTensor) -> Iterator[CopyTensor]:  # noqa: ARG002
        """As :meth:`Home.copier`; waits for what is on its way home."""
        with self._lent:
            self._out.synchronize()
            yield copied

    def rest(self) -> None:
        """As :meth:`Home.rest`; gives the slots back."""
        if self._visit is not None:
            with self._device.active():
                (self.end if self._visit.whole else self._take_back)(self._visit.index)
        self.settle()
        self._slots = [_Slot() for _ in range(SLOTS)]

    def _open(self, index: int, *, whole: bool) -> None:
        """Leads what is brought of a layer to its slot, and has the device wait for it."""
        layer = self._layers[index]
        if index not in self._met:
            layer.optimizers = list(stateful(layer.module)[0].values())
            if not layer.lies_in(layer.home, layer.kept()[1]):
                self._adopt(index)
            self._met.add(index)
        slot = self._slot_with(index, whole=whole)
        self._device.wait_for(slot.mark)
        self._visit = _Visit(index, slot, whole, [] if whole else layer.plan.versions())
        for tensor, piece in layer.plan.all() if whole else layer.plan.weights():
            tensor.data = slot.memory.tensor(piece)

    def _adopt(self, index: int) -> None:
        """Sends home what others have given a layer while it was there, such as a loaded state."""
        layer = self._layers[index]
        slot = self._slot_with(index, whole=True)
        self._device.wait_for(slot.mark)
        for tensor, piece in layer.plan.all():
            if layer.home.holds(tensor, piece):
                tensor.data = slot.memory.tensor(piece)
        self._device.take(layer.module)
        for optimizer in layer.optimizers:
            load_optimizer(optimizer, optimizer.state_dict())  # brings its states to where the weights are by now
        self._send(index, slot)

    def _slot_with(self, index: int, *, whole: bool) -> _Slot:
        """The slot that has a layer; else one to which it is brought, once that is free."""
        plan, largest = self._layers[index].plan, self._largest if whole else self._largest_weights
        size = plan.size if whole else plan.weights_size
        at_work = None if self._visit is None else self._visit.slot
        found = [slot for slot in self._slots if slot.holder == index]
        slot = found[0] if found else next(slot for slot in self._slots if slot is not at_work)
        self._slots.remove(slot)
        self._slots.append(slot)
        if slot.holder == index and slot.filled >= size:
            return slot
        if slot.size < largest:
            self._enlarge(slot, largest)
        slot.holder = None  # if the copy fails
        self._in.wait_for(slot.mark)
        slot.mark = self._copy(Way.BRING, index, size, slot, self._layers[index].sent)
        slot.holder, slot.filled = index, size
        return slot

    def _enlarge(self, slot: _Slot, size: int) -> None:
        """Replaces the memory of a slot; of no layer at work."""
        slot.holder = None
        self._device.wait_for(slot.mark)  # the allocator gives it out by the order of the device's work alone
        if slot.size:
            slot.room = None
            self._device.give_memory_back()
        slot.room = Memory(self._device.room(size))
        slot.mark = self._device.mark()

    def _send(self, index: int, slot: _Slot | None) -> None:
        """Sends a layer home, out of its slot or from wherever its tensors lie on the device, and leads them there."""
        layer = self._layers[index]
        counts, kept = layer.kept()
        changed = slot is None or not layer.lies_in(slot.memory, kept)
        if changed:
            self._change(index, layer, Plan.of(kept, counts, self._device.device))
        if slot is not None and layer.plan.size <= slot.size:
            if changed:
                gather(layer.plan, slot.memory)
            slot.holder, slot.filled = index, layer.plan.size
            slot.mark = layer.sent = self._copy(Way.SEND, index, layer.plan.size, slot, self._device.mark())
        else:
            # The host waits, so that this memory of the allocator is let go of before the next layer asks for some: the
            # device may be a whole batch behind.
            self._out.wait_for(self._device.mark())
            for begin, source in layer.plan.sources():
                self._out.copy(layer.home.flat[begin : begin + source.nbytes], source)
            self._out.synchronize()
            layer.sent = self._out.mark()
            if slot is not None:
                slot.holder, slot.mark = None, layer.sent
        for tensor, piece in layer.plan.all():
            tensor.data = layer.home.tensor(piece)

    def _change(self, index: int, layer: _Layer, plan: Plan) -> None:
        """Has a layer lie at home by another plan, before it is sent there."""
        if layer.home.size < plan.size:
            for lane in (self._in, self._out):
                lane.synchronize()  # what was given to it last copies from and to the memory that goes
            try:
                layer.home = Memory(self._device.locked(plan.size))
            except PlacementError as error:
                raise PlacementError(f"layer {index}: {error}") from error
        stay = {id(tensor) for tensor in plan.tensors}
        for tensor, _ in layer.plan.all():
            if id(tensor) not in stay:  # its place is another's from now on, but somebody may still have the tensor
                tensor.data = tensor.detach().clone()
        layer.plan = plan
        self._largest = max(self._largest, plan.size)
        self._largest_weights = max(self._largest_weights, plan.weights_size)

    def _copy(self, way: Way, index: int, size: int, slot: _Slot, after: Ready) -> Ready:
        """Copies the first bytes of a layer between its home and a slot, in one piece; returns the copy's mark."""
        home, there = self._layers[index].home.flat[:size], slot.memory.flat[:size]
        lane, into, source = (self._in, there, home) if way is Way.BRING else (self._out, home, there)
        lane.wait_for(after)
        if self._batch is None:
            lane.copy(into, source)
        else:
            begin = lane.stamp()
            lane.copy(into, source)
            self._clock.add_copy(way, index, self._batch, begin, lane.stamp())
        return lane.mark()


class _Layer:
    """A layer, and how it lies at home.

    Attributes:
        home: Its memory there.
        plan: What lies where in it.
        sent: When it is there.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        self.module = module
        self.optimizers = list(stateful(module)[0].values())
        self.home = Memory(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self.plan = Plan()
        self.sent: Ready = None
        self._device = device.device

    def kept(self) -> tuple[tuple[int, int], list[Tensor]]:
        """What it keeps from batch to batch by now; how many of it are buffers, and how many these or parameters."""
        found = [*self.module.buffers()]
        buffers = len(found)
        found += self.module.parameters()
        weights = len(found)
        found += [tensor for _, tensor in tensors_kept_by(self.optimizers)]
        found += [tensor.grad for tensor in found[buffers:weights] if tensor.grad is not None]
        return (buffers, weights), found

    def lies_in(self, memory: Memory, kept: Sequence[Tensor]) -> bool:
        """Whether it keeps what it kept when it was last sent home, and all of it lies in that memory."""
        return len(kept) == len(self.plan.tensors) and all(
            now is before and (not moves(now, self._device) if piece is None else memory.holds(now, piece))
            for now, before, piece in zip(kept, self.plan.tensors, self.plan.pieces, strict=True)
        )


@dataclass(eq=False)
class _Slot:
    """Memory of the device for one layer.

    Attributes:
        room: The memory; None before its first use.
        holder: The layer that lies in it; None for none.
        filled: How many of its bytes were brought.
        mark: When the last copy into it, or out of it, is made.
    """

    room: Memory | None = None
    holder: int | None = None
    filled: int = 0
    mark: Ready = None

    @property
    def size(self) -> int:
        return 0 if self.room is None else self.room.size

    @property
    def memory(self) -> Memory:
        assert self.room is not None  # it has been brought something
        return self.room


@dataclass(frozen=True, eq=False)
class _Visit:
    """A layer at work: in which slot, whether with all that it keeps, and which versions its parameters had."""

    index: int
    slot: _Slot
    whole: bool
    versions: list[int]
