"""A pipeline over processes: rank 0 has it in its hands like any other, all other ranks serve it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeal.core.errors import PeerLostError, ScheduleError
from pipeal.core.modules import layers_of, module_of
from pipeal.core.options import EngineOptions
from pipeal.core.partition import balance
from pipeal.core.protocols import TrainableLayer
from pipeal.engine.devices import Device, RemoteDevice, make_current, open_device
from pipeal.engine.devices.cpus import cores
from pipeal.engine.distributed.executor import DistributedExecutor
from pipeal.engine.distributed.follower import Feed, OnSnapshot, Server
from pipeal.engine.distributed.process_groups import open_groups, take_seats
from pipeal.engine.distributed.rank import Node
from pipeal.engine.distributed.remote_errors import rebuilt, told
from pipeal.engine.distributed.remote_predictor import RemotePredictor
from pipeal.engine.distributed.replicas import Alike
from pipeal.engine.distributed.requests import spans_in, times_in
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.executors import Executor
from pipeal.engine.pipeline import Pipeline
from pipeal.engine.runner.attention import attention_without_plans
from pipeal.engine.runner.precision import matmul_precision
from pipeal.engine.schedule import Schedule
from pipeal.engine.sizes import layers_of_stages
from pipeal.engine.stage import Stage
from pipeal.engine.state.disk_offload import one_by_one
from pipeal.engine.state.mapped_file import MappedFile
from pipeal.engine.state.snapshot import Snapshot
from pipeal.engine.state.stateful import release
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
        self._own = open_device(make_current(device))
        self._seats = take_seats(world, self._own)
        super().__init__(model, ["cpu"] * world.mesh.stages, schedule, **settings)

    def _options_here(self, options: EngineOptions) -> EngineOptions:
        options.check_layout(replicas=self.world.mesh.replicas, processes=True)
        return options if options.threads is not None else replace(options, threads=own_threads(self.world))

    def _layers_here(
        self,
        model: nn.Module | Iterable[TrainableLayer],
        sizes: Sequence[int] | None,
        options: EngineOptions,
        files: dict[int, MappedFile],
    ) -> list[TrainableLayer]:
        """The layers, of which those of other ranks are let go of as they come; a model that rank 0 holds stays whole.

        What goes wrong on one rank, such as on a full disk, ends all of them.
        """
        rank, failure = self.world.rank, None
        found: list[TrainableLayer] = []
        try:
            layers, own = self._own_layers(model, sizes)
            stays = rank == 0 and not isinstance(model, Iterator)

            def come() -> Iterator[TrainableLayer]:
                for number, layer in enumerate(layers):
                    if number not in own and not stays:
                        release(module_of(layer))
                    yield layer

            if options.offload != "disk":
                found += come()
            else:
                found += one_by_one(come(), options.offload_folder, files, self.seed, own)
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001  raised below, on all ranks
            failure = error
        finally:
            if isinstance(model, Generator):
                model.close()  # other ranks may wait for what it does at its end
        for other, said in enumerate(self.world.gather(None if failure is None else told(failure))):
            if said is not None:
                raise failure if other == rank and failure is not None else rebuilt(said, self.world.name_of(other))
        return found

    def _own_layers(
        self, model: nn.Module | Iterable[TrainableLayer], sizes: Sequence[int] | None
    ) -> tuple[Iterable[TrainableLayer], range]:
        """The layers to come, and the numbers of this rank's."""
        mesh = self.world.mesh
        if not isinstance(sizes, Sequence) or len(sizes) != mesh.stages:  # their numbers are known once all are there
            layers = layers_of(model)
            return layers, layers_of_stages(balance([1.0] * len(layers), mesh.stages))[mesh.stage_of(self.world.rank)]
        own = layers_of_stages(sizes)[mesh.stage_of(self.world.rank)]
        return model if isinstance(model, Iterator) else layers_of(model), own

    def _open_devices(self, devices: Sequence[str | torch.device]) -> list[Device]:
        mesh, rank = self.world.mesh, self.world.rank
        handles: list[Device] = []
        for stage in range(len(devices)):
            other = mesh.rank_of(mesh.replica_of(rank), stage)
            name = f"{self._seats[other].device} of rank {other}"
            handles.append(self._own if other == rank else RemoteDevice(name))
        return handles

    @property
    def _stage(self) -> Stage:
        return self.stages[self.world.mesh.stage_of(self.world.rank)]

    def _open_node(self) -> Node:
        groups = open_groups(self.world, self._seats)
        node = Node(self.world, self._seats, groups, self._stage, self.schedule, self.options)
        if self.world.mesh.replicas > 1:
            last, _ = self._stage.layers[-1]
            alike = Alike(self.world, groups, self._own, lambda: node.progress.stopped, last=last)
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
    is what a :meth:`~pipeal.Pipeline.snapshot` brings. Of an iterator they go to the meta device as they come, or are
    made there, so that no rank holds more than its own. It opens once.

    With replicas, each rank's batch is a share of one larger batch: gradients are means over all of its samples, and
    so are the losses reported. Buffers, such as those of batch norm, are replica 0's. Predictions run on replica 0. The
    samples of a report are all that were fed: a batch so small that every replica takes all of it counts for each.

    Args:
        model: As for :class:`pipeal.Pipeline`. Give ``sizes`` with an iterator: which
            of its layers are this rank's is else known when the last has come.
        world: The processes; as many stages and replicas as its mesh says.
        device: This rank's.
        schedule: As for :class:`pipeal.Pipeline`.
        settings: As for :class:`pipeal.Pipeline`. Of these, ``threads=None`` shares the cores among the ranks of this
            machine, and ``dump_folder`` is where every rank's watchdog leaves a file.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[TrainableLayer],
        world: World,
        device: str | torch.device = "cpu",
        schedule: str | Schedule = "pipelined",
        **settings: Any,
    ) -> None:
        super().__init__(model, world, device, schedule, **settings)
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
            self._line().tell_heads("leave out", {"count": int(count)})

    def snapshot(self, note: Any = None) -> Snapshot:
        """As :meth:`pipeal.Pipeline.snapshot`; the states, or what other ranks say of keeping theirs, come from all
        ranks.

        Args:
            note: For those who keep states on other ranks (``on_snapshot`` of :func:`serve`); what JSON can hold.

        Raises:
            Exception: As :meth:`submit`.
        """
        return self._snapshot(note)

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
    on_failure: Callable[[Exception], object] | None = None,
    **settings: Any,
) -> None:
    """Trains this rank's stage of the :class:`DistributedPipeline` of rank 0, until that ends.

    Args:
        model: The same as on rank 0, or an iterator. Layers that are not of this rank's stage are let go of (they go to
            the meta device), of an iterator as they come.
        world: The processes.
        device: This rank's.
        schedule: As on rank 0, like all other settings.
        on_snapshot: Keeps what a snapshot finds of this rank's layers, on a thread of its own; the snapshot on rank 0
            then carries what it returns (:attr:`pipeal.engine.state.snapshot.LayerState.kept`). None: the states are
            sent there.
        feed: On the first stage of a replica other than the first: its batches of an epoch, from one on.
        on_failure: Takes what would be raised, where rank 0 knows of it and may go on, as with the next trial.
        settings: As for :class:`DistributedPipeline`.

    Raises:
        PeerLostError: Another rank is lost.
        Exception: What this rank failed with, or else what rank 0 ended the pipeline with.
    """
    line = _Line(model, world, device, schedule, **settings)
    stage = line._stage
    stage.reset()
    with matmul_precision(line.options.matmul), attention_without_plans(line._kinds), line._ready():
        stage.device.follow_caller()
        node = line._open_node()
        server = Server(node, on_snapshot, feed)
        try:
            server.serve()
        except Exception as error:
            if on_failure is None or server.verdict is None or node.worker.is_alive():
                raise
            on_failure(error)
        finally:
            if not node.worker.is_alive():
                stage.drop_unlearnt()
