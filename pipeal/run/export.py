"""``pipeal export``: a trained model in a form that others read, whole or absent, and read back before it counts."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeal import __version__
from pipeal.core.artifacts import EXPORTED_FOLDER, EXPORTED_PROGRAM, EXPORTED_WEIGHTS, Artifact
from pipeal.core.atomic import replacing
from pipeal.core.errors import ConfigError, SaveError, first_line, require_usable
from pipeal.core.methods import METHODS
from pipeal.core.names import HF, source_of
from pipeal.core.protocols import UP
from pipeal.reporting.page import require_no_part
from pipeal.run.export_hf import trained_network, way_of, write_folder
from pipeal.run.trained import Trained, load_trained

_log = logging.getLogger(__name__)

FACTS = "facts.json"
"""What is told of the model within a program's file."""

_TRACED_LENGTH = 8


@dataclass(frozen=True)
class Target:
    """One form.

    Attributes:
        usual: Where it goes in the run's folder.
        write: Writes it, and gives what there is to say of it; raises AssertionError where what was written, read back,
            is not the model, and leaves nothing then.
    """

    usual: Artifact
    write: Callable[[Trained, Path], str]


def export(run: str, to: str, out: str | None, *, force: bool) -> None:
    """Writes the model of a run, and says in a line what came of it.

    Args:
        run: As for :func:`pipeal.run.trained.load_trained`.
        to: One of :data:`TARGETS`.
        out: The file or folder to write, or a folder that is there, to write into; None for the run's own.
        force: Whether what is there already is replaced.

    Raises:
        DataError: There is no such run, it has no checkpoint, or the system refused to write.
        ConfigError: Its model cannot be left so, or something is in the place of the output.
        SaveError: What was written is not the model.
    """
    target = TARGETS[to]
    path = None if out is None else Path(out)
    if path is not None:
        require_usable(path, f"--out {out}", "; name another", ConfigError)
        inside = path.is_dir() and target.usual is not EXPORTED_FOLDER
        path = target.usual.at(path) if inside else path
        require_no_part(path, [one.usual for one in TARGETS.values()])  # before anything is loaded
        _free(path, force)
    trained = load_trained(Path(run))
    if path is None:
        path = _free(target.usual.at(trained.folder), force)
    config = trained.config
    _log.info(f"exporting {config.model.name}, {METHODS[config.train.mode].title}, as it was after {trained.where}")
    try:
        said = target.write(trained, path)
    except AssertionError as error:
        raise SaveError(f"cannot write {path}: read back, it is not the run's model ({first_line(error)})") from error
    print(f"{path}: {said}")


def plain_model(trained: Trained) -> nn.Module:
    """The way of an answer as one plain module, in evaluation mode; of backpropagation it is the network itself.

    Raises:
        ConfigError: A layer has an inference of its own.
    """
    if METHODS[trained.config.train.mode].is_whole:
        network: nn.Module = trained.package[0].blocks()[UP]
        return network
    return trained.package.to_bp()


def _named(trained: Trained) -> nn.Module:
    """The module whose names weights have; of another library's network that is trained as a whole, its own."""
    source = source_of(trained.config.model.name)
    if source is None or not METHODS[trained.config.train.mode].is_whole:
        return plain_model(trained)
    network, _ = trained_network(trained)
    return network.get_submodule("model") if source == HF else network


def facts_of(trained: Trained) -> dict[str, str]:
    """What is told of a model within its file."""
    config = trained.config
    facts = {
        "pipeal": __version__,
        "dataset": config.dataset,
        "model": config.model.name,
        "method": config.train.mode,
        "trained": trained.where,
        "checkpoint": trained.checkpoint.path.name,
    }
    if trained.classes is not None:
        facts["classes"] = json.dumps(trained.classes, ensure_ascii=False)
    return facts


def _free(path: Path, force: bool) -> Path:
    if os.path.lexists(path) and not force and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} is there already; give --force to replace it, or another --out")
    return path


