"""Pipelined backpropagation under ``torchrun``: rank 0 has the network as a layer, whose blocks lie on all ranks.

::

    rank 0                                        rank r
    a pipeline of one stage and one layer         serves it: does what it is told, until the end
      forward    ── learn ──────────────────►     all micro-batches forward and backward (backprop_stage),
                 ◄─────────────── the loss ──     by PyTorch's own schedule, neighbour to neighbour
      update     ── update ─────────────────►     the optimizer's step of its own blocks
      inference  ── climb ──────────────────►     takes features from the rank before, and hands its own on
      state_dict ── state ──────────────────►     gives what its blocks have learnt

So feed, reports, checkpoints and evaluation are those of one process, whose checkpoints go on here, and the other way
round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeal.core.errors import ConfigError, PeerLostError
from pipeal.core.options import Precision
from pipeal.core.rng import random_words
from pipeal.core.tree import Shapes, Tree, batch_size, move, shapes_of
from pipeal.engine.devices import make_current, open_device
from pipeal.engine.devices.threads import set_intra_op_threads
from pipeal.engine.distributed.channel import Wire
from pipeal.engine.distributed.process_groups import Groups, Seat, gpu_group, have_gpus_of_their_own, take_seats
from pipeal.engine.distributed.requests import facts_of_clock
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.runner.error_context import ErrorContext
from pipeal.engine.runner.parts import cut
from pipeal.engine.schedule import Action
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.state.stateful import release
from pipeal.engine.trace import StageClock, Window
from pipeal.methods.bp import BP
from pipeal.methods.optimizers import follow_weights
from pipeal.run.backprop_stage import BackpropStage, Work
from pipeal.run.micro_batches import MicroBatches, Shape, shared_out
from pipeal.run.work_thread import WorkThread

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Rank:
    """What all ranks have.

    Args:
        layer: The whole network; all ranks have the same.
        world: The processes, a stage each.
        device: This rank's.
        sizes: The blocks of each stage.
        schedule: ``gpipe`` or ``1f1b``.
        micro_batches: Of a batch.
        precision: Of forwards.
        traced: The batches from whose first one on as many micro-batches are traced.

    Raises:
        ConfigError: Two stages would share a parameter or a buffer, or ranks a GPU.
    """

    def __init__(
        self,
        layer: BP,
        world: World,
        device: str | torch.device,
        *,
        sizes: Sequence[int],
        schedule: str,
        micro_batches: int,
        precision: Precision,
        traced: Window,
    ) -> None:
        self.layer, self.world = layer, world
        self.device = open_device(make_current(device))
        self.count = len(sizes)
        self.blocks = layers_of_stages(sizes)
        self._wires = world.wire_numbers(2)
        self.orders, self.features = (Wire(world.endpoint, number) for number in self._wires)
        layer.parameters_by_device(sizes)  # refuses what they would share
        own = [layer.row()[block] for block in self.blocks[world.rank]]
        for block in own:
            block.to(self.device.device)
        self.seats = take_seats(world, self.device)
        self._group = _group(world, self.seats)
        is_last, parts = world.rank == self.count - 1, micro_batches
        self.clock = StageClock(self.device, world.rank, Window(traced.first * parts, traced.count))
        self.stage = BackpropStage(
            own,
            self.blocks[world.rank].start,
            layer.cri.to(self.device.device) if is_last else None,
            (world.rank, self.count),
            *(schedule, parts, self.device, self._group, precision, self.clock),
        )

    def report(self) -> dict[str, Any]:
        """How this rank has spent its time since its clock was started, and its spans."""
        return facts_of_clock(self.clock, self.seats[self.world.rank].clock)

    def update(self, sequence: int) -> None:
        """The step of this rank's blocks, after a batch."""
        with self.stage.timed(Action.UPDATE, (sequence + 1) * self.stage.micro_batches - 1):
            BP.update(self.layer)

    def state_of(self, rank: int) -> dict[str, Any]:
        """What the blocks of a rank have learnt, by the names that the layer gives it, on the CPU."""
        named = self._named(rank)
        states = self.layer.opt.state
        kept = {
            name: dict(states[one])
            for name, one in named.items()
            if isinstance(one, torch.nn.Parameter) and one in states
        }
        return move({"weights": {name: one.detach() for name, one in named.items()}, "optimizer": kept}, _CPU)

    def leave(self) -> None:
        """Lets go of what connects the stages."""
        dist.destroy_process_group(self._group)
        self.world.endpoint.close_wires(self._wires)

    def abort(self) -> None:
        """After a failure: ends what NCCL would wait for until a rank that is gone comes back."""
        if self.seats[self.world.rank].gpu is not None:
            Groups(alike_on_gpus=self._group).abort(STOP_S)

    @torch.no_grad()
    def load_state_of(self, rank: int, state: Mapping[str, Any]) -> None:
        """Puts it back into the layer that is here; the optimizer's states have yet to follow the weights."""
        named = self._named(rank)
        for name, value in state["weights"].items():
            named[name].copy_(value)
        for name, values in state["optimizer"].items():
            self.layer.opt.state[named[name]] = values

    def _named(self, rank: int) -> dict[str, Tensor]:
        begins = tuple(f"model.{block}." for block in self.blocks[rank]) + (("cri.",) if rank == self.count - 1 else ())
        found = torch.nn.Module.state_dict(self.layer, keep_vars=True)
        return {name: one for name, one in found.items() if name.startswith(begins)}


