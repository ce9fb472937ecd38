"""A pipeline over processes: rank 0 has it in its hands like any other, all other ranks serve it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import ConfigError, ScheduleError
from pipeal.core.options import EngineOptions
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.devices import Device, RemoteDevice, open_device
from pipeal.engine.devices.cpus import cores
from pipeal.engine.distributed.channel import BrokenWireError, Wire
from pipeal.engine.distributed.executor import DistributedExecutor
from pipeal.engine.distributed.follower import Feed, OnSnapshot, Server
from pipeal.engine.distributed.process_groups import open_groups, take_seats
from pipeal.engine.distributed.rank import Node
from pipeal.engine.distributed.remote_predictor import RemotePredictor
from pipeal.engine.distributed.replicas import Alike
from pipeal.engine.distributed.requests import spans_in, times_in
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.executors import Executor
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.runner.precision import matmul_precision
from pipeal.engine.schedule import Schedule
from pipeal.engine.stage import Stage
from pipeal.engine.state.layer_state import layer_state, load_layer_state
from pipeal.engine.state.snapshot import Snapshot
from pipeal.engine.trace import Span, StageTimes


def own_threads(world: World) -> int:
    """How many of its machine's cores this rank can have."""
    return max(1, cores() // world.launch.local_size)


class _Line(Pipeline):
    """The line of stages of this rank's replica, of which one is here."""

    def __init__(
        self,
        model: nn.Module | Iterable[TrainableLayer],
        world: World,
        device: str | torch.device = "cpu",
        schedule: str | Schedule = "pipelined",
        **settings: Any,
    ) -> None:
        self.world = world
        self._own = open_device(device)
        self._seats = take_seats(world, self._own)
        super().__init__(model, ["cpu"] * world.mesh.stages, schedule, **settings)

    def _options_here(self, options: EngineOptions) -> EngineOptions:
        options.check_layout(replicas=self.world.mesh.replicas)
        if options.offload != "none":
            raise ConfigError(f"offload={options.offload!r} is not possible over processes yet; use 'none'")
        return options if options.threads is not None else replace(options, threads=own_threads(self.world))

    def _open_devices(self, devices: Sequence[str | torch.device]) -> list[Device]:
        mesh, rank = self.world.mesh, self.world.rank
        handles: list[Device] = []
        for stage in range(len(devices)):
            other = mesh.rank_of(mesh.replica_of(rank), stage)
            # Rank 0 may want to know the shapes of all layers; the others need no memory for what they do not train.
            where = torch.device("cpu" if rank == 0 else "meta")
            name = f"{self._seats[other].device} of rank {other}"
            handles.append(self._own if other == rank else RemoteDevice(name, where))
        return handles

    @property
    def _stage(self) -> Stage:
        return self.stages[self.world.mesh.stage_of(self.world.rank)]

    def _open_node(self) -> Node:
        groups = open_groups(self.world, self._seats)
        node = Node(self.world, self._seats, groups, self._stage, self.schedule, self.options)
        if self.world.mesh.replicas > 1:
            alike = Alike(self.world, groups, self._own, lambda: node.progress.stopped)
            alike.require_alike(self._stage)
            self._stage.learn_with(alike)
        return node


class DistributedPipeline(_Line):
    """A :class:`pipeal.Pipeline` whose stages are processes, on rank 0; the others :func:`serve` it meanwhile.

    ::

        with open_world(Launch.found(), facts) as world:
            if world.rank == 0:
                with DistributedPipeline(package, world, "cuda:0", **settings) as pipe:
                    report = pipe.run(batches)
            else:
                serve(package, world, "cuda:1", **settings)

    Weights, optimizer states, losses and predictions are those of one process, bit for bit on a CPU with the same
    ``threads``. All ranks build the same package from the same seed, and give the same settings. The layers of other
    ranks stay on the CPU here, as they were built: they are for shapes and costs, and learn nothing; what was learnt
    is what a :meth:`~pipeal.Pipeline.snapshot` brings. It opens once.

    With replicas, each rank's batch is a share of one larger batch: gradients are means over all of its samples, and
    so are the losses reported. Buffers, such as those of batch norm, are replica 0's. Predictions run on replica 0. The
    samples of a report are all that were fed: a batch so small that every replica takes all of it counts for each.

    Args:
        model: As for :class:`pipeal.Pipeline`, as all that is not named here.
        world: The processes; as many stages and replicas as its mesh says.
        device: This rank's.
        threads: None: the cores, shared among the ranks of this machine.
        dump_folder: On every rank, where its watchdog leaves a file.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._node: Node | None = None
        self._spans: list[Span] = []
        self._predictor = RemotePredictor(self.stages, self.options, serial=self.schedule.serial, executor=self._line)

    def _start(self) -> Executor:
        if self._node is not None:
            raise ScheduleError("a distributed pipeline opens once; make another, and have the other ranks serve it")
        self._node = self._open_node()
        return DistributedExecutor(self._node)

    @property
    def is_open(self) -> bool:
        """Whether it can be given batches."""
        return self._executor is not None

    def begin_feed(self, epoch: int, first: int = 0) -> None:
        """Has the other replicas begin with the batches of an epoch, from one on.

        Each batch submitted or passed over from then on takes one of theirs.

        Raises:
            Exception: As :meth:`submit`.
        """
        self._line().tell_heads("feed", {"epoch": epoch, "first": first})

    def skip(self, count: int = 1) -> None:
        """As :meth:`pipeal.Pipeline.skip`; the other replicas leave out as many batches of the feeds they have begun.

        Raises:
            ValueError: ``count`` is negative.
            Exception: As :meth:`submit`.
        """
        super().skip(count)
        if self.is_open and self.world.mesh.replicas > 1:
            self._line().tell_heads("leave out", {"count": count})

    def snapshot(self, note: Any = None) -> Snapshot:
        """As :meth:`pipeal.Pipeline.snapshot`; the states, or what other ranks say of keeping theirs, come from all
        ranks.

                Args:
                    note: For those who keep states on other ranks (``on_snapshot`` of :func:`serve`); what JSON can
                        hold.

                Raises:
                    Exception: As :meth:`submit`.
        """
        snapshot = Snapshot(self.next_batch, sum(self.sizes))
        snapshot.note = note
        return self._send(snapshot)

    def spans(self) -> list[Span]:
        """The spans of the traced batches of replica 0 as of the last :meth:`drain`, on this process's clock."""
        return sorted(self._spans, key=lambda span: span.begin)

    def _line(self) -> DistributedExecutor:
        executor = self._open()
        assert isinstance(executor, DistributedExecutor)
        return executor

    def _restart_clocks(self) -> None:
        self._stage.device.follow_caller()
        self._line().order("begin")

    def _finish(self, executor: Executor) -> None:
        assert isinstance(executor, DistributedExecutor)
        executor.drain()
        executor.await_fences()

    def _synchronize(self) -> None:
        """Every rank has, when it came to rest."""

    def _collect(self) -> tuple[dict[int, Tensor], list[StageTimes], list[int], list[int]]:
        found = sorted(self._line().ask("report"), key=lambda reply: int(reply[0]["rank"]))
        self._samples += sum(facts["samples"] for facts, _ in found)
        line = found[: self.world.mesh.stages]
        losses: dict[int, Tensor] = {}
        for _, by_layer in line:
            losses |= by_layer
        self._spans = [span for stage, (facts, _) in enumerate(line) for span in spans_in(facts, stage)]
        return (
            losses,
            [times_in(facts) for facts, _ in line],
            [count for facts, _ in line for count in facts["splits"]],
            [count for facts, _ in line for count in facts["overflows"]],
        )


def serve(
    model: nn.Module | Iterable[TrainableLayer],
    world: World,
    device: str | torch.device = "cpu",
    schedule: str | Schedule = "pipelined",
    *,
    on_snapshot: OnSnapshot | None = None,
    feed: Feed | None = None,
    **settings: Any,
) -> None:
    """Trains this rank's stage of the :class:`DistributedPipeline` of rank 0, until that ends.

    Args:
        model: The same as on rank 0. Layers that are not of this rank's stage are let go of (they go to ``meta``).
        world: The processes.
        device: This rank's.
        schedule: As on rank 0, like all other settings.
        on_snapshot: Keeps what a snapshot finds of this rank's layers, on a thread of its own; the snapshot on rank 0
            then carries what it returns (:attr:`pipeal.engine.state.snapshot.LayerState.kept`). None: the states are
            sent there.
        feed: On the first stage of a replica other than the first: its batches of an epoch, from one on.
        settings: As for :class:`DistributedPipeline`.

    Raises:
        PeerLostError: Another rank is lost.
        Exception: What this rank failed with, or else what rank 0 ended the pipeline with.
    """
    line = _Line(model, world, device, schedule, **settings)
    stage = line._stage
    stage.reset()
    with matmul_precision(line.options.matmul), line._ready():
        stage.device.follow_caller()
        node = line._open_node()
        try:
            Server(node, on_snapshot, feed).serve()
        finally:
            if not node.worker.is_alive():
                stage.drop_unlearnt()


def hand_out_states(world: World, layers: Sequence[TrainableLayer], sizes: Sequence[int]) -> None:
    """Brings the layers of every rank to where those of rank 0 are; every rank calls it.

    Args:
        world: The processes.
        layers: All layers of the model, on the CPU. On other ranks than 0, those of its own stage are changed.
        sizes: The number of layers of each stage.

    Raises:
        PeerLostError: A rank is lost.
    """
    wire, ends = Wire(world.endpoint, *world.wire_numbers(1)), list(accumulate(sizes))
    of_stage = [list(layers)[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def send() -> None:
        for rank in range(1, world.size):
            for layer in of_stage[world.mesh.stage_of(rank)]:
                wire.send(rank, "state", {}, layer_state(layer))

    def receive() -> None:
        for layer in of_stage[world.mesh.stage_of(world.rank)]:
            load_layer_state(layer, wire.body(wire.receive([0])))

    try:
        world.guarded(receive if world.rank else send)
    except BrokenWireError as error:
        raise world.peer_lost(error.peer, error) from error
