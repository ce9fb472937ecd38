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
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, StallError
from pipeal.core.options import Precision
from pipeal.core.rng import random_words
from pipeal.core.tree import Tree, batch_size, map_tensors, move
from pipeal.engine import Pipeline
from pipeal.engine.devices import make_current, open_device
from pipeal.engine.devices.threads import set_intra_op_threads
from pipeal.engine.distributed.attempt_store import POLL_S
from pipeal.engine.distributed.channel import BrokenWireError, Wire
from pipeal.engine.distributed.process_groups import Groups, Seat, gpu_group, have_gpus_of_their_own, take_seats
from pipeal.engine.distributed.requests import facts_of_clock, spans_in, times_in
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.executors import STOP_S
from pipeal.engine.schedule import Action
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.state.stateful import release
from pipeal.engine.trace import Span, StageClock, StageTimes, Window
from pipeal.methods.bp import BP
from pipeal.methods.layer import LocalLayer
from pipeal.methods.optimizers import follow_weights
from pipeal.run.backprop_stage import BackpropStage, Shape, Work

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
        """Puts it back into the layer that is here."""
        named = self._named(rank)
        for name, value in state["weights"].items():
            named[name].copy_(value)
        for name, values in state["optimizer"].items():
            self.layer.opt.state[named[name]] = values
        follow_weights((self.layer.opt,))

    def _named(self, rank: int) -> dict[str, Tensor]:
        begins = tuple(f"model.{block}." for block in self.blocks[rank]) + (("cri.",) if rank == self.count - 1 else ())
        found = torch.nn.Module.state_dict(self.layer, keep_vars=True)
        return {name: one for name, one in found.items() if name.startswith(begins)}


class Follower(_Rank):
    """Any rank but the first; the arguments are those of rank 0. Other ranks' blocks are let go of."""

    def serve(self, threads: int | None) -> None:
        """Does what rank 0 says until it ends the pipeline.

        Args:
            threads: Of operators on a CPU.

        Raises:
            PeerLostError: Another rank is lost.
        """
        for rank, blocks in enumerate(self.blocks):
            for block in blocks if rank != self.world.rank else ():
                release(self.layer.row()[block])

        def follow() -> None:
            set_intra_op_threads(threads)
            with self.device.active():
                while self._do():
                    pass

        try:
            _guarded(self.world, lambda: self.world.guarded(follow))
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
            loss = stage.learn(work)
            if loss is not None:
                self.features.send(0, "loss", {}, loss.cpu())
        elif order.kind == "update":
            self.layer.scale_lr(facts["lr_scale"])
            self.update(facts["sequence"])
        elif order.kind == "climb":
            shape = None if facts["shape"] is None else tuple(facts["shape"])
            for _ in range(facts["parts"]):
                came = self.features.body(self.features.receive([self.world.rank - 1]))
                out = stage.climb(move(came, self.device.device), shape)
                self.features.send((self.world.rank + 1) % self.count, "features", {}, move(out, _CPU))
        elif order.kind == "begin":
            self.clock.restart()
        elif order.kind == "report":
            self.features.send(0, "report", self.report())
        elif order.kind == "load":
            self.load_state_of(self.world.rank, tree)
        elif order.kind == "state":
            self.features.send(0, "state", {}, self.state_of(self.world.rank))
        return order.kind != "end"


