"""A run under ``torchrun``: rank 0 carries it out as one process would, and all other ranks serve it.

::

    rank 0                                           all others
    meets, compares the configuration         ◄──►   meet, compare the configuration
    reads the data                                   first stages of other replicas read it, too
    chooses, makes the run's folder
    for each turn: opens a pipeline            ──►   serve it, each with its own layers, as new or from the checkpoint
    shows what came of it                      ──►   leave
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from pipeal.config import RunConfig, all_values
from pipeal.core.errors import ConfigError, PeerLostError
from pipeal.core.methods import METHODS
from pipeal.engine.devices import ask_for_queues, device_names, gpu_count
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.engine.distributed.attempt_store import AttemptStore
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.world import World, open_world
from pipeal.reporting.environment import environment
from pipeal.run.backprop import check_backprop, is_pipelined_bp
from pipeal.run.build import Experiment
from pipeal.run.experiment import run_experiment
from pipeal.run.find_run import require_place
from pipeal.run.followers import OWN, Follower, Kind
from pipeal.run.opening import engine_options, schedule_of
from pipeal.run.site import Site
from pipeal.run.stopping import StopRequest
from pipeal.run.team import Team, require_devices

Config = TypeVar("Config", bound=RunConfig)


def carry_out(kind: Kind[Config], config: Config, resume: str, *, retry: bool = False) -> None:
    """Carries out a run where the command was started: in one process, or as one of many.

    Args:
        kind: Its kind of data.
        config: As asked for.
        resume: As for :func:`pipeal.run.experiment.run_experiment`.
        retry: Whether a new run makes choices again although they are remembered; of one process.

    Raises:
        PipealError: As there; and what is wrong with the processes, on every one of them.
    """
    keep_freed_memory()
    ask_for_queues()  # before anything of CUDA
    launch = Launch.found()
    check_backprop(config, processes=1 if launch is None else launch.size)
    if launch is None or launch.size == 1:
        attempts = None
        if launch is not None and launch.hosted and resume == "never":
            attempts = AttemptStore(launch, config.engine.peer_timeout_s)
        site = Site(retry=retry, attempts=attempts)
        resume = site.resumed(resume)
        run_experiment(_read(kind, config, resume), resume, site)
        return
    if retry:
        raise ConfigError("--retry: found under torchrun, where stages are measured each time; leave it out")
    method = METHODS.get(config.train.mode)  # None for a comparison
    # All in one layer: there are no stages to divide, unless they share its micro-batches.
    if method is not None and method.is_whole and config.engine.replicas == 1 and not is_pipelined_bp(config.engine):
        config = replace(config, engine=replace(config.engine, replicas=launch.size))
    facts = {
        # As JSON would give it back.
        **{key: list(value) if isinstance(value, tuple) else value for key, value in all_values(config).items()},
        "pipeal": environment()["pipeal"],
        "resume": resume,
        "kind": type(config).__name__,
    }
    own = {f"data.{key}" for key in OWN}
    devices = _devices(config, launch)
    device = devices[0].partition(":")[0]
    if method is None or not method.is_whole:
        _check_options(config, device)
    # Left open, the ranks must come to the same kind; else they must have been told the same.
    facts["engine.devices"] = ",".join(devices)
    with open_world(
        launch,
        {name: fact for name, fact in facts.items() if name not in own},
        replicas=config.engine.replicas,
        timeout_s=config.engine.peer_timeout_s,
    ) as world:
        require_devices(world, config.engine, device)
        if world.rank:
            Follower(world, kind, config, device).follow()
        else:
            with _blaming(world):
                world.on_signal(_signal_here)
                team = Team(world, device)
                resume = team.resumed(resume)
                run_experiment(team.gather(_read(kind, config, resume)), resume, team)
                team.dismiss()


def _read(kind: Kind[Config], config: Config, resume: str) -> Experiment:
    """The data, after a look at where a new run would be written."""
    require_place(config, resume)
    return kind.read(config)


def _check_options(config: RunConfig, device: str) -> None:
    """Tells what excludes each other before anybody is waited for, or any data is read.

    Raises:
        ConfigError: As :meth:`pipeal.core.options.EngineOptions.check_layout`.
    """
    engine, precision = config.engine, config.train.precision
    options = engine_options(config, "fp32" if precision == "auto" else precision)
    by_layer = schedule_of(config).by_layer
    options.check_layout(replicas=engine.replicas, kinds={device}, by_layer=by_layer, processes=True)


def _signal_here(number: int) -> None:
    """A signal that another rank got is as one that came here, but not as a second one."""
    if not StopRequest.any_heard:
        os.kill(os.getpid(), number)


@contextmanager
def _blaming(world: World) -> Iterator[None]:
    """Who starts processes ends all of them when one is gone: that it was gone is then the news, not the signal."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if world.lost.wait(world.patience_s):
            try:
                world.check()
            except PeerLostError as lost:
                raise lost from error
        raise


def _devices(config: RunConfig, launch: Launch) -> list[str]:
    """As asked for; left open, all are ``cuda`` where each process can have a GPU or was given one, or else ``cpu``.

    Whether each was given another one than its neighbours, or all of a machine the same, cannot be seen here;
    :func:`pipeal.run.team.require_devices` logs it where ranks share one.
    """
    if config.engine.devices == "auto":
        count = gpu_count()
        was_given_one = count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        return ["cuda" if count >= launch.local_size or was_given_one else "cpu"]
    return device_names(config.engine.devices)
