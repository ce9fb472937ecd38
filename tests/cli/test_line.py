"""The commands of a line as a user meets them: what is made, one line for each mistake, and how a line is stopped."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeal.cli import runs, text
from pipeal.cli.line import command
from pipeal.config import document
from pipeal.core.errors import DataError, Interrupted, LineError
from pipeal.core.lock import FileLock
from pipeal.line import commands
from pipeal.line.beginning import end_of_epoch
from pipeal.line.feed import Feed
from pipeal.line.incoming import Incoming
from pipeal.line.items import Item
from pipeal.line.line_file import key_path, keys_of, read_line
from pipeal.line.stage_run import StageRun
from pipeal.line.worker import StageWorker
from pipeal.run.stopping import StopRequest
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from tests.cli.running import run_command, told_one_line
from tests.integration.test_resume import assert_same
from tests.line.lines import Killed, built_in_turn, place_of, run_alone, run_line
from tests.line.test_line_exactness import text_line

pytestmark = [pytest.mark.usefixtures("one_thread", "built_in_turn")]

__all__ = ["built_in_turn"]


def ran(line: Path, stage: int, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    return run_command(command, capsys, "run", str(line), "--stage", str(stage), *options)


def test_a_line_is_made_and_says_what_goes_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "line"
    code, out, err = run_command(
        command, capsys, "init", "--dataset=toynews", "--model=lstm", "--stage=a:4001", "--stage=b:4002", "--epochs=3",
        "--method=greedy", f"--out={folder}",
    )  # fmt: skip
    assert code == 0, err
    line = read_line(folder / "line.yaml")
    assert (line.kind, line.config["train"]["epochs"], line.config["train"]["mode"]) == ("text", 3, "greedy")
    assert (
        f"stage 2: {folder / 'line.yaml'} and {folder / 'stage-2.key'} to its machine, which listens at b:4002" in out
    )
    assert sorted(path.name for path in folder.iterdir()) == ["line.yaml", "stage-0.key", "stage-1.key", "stage-2.key"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method=bp"], "train.mode: found bp; expected a method of"),
        (["--method=compare"], "train.mode: found compare; expected a method of"),
        (["--set=train.repeat=2"], "train.repeat: found 2, which a line does not do"),
        (["--set=engine.replicas=2"], "engine.replicas: found 2, which a line does not do"),
        (["--set=train.on_non_finite=stop-and-rewind"], "no stage of a line goes back for another"),
        (["--stage=a"], "found 'a', expected HOST:PORT"),
        (["--model="], "unknown model ''"),
        (["--out="], "'--out': found '', expected the name of a file or folder"),
        (["--resume="], "'--resume': found '', expected the name of a file or folder"),
        (["--model=charlm", "--dataset=shakespeare", "--preset=cpu", "--config=x.yaml"], "give one"),
        (["--model=nosuch"], "unknown model 'nosuch'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_line_cannot_do_is_refused_and_nothing_is_written(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "line"
    given = ["init", "--dataset=toynews", "--model=lstm", "--stage=a:4001", f"--out={folder}", *options]
    told_one_line(told, *run_command(command, capsys, *given))
    assert not folder.exists()


def test_more_stages_than_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 9)
    told_one_line(r"the line has 9 stages, the model \d layers; make a line of at most", *ran(line, 0, capsys))


def test_an_unknown_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 2)
    told_one_line("--stage: found 2, but the line has the stages 0 to 1", *ran(line, 2, capsys))


def test_an_unknown_kind_of_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 2, kind="sound")
    told_one_line(r"line\.yaml: kind: found 'sound', expected one of ", *ran(line, 0, capsys))


def test_a_line_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told_one_line(
        r"line\.yaml: cannot be read: .*; pipeal line init makes one", *ran(tmp_path / "line.yaml", 0, capsys)
    )


def test_a_key_of_another_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 3)
    key = f"--key={key_path(tmp_path, 0)}"
    told_one_line("it is not the key of stage 1 of this line", *ran(line, 1, capsys, key))


def test_what_needs_no_data_is_told_before_any_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 2)
    shutil.rmtree(tmp_path / "data")
    values = document.parse(line.read_text(encoding="utf-8"), source=str(line))
    line.write_text(json.dumps({**values, "resume": str(tmp_path / "nowhere")}), encoding="utf-8")
    told_one_line("nowhere: ", *ran(line, 0, capsys))
    told_one_line("it is not the key of stage 0 of this line", *ran(line, 0, capsys, f"--key={key_path(tmp_path, 1)}"))


def test_the_same_stage_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 2)
    folder = place_of(line, 1).folder
    folder.mkdir()
    lock = FileLock.take(folder / ".lock")
    assert lock is not None
    try:
        told_one_line("another process runs this stage; end it, or name another --folder", *ran(line, 1, capsys))
    finally:
        lock.release()


def test_a_port_in_use_however_often_stops_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the second try, while the process before was still ending, the whole line was stopped."""
    line = text_line(tmp_path, "lstm", 2)
    found, place = read_line(line), place_of(line, 1)
    address = found.stages[1].address
    assert address is not None
    other = Incoming(1, address, keys_of(found, place.key, 1, 0), found.line, 0, largest_bytes=1, room_bytes=1)
    try:
        for _ in range(3):
            told_one_line("the port is in use; end what listens there", *ran(line, 1, capsys))
    finally:
        other.close(0)
    assert not (place.folder / "failure.json").exists()


