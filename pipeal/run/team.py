"""Rank 0 of a run under ``torchrun``: what it tells the other ranks, who do nothing on their own."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pipeal.config import EngineConfig, RunConfig, dump_config
from pipeal.core.errors import ConfigError, PlacementError
from pipeal.core.methods import COMPARE, METHODS, with_all
from pipeal.core.modules import module_of
from pipeal.core.names import Mode
from pipeal.core.options import Precision
from pipeal.core.protocols import TrainableLayer
from pipeal.core.spread import blocks_of
from pipeal.data import Batch, Share
from pipeal.engine import Pipeline, Window, balance, parse_device
from pipeal.engine.devices import device_names, fastest_precision, gpu_count, make_current
from pipeal.engine.distributed.consistency import require_same
from pipeal.engine.distributed.handed_states import hand_out
from pipeal.engine.distributed.pipeline import DistributedPipeline, own_threads
from pipeal.engine.distributed.process_groups import own_gpu
from pipeal.engine.distributed.world import World
from pipeal.engine.runner.compiling import check_compile
from pipeal.engine.runner.precision import check_precision
from pipeal.engine.sizes import check_sizes, layers_of_stages
from pipeal.methods.bp_parts import bp_parts
from pipeal.planning.planner import TRIAL_BATCHES, balance_one_by_one
from pipeal.run.backprop import PER_STAGE, check_backprop, check_transport, is_pipelined_bp, open_backprop
from pipeal.run.build import Experiment
from pipeal.run.choices import sample_batches
from pipeal.run.opening import as_it_runs, engine_options, settings_of
from pipeal.run.site import Site
from pipeal.training.checkpoint.resume import ResumedTraining

_log = logging.getLogger(__name__)


class Team(Site):
    """All ranks of a run as rank 0 leads them.

    Args:
        world: The processes.
        device: ``cpu`` or ``cuda``, for all.
    """

    alternates = False  # the other ranks serve one pipeline at a time

    def __init__(self, world: World, device: str) -> None:
        super().__init__(attempts=world.attempts)  # without retry: stages are measured each time
        self.world = world
        self.device = device
        self.pipe: DistributedPipeline | None = None
        self._threads = 1
        self._precision: Precision = "fp32"
        self._opened = 0
        self._pad_index: int | None = None

    def can_go_on(self, pipe: Pipeline | None) -> bool:
        """Not where others may still wait for it: for its opening, or in the midst of a batch."""
        return pipe is not None and not pipe.left_behind

    def gather(self, experiment: Experiment) -> Experiment:
        """Lets all others get ready for an experiment; what is trained on is then shared among replicas.

        Raises:
            ConfigError: Their data is not the same.
        """
        self.world.tell(
            {"do": "get ready", "config": dump_config(experiment.config), "blueprint": experiment.models.blueprint}
        )
        self._pad_index = getattr(experiment.models, "pad_index", None)
        own = own_means(self.world, experiment.config.engine, self.device)
        ready = self.world.gather({**own, "facts": dict(experiment.facts)})
        # What decides how numbers round is the same for all.
        self._threads = min(rank["threads"] for rank in ready)
        self._precision = "bf16" if all(rank["precision"] == "bf16" for rank in ready) else "fp32"
        require_same([experiment.facts if rank["facts"] is None else rank["facts"] for rank in ready])
        return replace(experiment, shared=partial(_Announced, self)) if self.world.mesh.replicas > 1 else experiment

    def dismiss(self) -> None:
        """Lets all others leave."""
        self.world.tell({"do": "leave"})

    def choose(self, experiment: Experiment, form: Mode, config: RunConfig | None = None) -> RunConfig:
        """One stage for each process of a replica.

        Raises:
            PlacementError: There are more stages than layers, or devices or sizes do not fit.
            ConfigError: What was asked for cannot be done over processes.
        """
        config = config or experiment.config
        mesh, engine = self.world.mesh, config.engine
        whole = [name for name in config.train.methods if METHODS[name].is_whole]
        if config.train.mode == COMPARE and whole and mesh.stages > 1:
            divided = tuple(name for name, method in METHODS.items() if not method.is_whole)
            raise ConfigError(
                f"train.methods: found {whole[0]}, whose model is one layer, on {mesh.stages} stages; expected methods "
                f"of {with_all(divided)}, or as many replicas as ranks (--replicas {mesh.size})"
            )
        if config.train.on_non_finite not in ("raise", "skip"):
            raise ConfigError(
                f"train.on_non_finite: found {config.train.on_non_finite}, which one process can do; expected raise or "
                "skip over processes"
            )
        over_ranks = is_pipelined_bp(engine)
        described = list(experiment.layers(form, config.train.seed, here=()))
        layers = blocks_of(described[0]) if over_ranks else len(described)
        mesh.check_layers(layers, "block" if over_ranks else "layer")
        device = rank_device(self.world, engine, self.device)
        if over_ranks:
            check_backprop(config, processes=self.world.size)  # once more: a setting that is tried may not go with it
            check_transport(engine, device)
            engine = replace(engine, micro_batches=engine.micro_batches or PER_STAGE * mesh.stages)
        check_compile(engine.compile, [parse_device(device)])
        threads = engine.threads or self._threads
        precision = self._precision if config.train.precision == "auto" else config.train.precision
        check_precision(precision, [parse_device(device)])
        with closing(experiment.train_batches(config.train.seed)) as batches:  # batching that does not fit is told here
            if engine.sizes is not None:
                sizes = check_sizes(list(engine.sizes), layers, mesh.stages)
            elif mesh.stages in (1, layers):
                sizes = balance([1.0] * layers, mesh.stages)
            else:
                unit = "blocks" if over_ranks else "layers"
                _log.info(f"measuring {METHODS[form].label} {unit}, to balance {mesh.stages} stages")
                measured = experiment.layers(form, config.train.seed)
                sizes = balance_one_by_one(
                    bp_parts([module_of(layer) for layer in measured]) if over_ranks else measured,
                    layers,
                    sample_batches(batches, TRIAL_BATCHES),
                    mesh.stages,
                    replace(engine_options(config, precision), threads=threads),
                    device=device,
                )
        engine = as_it_runs(engine, form)
        parts = f", in {engine.micro_batches} micro-batches" if over_ranks else ""
        replicas = f", in {mesh.replicas} replicas" if mesh.replicas > 1 else ""
        how = f"{'blocks' if over_ranks else 'layers'} {sizes}{replicas}, {engine.schedule}{parts}, {precision}"
        _log.info(f"{METHODS[form].label} on {mesh.size} processes: {how}")
        return replace(
            config,
            engine=replace(
                engine,
                devices=tuple(stage_devices(self.world, engine, self.device)),
                sizes=tuple(sizes),
                threads=threads,
            ),
            train=replace(config.train, mode=form, precision=precision),
        )

    def fits(self, engine: EngineConfig) -> bool:
        """Whether choices that were made for another attempt at the run were made for this mesh."""
        mesh = self.world.mesh
        return (len(engine.devices), engine.replicas) == (mesh.stages, mesh.replicas)

    def here(self, config: RunConfig) -> Container[int]:
        """Those of the first stage; all of a layer whose blocks lie on several ranks."""
        return layers_of_stages((1,) if is_pipelined_bp(config.engine) else config.engine.sizes or ())[0]

    def open_pipeline(
        self,
        model: Iterable[TrainableLayer],
        config: RunConfig,
        seed: int,
        first_batch: int,
        traced: Window | None,
        dump_folder: Path,
        saved: ResumedTraining | None = None,
    ) -> Pipeline:
        """A pipeline that all others serve; each of them makes its own layers."""
        self._opened += 1
        with NamedTemporaryFile(prefix=".mark-", dir=dump_folder) as mark:  # do the others see this very folder?
            self.world.tell(
                {
                    "do": "serve",
                    "config": dump_config(config),
                    "seed": seed,
                    "first_batch": first_batch,
                    "traced": None if traced is None else [traced.first, traced.count],
                    "folder": str(dump_folder.resolve()),
                    "mark": str(Path(mark.name).resolve()),
                    "attempt": self.world.attempt,
                    "pipeline": self._opened,
                    "saved": None if saved is None else str(saved.path.resolve()),
                }
            )
            seen = self.world.gather(True)
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        device = rank_device(self.world, config.engine, self.device)
        settings = settings_of(config, seed, first_batch, traced, dump_folder)
        if is_pipelined_bp(config.engine):
            tells, pads = self._opened == 1, self._pad_index
            return open_backprop(model, self.world, device, config, settings, pad_index=pads, tells=tells)
        if self._opened == 1 and blind:
            _log.warning(
                f"{dump_folder.resolve()} is not seen by rank{'s' if len(blind) > 1 else ''} "
                f"{', '.join(map(str, blind))}: rank 0 writes their layers; an --out that all machines share spares "
                "them the way"
            )

        def layers() -> Iterator[TrainableLayer]:
            if saved is not None and blind:
                hand_out(self.world, blind, saved.states)
            yield from model

        self.pipe = DistributedPipeline(layers(), self.world, device, **settings)
        return self.pipe


def stage_devices(world: World, engine: EngineConfig, kind: str) -> list[str]:
    """The devices of a replica's stages, each as its own machine calls it; one name is good for all.

    Raises:
        PlacementError: There are more names than one, but not one for each stage.
    """
    names = [kind] if engine.devices == "auto" else engine.devices
    names = device_names(names)
    stages = world.mesh.stages
    if len(names) not in (1, stages):
        raise PlacementError(
            f"engine.devices: {len(names)} devices for {stages} stages, each of which is a process; expected auto, one "
            "kind such as cpu or cuda, or one device for each stage"
        )
    return names if len(names) == stages else names * stages


def rank_device(world: World, engine: EngineConfig, kind: str) -> str:
    """This rank's device; of a kind without a number, that of its place on its machine.

    Where a process sees fewer GPUs than its machine has processes, as one each (``CUDA_VISIBLE_DEVICES``), places are
    counted round.
    """
    name = stage_devices(world, engine, kind)[world.mesh.stage_of(world.rank)]
    return f"cuda:{world.launch.local_rank % max(1, gpu_count())}" if name == "cuda" else name


def own_means(world: World, engine: EngineConfig, kind: str) -> dict[str, Any]:
    """What this rank has to offer: cores for each of its machine's processes, and what precision is fastest here."""
    return {"threads": own_threads(world), "precision": fastest_precision(rank_device(world, engine, kind))}


