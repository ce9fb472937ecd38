"""Laws 1 and 4 over processes: a run under torchrun leaves what one process leaves, also when a rank is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import click
import pytest
import torch
from left_behind import left_behind
from torch.torch_version import TorchVersion

from pipeal.cli import text, vision
from tests.cli.test_text import varied
from tests.integration.processes import (
    ROOT,
    Started,
    checkpoints,
    each_rank,
    free_port,
    held_texts,
    many,
    started,
    torchrun,
    until,
)
from tests.integration.test_resume import IMAGES, SMALL, assert_same, run

NAME = "agnews-{}-al-001"
PEER = "--set=engine.peer_timeout_s=120"
"""Nothing here waits for so long: ranks that start together come apart on a busy machine."""
ONE_F_ONE_B = "1f1b" if TorchVersion(torch.__version__) >= "2.8" else "gpipe"
"""What does not stand still on CPUs: see :func:`pipeal.run.backprop.check_transport`."""
DISK = "--set=engine.offload=disk"


def texts(tmp_path: Path, model: str) -> tuple[str, ...]:
    """Lengths differ, and the last batches are smaller."""
    return ("agnews", model, "--data-root", str(varied(tmp_path / "data")), "--devices=cpu", *SMALL, PEER)


def one_process(command: click.Command, capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> Path:
    run(command, capsys, 0, *arguments, f"--out={out}")
    return next(out.iterdir())


def under_torchrun(tmp_path: Path, ranks: int, script: str, *arguments: str) -> str:
    """As :func:`many`, as programs that torchrun starts."""
    with started([*torchrun(ranks), script, *arguments], tmp_path / "said.txt") as job:
        found, said = job.end(), job.said()
        assert found == 0, said
        return said


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks"), [("lstm", 2), ("transformer", 4)])
def test_texts_over_processes(model: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = texts(tmp_path, model)
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    said = under_torchrun(tmp_path, ranks, "nlpmain.py", *arguments, f"--out={tmp_path / 'many'}")
    folder = tmp_path / "many" / alone.name
    assert_same(alone, folder)
    assert said.count("AL  epoch 1/2") == 1
    assert said.count("to balance 2 stages") == (ranks == 2)  # of four layers on four ranks there is nothing to choose
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["stages"]) == ranks
    assert all(0 < stage["busy_share"] <= 1 for stage in summary["stages"])
    assert {path.name for path in folder.iterdir()} >= {"timeline.png", "trace.json", "curves.png", "batches.png"}
    assert not (folder / "checkpoints" / ".parts").exists()


@pytest.mark.slow
def test_images_over_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch norm, held-out samples, and exits that samples leave at."""
    arguments = ("toyimages", "resnet", "--devices=cpu", *IMAGES, "--set=data.held_out=0.1", PEER)
    alone = one_process(vision.command, capsys, tmp_path / "alone", *arguments)
    many(tmp_path, 2, "cvmain.py", *arguments, f"--out={tmp_path / 'many'}")
    folder = tmp_path / "many" / alone.name
    assert_same(alone, folder)
    exits, exits_again = (json.loads((path / "exits.json").read_text()) for path in (alone, folder))
    assert [row["accuracy"] for row in exits["rows"]] == [row["accuracy"] for row in exits_again["rows"]]


@pytest.mark.slow
def test_replicas_share_batches_and_any_other_mesh_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = ("--set=model.dropout=0.0", "--set=train.precision=fp32", "--set=train.checkpoint.every=50")
    arguments = (*texts(tmp_path, "lstm"), *exact, "--set=data.prefetch=2", "--epochs=1")
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    many(tmp_path, 4, "nlpmain.py", *arguments, "--replicas=2", f"--out={tmp_path / 'many'}")
    (layers, rows), (shared_layers, shared_rows) = left_behind(alone), left_behind(tmp_path / "many" / alone.name)
    assert [row["test_acc"] for row in rows] == [row["test_acc"] for row in shared_rows]
    weights, shared = (dict(floats(found)) for found in (layers, shared_layers))
    assert weights.keys() == shared.keys()
    for name, one in weights.items():
        torch.testing.assert_close(
            shared[name], one, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )
    again = (*arguments, "--epochs=2")
    for out in ("one", "four"):
        shutil.copytree(tmp_path / "many", tmp_path / out)
    folder = tmp_path / "one" / alone.name
    err = run(text.command, capsys, 0, *again, f"--resume={folder}")
    assert "AL goes on after epoch 1" in err
    said = many(tmp_path, 4, "nlpmain.py", *again, f"--resume={tmp_path / 'four' / alone.name}")
    assert "AL goes on after epoch 1" in said
    assert_same(folder, tmp_path / "four" / alone.name)


