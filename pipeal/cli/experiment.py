"""A run from end to end: build, choose, train each form, and leave what there is to look at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pipeal.cli.build import Experiment
from pipeal.cli.choices import Form, choose
from pipeal.cli.outcome import Outcome, show, write_curves, write_summary
from pipeal.cli.run_folder import RunFolder, Status, find_run, new_run
from pipeal.cli.training import train_form
from pipeal.config import RunConfig, dump_config, load_config
from pipeal.data.atomic import replacing
from pipeal.engine.allocator import keep_freed_memory
from pipeal.errors import SaveError
from pipeal.train.attempts import Attempts
from pipeal.train.tensorboard import require_tensorboard


def run_experiment(make: Callable[[Callable[[str], None]], Experiment], resume: str = "auto") -> Path:
    """Carries out an experiment, or the rest of one, and shows what came of it.

    Args:
        make: Builds the experiment; it is given a function to say what it is doing.
        resume: ``auto`` takes up the newest unfinished run of just this configuration, if there is one; ``never``
            begins anew; anything else is the folder of the run to take up, or of one of its checkpoints.

    Returns:
        The run's folder.

    Raises:
        PipealError: A user's mistake, in one line; nothing has been written then.
        Interrupted: The run was asked to end, and saved.
    """
    keep_freed_memory()
    experiment = make(_say)
    config = experiment.config
    forms: tuple[Form, ...] = ("al", "bp") if config.train.mode == "compare" else (config.train.mode,)
    if config.train.tensorboard:
        require_tensorboard()
    with ExitStack() as open_now:
        found = find_run(config, resume)
        if found is not None:
            open_now.enter_context(found)
            _say(f"going on with {found.path}")
        chosen = [_choice(experiment, form, found, compared=len(forms) > 1) for form in forms]
        run = found or open_now.enter_context(new_run(config))
        run.begin()
        folder = run.path
        own = [_own(folder, choice.train.mode, compared=len(forms) > 1) for choice in chosen]
        for choice, path in zip(chosen, own, strict=True):
            with replacing(path / "config.yaml") as aside:
                aside.write_text(dump_config(choice), encoding="utf-8")
        run.keep_asked()
        experiment.save(folder)
        attempts = Attempts(_say)
        outcomes = [
            train_form(experiment, choice, path, run, attempts, _say) for choice, path in zip(chosen, own, strict=True)
        ]
        if len(forms) > 1:
            write_curves(outcomes, folder, attempts)
            write_summary(folder, lambda: {outcome.form: outcome.summary() for outcome in outcomes}, attempts)
        _end(run, outcomes, attempts)
    show(outcomes, folder)
    if attempts.missing:
        raise SaveError(
            f"training came to its end, but could not write {attempts}; make room, and give the same command again: it "
            "writes what is missing"
        )
    for outcome in outcomes:
        if outcome.unsaved is not None:
            raise SaveError(f"training came to its end, but not every checkpoint was written: {outcome.unsaved}")
    return folder


def _end(run: RunFolder, outcomes: Sequence[Outcome], attempts: Attempts) -> None:
    """A run is finished when all of it is on the disk; else the same command takes it up again."""
    unsaved = [str(outcome.unsaved) for outcome in outcomes if outcome.ended_unsaved]
    if attempts.missing:
        unsaved.append(f"cannot write {attempts}")
    status: Status = "failed" if unsaved else "finished"
    attempts.make(run.status_path, lambda: run.tell(status, "; ".join(unsaved)))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _own(folder: Path, form: str, *, compared: bool) -> Path:
    return folder / form if compared else folder


def _choice(experiment: Experiment, form: Form, run: RunFolder | None, *, compared: bool) -> RunConfig:
    """What is left open is chosen once in a run's life; that which decides how numbers round stays for all of it."""
    config = experiment.config
    path = None if run is None else _own(run.path, form, compared=compared) / "config.yaml"
    if run is None or path is None or not path.is_file():
        return choose(experiment, form, _say)
    before = load_config(type(config), path)
    train = replace(config.train, precision=before.train.precision)
    if config.engine == run.asked.engine:
        return replace(config, engine=before.engine, train=replace(train, mode=form))
    engine = replace(config.engine, threads=config.engine.threads or before.engine.threads)
    return choose(experiment, form, _say, replace(config, engine=engine, train=train))