def trained(tmp_path: Path) -> Path:
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1")
    run_line(line)
    return line


def test_snapshots_of_another_stage_or_line_and_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = trained(tmp_path)
    folders = [place_of(line, stage).folder for stage in (0, 1)]
    other = f"--folder={folders[0]}"
    told_one_line(
        "is of stage 0 of the line .*, not of stage 1 of .*; name another --folder", *ran(line, 1, capsys, other)
    )
    content = document.parse(line.read_text(), source="")
    line.write_text(document.dump({**content, "line": "another"}))
    told_one_line("is of stage 1 of the line .*, not of stage 1 of another; name another", *ran(line, 1, capsys))
    line.write_text(document.dump(content))
    rows = tmp_path / "data" / "ag_news_csv" / "train.csv"
    rows.write_text(rows.read_text() + '"1","more","more words than before"\n')
    assert ran(line, 0, capsys)[0] == 0, "it has done its part, and reads no data"
    (folders[0] / "parting-1").unlink()
    told_one_line(r"the data has .* but had .* when the line began; put the data back", *ran(line, 0, capsys))
    assert not list(tmp_path.glob("stage-*/failure.json"))


def test_how_a_line_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = trained(tmp_path)
    code, out, _ = run_command(command, capsys, "status", str(place_of(line, 1).folder))
    assert code == 0
    assert "the line" in out
    batches = re.findall(r"\| finished +\| (\d+) of (\d+) ", out)
    assert len(batches) == 2, "the first one was said to be at work for ever"
    assert {*batches[0], *batches[1]} == {batches[0][1]}
    told_one_line("name the folder of a stage", *run_command(command, capsys, "status", str(tmp_path / "nowhere")))


def test_how_a_line_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: all stages ended without a word of what had come of it, or where it was; and folders of stages were
    listed beside the run."""
    limits: list[Any] = []
    monkeypatch.setattr("resource.setrlimit", lambda *limit: limits.append(limit))
    line = trained(tmp_path)
    run = tmp_path / "run"
    (row,) = (json.loads(text) for text in (run / "epochs.jsonl").read_text().splitlines())
    told = f"test {row['test_acc']:.4f}"
    assert re.search(rf"^AL  epoch 1/1  train \d.*  {told}  ", capsys.readouterr().err, re.MULTILINE)
    code, out, _ = ran(line, 1, capsys)
    assert code == 0
    test = f"{row['test_acc']:.4f}"
    assert f"agnews lstm, AL, 1/1 epochs: test accuracy {test}, at best held-out {test}\n" in out
    assert f"files:    {run}\n" in out
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits == [(resource.RLIMIT_NOFILE, (most, most))], "who connects in vain takes a file each"
    code, out, _ = ran(line, 0, capsys)
    assert (code, out) == (
        0, f"stage 0 has done its part; the run lies with stage 1, at {read_line(line).stages[1].address}\n",
    )  # fmt: skip
    _, out, _ = run_command(runs.command, capsys, str(tmp_path))
    assert out.startswith(f"1 run in {tmp_path}\n")
    run.rename(tmp_path / "moved")
    assert ran(line, 1, capsys)[:2] == (0, "")
    run.mkdir()
    assert ran(line, 1, capsys)[:2] == (0, ""), "it has done its part, whatever lies there: this was exit code 2"


def test_one_process_goes_on_with_the_run_of_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: it was refused, for a learning rate and a precision that nobody had asked for. Cause: what the line had
    chosen was kept as what was asked for."""
    line = trained(tmp_path)
    config, out = read_line(line).config, tmp_path / "run"
    assert config["train"]["lr"]["base"] is None
    asked = tmp_path / "asked.yaml"
    asked.write_text(document.dump(config))
    given = ["agnews", "lstm", f"--config={asked}", "--devices=cpu", "--epochs=2", f"--resume={out}"]
    code, _, err = run_command(text.command, capsys, *given, "--set=engine.sizes=null")
    assert code == 0, err
    assert "AL goes on after epoch 1" in err
    rows = (out / "epochs.jsonl").read_text()
    assert len(rows.splitlines()) == 2
    assert ran(line, 1, capsys)[0] == 0
    assert (out / "epochs.jsonl").read_text() == rows, "the last stage, started again, took the later epochs away"