@pytest.mark.slow
def test_backpropagation_under_torchrun_is_one_stage_in_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has to say so: two stages cannot be made of one layer."""
    verses = tmp_path / "verses.txt"
    verses.write_text("so it goes, and so it went.\n" * 40, encoding="utf-8")
    arguments = (
        *("text", "charlm", f"--text={verses}", "--mode=bp", "--devices=cpu", "--epochs=2", PEER),
        *("--set=model.dropout=0.0", "--set=train.precision=fp32", "--set=data.steps=12", "--set=data.batch_size=5"),
        *("--set=data.estimate_batches=3", "--set=engine.threads=1", "--set=train.lr.base=1e-3"),
    )
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    said = under_torchrun(tmp_path, 2, "nlpmain.py", *arguments, f"--out={tmp_path / 'many'}")
    assert "BP on 2 processes: layers [1], in 2 replicas" in said
    (layers, rows), (shared_layers, shared_rows) = left_behind(alone), left_behind(tmp_path / "many" / alone.name)
    losses, shared_losses = ([float(row["test_loss"]) for row in found] for found in (rows, shared_rows))
    assert shared_losses == pytest.approx(losses, rel=1e-4)
    weights, shared = (dict(floats(found)) for found in (layers, shared_layers))
    assert weights.keys() == shared.keys()
    for name, one in weights.items():
        if (
            "qkv.bias" in name
        ):  # what is added to all keys moves no answer: its gradient is rounding, and Adam's step not
            continue
        torch.testing.assert_close(
            shared[name], one, rtol=1e-3, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


TUNED = {
    "stages": (),
    "replicas": ("--mode=bp",),
    "gpipe": ("--mode=bp", "--schedule=gpipe"),
    ONE_F_ONE_B: ("--mode=bp", f"--schedule={ONE_F_ONE_B}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", TUNED)
def test_a_setting_that_diverges_is_one_that_failed_under_ranks_too(form: str, tmp_path: Path) -> None:
    """Symptom: rank 0 went on with the next setting, and the other ranks ended with the error of the one before, or
    waited for what should become of it for ever."""
    arguments = (*texts(tmp_path, "transformer"), *TUNED[form], "--epochs=1", "--set=train.precision=fp32")
    grid = "--tune=train.lr.base=1e30,1e-3"
    said = many(tmp_path, 2, "nlpmain.py", *arguments, grid, f"--out={tmp_path / 'many'}")
    assert "diverged" in said
    (path,) = (tmp_path / "many").glob("*/tune.json")
    kept = json.loads(path.read_text())
    failed = {trial["setting"]["train.lr.base"]: trial["held_out"] is None for trial in kept["trials"]}
    assert (failed[1e30], failed[1e-3]) == (True, False)
    assert kept["chosen"]
    assert json.loads((path.parent / "status.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_where_all_settings_fail_each_rank_says_that(tmp_path: Path) -> None:
    """Symptom: rank 0 said that no setting came to a figure, and rank 1 that the loss of the last was not finite."""
    grid = "--tune=train.lr.base=1e30,1e31"
    arguments = (*texts(tmp_path, "transformer"), "--epochs=1", "--set=train.precision=fp32", grid)
    for code, said in each_rank([["nlpmain.py", *arguments, f"--out={tmp_path / 'many'}"]] * 2, tmp_path):
        assert code == 2, said
        assert "came to no figure" in said.splitlines()[-1]


NO_MEMORY = """
from {module} import {owner}
from pipeal.cli import entry, text
def refused(*_):
    raise MemoryError("out of memory")
{owner}.{method} = refused
entry.run(text.command)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "module", "owner", "method"),
    [
        ("gpipe", "pipeal.run.backprop_stage", "BackpropStage", "learn"),
        ("gpipe", "pipeal.run.backprop_pipeline", "PipelinedBackprop", "__enter__"),
        ("stages", "pipeal.engine.distributed.pipeline", "DistributedPipeline", "_start"),
    ],
)
def test_no_trial_follows_one_that_left_other_ranks_waiting(
    form: str, module: str, owner: str, method: str, tmp_path: Path
) -> None:
    """Symptom: rank 0 went on with the next setting, and waited for the others, which waited for its batches, or for
    the pipeline to open."""
    arguments = (*texts(tmp_path, "transformer"), *TUNED[form], "--epochs=1")
    arguments = (*arguments, "--tune=train.lr.base=1e-2,1e-3", f"--out={tmp_path / 'many'}")
    code = NO_MEMORY.format(module=module, owner=owner, method=method)
    ranks = each_rank([["-c", code, *arguments], ["nlpmain.py", *arguments]], tmp_path)
    for rank, (left, said) in enumerate(ranks):
        assert left == 1, said
        (told,) = [one for one in said.splitlines() if one.startswith("pipeal: ")]
        assert told.startswith(f"pipeal: rank {rank}: ")
        assert "memory" in told