class Leader(_Rank):
    """Rank 0; the other arguments are those of :class:`_Rank`.

    Args:
        threads: Of operators on a CPU.
        stall_timeout_s: How long a batch may take.
        pad_index: The token that fills up texts to the next of few lengths; None where inputs are no texts, or all of
            one length.
        longest: How long texts may be at most; None for any length.
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
        self._thread = _WorkThread(self.world, threads, stall_timeout_s)
        self._pad_index = pad_index
        self._longest = longest
        self._useful = self._computed = 0
        self._others, self._last = range(1, self.count), self.count - 1
        self._sequence = -1
        self.is_open = True

        def load() -> None:
            for rank in self._others:
                self.orders.send(rank, "load", {}, self.state_of(rank))

        self._thread(load)

    def learn(self, x: Tree, y: Tree) -> Tensor:
        """The mean loss of a batch, on this rank's device, with all gradients where its blocks are."""
        key, here = int(random_words(1, _CPU)), self._on_this_stream()
        parts, counts, shape = self._micro_batches(x)
        self._sequence += 1

        def work() -> Tensor:
            with here():
                if not self.stage.knows(shape):
                    self._climb(parts[:1], shape)
                facts = {"shape": shape, "counts": counts, "sequence": self._sequence, "key": key}
                for rank in self._others:
                    self.orders.send(rank, "learn", facts, move(y, _CPU) if rank == self._last else None)
                self.stage.learn(Work(shape, counts, self._sequence, key, parts))
            loss: Tensor = self.features.body(self.features.receive([self._last]))
            return loss

        loss = self._thread(work)
        if not loss.isfinite():
            self.collect()  # what is then said of the weights is said of those that others have learnt, too
        return loss.to(self.device.device)

    def infer(self, x: Tree) -> Tensor:
        """The network's answer, on this rank's device. A batch climbs in as many parts as there are stages."""
        samples, here = batch_size(x), self._on_this_stream()
        rows = torch.arange(samples).tensor_split(min(self.count, max(1, samples)))

        def work() -> Tensor:
            with here():
                return torch.cat(self._climb([map_tensors(partial(_part, rows=own), x) for own in rows]))

        return self._thread(work).to(self.device.device)

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

        self._thread(work)

    def close(self) -> None:
        """Ends the pipeline; the layer that is here has learnt all of it then."""
        self.collect()
        self.is_open = False
        if self._computed:
            share = 1 - self._useful / self._computed
            _log.info(f"micro-batches: {share:.1%} of what was computed filled them up to shapes that are alike")
        self._thread(partial(self._tell, "end"))
        self._thread.close()
        self.leave()

    def _tell(self, order: str, **facts: Any) -> None:
        for rank in self._others:
            self.orders.post(rank, order, facts)

    def _climb(self, parts: Sequence[Tree], shape: Shape | None = None) -> list[Tensor]:
        self._tell("climb", parts=len(parts), shape=shape)
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

    def _micro_batches(self, x: Tree) -> tuple[list[Tree], list[int], Shape]:
        """Those of a batch, filled up with padding and with copies to few shapes; how many samples of each count."""
        samples, parts, length = batch_size(x), self.stage.micro_batches, 0
        rows = [part.tolist() for part in torch.arange(samples).tensor_split(parts)]
        most = len(rows[0])
        if self._pad_index is not None and isinstance(x, Tensor) and x.dim() == 2:
            most, length = bound_of(most, steps=4), bound_of(x.shape[1], steps=2)
            if self._longest is not None:
                length = max(x.shape[1], min(length, self._longest))
            self._useful += x.numel()
            x = F.pad(x, (0, length - x.shape[1]), value=self._pad_index)
        else:
            self._useful += samples
        self._computed += most * parts * (length or 1)
        # Empty ones are of copies of the batch's first sample.
        filled = [own + (own or [0])[:1] * (most - len(own)) for own in rows]
        found = [map_tensors(partial(_rows_of, rows=own), x) for own in filled]
        return found, [len(own) for own in rows], (most, length)

    def _on_this_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """What has another thread give its work to the stream of this one."""
        device = self.device.device
        if device.type != "cuda":
            return nullcontext
        stream = torch.cuda.current_stream(device)
        return lambda: torch.cuda.stream(stream)


