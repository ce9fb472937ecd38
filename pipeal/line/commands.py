"""The commands of a line: made, run, looked at."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeal.config import RunConfig, all_values, document, load_config, nested
from pipeal.core.artifacts import CONFIG
from pipeal.core.atomic import make_folder
from pipeal.core.errors import ConfigError, DataError, first_line, refusals_told
from pipeal.core.lock import FileLock
from pipeal.core.names import FILE
from pipeal.engine.devices.allocator import keep_freed_memory
from pipeal.line.beginning import check_config, end_of_epoch
from pipeal.line.failures import Failures
from pipeal.line.line_file import key_path, make_line, read_line
from pipeal.line.stage_run import Place, StageRun
from pipeal.line.status import read_status, status_table
from pipeal.reporting.page import read_runs
from pipeal.run.configure import named_config
from pipeal.run.find_run import require_same_training
from pipeal.run.stopping import StopRequest
from pipeal.run.train import KINDS


def init(
    *,
    dataset: str | None,
    model: str | None,
    preset: str | None,
    addresses: tuple[str, ...],
    config_file: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    out: str,
    **given: Any,
) -> None:
    """Makes a line in a folder, and says what goes where.

    Args:
        dataset: As for :func:`pipeal.run.configure.named_config`, as are the other names.
        model: Likewise.
        preset: Likewise.
        addresses: Where each stage but the first listens.
        config_file: Likewise.
        overrides: Likewise.
        resume: The run, or checkpoint, to go on with; None to begin.
        out: The folder.
        given: Options, as :func:`pipeal.cli.options.setting` names them.

    Raises:
        PipealError: In one line; nothing has been written then.
    """
    settings = {name.replace("__", "."): value for name, value in given.items()}
    done = 0
    if resume is not None:
        if any(name is not None for name in (dataset, model, preset, config_file)):
            raise ConfigError(
                "--resume: the run says what is trained; leave out --dataset, --model, --preset, --config"
            )
        resume, done, dataset, model, config_file = _trained_in(Path(resume))
    kind, config = named_config(dataset, model, preset, config_file, overrides, settings)
    if resume is not None:
        _, before = named_config(dataset, model, None, config_file, (), {})
        if config.train.repeat in (1, before.train.repeat):  # a line is one turn: the one that the checkpoint is in
            before, config = (replace(one, train=replace(one.train, repeat=1)) for one in (before, config))
        require_same_training(before, config, Path(resume), otherwise="leave out --resume")
        config = _to_go_on(config, done, stages=1 + len(addresses))
    check_config(config)
    folder = Path(out)
    line = make_line(folder, kind, nested(all_values(config)), addresses, {"resume": resume})
    for number, stage in enumerate(line.stages):
        listens = "" if stage.address is None else f", which listens at {stage.address}"
        print(f"stage {number}: {folder / 'line.yaml'} and {key_path(folder, number)} to its machine{listens}")
    print("there, in any order, and again when it ends before its time:")
    print("  pipeal line run line.yaml --stage K")


def _trained_in(path: Path) -> tuple[str, int, str, str, str]:
    """The checkpoint to go on with, the epochs behind it, its data set and model, and the configuration's file."""
    before = end_of_epoch(path)
    config = CONFIG.at(before.path.parents[1])
    with refusals_told(f"{config}: cannot be read", "; name the folder of a run of one form"):
        found = document.parse(config.read_text(encoding="utf-8"), source=str(config))
    try:
        dataset, model = found["dataset"], found["model"]["name"]
        dataset = found["data"]["file"] if dataset == FILE else dataset
        return str(before.path), before.position.epoch, dataset, model, str(config)
    except (KeyError, TypeError) as error:
        raise DataError(f"{config}: {first_line(error)} is missing, which the configuration of a run has") from None


def _to_go_on(config: RunConfig, done: int, *, stages: int) -> RunConfig:
    """Without what was chosen for the devices that the run had.

    Raises:
        ConfigError: So many epochs are done, and no more are asked for.
    """
    if config.train.epochs <= done:
        raise ConfigError(f"--resume: {done} epochs of {config.train.epochs} are done; ask for more with --epochs")
    sizes = config.engine.sizes
    return replace(
        config,
        engine=replace(
            config.engine, devices="auto", sizes=sizes if sizes is not None and len(sizes) == stages else None
        ),
        model=replace(config.model, weights=None),  # those that it began with
        tune=type(config.tune)(),
    )


def run(*, file: str, stage: int, key: str | None, folder: str | None, run_folder: str | None, again: bool) -> None:
    """Runs a stage.

    Args:
        file: The line's.
        stage: The stage's number.
        key: The file with its key; None for the one beside.
        folder: Where it keeps what it has; None for the usual place.
        run_folder: Of the last stage.
        again: Whether an error that stopped the line is behind it.

    Raises:
        PipealError: A user's mistake, in one line.
        Interrupted: It was asked to end, and has saved.
        LineError: The line has failed for good.
    """
    path = Path(file)
    line = read_line(path)
    if stage >= len(line.stages):
        raise ConfigError(f"--stage: found {stage}, but the line has the stages 0 to {len(line.stages) - 1}")
    schema, _ = KINDS.get(line.kind, (None, None))
    if schema is None:
        raise ConfigError(f"{path}: kind: found {line.kind!r}, expected one of {', '.join(KINDS)}")
    check_config(load_config(schema, values=line.config))
    place = Place(
        Path(folder) if folder is not None else path.parent / f"stage-{stage}",
        Path(key) if key is not None else key_path(path.parent, stage),
        Path(run_folder) if run_folder is not None else path.parent / "run",
    )
    keep_freed_memory()
    _allow_all_files()
    with refusals_told(f"{place.folder}: cannot be made", "; name another --folder"):
        make_folder(place.folder)
    lock = FileLock.take(place.folder / ".lock")
    if lock is None:
        raise DataError(f"{place.folder}: another process runs this stage; end it, or name another --folder")
    try:
        if again:
            Failures(place.folder, stage).forget()
        with StopRequest() as stop:
            StageRun(line, stage, place, stop).run()
    finally:
        lock.release()
    last = len(line.stages) - 1
    if stage < last:
        print(f"stage {stage} has done its part; the run lies with stage {last}, at {line.stages[last].address}")
    else:
        with suppress(DataError):  # started once more after the end, it may find it moved, or something else there
            _print_run(place.run)


def _allow_all_files() -> None:
    """Has the system let this process open as many files as it may: each connection to the port takes one for a while,
    and snapshots need some."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _print_run(folder: Path) -> None:
    """How it went, and where it lies."""
    for run in read_runs(folder):
        measure, (done, asked) = run.measure, run.epochs
        best = "" if run.at_best is None else f", at best held-out {run.at_best}"
        print(f"{run.dataset} {run.model}, {run.form}, {done}/{asked} epochs: {measure.test_name} {run.last}{best}")
    print(f"files:    {folder}")


def status(folder: str) -> None:
    """Shows how a line stands.

    Raises:
        DataError: There is no status in the folder.
    """
    print(status_table(read_status(Path(folder))))
