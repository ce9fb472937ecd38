"""A whole line in one process, for tests: a thread for each stage, which may die anywhere, as by ``kill -9``."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from pipeal.config import document
from pipeal.core.errors import Interrupted
from pipeal.line.commands import init
from pipeal.line.items import Item
from pipeal.line.line_file import key_path, read_line
from pipeal.line.stage_run import Place, StageRun
from pipeal.line.worker import StageWorker
from pipeal.run.stopping import StopRequest
from pipeal.run.train import KINDS
from tests.integration.processes import free_port

LONG_S = 600.0
"""Far more than anything here takes."""


class Killed(BaseException):
    """What a stage dies of here: it says and saves nothing more."""


@pytest.fixture
def built_in_turn() -> Iterator[None]:
    """The stages of a line make their layers one after the other. First weights come from the generator that a process
    has one of: two that draw at the same time, as no two processes do, would begin with others."""
    turn = threading.Lock()

    def in_turn(build: Any) -> Any:
        def built(*given: Any) -> Any:
            with turn:
                return build(*given)

        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRun, "_build", in_turn(StageRun._build))
        patch.setattr(StageRun, "_begin_feed", in_turn(StageRun._begin_feed))
        yield


def new_line(folder: Path, dataset: str | None, model: str | None, stages: int, *settings: str, **fields: Any) -> Path:
    """Makes a line on ports of this machine, with a configuration, and with fields of its file; returns the file."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(stages - 1))
    with redirect_stdout(StringIO()):
        init(
            dataset=dataset, model=model, preset=fields.pop("preset", None), addresses=addresses, config_file=None,
            overrides=settings, resume=fields.pop("resume", None), out=str(folder),
        )  # fmt: skip
    path = folder / "line.yaml"
    content = document.parse(path.read_text(), source=str(path))
    path.write_text(document.dump({**content, **fields}))
    return path


def free_ports(count: int) -> list[int]:
    """Ports where nobody listens, all different."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)


def place_of(path: Path, stage: int) -> Place:
    """As the command has it."""
    return Place(path.parent / f"stage-{stage}", key_path(path.parent, stage), path.parent / "run")


class Mortal(StageRun):
    """A stage that is told at every place where it could die.

    Args:
        reached: Called with the number of the stage and the name of the place; may raise :class:`Killed`.
    """

    def __init__(self, *arguments: Any, reached: Callable[[int, str], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reached = reached
        save = self._snapshots._store.save

        def saved(*given: Any, **more: Any) -> Path:
            reached(self.number, "before a snapshot")
            path = save(*given, **more)
            reached(self.number, "after a snapshot")
            return path

        self._snapshots._store.save = saved  # type: ignore[method-assign]

    def _step(self, items: Any) -> bool:
        came = super()._step(items)
        answers = self._worker is not None and self._worker._evaluates
        self.reached(self.number, "between answers" if answers else "between items")
        return came

    def _emit(self, item: Item) -> None:
        super()._emit(item)
        self.reached(self.number, f"amid {item.kind}")


class Counted:
    """How often stages did what, over all of their lives, and when they die.

    Args:
        deaths: By stage, the places that it dies at, by their number; a neighbour named with it dies at its next one.
    """

    def __init__(self, deaths: Mapping[int, Sequence[int]] | None = None, together: float = 0.0) -> None:
        self.deaths = {stage: set(places) for stage, places in (deaths or {}).items()}
        self.places: Counter[int] = Counter()
        self.died: list[tuple[int, str]] = []
        self._together = together
        self._draw = random.Random(0)
        self._dying: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, stage: int, place: str) -> None:
        with self._lock:
            self.places[stage] += 1
            if self.places[stage] in self.deaths.get(stage, ()) or stage in self._dying:
                self._dying.discard(stage)
                self.died.append((stage, place))
                if self._draw.random() < self._together:
                    self._dying.add(stage + 1)
                raise Killed(place)


def run_line(path: Path, reached: Callable[[int, str], None] = lambda *_: None) -> None:
    """Runs all stages of a line to its end; one that was killed begins again at once.

    Raises:
        Exception: What a stage failed with; the others are asked to end then.
    """
    line = read_line(path)
    failures: list[BaseException] = []
    stops = [StopRequest() for _ in line.stages]

    def live(stage: int) -> None:
        try:
            while True:
                place = place_of(path, stage)
                place.folder.mkdir(exist_ok=True)
                try:
                    Mortal(line, stage, place, stops[stage], reached=reached).run()
                    return
                except Killed:
                    sleep(0.01)
        except BaseException as error:  # noqa: BLE001  raised where the test waits
            failures.append(error)

    threads = [
        threading.Thread(target=live, name=str(stage), args=(stage,), daemon=True) for stage in range(len(line.stages))
    ]
    for thread in threads:
        thread.start()
    end = monotonic() + LONG_S
    while any(thread.is_alive() for thread in threads):
        if failures or monotonic() > end:
            for stop in stops:
                stop.signal = 15  # type: ignore[assignment]
        for thread in threads:
            thread.join(0.1)
        assert monotonic() < end + 60
    if failures:
        raise failures[0]
    assert monotonic() < end


def stopped(path: Path) -> None:
    """Runs a line until its last stage has a snapshot, and no further."""
    line, saved = read_line(path), threading.Event()

    def reached(stage: int, place: str) -> None:
        if stage == len(line.stages) - 1:
            if place == "after a snapshot":
                saved.set()
            elif saved.is_set():
                raise Interrupted("here the test goes on", 143)

    with pytest.raises(Interrupted, match="here the test goes on"):
        run_line(path, reached)


def run_alone(path: Path, folder: Path) -> Path:
    """What one process leaves of a line's configuration; returns its run folder."""
    from pipeal.cli import entry, text, vision

    line = read_line(path)
    config = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(document.dump(line.config))
    command = vision.command if line.kind == "vision" else text.command
    name = line.config["model"]["name"]
    assert line.kind in KINDS
    arguments = [line.config["dataset"], name, f"--config={config}", "--devices=cpu", f"--out={folder / 'runs'}"]
    arguments.append("--set=engine.sizes=null")  # those of a line's stages
    with pytest.raises(SystemExit) as end:
        entry.run(command, arguments)
    assert not end.value.code
    (found,) = (folder / "runs").iterdir()
    return found


def learned_twice(monkeypatch: Any) -> Counter[tuple[str, int]]:
    """Counts how often each batch was learnt from, by the number of the stage and the batch."""
    counts: Counter[tuple[str, int]] = Counter()
    learn = StageWorker._learn

    def counted(worker: StageWorker, item: Item) -> None:
        learn(worker, item)
        counts[threading.current_thread().name, item.facts["batch"]] += 1

    monkeypatch.setattr(StageWorker, "_learn", counted)
    return counts