TOLD_LONGER = r"stages: their number is 3 in the line's file, but was 2 when the line began, and stays so; put it back"


def test_a_configuration_that_was_edited_when_the_line_had_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: it was left aside without a word; with a stage less, the last layers were never trained, and both ended
    with 0."""
    line = trained(tmp_path)
    content = document.parse(line.read_text(), source="")
    config = content["config"]
    edited = {**content, "config": {**config, "train": {**config["train"], "epochs": 5}}}
    told = (
        r"config: train\.epochs is 5 in the line's file, but was 1 when the line began, and stays so; put it back, or"
    )
    line.write_text(document.dump(edited))
    told_one_line(told, *ran(line, 0, capsys))
    never = {**content, "checkpoint_epochs": None}
    line.write_text(document.dump(never))
    told_never = (
        r"checkpoint_epochs: it is null in the line's file, but was 1 when the line began, and stays so; put it back"
    )
    told_one_line(told_never, *ran(line, 0, capsys))
    line.write_text(document.dump({**content, "resume": "elsewhere"}))
    told_one_line(r'resume: it is "elsewhere" in the line.s file, but was null when', *ran(line, 0, capsys))
    longer = {**content, "stages": [*content["stages"], content["stages"][1]]}
    line.write_text(document.dump(longer))
    for stage in (0, 1):
        told_one_line(TOLD_LONGER, *ran(line, stage, capsys))
    assert not list(tmp_path.glob("stage-*/failure.json"))
    moved = shutil.copytree(tmp_path / "data", tmp_path / "elsewhere")
    line.write_text(document.dump({**content, "config": {**config, "data": {**config["data"], "root": str(moved)}}}))
    assert ran(line, 0, capsys)[0] == 0, "data may lie elsewhere"
    shutil.rmtree(place_of(line, 0).folder / "snapshots")  # it dies before its first one
    line.write_text(document.dump(edited))
    told_one_line(told, *ran(line, 0, capsys))
    line.write_text(document.dump(never))
    told_one_line(told_never, *ran(line, 0, capsys))
    line.write_text(document.dump(longer))
    told_one_line(TOLD_LONGER, *ran(line, 0, capsys))


def test_a_stage_whose_file_was_edited_before_it_began_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: it counted as a mistake at the first item, for which the whole line has to be started with --again."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1")
    longer = tmp_path / "longer.yaml"
    content = document.parse(line.read_text(), source="")
    longer.write_text(document.dump({**content, "stages": [*content["stages"], content["stages"][1]]}))
    first = threading.Thread(target=supervised, args=(line, 1), kwargs={"stages": [0]}, daemon=True)
    first.start()
    told_one_line(TOLD_LONGER, *ran(longer, 1, capsys))
    assert supervised(line, 1, stages=[1]) == [[]]
    first.join(600)
    assert not first.is_alive()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("a file", "cannot be made: File exists; name another folder by --run"),
        ("another run", "holds another run; name another folder by --run"),
        ("a process", "another process works at this run"),
        ("a name that is too long", "cannot be made: File name too long; name another folder by --run"),
    ],
)
def test_a_last_stage_that_cannot_have_its_runs_folder_stops_no_other(
    found: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: it was told minutes later, when the first item came, for which the whole line had to be started with
    --again; of a file in the way another --out was to be chosen, which the command does not have."""
    line = text_line(tmp_path, "lstm", 2)
    place = tmp_path / ("e" * 300 if found == "a name that is too long" else "elsewhere")
    if found == "a file":
        place.touch()
    elif found != "a name that is too long":
        place.mkdir()
    if found == "another run":
        (place / "config.yaml").touch()
    lock = FileLock.take(place / "run.lock") if found == "a process" else None
    told_one_line(told, *ran(line, 1, capsys, f"--run={place}"))  # though the stage before has not come
    assert not (place_of(line, 1).folder / "failure.json").exists()
    if lock is not None:
        lock.release()


