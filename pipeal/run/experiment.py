"""A run from end to end: build, choose, train each form, and leave what there is to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path

from pipeal.config import RunConfig, dump_config, load_config, value_at
from pipeal.core.artifacts import CONFIG, PLACEMENT, TRACED
from pipeal.core.atomic import write_whole
from pipeal.core.errors import ConfigError, PlacementError, SaveError
from pipeal.core.messages import logged_to
from pipeal.engine import parse_device
from pipeal.engine.devices.cpus import ProcessorTime
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.tensorboard import require_tensorboard
from pipeal.run.build import Experiment
from pipeal.run.duration import at_its_length
from pipeal.run.find_run import find_run, new_run
from pipeal.run.forms import Form, Run, asked_forms, in_turns
from pipeal.run.grid import parse_grid
from pipeal.run.outcome import Outcome, show, write_outcomes
from pipeal.run.outlook import show_outlook
from pipeal.run.run_folder import RunFolder
from pipeal.run.site import ONE_PROCESS, Site
from pipeal.run.stopping import StopRequest
from pipeal.run.training import newest_of, require_same_data, require_same_length, train_form
from pipeal.run.tuning import check_grid, tune, tuned
from pipeal.training.checkpoint.resume import ResumedTraining

_log = logging.getLogger(__name__)


def run_experiment(experiment: Experiment, resume: str = "auto", site: Site = ONE_PROCESS) -> Path:
    """Carries out an experiment, or the rest of one, and shows what came of it.

    Args:
        experiment: What is to be run.
        resume: ``auto`` takes up the newest unfinished run of just this configuration, if there is one; ``never``
            begins a new one; anything else is the folder of the run to take up, or of one of its checkpoints.
        site: Where it is carried out.

    Returns:
        The run's folder.

    Raises:
        PipealError: A user's mistake, in one line; nothing has been written then.
        Interrupted: The run was asked to end, and saved.
    """
    config = experiment.config
    if config.train.tensorboard:
        require_tensorboard()
    with ExitStack() as open_now:
        found = find_run(config, resume)
        if found is not None:
            open_now.enter_context(found)
            experiment = _without_begun(experiment, found)
        forms = asked_forms(experiment, alternates=site.alternates)
        if found is not None:
            _check_taken_up(experiment, forms, found)
        else:
            _check_forms(experiment, forms)
        forms = _of_this_length(experiment, forms, found)
        # What was tried to make the choices: the run keeps it.
        with logged_to(BufferingHandler(capacity=1_000_000)) as heard:
            forms = [replace(form, config=_choice(experiment, form, found, site)) for form in forms]
        if found is not None and site.retry and not heard.buffer:
            _log.warning("--retry: without effect, since a run is taken up; --resume never begins a new one")
        folder = found or open_now.enter_context(new_run(config))
        if found is None:
            site.has_begun(folder.path)
        if resume != "auto":
            folder.way_back = f"--resume {folder.path}"
        run = Run(experiment, folder, StopRequest(), Attempts(), site)
        _begin(run, forms, [record.getMessage() for record in heard.buffer])
        with run.stop:  # one request for all: a second signal also gives up what waits to be written, drawn or measured
            if any(form.config.tune.grid for form in forms):
                forms = tune(run, forms)
                _write_configs(run, forms)
            before = ProcessorTime.now()
            outcomes = _train(run, forms)
        if len(outcomes) > 1:
            write_outcomes(outcomes, folder.path, run.attempts)
        unsaved = "; ".join(outcome.unsaved for outcome in outcomes if outcome.unsaved is not None)
        _end(run, unsaved)
    show(outcomes, folder.path)
    _require_written(run, unsaved)
    if site.alternates:  # all of it was done here
        show_outlook(outcomes, folder.path, before)
    return folder.path


def _without_begun(experiment: Experiment, found: RunFolder) -> Experiment:
    """Without starting weights, whose file may be gone, where checkpoints have others and no turn is still to begin."""
    config = experiment.config
    if config.model.weights is None:
        return experiment
    paths = (CONFIG.at(found.path), *found.path.glob(f"*/{CONFIG.name}"))
    saved = [newest_of(path.parent) for path in paths if path.is_file()]
    if not saved or any(one is None or ResumedTraining.of(one).position.turn < config.train.repeat for one in saved):
        return experiment
    return experiment.under(replace(config, model=replace(config.model, weights=None)))


def _check_taken_up(experiment: Experiment, forms: Sequence[Form], found: RunFolder) -> None:
    """Tells which run is taken up.

    Raises:
        DataError: It began with other data.
        ConfigError: Its turns would differ in length.
    """
    _log.info(f"going on with {found.path}")
    if found.passed is not None:
        _log.info(f"it has gone on from {found.passed.name} already: its newest checkpoint is taken")
    for form in forms:
        require_same_data(experiment, form.folder(found.path))
        require_same_length(found, form)
    going_on = {form.folder(found.path) for form in forms}
    for path in sorted(found.path.glob(f"*/{CONFIG.name}")):
        if path.parent not in going_on:
            _log.warning(
                f"{path.parent} is left as it stands: a form over several devices goes on where these are named, in "
                "one process and without engine.compile"
            )


def _check_forms(experiment: Experiment, forms: Sequence[Form]) -> None:
    """Makes the layers of all forms but the first, without weights: before minutes go into choices for that one.

    Raises:
        ConfigError: A method cannot train the model.
    """
    for form in forms[1:]:
        for _ in experiment.layers(form.mode, experiment.config.train.seed, here=()):
            pass


def _of_this_length(experiment: Experiment, forms: list[Form], found: RunFolder | None) -> list[Form]:
    """The forms with the learning rate of the length that the run has, or began with; with a grid, as they are.

    Raises:
        ConfigError: A form cannot be trained with a setting of ``tune.grid``, or the rate rises.
    """
    if experiment.config.tune.grid:
        check_grid(experiment, forms)
        return forms
    config = experiment.config
    paths = [] if found is None else [CONFIG.at(form.folder(found.path)) for form in forms]
    if path := next((path for path in paths if path.is_file()), None):
        # A form that is new, or whose file is gone, has the course of those that it is held against.
        begun = _as_chosen(type(config), path).train.lr
        lr = replace(config.train.lr, base=begun.base, warmup=begun.warmup)
    else:
        lr = at_its_length(experiment, config).train.lr
    return [replace(form, config=replace(form.config, train=replace(form.config.train, lr=lr))) for form in forms]


def _choice(experiment: Experiment, form: Form, found: RunFolder | None, site: Site) -> RunConfig:
    """What is left open is chosen once in a run's life; that which decides how numbers round stays for all of it."""
    config = form.config
    if found is None or not (path := CONFIG.at(form.folder(found.path))).is_file():
        return site.choose(experiment, form.mode, config)
    before = _as_chosen(type(config), path)
    if config.tune.grid and not before.tune.grid:  # its trials are behind it
        config = tuned(config, {key: value_at(before, key) for key in parse_grid(config)})
    # The rate and the warm-up that were left open were chosen by the length of the run when it began, or by trials.
    begun = before.train.lr
    lr = replace(config.train.lr, base=begun.base, warmup=begun.warmup)
    train = replace(config.train, precision=before.train.precision, lr=lr)
    if experiment.config.engine != found.asked.engine or not site.fits(before.engine):
        engine = replace(config.engine, threads=config.engine.threads or before.engine.threads)
        return site.choose(experiment, form.mode, replace(config, engine=engine, train=train))
    try:
        for device in before.engine.devices:
            parse_device(device)
    except PlacementError as error:
        raise PlacementError(
            f"{path}: {error}; to go on elsewhere, give --resume {found.path} and --devices"
        ) from error
    return replace(config, engine=before.engine, train=replace(train, mode=form.mode))


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


