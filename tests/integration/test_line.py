"""A line as users run it: a process for each stage, ended by signals and by ``kill -9``, and taken up again."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pipeal.line.line_file import read_line
from pipeal.line.status import STATUS_FILE
from tests.integration.processes import Started, started, started_fork, until
from tests.integration.test_resume import assert_same
from tests.line.lines import new_line, place_of, run_alone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cheap_runs", "one_thread")]

HELD = """
import os
from pathlib import Path
from time import sleep
from pipeal.line.stage_run import StageRun

gate, every, inner = Path(os.environ["PIPEAL_TEST_GATE"]), int(os.environ["PIPEAL_TEST_EVERY"]), StageRun._next
def held(run, items):
    if run._feed is not None and run._feed.position.batches >= every * (1 + gate.stat().st_size):
        sleep(0.01)
        return None
    found = inner(run, items)
    while found is None and run._worker is not None and run._worker.gathers:
        found = inner(run, items)
    return found
StageRun._next = held
from pipeal.cli.main import main
main()
"""
"""As ``pipeal``, but the first stage sends so many batches and waits then, until a file has grown by a byte for as many
more: no line is at its end before it was killed, however late the test wakes up. And the other batches of an
update are waited for, since they may be as late."""

COMMAND = ("-c", HELD, "line", "run")
TEXT = (
    "model.embedding_dim=12", "model.n_heads=2", "model.x_hid=8", "model.y_hid=8", "data.batching.budget_tokens=512",
    "train.precision=fp32", "engine.threads=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """What is started from a shell's background job would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stages:
    """The processes of a line.

    Args:
        path: Of the line's file.
        stack: Ends them, whatever happens.
        every: How many batches the first stage sends until :meth:`go_on` is called, and after each call.
        programs: Whether they are programs, and not forks.
    """

    def __init__(self, path: Path, stack: ExitStack, every: int, programs: bool) -> None:
        self.path = path
        self._programs = programs
        self._gate = path.parent / "gate"
        self._gate.touch()
        self._every = every
        self.count = len(read_line(path).stages)
        self.lives = [0] * self.count
        self._stack = stack
        self._running: dict[int, Started] = {}

    def start(self, stage: int) -> None:
        self.lives[stage] += 1
        log = self.path.parent / f"said-{stage}-{self.lives[stage]}.txt"
        command = [*COMMAND, str(self.path), "--stage", str(stage)]
        held = {"PIPEAL_TEST_GATE": str(self._gate), "PIPEAL_TEST_EVERY": str(self._every)}
        if self._programs:
            begun = started([sys.executable, *command], log, **held)
        else:
            begun = started_fork(command, log, **held)
        self._running[stage] = self._stack.enter_context(begun)

    def go_on(self, times: int = 1) -> None:
        """Lets the first stage send more."""
        with self._gate.open("ab") as gate:
            gate.write(bytes(times))

    def snapshot(self, stage: int) -> int:
        """How many items the newest snapshot of a stage covers; -1 without one."""
        folder = place_of(self.path, stage).folder / "snapshots"
        numbers = [-1]
        with suppress(OSError):
            numbers += [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
        return max(numbers)

    def has_begun(self, stage: int) -> bool:
        """Whether this life of a stage works: its process has written how it stands."""
        path = place_of(self.path, stage).folder / STATUS_FILE
        with suppress(OSError, ValueError):
            own = json.loads(path.read_text())["stages"][str(stage)]
            return bool(own["items"])
        return False

    def signal(self, stage: int, number: signal.Signals, code: int) -> str:
        """Sends a signal, lets the line go on, waits for the end, and looks at the exit code; what was said."""
        run = self._running.pop(stage)
        os.kill(run.process.pid, number)
        self.go_on()
        assert run.end() == code, run.said()
        return run.said()

    def kill(self, *stages: int) -> None:
        """Of several at once none lives to see another one's end."""
        assert self.killed(*stages) == [-signal.SIGKILL] * len(stages)

    def killed(self, *stages: int) -> list[int]:
        """As :meth:`kill`; the exit codes, which are others where a stage was done by then."""
        runs = [self._running.pop(stage) for stage in stages]
        for run in runs:
            os.kill(run.process.pid, signal.SIGKILL)
        return [run.end() for run in runs]

    def await_snapshots(self, stages: Sequence[int]) -> None:
        """Waits until each of them has saved since now; the line goes on so far."""
        before = {stage: self.snapshot(stage) for stage in stages}
        assert all(map(self.lives_on, stages)), "the line must not come to its end before"
        self.go_on()
        until(lambda: all(self.snapshot(stage) > before[stage] for stage in stages))

    def lives_on(self, stage: int) -> bool:
        return self._running[stage].process.poll() is None

    def end(self) -> None:
        """Waits for all of them, and expects that they have done all."""
        for stage, run in sorted(self._running.items()):
            assert run.end() == 0, (stage, run.said())


@contextmanager
def stages_of(path: Path, every: int = 10**9, *, programs: bool = False) -> Iterator[Stages]:
    with ExitStack() as stack:
        yield Stages(path, stack, every, programs)


def test_six_times_kill_9_and_stages_that_start_in_any_order(tmp_path: Path) -> None:
    draw = random.Random(27)
    line = new_line(tmp_path, "toynews", "transformer", 3, *TEXT, "train.epochs=4", snapshot_s=0.05, retain_mib=0.2)
    kills = 0
    with stages_of(line, every=130) as stages:  # of 1112
        order = [2, 0, 1]
        draw.shuffle(order)
        for stage in order:
            stages.start(stage)
        # At the very beginning: before its first snapshot, or just after it.
        until(lambda: stages.has_begun(1))
        stages.kill(1)
        kills += 1
        stages.start(1)
        while kills < 6:
            victims = [draw.randrange(3)]
            if draw.random() < 0.5:
                victims = [0, 1] if draw.random() < 0.5 else [1, 2]
            stages.await_snapshots(victims)
            stages.kill(*victims)
            kills += len(victims)
            for stage in reversed(victims):
                stages.start(stage)
        stages.go_on(9)
        stages.end()
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_ctrl_c_and_sigterm_and_a_kill_at_the_very_end(tmp_path: Path) -> None:
    line = new_line(tmp_path, "toynews", "lstm", 2, *TEXT, "train.epochs=1", "train.accumulate=2", snapshot_s=1000.0)
    with stages_of(line, every=100, programs=True) as stages:  # of 278
        stages.start(0)
        until(lambda: stages.has_begun(0))
        words = stages.signal(0, signal.SIGINT, 130)
        assert "Traceback" not in words
        stages.start(1)
        stages.start(0)
        until(lambda: stages.has_begun(1))
        words = stages.signal(1, signal.SIGTERM, 143)
        assert "Traceback" not in words
        assert stages.snapshot(1) > 0, "the batches of the update under way are done, and then it is saved"
        stages.start(1)
        until(lambda: (tmp_path / "run" / "checkpoints").exists())
        (code,) = stages.killed(1)
        assert code in (-signal.SIGKILL, 0)
        if code:  # else it was done before it was hit
            stages.start(1)
        stages.end()
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_line_that_was_done_is_done_again_at_once(tmp_path: Path) -> None:
    """A supervisor that starts a stage once more although it ended well."""
    line = new_line(tmp_path, "toynews", "lstm", 2, *TEXT, "train.epochs=1")
    for _ in range(2):
        with stages_of(line) as stages:
            stages.start(1)
            stages.start(0)
            stages.end()
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))
