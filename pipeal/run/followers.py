"""All ranks of a run under ``torchrun`` but the first: each does what rank 0 tells it, and serves its pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipeal.config import RunConfig, document, load_config
from pipeal.core.artifacts import CHECKPOINTS
from pipeal.core.errors import PeerLostError, first_line
from pipeal.core.protocols import TrainableLayer
from pipeal.data import Batch, Share
from pipeal.engine import Window
from pipeal.engine.distributed.handed_states import Asked
from pipeal.engine.distributed.pipeline import serve
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.collector import libraries_left_out
from pipeal.engine.sizes import layers_of_stages
from pipeal.run.backprop import is_pipelined_bp, serve_backprop
from pipeal.run.build import Experiment, Models
from pipeal.run.opening import made_ready, settings_of
from pipeal.run.stopping import StopRequest
from pipeal.run.team import own_means, rank_device
from pipeal.training.checkpoint.manifest import Checkpoint
from pipeal.training.checkpoint.rank_files import RankFiles

Config = TypeVar("Config", bound=RunConfig)

OWN = ("root", "text", "file", "test_file", "download", "workers", "prefetch", "cache", "cache_dir")
"""Keys of ``data`` that may differ from machine to machine."""


@dataclass(frozen=True)
class Kind(Generic[Config]):
    """A kind of data.

    Attributes:
        read: Reads the data and gives the experiment.
        models: Makes models of a configuration and the blueprint of an experiment, without the data.
    """

    read: Callable[[Config], Experiment]
    models: Callable[[Config, Mapping[str, Any]], Models]


class Follower(Generic[Config]):
    """One of them.

    Args:
        world: The processes.
        kind: The run's kind of data.
        asked: What was asked for here.
        device: ``cpu`` or ``cuda``, for all.
    """

    def __init__(self, world: World, kind: Kind[Config], asked: Config, device: str) -> None:
        self.world = world
        self.kind = kind
        self.asked = asked
        self.device = device
        self._models: Models | None = None
        self._experiment: Experiment | None = None
        self._failure: Exception | None = None

    def follow(self) -> None:
        """Does what is told until rank 0 has it leave.

        Raises:
            PeerLostError: Another rank is lost.
            Exception: What this rank failed with, or else what rank 0 ended a pipeline with.
        """
        # A signal asks the run to end: rank 0 saves, for which it needs the others. A second one ends this process.
        with StopRequest(self.world.pass_on):
            while True:
                order = self._hear()
                if order["do"] == "leave":
                    return
                told = load_config(type(self.asked), values=document.parse(order["config"], source="rank 0"))
                config = with_own_data(told, self.asked)
                if order["do"] == "get ready":
                    self._get_ready(config, order["blueprint"])
                else:
                    self._serve(config, order)

    def _hear(self) -> dict[str, Any]:
        """The next order. Where a pipeline has failed, rank 0 gets over it, as in a trial of ``--tune``, or ends."""
        try:
            order: dict[str, Any] = self.world.hear()
        except PeerLostError as lost:
            if self._failure is None or first_line(self._failure) not in str(lost):  # it ended with something else
                raise
            raise self._failure from lost
        self._failure = None
        return order

    def _keep(self, failure: Exception) -> None:
        self._failure = failure

    def _get_ready(self, config: Config, blueprint: Mapping[str, Any]) -> None:
        """The first stage of a replica reads the data; all others need to know only how large it is."""
        facts = None
        if self.world.mesh.stage_of(self.world.rank) == 0:
            self._experiment = self.kind.read(config)
            self._models, facts = self._experiment.models, self._experiment.facts
        else:
            self._models = self.kind.models(config, blueprint)
        self.world.gather({**own_means(self.world, config.engine, self.device), "facts": facts})

    def _serve(self, config: Config, order: Mapping[str, Any]) -> None:
        assert self._models is not None
        sees = Path(order["mark"]).exists()
        self.world.gather(sees)
        seed, first_batch = order["seed"], order["first_batch"]
        saved = None if order["saved"] is None else Path(order["saved"])
        folder = Path(order["folder"])
        keep = RankFiles(CHECKPOINTS.at(folder), order["attempt"], order["pipeline"]) if sees else None
        device = rank_device(self.world, config.engine, self.device)
        traced = None if order["traced"] is None else Window(*order["traced"])
        if is_pipelined_bp(config.engine):
            network = list(self._models.under(config).layers(config.train.mode, seed))
            with libraries_left_out():
                serve_backprop(network, self.world, device, config, traced, first_batch)
            return
        settings = settings_of(config, seed, first_batch, traced, folder if sees else None)
        with self._fed(config, seed) as feed, ExitStack() as while_serving:

            def layers() -> Iterator[TrainableLayer]:
                yield from self._layers(config, seed, saved, sees=sees)
                while_serving.enter_context(libraries_left_out())

            serve(
                layers(),
                self.world,
                device,
                on_snapshot=keep,
                feed=feed,
                on_failure=self._keep,
                **settings,
            )

    def _layers(self, config: Config, seed: int, saved: Path | None, *, sees: bool) -> Iterator[TrainableLayer]:
        """This rank's own layers, each made, and brought to where a checkpoint stands, when it is asked for."""
        assert self._models is not None
        here = layers_of_stages(config.engine.sizes or ())[self.world.mesh.stage_of(self.world.rank)]
        layers = self._models.under(config).layers(config.train.mode, seed, here)
        if saved is None or sees:
            states = None if saved is None else Checkpoint.open(saved, here).layers()
            yield from made_ready(layers, config, states=states, here=here)
            return
        with closing(Asked(self.world)) as asked:
            yield from made_ready(layers, config, states=asked, here=here)

    @contextmanager
    def _fed(self, config: Config, seed: int) -> Iterator[Callable[[int, int], Iterator[Batch]] | None]:
        """This replica's share of the training batches, where this is its first stage."""
        if self._experiment is None:
            yield None
            return
        mesh = self.world.mesh
        share = Share(mesh.replica_of(self.world.rank), mesh.replicas)
        with closing(self._experiment.under(config).batches(seed, share)) as batches:

            def feed(epoch: int, first: int) -> Iterator[Batch]:
                batches.set_epoch(epoch, first)
                return iter(batches)

            yield feed


def with_own_data(told: Config, asked: Config) -> Config:
    """What rank 0 said, but for where the data lies here and how it is read."""
    own = {key: getattr(asked.data, key) for key in OWN if hasattr(asked.data, key)}
    return replace(told, data=replace(told.data, **own))