def _begin(run: Run, forms: Sequence[Form], heard: Sequence[str]) -> None:
    """Writes what the run begins with; ``heard`` is what was logged while choices were made."""
    run.folder.begin()
    for form in forms:
        if _is_laid_out_anew(form, run.folder.path):
            for picture in TRACED:
                picture.at(form.folder(run.folder.path)).unlink(missing_ok=True)  # it shows other stages
    if heard:  # first: once the choices are in config.yaml, they are not made, nor heard of, a second time
        write_whole(PLACEMENT.at(run.folder.path), "\n".join([*heard, ""]))
    _write_configs(run, forms)
    run.folder.keep_asked()
    run.experiment.save(run.folder.path)


def _write_configs(run: Run, forms: Sequence[Form]) -> None:
    weights = run.folder.asked.model.weights  # a run that goes on has them no more, its file says what it began with
    for form in forms:
        config = replace(form.config, model=replace(form.config.model, weights=weights))
        write_whole(CONFIG.at(form.folder(run.folder.path)), dump_config(config))


def _is_laid_out_anew(form: Form, run: Path) -> bool:
    """Whether a form goes on in other stages, or another schedule, than those of the configuration in its folder."""
    try:
        engine = load_config(type(form.config), CONFIG.at(form.folder(run))).engine
    except ConfigError:  # there is none, or it is replaced
        return True
    now = form.config.engine
    return (engine.devices, engine.sizes, engine.schedule) != (now.devices, now.sizes, now.schedule)


def _train(run: Run, forms: Sequence[Form]) -> list[Outcome]:
    """Trains every form: epoch by epoch in turns, where their pipelines can be open at once."""
    trainings = [train_form(run, form) for form in forms]
    if run.site.alternates:
        return in_turns(trainings)
    if len(forms) > 1:
        _log.info("the forms are trained one after the other: processes serve one pipeline at a time")
    return [outcome for training in trainings for outcome in in_turns([training])]


def _end(run: Run, unsaved: str) -> None:
    """A run whose command ends well is finished; any other is taken up again by the same one, where it stands."""
    missing = f"cannot write {run.attempts}" if run.attempts.missing else ""
    why = "; ".join(filter(None, (unsaved, missing)))
    run.attempts.make(run.folder.status_path, lambda: run.folder.tell("failed" if why else "finished", why))


def _require_written(run: Run, unsaved: str) -> None:
    """Raises SaveError where not all of it was written, with what completes the run."""
    way_back = run.folder.way_back
    checkpoints = f"not every checkpoint was written: {unsaved}" if unsaved else ""
    if run.attempts.missing:
        lost = {path.name for path in run.attempts.missing} & {picture.name for picture in TRACED}
        but = f", but for {' and '.join(sorted(lost))}: no batch is left to trace" if lost else ""
        raise SaveError(
            f"training came to its end, but could not write {run.attempts}; make room: {way_back} writes what is "
            f"missing{but}{checkpoints and f'; {checkpoints}'}"
        )
    if unsaved:
        raise SaveError(f"training came to its end, but {checkpoints}; {way_back} completes the run")