def floats(state: Any, path: str = "") -> Any:
    """All floating-point tensors in nested states, by their path."""
    if isinstance(state, torch.Tensor) and state.is_floating_point():
        yield path, state
    elif isinstance(state, dict):
        for key, inner in state.items():
            yield from floats(inner, f"{path}/{key}")
    elif isinstance(state, (list, tuple)):
        for number, inner in enumerate(state):
            yield from floats(inner, f"{path}/{number}")


def until_it_saves(job: Started, folder: Path, before: set[str]) -> None:
    """Waits for a checkpoint that was not there before."""
    until(lambda: checkpoints(folder) - before or job.process.poll() is not None)
    assert job.process.poll() is None, job.said()


def ended_without_rank_1(command: list[str], log: Path, folder: Path, gate: Path) -> str:
    """What a job said that was to its end, though its rank 1 was killed after a checkpoint."""
    gate.unlink(missing_ok=True)
    before = checkpoints(folder)
    with started(command, log) as job:
        until_it_saves(job, folder, before)
        (victim,) = job.processes(RANK="1")
        os.kill(victim, signal.SIGKILL)
        gate.touch()
        code, said = job.end(), job.said()
    assert code == 0, said
    return said


@pytest.mark.slow
def test_a_job_is_asked_to_end_then_a_rank_of_it_is_killed_and_it_comes_back_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*texts(tmp_path, "transformer"), "--epochs=12")
    script, gate = held_texts(tmp_path, epochs=6)  # and the job after it later, with batches to save before
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    folder = tmp_path / "many" / alone.name
    command = [*torchrun(2, "--max-restarts=1"), str(script), *arguments, f"--out={tmp_path / 'many'}"]
    with started(command, tmp_path / "asked.txt") as job:
        until_it_saves(job, folder, set())
        (asked,) = job.processes(RANK="1")
        os.kill(asked, signal.SIGTERM)  # it is for all of them
        until(lambda: "pipeal: rank 0: " in job.said())
        job.process.send_signal(signal.SIGTERM)  # nor shall torchrun start it again
        job.end()
        assert re.search("pipeal: rank 0: interrupted after batch .*, and saved; the same command goes on", job.said())
    held_texts(tmp_path, epochs=12)
    said = ended_without_rank_1(command, tmp_path / "said.txt", folder, gate)
    assert re.search(r"pipeal: rank 0: .*rank 1 \(stage 1\)", said), said
    assert said.count("AL goes on after ") == 2
    assert_same(alone, folder)


