"""Runs, read out of their folders, and what of each is missing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeal.config import document
from pipeal.core.artifacts import ASKED, CONFIG, EXITS, LOCK, ROWS, STATUS, SUMMARY, Artifact, artifacts
from pipeal.core.errors import ConfigError, DataError, refusals_told
from pipeal.core.lock import lock_is_held
from pipeal.core.methods import METHODS
from pipeal.reporting.page.rows import read_rows, require_file
from pipeal.reporting.page.run import MARKS, Run, State, Status, epochs_asked, value_at
from pipeal.training.row import EpochRow

_FORM = re.compile(rf"({'|'.join(METHODS)})(-.+)?")
"""The folder of a form within that of a comparison."""


_TOLD: tuple[State, ...] = ("running", "finished", "interrupted", "failed")


def is_run(folder: Path) -> bool:
    """Whether a folder is what a run leaves."""
    return _is_marked(folder) or bool(_forms_in(folder))


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder, by name; or the folder itself, if it is one.

    Raises:
        DataError: There is no such folder, or it cannot be read.
    """
    with refusals_told(f"{folder}: cannot be read"):  # no permission, or a name that is too long
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; name the one that training was told as --out (default: runs)")
        return [folder] if is_run(folder) else sorted(child for child in folder.iterdir() if _is_listed(child))


def read_runs(folder: Path) -> list[Run]:
    """Reads a run's folder; one that compares forms gives all of them.

    Raises:
        DataError: The folder is no run, or cannot be read.
    """
    with refusals_told(f"{folder}: cannot be read"):  # no permission, or a name that is too long
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; name a run's folder, such as runs/agnews-transformer-al-001")
        if not is_run(folder):
            within = runs_in(folder)
            hint = f"it holds {len(within)}, such as {within[0]}" if within else "name a folder with one"
            raise DataError(f"{folder}: no run: it has no {', '.join(MARKS[:-1])} or {MARKS[-1]}; {hint}")
        absolute = folder.resolve()
        missing: list[str] = []
        whole = _read_status(absolute, missing)
        forms = _forms_in(absolute)
        if forms:
            asked = value_at(_mapping(ASKED.at(absolute), []), "train.methods")
            # As its tables have them: methods in their order, then those that are spread over devices.
            order = asked if isinstance(asked, list) else [*METHODS]
            forms.sort(key=lambda form: order.index(form) if form in order else len(order))
            found = [_read(absolute / form, f"{absolute.name}/{form}", whole, missing) for form in forms]
            return found if all(map(_has_ended, found)) else [_apart(run) for run in found]
        if _FORM.fullmatch(absolute.name) and is_run(absolute.parent):
            return [run for run in read_runs(absolute.parent) if run.folder == absolute]
        return [_read(absolute, absolute.name, whole, missing)]


def require_no_part(out: Path, own: Collection[Artifact]) -> None:
    """Asks that what a command writes takes the place of no file that a run left in its folder.

    Args:
        out: Where it is to be written.
        own: What the command may leave there, and replace.

    Raises:
        ConfigError: It would.
    """
    kept = [one.name for one in artifacts() if one not in own]
    where = Path(os.path.realpath(out.parent), out.name)  # links and .. lead into a run, and out of one
    for part in (where, *where.parents):
        if any(fnmatch(part.name, name) for name in kept) and is_run(part.parent):
            raise ConfigError(f"--out {out}: {part.name} there is the run's own; name another --out")


def _is_listed(folder: Path) -> bool:
    """Not what is being made, and what a killed process left of it; what cannot be looked into is for its reader."""
    try:
        return not folder.name.startswith(".") and is_run(folder)
    except PermissionError:
        return True


def are_forms(runs: Sequence[Run]) -> bool:
    """Whether they are the forms of one comparison."""
    return (
        len({run.folder for run in runs}) == len(runs) > 1
        and len({run.folder.parent for run in runs}) == 1
        and all(_FORM.fullmatch(run.folder.name) for run in runs)
    )


