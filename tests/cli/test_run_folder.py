"""Which folder a command works in, and who else may."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeal.config import TextConfig
from pipeal.config.text import TextDataConfig
from pipeal.core.errors import ConfigError, DataError, Interrupted
from pipeal.core.lock import FileLock
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.page import runs_in
from pipeal.run.experiment import _begin
from pipeal.run.find_run import find_run, new_run
from pipeal.training.checkpoint.store import CheckpointStore


def asked(out: Path) -> TextConfig:
    return TextConfig(dataset="toynews", out=str(out))


def status(path: Path) -> str:
    return json.loads((path / "status.json").read_text())["status"]


def unfinished(config: TextConfig) -> Path:
    run = new_run(config)

    def work() -> None:
        with run:
            run.begin()
            raise Interrupted("someone asked", 130)

    with pytest.raises(Interrupted):
        work()
    return run.path


def test_an_unfinished_run_of_the_same_command_is_found_and_a_finished_one_is_not(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    assert status(path) == "interrupted"
    again = find_run(config, "auto")
    assert again is not None
    with again:
        assert (again.path, again.resumed) == (path, True)
        again.begin()
        assert status(path) == "running"
    assert status(path) == "finished"
    assert find_run(config, "auto") is None
    with new_run(config) as other:
        assert other.path.name == "toynews-transformer-al-002"


def test_another_command_or_never_begins_anew(tmp_path: Path) -> None:
    config = asked(tmp_path)
    unfinished(config)
    assert find_run(config, "never") is None
    assert find_run(replace(config, train=replace(config.train, seed=1)), "auto") is None


@pytest.mark.parametrize(("mode", "found"), [("bp", True), ("al", False), ("compare", False)])
def test_a_run_of_one_layer_is_found_by_any_number_of_processes(mode: Any, found: bool, tmp_path: Path) -> None:
    """Symptom: after "the same command goes on from there" a run by backpropagation began again under a torchrun of
    another number of processes, and in one: their number was in what it was found by."""

    def on(processes: int) -> TextConfig:
        config = asked(tmp_path)
        engine = replace(config.engine, replicas=processes)
        return replace(config, engine=engine, train=replace(config.train, mode=mode))

    path = unfinished(on(2))
    for processes in (1, 3):
        again = find_run(on(processes), "auto")
        assert (again is not None) == found
        if again is not None:
            with again:
                assert again.path == path
                assert again.asked.engine.replicas == 2, "choices are made again for as many as there are now"
    more = on(3)
    assert find_run(replace(more, train=replace(more.train, seed=1)), "auto") is None


@pytest.mark.slow
def test_a_run_that_was_killed_is_found_though_its_status_says_running(tmp_path: Path) -> None:
    config = asked(tmp_path)
    code = (
        "import os, signal; from pipeal.run.find_run import new_run; from pipeal.config import TextConfig\n"
        f"run = new_run(TextConfig(dataset='toynews', out={str(tmp_path)!r})); run.begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert status(tmp_path / "toynews-transformer-al-001") == "running"
    found = find_run(config, "auto")
    assert found is not None
    with found:
        pass


@pytest.mark.slow
def test_a_run_that_another_process_works_at_is_left_alone(tmp_path: Path, said: list[str]) -> None:
    config = asked(tmp_path)
    code = (
        "from pipeal.run.find_run import new_run; from pipeal.config import TextConfig\n"
        f"run = new_run(TextConfig(dataset='toynews', out={str(tmp_path)!r})); run.begin()\n"
        "print('ready', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        assert find_run(config, "auto") is None
        assert said == [f"{tmp_path / 'toynews-transformer-al-001'} is left alone: another process works at this run"]
        with pytest.raises(ConfigError, match="another process works at this run"):
            find_run(config, str(tmp_path / "toynews-transformer-al-001"))
        other.communicate(b"\n")


@pytest.mark.slow
def test_a_process_that_was_forked_from_a_killed_run_does_not_hold_it(tmp_path: Path) -> None:
    """A loader's workers live some seconds longer than a run that was killed, and inherited its lock."""
    config = asked(tmp_path)
    code = (
        "import os, signal, sys; from pipeal.run.find_run import new_run; from pipeal.config import TextConfig\n"
        f"run = new_run(TextConfig(dataset='toynews', out={str(tmp_path)!r})); run.begin()\n"
        "if os.fork() == 0: print('ready', flush=True); sys.stdin.readline(); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        other.wait()
        found = find_run(config, "auto")
        assert found is not None
        with found:
            pass
        other.stdin.close()  # type: ignore[union-attr]


def test_a_mistake_before_the_run_began_leaves_its_status(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    with pytest.raises(ConfigError), find_run(config, "auto"):  # type: ignore[union-attr]
        raise ConfigError("no such device")
    assert status(path) == "interrupted"


def test_a_named_run_may_be_executed_otherwise_but_not_be_another(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    elsewhere = replace(
        config,
        engine=replace(config.engine, schedule="al-fm", devices=("cpu", "cpu")),
        train=replace(config.train, epochs=99),
    )
    with find_run(elsewhere, str(path)) as run:  # type: ignore[union-attr]
        assert run.asked == config
    other = replace(config, data=replace(config.data, vocab_size=99))
    with pytest.raises(ConfigError, match=r"its run has data.vocab_size 30000, this command 99; .*--resume never"):
        find_run(other, str(path))
    # Of how it is executed, what decides the weights.
    rounded = replace(config, engine=replace(config.engine, packet="int8"))
    with pytest.raises(ConfigError, match=r"its run has engine.packet as_is, this command int8; .*--resume never"):
        find_run(rounded, str(path))
    with pytest.raises(ConfigError, match="no run there; expected the folder of a run or checkpoint"):
        find_run(config, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["", "nonsense: [", "train: {epochs: many}"])
def test_a_damaged_record_of_what_was_asked_is_no_run_to_go_on_with(tmp_path: Path, text: str, said: list[str]) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    (path / "asked.yaml").write_text(text)
    assert find_run(config, "auto") is None
    assert len(said) == 1
    assert said[0].startswith(f"{path} is left alone: ")


def test_a_record_that_was_cut_is_not_blamed_on_the_command(tmp_path: Path, said: list[str]) -> None:
    """Symptom: the command was told to give what was missing there."""
    config = replace(asked(tmp_path), data=replace(TextConfig().data, vocab_size=99))
    path = unfinished(config)
    (path / "asked.yaml").write_text("dataset: toynews\n")
    with pytest.raises(ConfigError, match=r"asked.yaml is cut off: its last key, out, is missing; put it back"):
        find_run(config, str(path))
    assert find_run(config, "auto") is None
    assert "asked.yaml is cut off" in said[0]


def test_an_unfinished_run_that_cannot_be_found_any_more_is_named(tmp_path: Path, said: list[str]) -> None:
    """The same command began anew beside it, without a word."""
    config = asked(tmp_path)
    path = unfinished(config)
    (path / "asked.yaml").unlink()
    (path / "checkpoints").mkdir()
    assert find_run(config, "auto") is None
    assert said == [f"{path} is left alone: it has no asked.yaml, which says what its run was asked for"]
    (path / "status.json").write_text('{"status": "finished"}')
    assert find_run(config, "auto") is None
    assert len(said) == 1


@pytest.mark.parametrize("name", ["", "a\0b", "a" * 5_000])
def test_what_can_be_no_folder_is_a_mistake_of_the_user(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        find_run(asked(tmp_path), name)


@pytest.mark.parametrize("end", [SystemExit(143), KeyboardInterrupt()])
def test_a_run_that_was_ended_at_once_says_so_in_words(tmp_path: Path, end: BaseException) -> None:
    """Its message was 143."""
    run = new_run(asked(tmp_path))
    run.way_back = "--resume RUN"

    def work() -> None:
        with run:
            run.begin()
            raise end

    with pytest.raises(type(end)):
        work()
    told = json.loads((run.path / "status.json").read_text())
    assert told["status"] == "interrupted"
    assert told["message"] == "ended at once; --resume RUN goes on from the last checkpoint"


def test_what_a_killed_process_left_without_a_run_in_it_troubles_nobody(tmp_path: Path) -> None:
    """A kill between the folder and what was asked left a folder that every later command met."""
    config = asked(tmp_path)
    (tmp_path / "toynews-transformer-al-001").mkdir()
    (tmp_path / "toynews-transformer-al-002").mkdir()
    (tmp_path / "toynews-transformer-al-002" / "run.lock").touch()
    (tmp_path / "toynews-transformer-al-003").touch()
    (tmp_path / ".toynews-transformer-al.0.aside").mkdir()
    (tmp_path / ".toynews-transformer-al.0.aside" / "asked.yaml").touch()
    assert find_run(config, "auto") is None
    names = []
    for _ in range(2):
        with new_run(config) as run:
            names.append(run.path.name)
    assert names == ["toynews-transformer-al-001", "toynews-transformer-al-004"]
    assert [path.name for path in runs_in(tmp_path)] == names


def test_a_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match=r"--out .*: No space left on device; choose another"):
            new_run(asked(tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []
    with new_run(asked(tmp_path / "runs")):
        pass


def test_the_thousandth_run_is_newer_than_the_one_before(tmp_path: Path) -> None:
    config = asked(tmp_path)
    first = unfinished(config)
    for number in (999, 1000):
        shutil.copytree(first, tmp_path / f"toynews-transformer-al-{number}")
    with find_run(config, "auto") as run:  # type: ignore[union-attr]
        assert run.path.name == "toynews-transformer-al-1000"


def test_a_run_taken_up_keeps_when_it_began_and_counts_how_often(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    told = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**told, "started": "2026-01-01T00:00:00+00:00", "epoch": 3}))
    for number in (1, 2):
        with pytest.raises(Interrupted), find_run(config, "auto") as run:  # type: ignore[union-attr]  # noqa: PT012
            run.begin()
            found = json.loads((path / "status.json").read_text())
            assert (found["epoch"], found["resumes"], found["started"]) == (3, number, "2026-01-01T00:00:00+00:00")
            raise Interrupted("someone asked", 130)
    for nonsense in ("", "[", "[1]", '{"epoch": "x", "resumes": -3, "started": null}'):
        (path / "status.json").write_text(nonsense)
        with pytest.raises(Interrupted), find_run(config, "auto") as run:  # type: ignore[union-attr]  # noqa: PT012
            run.begin()
            found = json.loads((path / "status.json").read_text())
            assert (found["epoch"], found["resumes"]) == (0, 1)
            raise Interrupted("someone asked", 130)


def test_a_named_run_that_goes_on_otherwise_is_found_by_what_it_was_asked_last(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    longer = replace(config, train=replace(config.train, epochs=99))
    assert find_run(longer, "auto") is None
    with pytest.raises(Interrupted), find_run(longer, str(path)) as run:  # type: ignore[union-attr]  # noqa: PT012
        run.begin()
        run.keep_asked()
        raise Interrupted("someone asked", 130)
    assert find_run(config, "auto") is None
    with find_run(longer, "auto") as run:  # type: ignore[union-attr]
        assert run.path == path


def test_where_runs_lie_may_be_spelled_otherwise(tmp_path: Path) -> None:
    path = unfinished(asked(tmp_path))
    with find_run(asked(tmp_path / "." / ".." / tmp_path.name), "auto") as run:  # type: ignore[union-attr]
        assert run.path.resolve() == path.resolve()


def test_what_was_half_written_at_a_kill_is_gone_when_the_run_goes_on(tmp_path: Path) -> None:
    path = unfinished(asked(tmp_path))
    (path / "al").mkdir()
    for left in (path / ".status.json.0.aside", path / "al" / ".epochs.csv.0.aside"):
        left.touch()
    with find_run(asked(tmp_path), "auto") as run:  # type: ignore[union-attr]
        run.begin()
        assert not list(path.rglob("*.aside"))


def save(path: Path, *steps: int) -> list[Path]:
    with CheckpointStore(path / "checkpoints", keep=9) as store:
        return [store.save(step, {0: {"w": step}}, {}, {}) for step in steps]


def taken(config: TextConfig, named: Path, *, until: str = "interrupted") -> tuple[Path | None, Path | None]:
    """What a command that names a checkpoint goes on from, and which it passes; it ends as ``until`` says."""
    run = find_run(config, str(named))
    assert run is not None
    with run:
        run.begin()
        run.tell("finished" if until == "finished" else "interrupted")
    return run.checkpoint, run.passed


def test_a_command_that_names_a_checkpoint_goes_back_to_it_once(tmp_path: Path) -> None:
    """At every re-queue by a batch system it went back again, or found that the checkpoint was rotated away."""
    config = asked(tmp_path)
    path = unfinished(config)
    first, second, _ = save(path, 1, 2, 3)
    assert taken(config, first) == (first, None)
    assert taken(config, first) == (first, None), "nothing was saved since"
    save(path, 1)  # as the run does when it is there again
    assert taken(config, first) == (None, first)
    save(path, 2)
    shutil.rmtree(first)
    assert taken(config, first) == (None, first), "rotated away by what it has trained since"
    assert taken(config, second) == (second, None), "another one"
    link = tmp_path / "link"
    link.symlink_to(second)
    save(path, 3)
    assert taken(config, link) == (None, second), "by another name"
    assert taken(config, second, until="finished") == (None, second)
    assert taken(config, second) == (second, None), "the run had come to its end"


def test_other_runs_than_those_told_to_go_back_know_nothing_of_it(tmp_path: Path) -> None:
    config = asked(tmp_path)
    path = unfinished(config)
    (only,) = save(path, 1)
    told = json.loads((path / "status.json").read_text())
    assert told["back"] is None
    for nonsense in (3, [], {"to": 3}, {"to": "checkpoints/step-000000001", "newest": "x"}):
        (path / "status.json").write_text(json.dumps({**told, "back": nonsense}))
        with find_run(config, str(path)) as run:  # type: ignore[union-attr]
            assert (run.checkpoint, run.passed) == (None, None)
        assert taken(config, only) in ((only, None), (None, only))


def test_a_named_checkpoint_that_is_damaged_is_told_before_anything_is_done(tmp_path: Path) -> None:
    """A layer's file that was cut made a finished run a failed one: only the manifest was looked at before."""
    config = asked(tmp_path)
    path = unfinished(config)
    (named,) = save(path, 1)
    taken(config, path, until="finished")
    before = (path / "status.json").read_bytes()
    file = named / "layer-000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"layer-000.safetensors is truncated"):
        find_run(config, str(named))
    assert (path / "status.json").read_bytes() == before
    with find_run(config, str(path)):  # type: ignore[union-attr]
        pass  # nobody holds it


def test_a_folder_that_a_kill_left_in_the_making_is_removed_by_a_later_run(tmp_path: Path) -> None:
    config = asked(tmp_path)
    left, fresh, held = (tmp_path / f".toynews-transformer-al.{name}.aside" for name in ("left", "fresh", "held"))
    locks = []
    for folder in (left, fresh, held):
        folder.mkdir()
        locks.append(FileLock.take(folder / "run.lock"))
    for lock in locks[:2]:
        lock.release()  # type: ignore[union-attr]
    for folder in (left, held):
        for path in (folder / "run.lock", folder):
            os.utime(path, (time.time() - 3600,) * 2)
    with new_run(config) as run:
        assert {folder for folder in (left, fresh, held) if folder.exists()} == {fresh, held}
        assert run.path.is_dir()
    locks[2].release()  # type: ignore[union-attr]


def test_a_folder_for_all_runs_with_too_long_a_name_is_one_line(tmp_path: Path) -> None:
    """Found by the fuzzer: a traceback."""
    with pytest.raises(ConfigError, match=r"--out .*: File name too long; choose another"):
        find_run(asked(tmp_path / ("a" * 5000)), "auto")


def test_a_run_that_ends_as_it_begins_has_told_its_choices(tmp_path: Path) -> None:
    """Symptom: ended after its config.yaml, it went on by that, and its placement.txt never came."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space left")

    weights = SimpleNamespace(model=SimpleNamespace(weights=None))
    folder = SimpleNamespace(path=tmp_path, begin=lambda: None, asked=weights, keep_asked=full)
    run: Any = SimpleNamespace(folder=folder, attempts=Attempts())
    with pytest.raises(OSError, match="no space left"):
        _begin(run, [], ["AL on cpu: 4 layers"])
    assert (tmp_path / "placement.txt").read_text() == "AL on cpu: 4 layers\n"


def test_a_run_of_a_file_has_its_name_and_one_of_an_earlier_version_is_found(tmp_path: Path) -> None:
    """Symptom: pages named ``runs/reviews-…``, but runs of all files were called ``file-…``."""
    data = TextDataConfig(file="my/Old reviews.csv.gz")
    config = TextConfig(dataset="file", data=data, out=str(tmp_path))
    path = unfinished(config)
    assert path.name == "Old_reviews-transformer-al-001"
    for name in (path.name, "file-transformer-al-007"):
        path = path.rename(tmp_path / name)
        found = find_run(config, "auto")
        assert found is not None
        assert found.path == path
        found.release()
