"""The last stage's part: it answers, and keeps what one process would: rows, and checkpoints of all layers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeal.config import RunConfig, dump_config
from pipeal.core.artifacts import ASKED, CHECKPOINTS, CONFIG, STATUS
from pipeal.core.atomic import make_folder, sweep, write_whole
from pipeal.core.checked import checked
from pipeal.core.errors import DataError, UntidyError, refusals_told
from pipeal.core.lock import FileLock
from pipeal.core.methods import METHODS
from pipeal.engine.state.layer_state import State
from pipeal.line.feed import PART, PARTS
from pipeal.line.items import Item
from pipeal.reporting.progress import Progress
from pipeal.reporting.recorders import write_json
from pipeal.run.run_folder import last_told, lock_run
from pipeal.run.training import recorders_of
from pipeal.training.checkpoint.policy import is_best
from pipeal.training.checkpoint.store import CheckpointStore
from pipeal.training.evaluation import Criterion, mean_of, right, right_and_loss, share_right
from pipeal.training.position import Position
from pipeal.training.trainer import Scores

_log = logging.getLogger(__name__)

POSITION = ".position"
"""Beside the files of the first item: no name of one."""

_MOST_FILES = 16


def take_folder(folder: Path, line: str) -> FileLock:
    """The lock of a line's run, whose folder is made where there is none.

    Args:
        folder: The run's.
        line: The line's name.

    Raises:
        DataError: Another run is there, another process works there, or the system refused to make it.
    """
    with refusals_told(f"{folder}: cannot be made", "; name another folder by --run"):
        make_folder(folder)
    lock = lock_run(folder)
    if CONFIG.at(folder).exists() and not _is_of(folder, line):
        lock.release()
        raise DataError(f"{folder} holds another run; name another folder by --run")
    return lock


def _is_of(folder: Path, line: str) -> bool:
    return last_told(folder).get("line") == line


class Top:
    """That part.

    Args:
        folder: The run's folder, as one process leaves it.
        line: The line's name.
        config: With every choice made.
        facts: About the data.
        criterion: The loss that epochs are measured by, if any.
    """

    def __init__(
        self,
        folder: Path,
        line: str,
        config: RunConfig,
        facts: Mapping[str, Any],
        criterion: Criterion | None,
    ) -> None:
        self.folder = folder
        self.position = Position()
        self._config = config
        self._line = line
        self._facts = facts
        self._criterion = criterion
        self._asked: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        self._evaluated: Mapping[str, Any] = {}
        self._states: dict[int, State] = {}
        self._lock: FileLock | None = None
        self._recorders = list(recorders_of(config, folder))
        self._progress = Progress(epochs=config.train.epochs, label=METHODS[config.train.mode].label)

    def begin(self, asked: RunConfig, files: Mapping[str, Tensor]) -> None:
        """Makes the folder, with the files that a trained model needs to read its input.

        Args:
            asked: The configuration of the line's file, by which a run is taken up again.
            files: What they hold, by name; as :data:`POSITION`, where the training stood that the line goes on with.

        Raises:
            DataError: Their names lead elsewhere, the system refused to write, or as :func:`take_folder`.
        """
        files = dict(files)
        before = files.pop(POSITION, None)
        if len(files) > _MOST_FILES or any(Path(name).name != name or name.startswith(".") for name in files):
            raise DataError(f"files of the names {', '.join(files)[:200]} came; expected plain names")
        if before is not None:
            self.position = Position.of(json.loads(bytes(before.numpy())), [])
        self._lock = take_folder(self.folder, self._line)  # until all is written, or this process ends
        self._tell("running")  # first: by its line the folder is known again
        write_whole(CONFIG.at(self.folder), dump_config(self._config))
        write_whole(ASKED.at(self.folder), dump_config(asked))
        for name, content in files.items():
            write_whole(self.folder / name, bytes(content.numpy()).decode("utf-8"))
        self.record_again()

    def _let_others_in(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def record_again(self) -> None:
        """Writes the rows so far, and no others; removes what an end by force left half-written before."""
        sweep(self.folder, older_than_s=0.0)  # no other process writes here
        for recorder in self._recorders:
            recorder.rewrite(self.position.rows)
        self._tell("running")

    def begin_evaluation(self, facts: Mapping[str, Any]) -> None:
        """An epoch was trained."""
        self._evaluated = facts

    def answer(self, part: str, logits: Tensor, wanted: Tensor) -> None:
        """Counts the answers to a batch."""
        found = right(logits, wanted) if self._criterion is None else right_and_loss(logits, wanted, self._criterion)
        self._asked[part].append(found.cpu())

    def end_evaluation(self) -> None:
        """Makes the epoch's row of them."""
        position, facts = self.position, self._evaluated
        position.part = checked(PART, facts["part"])
        position.batches += position.part.batches
        layers = [facts["layers"][number] for number in sorted(facts["layers"], key=int)]
        position.totals.non_finite += sum(layer["non_finite"] for layer in layers)
        position.totals.splits += sum(layer["splits"] for layer in layers)
        position.totals.overflows[1] = sum(layer["overflows"] for layer in layers)
        row = position.row([layer["losses"] for layer in layers if layer["losses"]], self._scores()._asdict())
        position.end_epoch(row)
        self._asked = {name: [] for name in PARTS}
        for recorder in self._recorders:
            recorder.write(row)
        self._progress.end_epoch(row)
        self._tell("running")

    def take_layer(self, item: Item) -> None:
        """Keeps what a layer has learnt, for the checkpoint."""
        self._states[item.facts["layer"]] = item.tree

    def save(self, *, ended: bool) -> None:
        """Writes a checkpoint, as one process does after an epoch; the last of them, where that has ``ended``, must be.

        Raises:
            DataError: The last one was refused.
        """
        try:
            self._save()
        except UntidyError as error:
            _log.warning(str(error))
        except DataError as error:
            if ended:
                raise
            _log.warning(f"{error}; training goes on without this checkpoint")
        self._states = {}
        if ended:
            self._tell("finished")
            self._let_others_in()

    def _save(self) -> None:
        position = self.position
        store = CheckpointStore(CHECKPOINTS.at(self.folder), keep=self._config.train.checkpoint.keep)
        with store:
            store.save(
                position.step,
                self._states,
                {"turn": 1, "epoch": position.epoch, "batch": 0},
                {"training": position.state(), "data": dict(self._facts), "config": asdict(self._config)},
                best=is_best(position),
                epoch={"losses": [], "splits": 0},
            )

    def state(self) -> dict[str, Any]:
        """For a snapshot."""
        return {
            "position": self.position.state(),
            "evaluated": dict(self._evaluated),
            "asked": {part: list(answers) for part, answers in self._asked.items()},
            "states": {str(number): state for number, state in self._states.items()},
        }

    def go_on(self, state: Mapping[str, Any], *, ended: bool) -> None:
        """Takes up what :meth:`state` gave.

        Raises:
            DataError: The folder does not hold the run as the line left it, or another process works there.
        """
        self.position = Position.of(state["position"], [])
        self._evaluated, self._asked = state["evaluated"], state["asked"]
        self._states = {int(number): found for number, found in state["states"].items()}
        if not ended:  # or all is written, and one process may have gone on with the run since
            if not CONFIG.at(self.folder).exists():
                raise DataError(f"{self.folder} does not hold the run of this line; put it back, or name it by --run")
            self._lock = lock_run(self.folder)
            if not _is_of(self.folder, self._line):
                raise DataError(
                    f"{self.folder} does not hold the run as this line left it: either it is another run, and --run is "
                    "to name this line's, or one process has gone on with it, and so can another line (pipeal line "
                    f"init --resume {self.folder}), but not this one"
                )
            self.record_again()

    def close(self) -> None:
        """Closes what it writes to."""
        for recorder in self._recorders:
            recorder.close()
        self._let_others_in()

    def _scores(self) -> Scores:
        found: dict[str, float] = {}
        for part, answers in self._asked.items():
            if part == "held" and not answers:
                continue
            if self._criterion is None:
                found[f"{part}_acc"] = share_right(answers)
            else:
                found[f"{part}_acc"], found[f"{part}_loss"] = mean_of(answers)
        return Scores(**found)

    def _tell(self, status: str) -> None:
        write_json(
            STATUS.at(self.folder),
            {
                "status": status,
                "line": self._line,
                "message": "",
                "epoch": self.position.epoch,
                "epochs": self._config.train.epochs,
            },
        )