def _write_weights(trained: Trained, path: Path) -> str:
    # Each tensor by itself, as the format has it: two names of one become two tensors.
    weights = {name: tensor.detach().clone() for name, tensor in _named(trained).state_dict().items()}
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    with replacing(path) as aside:
        # Not by save_file, whose files their owner alone may read.
        aside.write_bytes(save(weights, metadata={"format": "pt", **facts_of(trained)}))
        torch.testing.assert_close(load_file(aside), weights, rtol=0, atol=0, equal_nan=True)
    return (
        f"{len(weights)} tensors, {sum(tensor.numel() for tensor in weights.values()):,} numbers{_not_its_own(trained)}"
    )


def _not_its_own(trained: Trained) -> str:
    """What to say of the names and the answers of another library's network that is trained in parts."""
    source, method = source_of(trained.config.model.name), METHODS[trained.config.train.mode]
    if source is None or method.is_whole:
        return ""
    inner = "model." if source == HF else ""
    return f"; its own names stand after f.N.{inner}, and answers go through {way_of(method)}"


def _write_program(trained: Trained, path: Path) -> str:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says about its own export
        model = plain_model(trained)
        program, free = _program(model, trained)
        with replacing(path) as aside:
            # Given a name, torch wants it to end in .pt2.
            with aside.open("wb") as file:
                torch.export.save(program, file, extra_files={FACTS: json.dumps(facts_of(trained))})
            with aside.open("rb") as file:
                read = torch.export.load(file)
            _require_same(read, model, trained, free)
    sizes = [*trained.inputs(2, trained.longest).shape]
    shown = [name if name in free else str(size) for name, size in zip(_NAMES, sizes, strict=False)]
    fixed = "" if "length" in free or trained.longest is None else "; pad texts on the right to that length"
    return f"takes ({', '.join([*shown, *map(str, sizes[2:])])}), and answers as the run's model does{fixed}"


TARGETS: Mapping[str, Target] = {
    "safetensors": Target(EXPORTED_WEIGHTS, _write_weights),
    "torch-export": Target(EXPORTED_PROGRAM, _write_program),
    "hf": Target(EXPORTED_FOLDER, write_folder),
}
"""By the names that ``--to`` takes."""

_ROUNDING = 1e-4
"""Of the largest number of an answer, how far others may be off for other orders of float32 sums."""

_NAMES = ("batch", "length")
"""The sizes of an input that a program may leave open, in the order of its dimensions."""


def _program(model: nn.Module, trained: Trained) -> tuple[ExportedProgram, Sequence[str]]:
    """The model as a program, with as many sizes left open as it can be traced with, and their names.

    Raises:
        ConfigError: It cannot be traced at all.
    """
    longest = trained.longest
    tries: list[Sequence[str]] = [("batch",), ()]
    if longest is not None and longest > 2:
        tries.insert(0, _NAMES)
    why = ""
    for free in tries:
        length = longest if longest is None or "length" not in free else min(longest, _TRACED_LENGTH)
        dims = {"batch": Dim("batch")} | ({"length": Dim("length", max=longest)} if "length" in free else {})
        shapes = ({place: dims[name] for place, name in enumerate(free)},)
        try:
            program = torch.export.export(model, (trained.inputs(2, length),), dynamic_shapes=shapes)
            _require_same(program, model, trained, free)
        except Exception as error:  # noqa: BLE001  whatever tracing raises: with fewer open sizes it may do
            why = first_line(error)
            continue
        return program, free
    raise ConfigError(f"torch.export cannot trace {trained.config.model.name}: {why}; export its weights instead")


def _require_same(program: ExportedProgram, model: nn.Module, trained: Trained, free: Sequence[str]) -> None:
    """Asks that a program answers as the model does of which it is, also for other sizes than it was traced with, and
    this as the package, but for the rounding of maps that are one.

    Raises:
        AssertionError: It does not.
    """
    longest, run = trained.longest, program.module()
    rows = (1, 3) if "batch" in free else (2,)
    lengths = (longest,) if "length" not in free or longest is None else (1, longest)
    for row, length in product(rows, lengths):
        x = trained.inputs(row, length)
        answer, wanted = model(x), trained.package.infer(x)
        torch.testing.assert_close(run(x), answer)
        torch.testing.assert_close(answer, wanted, rtol=0, atol=_ROUNDING * float(wanted.abs().max()))