@pytest.mark.slow
def test_an_offloaded_job_whose_rank_is_killed_leaves_what_one_process_leaves_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks make their own layers, and take them up from their files, when torchrun has started them again. It was said
    to begin a new run, and did so after each restart."""
    arguments = (*texts(tmp_path, "transformer"), "--epochs=4", "--resume=never")
    script, gate = held_texts(tmp_path, epochs=4)
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    folder = tmp_path / "many" / alone.name
    command = [*torchrun(2, "--max-restarts=1"), str(script), *arguments, f"--out={tmp_path / 'many'}", DISK]
    said = ended_without_rank_1(command, tmp_path / "said.txt", folder, gate)
    assert said.count("AL goes on after ") == 1
    assert_same(alone, folder)


@pytest.mark.slow
def test_offloaded_replicas_leave_what_they_leave_in_memory(tmp_path: Path) -> None:
    arguments = (*texts(tmp_path, "lstm"), "--replicas=2", "--epochs=1")
    many(tmp_path, 4, "nlpmain.py", *arguments, f"--out={tmp_path / 'memory'}")
    many(tmp_path, 4, "nlpmain.py", *arguments, f"--out={tmp_path / 'disk'}", DISK)
    assert_same(tmp_path / "memory" / NAME.format("lstm"), tmp_path / "disk" / NAME.format("lstm"))


FULL = """
import errno, os
from pipeal.cli import entry, text
def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.posix_fallocate = full
entry.run(text.command)
"""
DAMAGED = """
from pipeal.cli import entry, text
from pipeal.training.checkpoint import manifest
manifest._crc32_of = lambda file: 7
entry.run(text.command)
"""


@pytest.mark.slow
def test_what_one_rank_cannot_load_is_one_line_on_every_rank(tmp_path: Path) -> None:
    arguments = [*texts(tmp_path, "lstm"), "--set=engine.sizes=[2,2]", "--epochs=1", DISK]

    def ends(wanted: int, line: str, script: str, *more: str) -> None:
        commands = [["nlpmain.py", *arguments, *more], ["-c", script, *arguments, *more]]
        for rank, (code, said) in enumerate(each_rank(commands, tmp_path)):
            assert code == wanted, said
            (told,) = [one for one in said.splitlines() if one.startswith("pipeal: ")]
            assert told.startswith(f"pipeal: rank {rank}: ")
            assert re.search(line, told)
            assert "Traceback" not in said

    out = f"--out={tmp_path / 'runs'}"
    ends(1, r"No space left on device; [\d.]+ MiB more were needed for an offloaded layer", FULL, out)
    many(tmp_path, 2, "nlpmain.py", *arguments, out)
    folder = tmp_path / "runs" / NAME.format("lstm")
    ends(2, r"layer-002\.safetensors has other bytes than were written", DAMAGED, f"--resume={folder}", "--epochs=2")
    many(tmp_path, 2, "nlpmain.py", *arguments, f"--resume={folder}", "--epochs=2")


@pytest.mark.slow
def test_no_rank_holds_more_of_an_offloaded_model_than_some_layers(tmp_path: Path) -> None:
    """Rank 0 held all of it three times: to count layers, to train, and for costs at the end."""
    verses = tmp_path / "verses.txt"
    verses.write_text("so it goes, and so it went.\n" * 400, encoding="utf-8")

    def peaks(width: int) -> tuple[list[int], int]:
        """Of memory that is no file's, by rank, and the bytes of a checkpoint."""
        arguments = (
            *("text", "charlm", f"--text={verses}", "--devices=cpu", "--epochs=1", PEER, DISK),
            *(f"--set=model.width={width}", "--set=model.heads=4", "--set=model.layers=8", "--set=model.code=64"),
            *("--set=data.steps=4", "--set=data.batch_size=4", "--set=data.estimate_batches=2"),
            *("--set=train.precision=fp32", "--set=engine.threads=1", f"--out={tmp_path / str(width)}"),
        )
        found = {"0": 0, "1": 0}
        script, gate = held_texts(tmp_path, epochs=1)
        reached = gate.with_suffix(".reached")
        for path in (gate, reached):
            path.unlink(missing_ok=True)
        with started([*torchrun(2), str(script), *arguments], tmp_path / "said.txt") as job:
            while job.process.poll() is None:
                trains = reached.exists()
                for rank in found:
                    for process in job.processes(RANK=rank):
                        found[rank] = max(found[rank], anonymous(process))
                if trains:
                    gate.touch()  # seen with all that it has loaded: a run may be over before it is looked at again
                sleep(0.02)
            assert job.end() == 0, job.said()
        (saved,) = (tmp_path / str(width)).glob("*/checkpoints/step-*")
        return list(found.values()), sum(file.stat().st_size for file in saved.iterdir())

    idle, _ = peaks(32)
    large, size = peaks(512)
    assert size > 250e6
    for little, much in zip(idle, large, strict=True):
        assert much - little < size / 2


