"""The files of a run folder: what each holds, who writes and reads it, and when it is stale.

A new file is one entry here, and so is a new recorder; the table in ``docs/run-folder.md`` is made of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Artifact:
    """One file, or one family of files, that a run leaves.

    Attributes:
        name: The name in its folder; a pattern where there may be several.
        holds: What is in it.
        writer: The module that writes it, without ``pipeal.``.
        readers: Likewise those that read it; none where it is for people or other programs.
        stale: When it no longer tells the truth.
        recorder: The class in its writer that is given every epoch's row, where it is made of these.
    """

    name: str
    holds: str
    writer: str
    readers: tuple[str, ...] = ()
    stale: str = "never"
    recorder: str = ""

    def at(self, folder: Path) -> Path:
        """Where it lies."""
        return folder / self.name


LOCK = Artifact(
    "run.lock", "nothing; locked by the process that writes in the folder", "run.find_run", ("reporting.page.folder",)
)
ASKED = Artifact(
    "asked.yaml",
    "the configuration as asked for, by which the same command finds its unfinished run",
    "run.run_folder",
    ("run.find_run", "reporting.page.folder"),
)
STATUS = Artifact(
    "status.json",
    "running, finished, interrupted or failed; epochs done; since when; how often it was resumed",
    "run.run_folder",
    ("run.run_folder", "reporting.page.folder"),
    "it says running and run.lock is free: the process was killed",
)
CONFIG = Artifact(
    "config.yaml",
    "the configuration with every choice made; --config repeats the run",
    "run.experiment",
    ("run.experiment", "run.trained", "reporting.page.folder"),
)
PLACEMENT = Artifact(
    "placement.txt",
    "devices, layers, threads, schedule and precision of each form, and what devices: auto tried, with times",
    "run.experiment",
)
TRIALS = Artifact(
    "tune.json", "every setting that --tune tried, with its held-out result", "run.tuning", ("run.tuning",)
)
VOCABULARY = Artifact("vocab.json", "the words of a text model, in order", "run.build_text", ("run.trained",))
CLASSES = Artifact(
    "classes.json", "the names of the classes of a text data set, in order", "run.build_text", ("run.trained",)
)
HF_FOLDER = Artifact(
    "hf",
    "of a model hf:FOLDER: a folder with its config.json, for these classes, and its tokenizer",
    "models.hf_folder",
    ("run.trained",),
)
ALPHABET = Artifact("alphabet.json", "the characters of a language model", "run.build_language", ("run.trained",))
IMAGES = Artifact(
    "images.json", "means, deviations and classes of an image data set", "run.build_vision", ("run.trained",)
)
CHECKPOINTS = Artifact(
    "checkpoints",
    "a folder for each checkpoint: a file for each layer, one for the epoch so far, and the manifest",
    "training.checkpoint.store",
    ("training.checkpoint.store", "run.trained"),
)
ROWS = Artifact(
    "epochs.csv",
    "one row per epoch, the published columns first",
    "reporting.recorders",
    ("reporting.page.folder",),
    "never: rows of epochs that come again are dropped when a run is resumed",
    recorder="CsvRecorder",
)
ROWS_JSON = Artifact(
    "epochs.jsonl",
    "the same rows, one JSON object a line",
    "reporting.recorders",
    stale="never: as epochs.csv",
    recorder="JsonLinesRecorder",
)
TENSORBOARD = Artifact(
    "tensorboard",
    "the same rows for TensorBoard, with train.tensorboard",
    "reporting.tensorboard",
    recorder="TensorBoardRecorder",
)
SUMMARY = Artifact(
    "summary.json",
    "results, costs, and the circumstances of every figure",
    "run.outcome",
    ("reporting.page.folder",),
    "a resumed run is under way: it is written again when that ends",
)
COSTS = Artifact(
    "costs.json",
    "of a comparison of AL with BP, what each layer and block costs, for pipeal plan --costs",
    "run.outlook",
)
CURVES = Artifact("curves.png", "results over epochs and seconds", "run.outcome", (), "as summary.json")
BATCHES = Artifact(
    "batches.png",
    "lengths of samples, shapes of batches, padding",
    "run.outcome",
    ("reporting.page.page",),
    "as summary.json",
)
TIMELINE = Artifact(
    "timeline.png",
    "forwards, backwards and updates of each stage over time, and copies of offloaded layers",
    "run.turns",
    ("reporting.page.page",),
    "never: removed when a run is resumed on other stages",
)
TRACE = Artifact(
    "trace.json",
    "the same batches for Perfetto",
    "run.turns",
    ("reporting.page.page",),
    "never: as timeline.png",
)
EXITS = Artifact(
    "exits.json",
    "accuracy and cost of every exit, and of the calibrated early exit",
    "run.turns",
    ("reporting.page.folder",),
    "as summary.json",
)
EXITS_PICTURE = Artifact(
    "exits.png", "accuracy over cost of each exit", "run.turns", ("reporting.page.page",), "as summary.json"
)
BROKEN_BATCH = Artifact("non-finite-batch-*.pt", "a batch on which a loss was not finite", "training.kept_batch")
STALL = Artifact("stall-*.txt", "the stacks of all threads when nothing moved", "engine.execution.watchdog")
EXPORTED_WEIGHTS = Artifact(
    "model.safetensors", "the weights, by pipeal export", "run.export", (), "the run went on since; export again"
)
EXPORTED_PROGRAM = Artifact(
    "model.pt2",
    "a program of inference, by pipeal export",
    "run.export",
    (),
    "the run went on since; export again",
)
EXPORTED_FOLDER = Artifact(
    "model-hf",
    "a folder for transformers, by pipeal export",
    "run.export_hf",
    (),
    "the run went on since; export again",
)
REPORT = Artifact("report.html", "the page of pipeal report", "cli.report", (), "the run went on since; ask again")

TRACED = (TIMELINE, TRACE)
"""What is written of batches that are trained on, and cannot be made when all of them are behind."""


def artifacts() -> Iterator[Artifact]:
    """All of them, in the order above."""
    for found in globals().values():
        if isinstance(found, Artifact):
            yield found


def table() -> str:
    """All of them as a Markdown table."""
    rows = ["| file | holds | written by | read by | stale when |", "| --- | --- | --- | --- | --- |"]
    for one in artifacts():
        readers = ", ".join(f"`{reader}`" for reader in one.readers) or "–"
        rows.append(f"| `{one.name}` | {one.holds} | `{one.writer}` | {readers} | {one.stale} |")
    return "\n".join(rows) + "\n"
