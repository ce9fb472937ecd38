"""Where a run is carried out: in one process, or over many, as :class:`pipeal.run.team.Team` says."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from pipeal.config import EngineConfig, RunConfig
from pipeal.core.artifacts import ASKED
from pipeal.core.errors import ConfigError
from pipeal.core.names import Mode
from pipeal.core.protocols import TrainableLayer
from pipeal.engine import Pipeline, Window
from pipeal.engine.distributed.attempt_store import AttemptStore
from pipeal.run.build import Experiment
from pipeal.run.choices import choose
from pipeal.run.opening import open_pipeline
from pipeal.run.remembered import PlacementCache
from pipeal.run.run_folder import last_told
from pipeal.training.checkpoint.resume import ResumedTraining


class Site:
    """One process, with a thread for each stage; other sites differ in what is here.

    Args:
        retry: Whether choices are made again although they are remembered.
        attempts: What outlives this attempt at the command, where ``torchrun`` may make others.

    Attributes:
        alternates: Whether pipelines of several forms can be open at once, so that their epochs come in turns.
        retry: As given.
    """

    alternates = True

    def __init__(self, *, retry: bool = False, attempts: AttemptStore | None = None) -> None:
        self.retry = retry
        self._attempts = attempts

    def resumed(self, resume: str) -> str:
        """As asked for; but ``never`` counts for the first attempt, and later ones go on with the run that it began, if
        that is here and has not come to its end."""
        kept = self._attempts.kept_run() if self._attempts is not None and resume == "never" else None
        if kept is None or not ASKED.at(Path(kept)).is_file() or last_told(Path(kept)).get("status") == "finished":
            return resume
        return kept

    def has_begun(self, run: Path) -> None:
        """Lets later attempts know of a new run."""
        if self._attempts is not None:
            self._attempts.keep_run(str(run))

    def can_go_on(self, pipe: Pipeline | None) -> bool:  # noqa: ARG002
        """Whether another pipeline can follow one that has failed; None for one that did not come to be open."""
        return True

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

    def here(self, config: RunConfig) -> Container[int] | None:  # noqa: ARG002
        """The numbers of the layers that this process holds; None for all. The others are on the meta device."""
        return None

    def open_pipeline(
        self,
        model: Iterable[TrainableLayer],
        config: RunConfig,
        seed: int,
        first_batch: int,
        traced: Window | None,
        dump_folder: Path,
        saved: ResumedTraining | None = None,  # noqa: ARG002
    ) -> Pipeline:
        """The pipeline that a configuration with every choice made describes.

        Args:
            model: Its layers, those that are :meth:`here` as what they go on from.
            config: As for :func:`pipeal.run.opening.open_pipeline`, as is what follows.
            seed: Of all randomness in forwards.
            first_batch: The number of the first batch.
            traced: The batches whose spans are kept.
            dump_folder: Where the watchdog leaves a file.
            saved: What the layers that are elsewhere go on from; None for their first weights.
        """
        return open_pipeline(model, config, seed, first_batch, traced, dump_folder)


ONE_PROCESS = Site()
