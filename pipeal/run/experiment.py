"""A run from end to end: build, choose, train each form, and leave what there is to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeal.config import RunConfig, dump_config, load_config, value_at
from pipeal.core.artifacts import CONFIG, PLACEMENT, TRACED
from pipeal.core.atomic import write_whole
from pipeal.core.errors import ConfigError, PlacementError, SaveError
from pipeal.engine import parse_device
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.tensorboard import require_tensorboard
from pipeal.run.build import Experiment
from pipeal.run.duration import at_its_length
from pipeal.run.find_run import find_run, new_run
from pipeal.run.forms import Form, asked_forms, in_turns
from pipeal.run.grid import parse_grid
from pipeal.run.outcome import Outcome, show, write_curves, write_summary
from pipeal.run.run_folder import RunFolder, Status
from pipeal.run.site import ONE_PROCESS, Site
from pipeal.run.stopping import StopRequest
from pipeal.run.training import require_same_data, train_form
from pipeal.run.tuning import check_grid, tune, tuned

_log = logging.getLogger(__name__)


def run_experiment(experiment: Experiment, resume: str = "auto", site: Site = ONE_PROCESS) -> Path:
    """Carries out an experiment, or the rest of one, and shows what came of it.

    Args:
        experiment: What is to be run.
        resume: ``auto`` takes up the newest unfinished run of just this configuration, if there is one; ``never``
            begins anew; anything else is the folder of the run to take up, or of one of its checkpoints.
        site: Where it is carried out.

    Returns:
        The run's folder.

    Raises:
        PipealError: A user's mistake, in one line; nothing has been written then.
        Interrupted: The run was asked to end, and saved.
    """
    config = experiment.config
    asked = asked_forms(experiment, alternates=site.alternates)
    compared = len(asked) > 1
    if config.train.tensorboard:
        require_tensorboard()
    with ExitStack() as open_now:
        found = find_run(config, resume)
        if found is not None:
            open_now.enter_context(found)
            _log.info(f"going on with {found.path}")
            if found.passed is not None:
                _log.info(f"it has gone on from {found.passed.name} already: its newest checkpoint is taken")
        own = partial(_own, compared=compared)
        if found is not None:
            for form in asked:
                require_same_data(experiment, own(found.path, form.name))
        if config.tune.grid:
            check_grid(experiment, asked)
        elif found is None or not all(CONFIG.at(own(found.path, form.name)).is_file() for form in asked):
            lr = at_its_length(experiment, config).train.lr
            asked = [replace(one, config=replace(one.config, train=replace(one.config.train, lr=lr))) for one in asked]
        with _Heard() as heard:  # what was tried to make the choices: the run keeps it
            forms = [replace(form, config=_choice(experiment, form, found, site, compared=compared)) for form in asked]
        run = found or open_now.enter_context(new_run(config))
        if resume != "auto":
            run.way_back = f"--resume {run.path}"
        run.begin()
        folder = run.path
        folders = [own(folder, form.name) for form in forms]
        for form, path in zip(forms, folders, strict=True):
            if _is_laid_out_anew(form.config, CONFIG.at(path)):
                for picture in TRACED:
                    picture.at(path).unlink(missing_ok=True)  # it shows other stages
            write_whole(CONFIG.at(path), dump_config(form.config))
        run.keep_asked()
        experiment.save(folder)
        attempts = Attempts()
        if heard.lines:
            text = "\n".join([*heard.lines, ""])
            attempts.make(PLACEMENT.at(folder), lambda: write_whole(PLACEMENT.at(folder), text))
        # One request for all of it: what waits to be written, is drawn or calibrated is given up at a second signal.
        with StopRequest() as stop:
            if any(form.config.tune.grid for form in forms):
                forms = tune(experiment, forms, run, stop, site.open_pipeline)
                for form, path in zip(forms, folders, strict=True):
                    write_whole(CONFIG.at(path), dump_config(form.config))
            trainings = [
                train_form(experiment, form, path, run, stop, attempts, site.open_pipeline)
                for form, path in zip(forms, folders, strict=True)
            ]
            if site.alternates:
                outcomes = in_turns(trainings)
            else:
                if compared:
                    _log.info("the forms are trained one after the other: processes serve one pipeline at a time")
                outcomes = [outcome for training in trainings for outcome in in_turns([training])]
        if compared:
            write_curves(outcomes, folder, attempts)
            write_summary(folder, lambda: {outcome.label: outcome.summary() for outcome in outcomes}, attempts)
        _end(run, outcomes, attempts)
    show(outcomes, folder)
    unsaved = [outcome.unsaved for outcome in outcomes if outcome.unsaved is not None]
    checkpoints = f"not every checkpoint was written: {'; '.join(unsaved)}" if unsaved else ""
    if attempts.missing:
        lost = " and ".join(sorted({path.name for path in attempts.missing} & {picture.name for picture in TRACED}))
        raise SaveError(
            f"training came to its end, but could not write {attempts}; make room: "
            f"{run.way_back} writes what is missing{f', but for {lost}: no batch is left to trace' if lost else ''}"
            f"{checkpoints and f'; {checkpoints}'}"
        )
    if unsaved:
        raise SaveError(f"training came to its end, but {checkpoints}; {run.way_back} completes the run")
    return folder


def _end(run: RunFolder, outcomes: Sequence[Outcome], attempts: Attempts) -> None:
    """A run whose command ends well is finished; any other is taken up again, and not trained anew, by the same one."""
    unsaved = [outcome.unsaved for outcome in outcomes if outcome.unsaved is not None]
    if attempts.missing:
        unsaved.append(f"cannot write {attempts}")
    status: Status = "failed" if unsaved else "finished"
    attempts.make(run.status_path, lambda: run.tell(status, "; ".join(unsaved)))


def _is_laid_out_anew(config: RunConfig, before: Path) -> bool:
    """Whether a form goes on in other stages, or another schedule, than those of the configuration in a file."""
    try:
        engine = load_config(type(config), before).engine
    except ConfigError:  # there is none, or it is replaced
        return True
    now = config.engine
    return (engine.devices, engine.sizes, engine.schedule) != (now.devices, now.sizes, now.schedule)


def _as_chosen(schema: type[RunConfig], path: Path) -> RunConfig:
    """What was chosen for a run, read back.

    Raises:
        ConfigError: It is not as it was written; a part of it may be a configuration, too, which leaves choices open.
    """
    hint = "put it back, or remove it, and what it holds is chosen anew"
    try:
        found = load_config(schema, path)
    except ConfigError as error:
        raise ConfigError(f"{error}; {hint}") from error
    engine = found.engine
    if isinstance(engine.devices, str) or None in (engine.sizes, engine.threads) or found.train.precision == "auto":
        raise ConfigError(f"{path} is not as the run wrote it, it leaves choices open: {hint}")
    return found


class _Heard(logging.Handler):
    """Keeps what pipeal logs within its ``with`` block, whether or not it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._logger = logging.getLogger("pipeal")

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a message."""
        self.lines.append(record.getMessage())

    def __enter__(self) -> _Heard:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def _own(folder: Path, form: str, *, compared: bool) -> Path:
    return folder / form if compared else folder


def _choice(
    experiment: Experiment,
    form: Form,
    run: RunFolder | None,
    site: Site,
    *,
    compared: bool,
) -> RunConfig:
    """What is left open is chosen once in a run's life; that which decides how numbers round stays for all of it."""
    config = form.config
    path = None if run is None else CONFIG.at(_own(run.path, form.name, compared=compared))
    if run is None or path is None or not path.is_file():
        return site.choose(experiment, form.mode, config)
    before = _as_chosen(type(config), path)
    if config.tune.grid and not before.tune.grid:  # its trials are behind it
        config = tuned(config, {key: value_at(before, key) for key in parse_grid(config)})
    # The rate and the warm-up that were left open were chosen by the length of the run when it began.
    begun = before.train.lr
    lr = replace(config.train.lr, base=begun.base, warmup=begun.warmup)
    train = replace(config.train, precision=before.train.precision, lr=lr)
    if experiment.config.engine == run.asked.engine and site.fits(before.engine):
        try:
            for device in before.engine.devices:
                parse_device(device)
        except PlacementError as error:
            raise PlacementError(
                f"{path}: {error}; to go on elsewhere, give --resume {run.path} and --devices"
            ) from error
        if site.retry:
            _log.warning("--retry: without effect, since a run is taken up; --resume never begins a new one")
        return replace(config, engine=before.engine, train=replace(train, mode=form.mode))
    engine = replace(config.engine, threads=config.engine.threads or before.engine.threads)
    return site.choose(experiment, form.mode, replace(config, engine=engine, train=train))