def supervised(
    line: Path, attempts: int, stages: Sequence[int] | None = None, **options: Any
) -> list[list[BaseException]]:
    """Runs stages, all if none are named, by their command, each again when it fails; what each failed with."""
    stages = range(len(read_line(line).stages)) if stages is None else stages
    failures: dict[int, list[BaseException]] = {stage: [] for stage in stages}

    def live(stage: int) -> None:
        while len(failures[stage]) < attempts:
            try:
                given: dict[str, Any] = {"key": None, "folder": None, "run_folder": None, "again": False, **options}
                commands.run(file=str(line), stage=stage, **given)
                return
            except LineError as error:
                failures[stage].append(error)
                return
            except BaseException as error:  # noqa: BLE001  what the test looks at
                failures[stage].append(error)

    threads = [threading.Thread(target=live, args=(stage,), daemon=True) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    return list(failures.values())


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_that_comes_twice_at_the_same_item_stops_the_line_until_it_is_mended(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that stops was said before there was a connection, and never arrived; and by it the stage before was
    told that all this one had seen was saved."""
    line = text_line(
        tmp_path, "transformer", 3, "train.epochs=1", "engine.sizes=[1,1,2]", snapshot_s=0.05, retain_mib=0.002
    )
    learn, layer = StageWorker._learn, [0, 1, 2][stage]

    def failing(worker: StageWorker, item: Item) -> None:
        if item.facts["batch"] == 7 and worker._stage.layers[0][0] == layer:
            raise ZeroDivisionError("one half of a bug")
        learn(worker, item)

    with monkeypatch.context() as patch:
        patch.setattr(StageWorker, "_learn", failing)
        failures = supervised(line, attempts=5)
    why = f"stage {stage} failed: ZeroDivisionError: one half of a bug"
    assert [type(error) for error in failures[stage]] == [ZeroDivisionError, ZeroDivisionError, LineError]
    for other in {0, 1, 2} - {stage}:
        assert [(type(error), str(error)) for error in failures[other]] == [(LineError, why)]
    again = "; once its cause is mended, start every stage with --again"
    assert [[str(error) for error in found] for found in supervised(line, attempts=1)] == [[why + again]] * 3
    assert supervised(line, attempts=1, again=True) == [[], [], []]
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_neighbour_that_was_away_when_the_line_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears it when the stage that stopped is started once more, which waits for it. Symptom: it was told instead
    that this stage had lost its snapshots, since that asked for the first item of all."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1", snapshot_s=0.02, retain_mib=0.002)
    learn = StageWorker._learn

    def failing(worker: StageWorker, item: Item) -> None:
        if worker._top is not None and item.facts["batch"] == 9:
            raise ZeroDivisionError("a bug")
        learn(worker, item)

    monkeypatch.setattr(StageWorker, "_learn", failing)
    supervised(line, attempts=5)
    (place_of(line, 0).folder / "failure.json").unlink()  # as if it had been away, and were back
    heard: list[list[BaseException]] = []
    away = threading.Thread(target=lambda: heard.extend(supervised(line, 1, stages=[0])), daemon=True)
    told, await_told = list[bool](), Incoming.await_told

    def comes_back(end: Incoming, timeout_s: float) -> bool:
        away.start()
        while not (was_told := await_told(end, timeout_s)) and timeout_s and away.is_alive():
            pass  # on a busy machine it takes longer than a stage waits
        told.append(was_told)
        return was_told

    monkeypatch.setattr(Incoming, "await_told", comes_back)
    ((error,),) = supervised(line, 1, stages=[1])
    assert isinstance(error, LineError)
    assert told == [True], "the stage left before the one that was away could hear it"
    away.join(600)
    ((error,),) = heard
    assert isinstance(error, LineError)
    assert str(error) == "stage 1 failed: ZeroDivisionError: a bug"


def test_what_fails_where_the_first_stage_reads_counts_as_the_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: the other stages waited without end for a first one that could not read a sample; and a worker that died
    came out as a traceback of PyTorch."""
    monkeypatch.setattr("pipeal.line.neighbours._STOP_S", 0.0)
    line = text_line(tmp_path, "lstm", 2)
    kept = place_of(line, 0).folder / "failure.json"

    def first(error: Exception, *, asked_to_end: bool = False) -> tuple[int, str]:
        def items(feed: Feed) -> Iterator[Item]:
            yield feed._first
            if asked_to_end:
                os.kill(os.getpid(), signal.SIGTERM)
            raise error

        monkeypatch.setattr(Feed, "items", items)
        code, _, err = ran(line, 0, capsys, "--again")
        assert "Traceback" not in err
        return code, err.splitlines()[-1]

    assert first(DataError("sample 7 is no image")) == (2, "pipeal: sample 7 is no image")
    assert json.loads(kept.read_text())["stopped"]
    died = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    code, said = first(died)
    assert (code, json.loads(kept.read_text())["stopped"]) == (1, False)
    assert said.startswith("pipeal: a worker process that prepares batches died")
    code, said = first(died, asked_to_end=True)
    assert (code, said.rpartition("; ")[2]) == (143, "the same command goes on from its snapshot")
    assert list(place_of(line, 0).folder.glob("snapshots/*")), "it ended without saving"


def test_a_stage_ended_amid_its_first_update_says_that_it_begins_again(tmp_path: Path) -> None:
    """Symptom: it named a snapshot to go on from, and had written none."""
    run = StageRun(read_line(line := text_line(tmp_path, "lstm", 2)), 1, place_of(line, 1), StopRequest())
    run._worker = SimpleNamespace(gathers=True)  # type: ignore[assignment]
    with pytest.raises(Interrupted, match=r"the same command begins it$"):
        run._interrupt(130)


def test_errors_at_different_items_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1", snapshot_s=0.02)
    learn, left = StageWorker._learn, [3, 5, 8]

    def failing(worker: StageWorker, item: Item) -> None:
        if worker._top is not None and left and item.facts["batch"] == left[0]:
            left.pop(0)
            raise ZeroDivisionError("now and then")
        learn(worker, item)

    monkeypatch.setattr(StageWorker, "_learn", failing)
    failures = supervised(line, attempts=9)
    assert [len(found) for found in failures] == [0, 3]
    assert not list(tmp_path.glob("stage-*/failure.json")), "what came to its end has no failure"


def test_a_neighbour_that_stays_away_for_longer_than_the_line_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = text_line(tmp_path, "lstm", 2, wait_s=0.5)
    code, _, err = ran(line, 1, capsys)
    assert code == 1
    assert err.splitlines()[-1] == "pipeal: stage 0 was away for 0.5 s (wait_s); start it, and this one again"
    code, _, err = ran(line, 0, capsys)
    assert code == 1
    assert err.splitlines()[-1].startswith("pipeal: stage 1 was away for 0.5 s (wait_s)")


def test_a_stage_that_lost_its_folder_is_told_of(tmp_path: Path) -> None:
    """In one line, and by that stage itself: the one before, which knows it, goes on waiting."""
    # With little room it waits for snapshots, and there are as many however late they are written.
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1", snapshot_s=0.02, retain_mib=0.002)
    seen: list[int] = []

    def reached(stage: int, where: str) -> None:
        if (stage, where) == (1, "after a snapshot"):
            seen.append(1)
            if len(seen) == 3:
                raise Killed
        if stage == 1 and len(seen) == 3:
            seen.append(1)
            shutil.rmtree(place_of(line, 1).folder / "snapshots")
            raise Killed

    with pytest.raises(Exception, match=r"it has lost its newest snapshot|interrupted") as error:
        run_line(line, reached)
    assert not isinstance(error.value, Interrupted)


def test_a_line_is_made_to_go_on_with_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was chosen for the run's devices is chosen again; what decides how numbers round stays. Of several turns it
    goes on with one."""
    alone = run_alone(text_line(tmp_path / "0", "lstm", 2, "train.epochs=1"), tmp_path / "alone")
    config = alone / "config.yaml"
    config.write_text(config.read_text().replace("repeat: 1\n", "repeat: 2\n"))
    folder = tmp_path / "line"
    code, _, err = run_command(
        command, capsys, "init", f"--resume={alone}", "--stage=a:4001", "--epochs=3", f"--out={folder}"
    )
    assert code == 0, err
    line = read_line(folder / "line.yaml")
    (checkpoint,) = (alone / "checkpoints").glob("step-*")
    assert (line.kind, line.resume) == ("text", str(checkpoint))
    engine, train = line.config["engine"], line.config["train"]
    assert (engine["devices"], engine["sizes"], engine["threads"]) == ("auto", None, 1)
    assert (train["epochs"], train["repeat"], train["precision"], line.config["model"]["name"]) == (
        3,
        1,
        "fp32",
        "lstm",
    )


def test_a_line_goes_on_with_the_checkpoint_that_a_run_went_back_to(tmp_path: Path) -> None:
    """It is the newest, though others have more batches behind them."""
    settings = ("train.epochs=2", "train.checkpoint.keep=9")
    alone = run_alone(text_line(tmp_path / "0", "lstm", 2, *settings), tmp_path / "alone")
    first, last = sorted((alone / "checkpoints").glob("step-*"))
    assert end_of_epoch(alone).path == last
    with CheckpointStore(alone / "checkpoints", keep=9) as store:
        store.make_newest(Checkpoint.open(first))
    assert end_of_epoch(alone).path == first


def test_what_a_line_cannot_go_on_with_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*options: str) -> str:
        code, _, err = run_command(command, capsys, "init", "--stage=a:4001", f"--out={tmp_path / 'line'}", *options)
        assert (code, len(err.splitlines())) == (2, 1), err
        assert not (tmp_path / "line").exists()
        return err

    alone = run_alone(text_line(tmp_path / "0", "lstm", 2, "train.epochs=1"), tmp_path / "alone")
    capsys.readouterr()
    assert "no checkpoint there; name the folder of a run" in told(f"--resume={tmp_path}")
    assert "no checkpoint there; name the folder of a run" in told(
        f"--resume={alone / 'checkpoints' / 'step-000000001'}"
    )
    assert "1 epochs of 1 are done; ask for more with --epochs" in told(f"--resume={alone}")
    assert "leave out --dataset, --model" in told(f"--resume={alone}", "--model=lstm")
    for setting in ("--set=data.held_out=0.2", "--set=model.x_hid=16", "--method=scpl", "--set=engine.packet=int8"):
        found = told(f"--resume={alone}", "--epochs=2", "--set=engine.threads=2", setting)
        assert re.search("its run has .*, this command (0.2|16|scpl|int8); give the same, or leave out --resume", found)
    (checkpoint,) = (alone / "checkpoints").glob("step-*")
    with CheckpointStore(alone / "checkpoints") as store:
        one = Checkpoint.open(checkpoint)
        part = one.state["training"]["part"] | {"batches": 1}
        training = one.state["training"] | {"part": part, "batches": one.step + 1}
        within = store.save(
            one.step + 1, dict(one.layers()), one.position, one.state | {"training": training}, epoch={"losses": []}
        )
    found = told(f"--resume={within}", "--epochs=2")
    assert "no checkpoint at the end of an epoch" in found
    assert "was taken after batch 1 of epoch 2" in found
    code, _, err = run_command(
        command, capsys, "init", f"--resume={alone}", "--epochs=2", "--stage=a:4001", f"--out={tmp_path / 'line'}"
    )
    assert code == 0, err
    assert read_line(tmp_path / "line" / "line.yaml").resume == str(checkpoint)


def test_snapshots_that_cannot_be_written_are_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A disk that is full for a while; snapshots are waited for, so that none of these is the last."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1", snapshot_s=0.02, retain_mib=0.002)
    from pipeal.training.checkpoint import store as module

    write, failed = module.write_layer, []

    def full(path: Path, layer: Any) -> tuple[int, int]:
        if len(failed) < 4 and "stage-" in str(path):
            failed.append(path)
            raise OSError(28, "No space left on device")
        return write(path, layer)

    monkeypatch.setattr(module, "write_layer", full)
    run_line(line)
    assert len(failed) == 4
    told = [line for line in said if "No space left on device" in line]
    assert len(told) == 4
    assert all("; the snapshot before it stands" in line and "\n" not in line for line in told)
    monkeypatch.undo()
    assert CheckpointStore(place_of(line, 0).folder / "snapshots").newest(print) is not None
    assert_same(tmp_path / "run", run_alone(line, tmp_path / "alone"))


def test_a_failure_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text_line(tmp_path, "lstm", 2)
    folder = place_of(line, 1).folder
    folder.mkdir()
    (folder / "failure.json").write_text(json.dumps(["x"]))
    told_one_line(r"failure\.json: .*; remove it", *ran(line, 1, capsys))


def test_a_tensor_that_the_next_stage_would_refuse_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    """The connection was closed each time that it came, and made again, for ever."""
    line = text_line(tmp_path, "lstm", 2, "train.epochs=1", largest_mib=0.01)
    with pytest.raises(
        DataError, match=r"takes .* MiB there, more than largest_mib, 0.01; raise that in the line's file"
    ):
        run_line(line)