def require_devices(world: World, engine: EngineConfig, kind: str) -> None:
    """Refuses, on every rank, a run for which one of them lacks its device, which else is made its current one; every
    rank calls it. Rank 0 logs which ranks share a GPU.

    Raises:
        PlacementError: One does; says which, of those it happens to the first.
    """
    missing = gpu = None
    try:
        gpu = own_gpu(world, make_current(rank_device(world, engine, kind)))
    except PlacementError as error:
        missing = str(error)
    together: dict[str, list[str]] = {}
    for rank, (lacks, has) in enumerate(world.gather([missing, gpu])):
        if lacks is not None:
            raise PlacementError(f"{world.name_of(rank)}: {lacks}")
        if has is not None:
            together.setdefault(has, []).append(str(rank))
    shared = "; ".join(", ".join(ranks) for ranks in together.values() if len(ranks) > 1)
    if shared and world.rank == 0:
        _log.warning("ranks that share a GPU: %s", shared)


class _Announced:
    """Rank 0's share of the training batches; the other replicas begin with theirs when an iterator of it begins."""

    def __init__(self, team: Team, experiment: Experiment, seed: int) -> None:
        self._team = team
        self._experiment = experiment
        self._seed = seed
        self._batches = experiment.batches(seed, Share(0, team.world.mesh.replicas))
        self._place = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        pipe = self._team.pipe
        if pipe is None:
            return iter(self._batches)
        if not pipe.is_open:  # the training has ended: the batch as a whole is wanted for a look
            return self._whole()
        pipe.begin_feed(*self._place)
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        self._place = epoch, first
        self._batches.set_epoch(epoch, first)

    def close(self) -> None:
        self._batches.close()

    def _whole(self) -> Iterator[Batch]:
        with closing(self._experiment.batches(self._seed)) as batches:
            batches.set_epoch(*self._place)
            yield from batches
