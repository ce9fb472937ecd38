"""How a line begins: the choices that a configuration leaves open, and the first item, by which stages know them."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from pipeal.config import RunConfig, document, dump_config, load_config
from pipeal.core.artifacts import CHECKPOINTS
from pipeal.core.atomic import write_whole
from pipeal.core.checked import checked
from pipeal.core.errors import ConfigError, DataError, PlacementError, first_line
from pipeal.core.methods import METHODS, with_all
from pipeal.core.partition import balance
from pipeal.engine.devices import fastest_precision
from pipeal.engine.devices.cpus import cores
from pipeal.engine.sizes import check_sizes
from pipeal.line.items import BEGIN, Item
from pipeal.line.line_file import LineFile
from pipeal.line.top import POSITION
from pipeal.planning.planner import TRIAL_BATCHES, balance_one_by_one
from pipeal.run.backprop import check_backprop
from pipeal.run.build import Experiment
from pipeal.run.choices import sample_batches
from pipeal.run.duration import at_its_length
from pipeal.run.find_run import WHERE_DATA_IS, changes, run_of
from pipeal.run.grid import is_in
from pipeal.run.opening import engine_options
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from pipeal.training.position import Position

_log = logging.getLogger(__name__)

_CHOSEN = TypeAdapter(dict[str, str])


def check_config(config: RunConfig) -> None:
    """Refuses, before any data is read, what a line cannot do.

    Raises:
        ConfigError: One line.
    """
    train, engine = config.train, config.engine
    method = METHODS.get(train.mode)
    if method is None or method.is_whole:
        divided = tuple(name for name, one in METHODS.items() if not one.is_whole)
        raise ConfigError(f"train.mode: found {train.mode}; expected a method of {with_all(divided)} on a line")
    for key, found, wanted in (
        ("train.repeat", train.repeat, 1),
        ("tune.grid", config.tune.grid, type(config.tune.grid)()),
        ("engine.replicas", engine.replicas, 1),
        ("engine.offload", engine.offload, "none"),
    ):
        if found != wanted:
            raise ConfigError(f"{key}: found {found}, which a line does not do; leave it out")
    check_backprop(config, processes=2)
    if train.on_non_finite == "stop-and-rewind":
        raise ConfigError(
            "train.on_non_finite: found stop-and-rewind, but no stage of a line goes back for another; expected raise "
            "or skip"
        )


def first_item(experiment: Experiment, config: RunConfig, begun: str, before: Position | None) -> Item:
    """The item that a line begins with.

    Args:
        experiment: Has read the data.
        config: As :func:`kept_choice` gave it.
        begun: Likewise.
        before: Where the training stood that it goes on with; None for a new one.
    """
    with tempfile.TemporaryDirectory() as folder:
        experiment.save(Path(folder))
        files = {path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                 for path in sorted(Path(folder).iterdir())}  # fmt: skip
    if before is not None:  # a row for each epoch may be more than fits beside tensors
        files[POSITION] = torch.frombuffer(bytearray(json.dumps(before.state()).encode()), dtype=torch.uint8)
    facts = {
        "begun": begun,
        "asked": dump_config(experiment.config),
        "config": dump_config(config),
        "blueprint": experiment.models.under(config).blueprint,
        "facts": dict(experiment.facts),
        "batches": 0 if before is None else before.batches,
    }
    return Item(BEGIN, facts, files)


def end_of_epoch(path: Path) -> ResumedTraining:
    """A training to go on with: of a run's folder the newest checkpoint at the end of an epoch, or the one named.

    Raises:
        DataError: There is none, it stands within an epoch, or it is of a later turn.
    """
    passed_over = list[str]()

    def ends_an_epoch(checkpoint: Checkpoint) -> bool:
        position = ResumedTraining.of(checkpoint).position
        if position.turn == 1 and position.epoch and not position.part.batches:
            return True
        passed_over.append(f"{checkpoint.path} was taken after {position.where} of turn {position.turn}")
        return False

    if run_of(path) is None:
        found = CheckpointStore(CHECKPOINTS.at(path)).newest(passed_over.append, ends_an_epoch)
    else:
        named = Checkpoint.open(path) if path.is_dir() else None
        found = named if named is not None and ends_an_epoch(named) else None
    if found is not None:
        return ResumedTraining.of(found)
    if not passed_over:
        raise DataError(
            f"{path}: no checkpoint there; name the folder of a run, as line/run is, or one of its checkpoints"
        )
    raise DataError(
        f"{path}: no checkpoint at the end of an epoch ({'; '.join(passed_over[:3])}); have the run go on to one, or "
        "name another"
    )


def kept_choice(folder: Path, line: LineFile, experiment: Experiment, device: str) -> tuple[Any, str]:
    """The configuration with every choice made, and the name of this beginning, which no other one has; measures layers
    where the sizes of stages are left open.

    What was measured and chosen holds from then on: the next stage may have saved it before this one does.

    Args:
        folder: Where it is kept.
        line: Whose stages it is for.
        experiment: Has read the data.
        device: Of the first stage, on which layers are measured.

    Raises:
        DataError: What was kept is not as it was written.
        PlacementError: There are more stages than layers, or the sizes do not fit.
        ConfigError: The configuration does not fit the data, or is not what the line began with.
    """
    path = folder / "chosen.json"
    if path.exists():
        try:
            found = checked(_CHOSEN, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {first_line(error)}; begin a new line") from error
        if found.get("line") == line.line:
            require_same_config(experiment.config, found.get("asked"))
            require_same_fixed(line, json.loads(found.get("fixed", "{}")))
            config = load_config(type(experiment.config), values=document.parse(found["config"], source="stage 0"))
            return config, found["begun"]
    config, begun = _chosen(experiment, line, device), secrets.token_hex(8)
    kept = {
        "line": line.line,
        "begun": begun,
        "asked": dump_config(experiment.config),
        "config": dump_config(config),
        "fixed": json.dumps(line.fixed),
    }
    write_whole(path, json.dumps(kept) + "\n")
    return config, begun


def _chosen(experiment: Experiment, line: LineFile, device: str) -> Any:
    stages = len(line.stages)
    config = at_its_length(experiment, experiment.config)
    mode, train, engine = config.train.mode, config.train, config.engine
    layers = sum(1 for _ in experiment.layers(mode, train.seed, here=()))
    if stages > layers:
        raise PlacementError(
            f"the line has {stages} stages, the model {layers} layers; make a line of at most {layers}"
        )
    precision = fastest_precision(device) if train.precision == "auto" else train.precision
    threads = engine.threads or max(1, cores() // line.crowd)  # all have the same number, on which bits depend
    if engine.sizes is not None:
        sizes = check_sizes(list(engine.sizes), layers, stages)
    elif stages == layers:
        sizes = balance([1.0] * layers, stages)
    else:
        _log.info(f"measuring {layers} layers, to share them out to {stages} stages")
        with closing(experiment.train_batches(train.seed)) as batches:
            sizes = balance_one_by_one(
                experiment.layers(mode, train.seed),
                layers,
                sample_batches(batches, TRIAL_BATCHES),
                stages,
                replace(engine_options(config, precision), threads=threads),
                device=device,
            )
    engine = replace(engine, devices=(device,) * stages, sizes=tuple(sizes), threads=threads)
    return replace(config, engine=engine, train=replace(train, precision=precision))


def require_same_config(config: RunConfig, asked: str | None) -> None:
    """Refuses a configuration that the line did not begin with: stages have begun by the first one. Where the data is
    may change.

    Args:
        config: That of the line's file.
        asked: What that had when the line began.

    Raises:
        ConfigError: A key is another one now.
        DataError: An earlier version of pipeal began the line, and did not keep it.
    """
    if asked is None:
        raise DataError("an earlier version of pipeal began the line; end it by that one, or begin a new line")
    before = load_config(type(config), values=document.parse(asked, source="stage 0"))
    for key, was, found in changes(before, config):
        if not is_in(key, (*WHERE_DATA_IS, "out")):
            raise _another(f"config: {key} is", found, was)


def require_same_fixed(line: LineFile, before: Mapping[str, Any]) -> None:
    """Refuses what decides which items there are, where it is not what the line began with: the next stage may have
    seen some of them.

    Args:
        line: As its file has it now.
        before: Its :attr:`LineFile.fixed` when it began.

    Raises:
        ConfigError: Something is another.
    """
    for key, found in line.fixed.items():
        if found != before.get(key):
            raise _another(f"{key}: it is", json.dumps(found), json.dumps(before.get(key)))


def require_same_stages(line: LineFile, config: RunConfig) -> None:
    """Refuses another number of stages than layers were divided into: some would be left out, or none be left for one.

    Args:
        line: As its file has it now.
        config: As :func:`kept_choice` gave it.

    Raises:
        ConfigError: There are more now, or fewer.
    """
    found, before = len(line.stages), len(config.engine.sizes or ())
    if found != before:
        raise _another("stages: their number is", str(found), str(before))


def _another(key_is: str, found: str, before: str) -> ConfigError:
    return ConfigError(
        f"{key_is} {found} in the line's file, but was {before} when the line began, and stays so; put it back, or "
        "begin a new line with pipeal line init"
    )


def require_same_data(experiment: Experiment, before: Mapping[str, Any]) -> None:
    """Refuses to go on with other data.

    Raises:
        DataError: It is not what the line began with.
    """
    for name, found in experiment.facts.items():
        if before.get(name, found) != found:
            raise DataError(
                f"the data has {name} {found}, but had {before[name]} when the line began; put the data back, or begin "
                "a new line"
            )