class RowOverRanks(BP):
    """A network in BP form as rank 0 has it in its pipeline, while a :class:`Leader` trains it on all ranks.

    Args:
        leader: Has the network.
    """

    draws_from_default = False

    def __init__(self, leader: Leader) -> None:
        LocalLayer.__init__(self)  # with the optimizer that is there, and what it has learnt
        self.model, self.cri, self.opt = leader.layer.model, leader.layer.cri, leader.layer.opt
        self._places = ()
        self._leader: Any = leader
        self._lr_scale = 1.0

    def forward(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """Forward and backward on all ranks."""
        self.keep(self._leader.learn(x, y))
        return x, y

    def backward(self) -> None:
        """Was done, micro-batch by micro-batch."""
        self._taken_graph()

    def scale_lr(self, factor: float) -> None:
        """See :meth:`LocalLayer.scale_lr`."""
        self._lr_scale = factor
        super().scale_lr(factor)

    def update(self) -> None:
        """On all ranks."""
        self._leader.update_all(self._lr_scale)

    def scale_losses(self, wanted: bool = True) -> None:
        """Losses of this are not scaled.

        Raises:
            ConfigError: They are to be.
        """
        if wanted:
            raise ConfigError("precision is fp16, whose scaled losses no stages of backpropagation share; use 'bf16'")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the whole network, as all ranks have learnt it."""
        if self._leader.is_open:
            self._leader.collect()
        return super().state_dict(*args, **kwargs)

    def _climb(self, x: Tree) -> Tree:
        return self._leader.infer(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowOverRanks:
        """Other ranks' blocks stay on the CPU: they are for what is collected."""
        for block in self._leader.blocks[0]:
            self.row()[block]._apply(fn, recurse)
        follow_weights(self.optimizers())
        return self


class PipelinedBackprop(Pipeline):
    """Rank 0's pipeline; it ends the others' work with its own.

    Args:
        leader: Has the network.
        settings: As for :class:`pipeal.Pipeline`.
    """

    def __init__(self, leader: Leader, **settings: Any) -> None:
        self._leader = leader
        self._spans: list[Span] = []
        super().__init__([RowOverRanks(leader)], [str(leader.device.device)], **settings)
        self.sizes = [len(blocks) for blocks in leader.blocks]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As :meth:`pipeal.Pipeline.__exit__`."""
        try:
            super().__exit__(kind, error, trace)
            if error is None:
                self._leader.close()
        finally:
            if self._leader.is_open:
                self._leader.abort()

    @property
    def device_names(self) -> list[str]:
        """See :attr:`pipeal.Pipeline.device_names`."""
        return [
            f"{seat.device} of rank {rank}" if rank else seat.device for rank, seat in enumerate(self._leader.seats)
        ]

    def spans(self) -> list[Span]:
        """Those of micro-batches, numbered through all batches, as of the last report."""
        return sorted(self._spans, key=lambda span: span.begin)

    def _restart_clocks(self) -> None:
        super()._restart_clocks()
        self._leader.begin()

    def _collect(self) -> tuple[dict[int, Tensor], list[StageTimes], list[int], list[int]]:
        losses, _, splits, overflows = super()._collect()
        reports = self._leader.reports()
        self._spans = [span for rank, facts in enumerate(reports) for span in spans_in(facts, rank)]
        return losses, [times_in(facts) for facts in reports], splits, overflows


class _WorkThread:
    """A thread for what may wait for another rank for ever; it is left behind where one is lost.

    Args:
        world: The processes.
        threads: Of its operators on a CPU.
        stall_timeout_s: How long a piece of work may take.
    """

    def __init__(self, world: World, threads: int | None, stall_timeout_s: float) -> None:
        self._world, self._timeout_s = world, stall_timeout_s
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, args=[threads], name="pipeal-backprop", daemon=True).start()

    def __call__(self, work: Callable[[], T]) -> T:
        """Has it done.

        Raises:
            PeerLostError: Another rank is lost.
            StallError: It takes too long.
            Exception: What ``work`` raised.
        """
        until = monotonic() + self._timeout_s
        done: Future[T] = Future()
        self._work.put((work, done))

        def found() -> T:
            while not wait([done], POLL_S).done:
                self._world.check()
                if monotonic() > until:
                    raise StallError(
                        f"the stages of backpropagation were not done with a batch within {self._timeout_s:g} s "
                        "(engine.stall_timeout_s)"
                    )
            return done.result()

        return _guarded(self._world, found)

    def close(self) -> None:
        """Ends the thread."""
        self._work.put(None)

    def _run(self, threads: int | None) -> None:
        set_intra_op_threads(threads)
        while (found := self._work.get()) is not None:
            work, done = found
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised where it was asked for
                done.set_exception(error)


def _guarded(world: World, work: Callable[[], T]) -> T:
    """Says which rank is lost where a connection to it has broken."""
    try:
        return work()
    except BrokenWireError as error:
        raise world.peer_lost(error.peer, error) from error
    except RuntimeError as error:
        # Gloo has no class of its own for it.
        if "gloo" in str(error).lower() or isinstance(error, getattr(dist, "DistError", ())):
            raise world.peer_lost(None, error) from error
        raise


def bound_of(count: int, steps: int) -> int:
    """The least bound that is no less; between a power of two and the next there are so many steps of equal length.

    It follows from the batch alone, so that a run that is taken up again divides it as before.

    >>> [bound_of(count, steps=2) for count in (1, 3, 5, 6, 7, 13, 100)]
    [1, 3, 6, 6, 8, 16, 128]
    >>> [bound_of(count, steps=4) for count in (1, 3, 5, 6, 7, 13, 100)]
    [1, 3, 5, 6, 7, 14, 112]
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step


def _part(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor[int(rows[0]) : int(rows[-1]) + 1] if len(rows) else tensor


def _rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows, in the layout that the tensor has."""
    found = tensor[torch.tensor(rows, device=tensor.device)]
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return found.contiguous(memory_format=torch.channels_last) if is_last else found.contiguous()


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

    return world.together("connecting the stages", made)


_CPU = torch.device("cpu")