def _forms_in(folder: Path) -> list[str]:
    """The forms that a run compares, by name."""
    return sorted(path.name for path in folder.glob("*") if _FORM.fullmatch(path.name) and _is_marked(path))


def _is_marked(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def _apart(run: Run) -> Run:
    """One form of a run whose other has not ended: it is done, whatever became of that."""
    if not _has_ended(run) or run.status.state == "finished":
        return run
    return replace(run, status=Status("finished", started=run.status.started, updated=run.status.updated))


def _has_ended(run: Run) -> bool:
    """Whether all of its epochs are there, and what it writes in the end."""
    done, asked = run.epochs
    return asked is not None and done >= asked and bool(run.summary)


def _read(folder: Path, name: str, whole: Status | None, missing: Sequence[str]) -> Run:
    """Reads one form; ``whole`` is the status of the run that it is a part of, or None; ``missing`` that run lacks."""
    missing = [*missing]
    config = _mapping(CONFIG.at(folder), missing, "a run writes it when it begins")
    if not CONFIG.at(folder).exists() and ASKED.at(folder).exists():
        config = _mapping(ASKED.at(folder), missing)
    summary = _mapping(SUMMARY.at(folder), missing, "a run writes it when it ends")
    exits = _mapping(EXITS.at(folder), missing) if EXITS.at(folder).exists() else {}
    rows: list[EpochRow] = []
    with _noted(ROWS.name, missing, "a run adds a row after each epoch"):
        rows, broken = read_rows(ROWS.at(folder))
        if broken:
            missing.append(f"{ROWS.name}: {broken} of {broken + len(rows)} lines cannot be read")
    if whole is None:
        whole = _inferred_status(done=len(rows), asked=epochs_asked(config), summarised=bool(summary))
    return Run(folder, name, whole, config, summary, rows, exits, tuple(missing))


def _read_status(folder: Path, missing: list[str]) -> Status | None:
    """The status that a folder tells; None if it tells none, which runs of earlier versions do not."""
    path = STATUS.at(folder)
    return _told_status(_mapping(path, missing), folder) if path.exists() else None


def _mapping(path: Path, missing: list[str], why: str = "") -> Mapping[str, Any]:
    """What a YAML or JSON file holds; nothing, and a word about it, where it is not there or not as it should be."""
    with _noted(path.name, missing, why):
        require_file(path)
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else document.parse(text, source=path.name)
        if isinstance(found, Mapping):
            return found
        missing.append(f"{path.name}: found no mapping in it")
    return {}


@contextmanager
def _noted(name: str, missing: list[str], why: str) -> Iterator[None]:
    """Goes on where a file cannot be read in its block, with a word about it in ``missing``."""
    try:
        yield
    except FileNotFoundError:
        missing.append(f"{name}: not there; {why}")
    except OSError as error:
        missing.append(f"{name}: {error.strerror or error}")
    except (ValueError, RecursionError) as error:  # a ConfigError and text that is no UTF-8 are such
        missing.append(f"{name}: cannot be read: {error}")


def _told_status(told: Mapping[str, Any], folder: Path) -> Status:
    """The status that a run wrote into its ``status.json``, held against its lock.

    Args:
        told: The content of ``status.json``.
        folder: The run's folder, in which ``run.lock`` is held for as long as its process lives.
    """
    state: State = next((known for known in _TOLD if known == told.get("status")), "unknown")
    if state == "running":
        held = lock_is_held(LOCK.at(folder))
        state = "unknown" if held is None else "running" if held else "died"
    words = {name: str(told.get(name) or "") for name in ("message", "started", "updated")}
    if state == "died":
        words["message"] = words["message"] or "its process is gone without a word, as after a kill or a power cut"
    return Status(state, **words)


def _inferred_status(*, done: int, asked: int | None, summarised: bool) -> Status:
    """The status of a run that left no ``status.json``.

    Args:
        done: Epochs in its rows, of all turns.
        asked: Epochs that were asked for; None where that is not known.
        summarised: Whether it wrote a summary, which it does when it ends, however it ends.
    """
    if summarised:
        return Status("interrupted" if asked is not None and 0 < done < asked else "finished")
    return Status("unknown")