class Follower(_Rank):
    """Any rank but the first; the arguments are those of rank 0. Other ranks' blocks are let go of."""

    def serve(self, threads: int | None, first_batch: int = 0) -> None:
        """Does what rank 0 says until it ends the pipeline.

        Args:
            threads: Of operators on a CPU.
            first_batch: The number of the first batch, for messages.

        Raises:
            PeerLostError: Another rank is lost.
            Exception: What this stage raised; a note says where.
        """
        self._errors = ErrorContext(self.world.rank, {}, self.device, "raise")
        self._first_batch, self._had = first_batch, Shapes()
        for rank, blocks in enumerate(self.blocks):
            for block in blocks if rank != self.world.rank else ():
                release(self.layer.row()[block])

        def follow() -> None:
            set_intra_op_threads(threads)
            with self.device.active():
                while self._do():
                    pass

        try:
            with self.world.naming_lost():
                self.world.guarded(follow)
        except BaseException:
            self.abort()
            raise
        self.leave()

    def _do(self) -> bool:
        order = self.orders.receive([0])
        facts, stage, tree = order.facts, self.stage, self.orders.body(order)
        if order.kind == "learn":
            work = Work(
                *(tuple(facts["shape"]), facts["counts"], facts["sequence"], facts["key"]),
                y=move(tree, self.device.device),
            )
            self._had = stage.takes(work.shape)
            loss = self._explained(partial(stage.learn, work), facts["sequence"])
            if loss is not None:
                self.features.send(0, "loss", {}, loss.cpu())
        elif order.kind == "update":
            self.layer.scale_lr(facts["lr_scale"])
            self._explained(partial(self.update, facts["sequence"]), facts["sequence"])
        elif order.kind == "climb":
            shape = None if facts["shape"] is None else tuple(facts["shape"])
            for _ in range(facts["parts"]):
                came = self.features.body(self.features.receive([self.world.rank - 1]))
                self._had, climb = shapes_of(came), partial(stage.climb, move(came, self.device.device), shape)
                out = climb() if shape is None else self._explained(climb, facts["sequence"])
                self.features.send((self.world.rank + 1) % self.count, "features", {}, move(out, _CPU))
        elif order.kind == "begin":
            self.clock.restart()
        elif order.kind == "report":
            self.features.send(0, "report", self.report())
        elif order.kind == "load":
            self.load_state_of(self.world.rank, tree)
            follow_weights((self.layer.opt,))
        elif order.kind == "state":
            self.features.send(0, "state", {}, self.state_of(self.world.rank))
        return order.kind != "end"

    def _explained(self, work: Callable[[], T], sequence: int) -> T:
        """Says of what goes wrong in this stage where it was, as other stages do."""
        try:
            return work()
        except BaseException as error:
            self._errors.explain(error, self.stage.action, None, self._first_batch + sequence, self._had)
            raise