def anonymous(process: int) -> int:
    """Bytes of a process's memory that are no file's; 0 where it is gone."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.slow
def test_the_command_for_two_machines_is_as_the_docs_print_it_and_comes_back_when_a_rank_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each torchrun counts its own restarts, and joins the other one again."""
    page = (ROOT / "docs" / "many-machines.md").read_text().replace("\\\n", " ")
    (printed,) = re.findall(r"^torchrun (.*--rdzv-backend c10d.*)$", page, re.MULTILINE)
    arguments = (*texts(tmp_path, "transformer"), "--epochs=6")
    assert printed.split()[-3:] == ["nlpmain.py", *arguments[:2]]
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    folder = tmp_path / "many" / alone.name
    script, gate = held_texts(tmp_path, epochs=6)
    command = printed.replace("HOST:29500", f"127.0.0.1:{free_port()}").replace("nlpmain.py", str(script)).split()
    command = [*torchrun(2)[:-1], *command, *arguments[2:], f"--out={tmp_path / 'many'}"]
    with started(command, tmp_path / "here.txt") as here, started(command, tmp_path / "there.txt") as there:
        until_it_saves(here, folder, set())
        (victim,) = [*here.processes(RANK="3"), *there.processes(RANK="3")]
        os.kill(victim, signal.SIGKILL)
        gate.touch()
        codes = here.end(), there.end()
    said = here.said() + there.said()
    assert codes == (0, 0), said
    assert re.search(r"pipeal: rank [012]: .*rank 3 \(stage 3\)", said), said
    assert said.count("AL goes on after ") == 1
    assert_same(alone, folder)


@pytest.mark.slow
def test_a_mistake_is_one_line_on_every_rank(tmp_path: Path) -> None:
    arguments = ["nlpmain.py", *texts(tmp_path, "lstm"), f"--out={tmp_path / 'runs'}"]

    def ends(line: str, *more: list[str], arguments: list[str] = arguments) -> None:
        for rank, (code, said) in enumerate(each_rank([arguments + one for one in more], tmp_path)):
            (told,) = [one for one in said.splitlines() if one.startswith("pipeal: ")]
            assert code == 2
            assert told.startswith(f"pipeal: rank {rank}: ")
            assert re.search(line, told)
            assert "Traceback" not in said

    verses = tmp_path / "verses.txt"
    verses.write_text("so it goes, and so it went.\n" * 40, encoding="utf-8")
    shallow = ["nlpmain.py", "text", "charlm", f"--text={verses}", "--set=model.layers=1", f"--out={tmp_path / 'runs'}"]
    ends(r"2 ranks make 2 stages, but the model has 1 layer", [], [], arguments=shallow)
    ends(r"3 replicas do not divide 2 ranks", ["--replicas=3"], ["--replicas=3"])
    ends(r"rank 1 has train\.seed 1, rank 0 has 0", [], ["--seed=1"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_within_the_timeout(tmp_path: Path) -> None:
    arguments = ["nlpmain.py", *texts(tmp_path, "lstm"), f"--out={tmp_path / 'runs'}", "--set=engine.peer_timeout_s=3"]
    ((code, said),) = each_rank([arguments], tmp_path, size=2)
    assert code == 1
    assert "pipeal: rank 0: rank 1 of 2 did not come within 3 s" in said
