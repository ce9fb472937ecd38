"""Where a run is carried out: in one process, or over many, as :class:`pipeal.run.team.Team` says."""

from __future__ import annotations

from pipeal.config import EngineConfig, RunConfig
from pipeal.core.errors import ConfigError
from pipeal.core.names import Mode
from pipeal.run.build import Experiment
from pipeal.run.choices import choose
from pipeal.run.opening import open_pipeline
from pipeal.run.remembered import PlacementCache


class Site:
    """One process, with a thread for each stage; other sites differ in what is here.

    Args:
        retry: Whether choices are made again although they are remembered.

    Attributes:
        alternates: Whether pipelines of several forms can be open at once, so that their epochs come in turns.
        retry: As given.
    """

    alternates = True

    def __init__(self, *, retry: bool = False) -> None:
        self.retry = retry

    def choose(self, experiment: Experiment, form: Mode, config: RunConfig | None = None) -> RunConfig:
        """The configuration of one form with nothing left open: tries placements where devices are.

        Raises:
            ConfigError: Replicas were asked for, which are processes.
            PipealError: As :func:`pipeal.run.choices.choose`.
        """
        replicas = (config or experiment.config).engine.replicas
        if replicas > 1:
            raise ConfigError(
                f"engine.replicas: found {replicas}, but this is one process; expected 1, or start it with "
                "torchrun --nproc-per-node, whose processes are stages × replicas"
            )
        return choose(experiment, form, config, cache=PlacementCache(retry=self.retry))

    def fits(self, engine: EngineConfig) -> bool:
        """Whether choices that were made for another attempt at the run will do here."""
        # Stages that were processes may as well be threads.
        return engine.replicas == 1

    open_pipeline = staticmethod(open_pipeline)


ONE_PROCESS = Site()