class Leader(_Rank):
    """Rank 0; the other arguments are those of :class:`_Rank`.

    Args:
        threads: Of operators on a CPU.
        stall_timeout_s: How long a batch may take.
        pad_index: As for :class:`~pipeal.run.micro_batches.MicroBatches`, as is ``longest``.
        longest: Likewise.

    Attributes:
        is_open: Whether the others still serve it.
    """

    def __init__(
        self,
        *args: Any,
        threads: int | None,
        stall_timeout_s: float,
        pad_index: int | None,
        longest: int | None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._thread = WorkThread(self.world, threads, stall_timeout_s)
        self._micro_batches = MicroBatches(self.stage.micro_batches, pad_index, longest)
        self._others, self._last = range(1, self.count), self.count - 1
        self._sequence = -1
        self.is_open = True

        def load() -> None:
            for rank in self._others:
                self.orders.send(rank, "load", {}, self.state_of(rank))

        self._thread(load)

    def learn(self, x: Tree, y: Tree) -> Tensor:
        """The mean loss of a batch, on this rank's device, with all gradients where its blocks are."""
        key = int(random_words(1, _CPU))
        parts, counts, shape = self._micro_batches.of(x)
        self._sequence += 1

        def work() -> Tensor:
            if not self.stage.knows(shape):
                self._climb(parts[:1], shape)
            facts = {"shape": shape, "counts": counts, "sequence": self._sequence, "key": key}
            for rank in self._others:
                self.orders.send(rank, "learn", facts, move(y, _CPU) if rank == self._last else None)
            self.stage.learn(Work(shape, counts, self._sequence, key, parts))
            return self._answer()

        loss = self._on_this_stream(work)
        if not loss.isfinite():
            self.collect()  # what is then said of the weights is said of those that others have learnt, too
        return loss.to(self.device.device)

    def infer(self, x: Tree) -> Tensor:
        """The network's answer, on this rank's device. A batch climbs in as many parts as there are stages."""
        samples = batch_size(x)
        parts = [cut(x, rows) for rows in shared_out(samples, min(self.count, max(1, samples)))]
        return self._on_this_stream(lambda: torch.cat(self._climb(parts))).to(self.device.device)

    def update_all(self, lr_scale: float) -> None:
        """Has all ranks update, at a factor on their learning rates; here it is set already."""
        self._thread(partial(self._tell, "update", lr_scale=lr_scale, sequence=self._sequence))
        self.update(self._sequence)

    def begin(self) -> None:
        """Starts all clocks."""
        self._thread(partial(self._tell, "begin"))
        self.clock.restart()

    def reports(self) -> list[dict[str, Any]]:
        """Those of all ranks."""

        def work() -> list[dict[str, Any]]:
            self._tell("report")
            came = [self.features.receive(self._others) for _ in self._others]  # in any order
            return [dict(one.facts) for one in sorted(came, key=lambda one: one.source)]

        return [self.report(), *self._thread(work)]

    def collect(self) -> None:
        """Brings what the others have learnt into the layer that is here."""

        def work() -> None:
            for rank in self._others:
                self.orders.post(rank, "state", {})
                self.load_state_of(rank, self.features.body(self.features.receive([rank])))
            follow_weights((self.layer.opt,))

        self._thread(work)

    def close(self) -> None:
        """Ends the pipeline; the layer that is here has learnt all of it then."""
        self.collect()
        if self._sequence >= 0:
            share = self._micro_batches.filling
            _log.info(f"micro-batches: {share:.1%} of what was computed filled them up to shapes that are alike")
        self._end()

    def abort(self) -> None:
        """After a failure: lets the others go, as far as they wait for an order. Where one of them may be in the midst
        of a batch it stays open, and no other pipeline can follow."""
        if not self._thread.is_idle:
            super().abort()
            return
        with suppress(PeerLostError):  # what failed before says more
            self._end()

    def _end(self) -> None:
        self._thread(partial(self._tell, "end"))
        self._thread.close()
        self.leave()
        self.is_open = False

    def _tell(self, order: str, **facts: Any) -> None:
        for rank in self._others:
            self.orders.post(rank, order, facts)

    def _climb(self, parts: Sequence[Tree], shape: Shape | None = None) -> list[Tensor]:
        self._tell("climb", parts=len(parts), shape=shape, sequence=self._sequence)
        answers: list[Tensor] = []
        for number, part in enumerate(parts):
            own = move(self.stage.climb(part, shape), _CPU)
            if number - len(answers) >= len(self._others):  # so many there is always room for, however large they are
                answers.append(self._answer())
            self.features.send(1, "features", {}, own)
        return answers + [self._answer() for _ in range(len(parts) - len(answers))]

    def _answer(self) -> Tensor:
        found: Tensor = self.features.body(self.features.receive([self._last]))
        return found

    def _on_this_stream(self, work: Callable[[], T]) -> T:
        """Has the other thread do what it gives to a GPU on the stream of this one."""
        if self.device.device.type != "cuda":
            return self._thread(work)
        stream = torch.cuda.current_stream(self.device.device)

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                return work()

        return self._thread(on_stream)


def _group(world: World, seats: list[Seat]) -> Any:
    """All ranks, over what carries between their devices.

    Raises:
        ConfigError: Some have GPUs, but not each its own.
        PeerLostError: One is lost.
    """
    everyone, on_gpus = list(range(world.size)), have_gpus_of_their_own(seats)
    if not on_gpus and any(seat.gpu is not None for seat in seats):
        raise ConfigError(
            f"engine.devices: found {', '.join(seat.device for seat in seats)} for stages of backpropagation, which go "
            "over NCCL between GPUs; expected a GPU for each rank, or cpu"
        )

    def made() -> Any:
        return gpu_group(everyone, seats[world.rank]) if on_gpus else dist.new_group(everyone, backend="gloo")

    world.open_groups()
    return world.together("connecting the stages", made)


_CPU = torch.device("cpu")
