"""Checkpoints: whole or absent whenever the process is killed, and never loaded when a bit of them is wrong."""

import errno
import gc
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import warnings
import zlib
from collections import OrderedDict
from itertools import count

import pytest
import torch

from pipeal.core.errors import DataError, UntidyError
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore
from pipeal.training.position import Part, Position

CHILD = """
import os, signal, sys
import torch
from pipeal.training.checkpoint.store import CheckpointStore

torch.set_num_threads(1)

def layers(mark):
    return {n: {"w": torch.full((20_000,), float(mark + n)), "mark": mark} for n in range(2)}

def save_on(folder, keep, rounds, steps=3):
    with CheckpointStore(folder, keep=keep) as store:
        before = store.newest(print)
        mark = before.position["mark"] if before else 0
        for _ in range(rounds):
            mark += 1
            store.save(mark % steps, layers(mark), {"mark": mark}, {"text": "x" * mark}, best=mark % 5 == 0)
            os.write(1, b"%d\\n" % mark)

def kill_at(operation, folder):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and str(folder) in os.fsdecode(args[0]):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""


def layers(mark, count=2):
    return {n: {"w": torch.full((20_000,), float(mark + n)), "mark": mark} for n in range(count)}


def same(checkpoint, mark):
    """Whether it holds what was saved under a mark, and nothing else."""
    wanted = layers(mark)
    found = checkpoint.layers()
    return (
        checkpoint.position == {"mark": mark}
        and checkpoint.state == {"text": "x" * mark}
        and found.keys() == wanted.keys()
        and all(one["mark"] == mark and torch.equal(one["w"], wanted[n]["w"]) for n, one in found.items())
    )


def put(store, mark, step=None, **more):
    return store.save(mark if step is None else step, layers(mark), {"mark": mark}, {"text": "x" * mark}, **more)


def newest(folder):
    """The newest good one, and what was said of the bad."""
    bad = []
    return CheckpointStore(folder).newest(bad.append), bad


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".step"))


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.name.startswith("step-"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


class Forking:
    """A process that has imported everything, and forks one that saves and is killed, as often as asked."""

    def __init__(self, folder, how):
        code = (
            f"{CHILD}\nimport time\nfolder, keep = {str(folder)!r}, 1\n"
            "for line in sys.stdin:\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            f"        {how}\n"
            "        os._exit(0)\n"
            "    if how := float(line) if '.' in line else 0:\n"
            "        time.sleep(how)\n"
            "        os.kill(pid, signal.SIGKILL)\n"
            "    print('end', os.waitpid(pid, 0)[1], flush=True)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def round(self, line):
        """The marks that were saved until it ended, and whether it was killed."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        marks = []
        while not (told := self.process.stdout.readline()).startswith("end"):
            marks.append(int(told))  # what newest() says would be no number
        return marks, int(told.split()[1]) == signal.SIGKILL


def check_after_kill(folder, saved):
    """After any kill: the newest is the last that was saved, or the one that was just being saved; all of it."""
    if saved:
        with CheckpointStore(folder) as store:
            found = store.newest(pytest.fail)
            assert not hidden(folder)
        assert found.position["mark"] in (saved, saved + 1)
        assert same(found, found.position["mark"])
        return found.position["mark"]
    return 0


def test_what_is_saved_is_found_again(folder):
    state = {
        "module": OrderedDict(w=torch.randn(3, 4), b=torch.nn.Parameter(torch.randn(2)), n=torch.tensor(7)),
        "optimizers": {
            "o": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0, 1)}]}
        },
        "texts": ["ä", None, True, b"bytes", torch.Size([2, 3]), torch.float16, torch.device("cpu")],
    }
    with CheckpointStore(folder) as store:
        path = store.save(50, {0: state, 11: {}}, {"epoch": 2, "best": [1.5, None]}, {"ä": float("inf")})
    found, bad = newest(folder)
    assert (found.path, found.step, found.position, found.state) == (
        path,
        50,
        {"epoch": 2, "best": [1.5, None]},
        {"ä": float("inf")},
    )
    assert not bad
    back = found.layers()
    assert list(back) == [0, 11]
    assert back[0]["texts"] == state["texts"]
    assert torch.equal(back[0]["module"]["w"], state["module"]["w"])
    assert back[0]["optimizers"]["o"]["param_groups"] == state["optimizers"]["o"]["param_groups"]
    assert sorted(os.listdir(path)) == ["layer-000.safetensors", "layer-011.safetensors", "manifest.json"]


def test_an_empty_or_missing_folder_has_no_checkpoint(folder):
    assert newest(folder) == (None, [])
    with CheckpointStore(folder) as store:
        assert store.newest(pytest.fail) is None


def test_the_newest_and_the_best_are_kept(folder):
    with CheckpointStore(folder, keep=2) as store:
        kept = []
        for mark in range(1, 8):
            put(store, mark, best=mark in (2, 5))
            kept.append(steps(folder))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert not hidden(folder)
    with CheckpointStore(folder, keep=1) as store:  # what is best is known after a new start
        put(store, 8)
        assert steps(folder) == [5, 8]


def test_the_newest_is_the_last_saved_whatever_its_step(folder):
    with CheckpointStore(folder) as store:
        put(store, 1, step=100)
        put(store, 2, step=150)
    with CheckpointStore(folder) as store:  # a run that went back, or the next turn
        put(store, 3, step=100)
        assert steps(folder) == [100, 150]
        assert same(store.newest(pytest.fail), 3)
        put(store, 4, step=50)
        assert steps(folder) == [50, 100]


def test_a_good_one_is_not_removed_for_the_sake_of_bad_ones(folder):
    with CheckpointStore(folder, keep=2) as store:
        for mark in (1, 2, 3):
            put(store, mark)
        (folder / "step-000000003" / "layer-000.safetensors").unlink()
        bad = []
        assert same(store.newest(bad.append), 2)
        assert len(bad) == 1
        put(store, 4)
        assert steps(folder) == [2, 3, 4]
        put(store, 5)
        assert steps(folder) == [4, 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.slow
def test_killed_at_any_moment_the_newest_is_what_was_saved(folder):
    saved, killed = 0, 0
    chance, most_s = random.Random(5), 0.08
    with Forking(folder, "save_on(folder, keep, 10**9)") as child:
        while killed < 25 or saved <= 10:
            marks, dead = child.round(f"{chance.uniform(0.001, most_s):.4f}")
            # A machine that has much to do saves nothing in so short a time.
            most_s = max(0.08, most_s / 1.5) if marks else 1.5 * most_s
            assert dead
            killed += 1
            saved = check_after_kill(folder, marks[-1] if marks else saved)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    ("rounds", "of_steps"),
    [(3, 3), pytest.param(2, 1, marks=pytest.mark.slow)],
    ids=["new steps", "always the same step"],
)
def test_killed_before_every_single_change_of_the_disk_the_newest_is_what_was_saved(folder, rounds, of_steps):
    saved, operation, dead = 0, 0, True
    with Forking(folder, f"kill_at(int(line), folder); save_on(folder, keep, {rounds}, {of_steps})") as child:
        while dead:
            operation += 1
            marks, dead = child.round(operation)
            saved = check_after_kill(folder, marks[-1] if marks else saved)
    assert operation > 10 * rounds  # there are so many moments


def flip(path, at):
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x10
    path.write_bytes(whole)


def overwrite(path, **changes):
    """Writes another manifest whose hash is right."""
    body = json.loads(path.read_text())["manifest"] | changes
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "manifest": body}))


FILE = {"bytes": 1, "crc32": 0}
DAMAGES = {
    r"layer-001\.safetensors is missing": lambda at: (at / "layer-001.safetensors").unlink(),
    r"layer-001\.safetensors is a pipe": lambda at: (
        (at / "layer-001.safetensors").unlink(),
        os.mkfifo(at / "layer-001.safetensors"),
    ),
    r"manifest\.json is missing": lambda at: (at / "manifest.json").unlink(),
    r"layer-000\.safetensors is truncated: 1,000 bytes found, 8\d,\d{3} wanted": lambda at: os.truncate(
        at / "layer-000.safetensors", 1000
    ),
    r"layer-000\.safetensors is truncated: 0 bytes found": lambda at: os.truncate(at / "layer-000.safetensors", 0),
    r"layer-000\.safetensors is too long": lambda at: (at / "layer-000.safetensors").open("ab").write(b"x"),
    r"layer-001\.safetensors has other bytes than were written: CRC-32 [0-9a-f]{8} found, [0-9a-f]{8} w": lambda at: (
        flip(at / "layer-001.safetensors", 40_000)
    ),
    r"layer-000\.safetensors cannot be read: Is a directory": lambda at: (
        (at / "layer-000.safetensors").unlink(),
        (at / "layer-000.safetensors").mkdir(),
    ),
    r"manifest\.json is not JSON": lambda at: os.truncate(at / "manifest.json", 50),
    r"manifest\.json is not JSON \(Exp": lambda at: os.truncate(at / "manifest.json", 0),
    r"manifest\.json is not JSON \(max": lambda at: (at / "manifest.json").write_text("[" * 100_000),
    r"manifest\.json is not JSON \('utf": lambda at: (at / "manifest.json").write_bytes(b"\xff\xfe"),
    r"manifest\.json is not the one of a checkpoint": lambda at: (at / "manifest.json").write_text("[]"),
    r"checkpoint \(number: input should be a valid integer, found '2'\)": lambda at: overwrite(
        at / "manifest.json", number="2"
    ),
    r"checkpoint \(step: .* found -1\)": lambda at: overwrite(at / "manifest.json", step=-1),
    r"checkpoint \(best: .* found 'yes'\)": lambda at: overwrite(at / "manifest.json", best="yes"),
    r"checkpoint \(position: .* found \[\]\)": lambda at: overwrite(at / "manifest.json", position=[]),
    r"checkpoint \(files\.layer-000\.safetensors\.bytes: ": lambda at: overwrite(
        at / "manifest.json", files={"layer-000.safetensors": {"bytes": 1e9, "crc32": 0}}
    ),
    r"format version 99 is unknown; this version of pipeal reads 1 and 2": lambda at: overwrite(
        at / "manifest.json", format=99
    ),
    r"names 'layer-000.pt', wanted files of layers": lambda at: overwrite(
        at / "manifest.json", files={"layer-000.pt": FILE}
    ),
    # A second file of layer 0, which silently took the place of the first.
    r"names 'layer-0000\.safetensors', wanted files of layers, such as layer-000": lambda at: overwrite(
        at / "manifest.json", files=dict.fromkeys(["layer-000.safetensors", "layer-0000.safetensors"], FILE)
    ),
    r"names '\.\./secret', wanted files of layers": lambda at: overwrite(
        at / "manifest.json", files={"../secret": FILE}
    ),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_one_is_named_and_skipped_for_the_one_before(folder, told):
    with CheckpointStore(folder) as store:
        put(store, 1)
        damaged = put(store, 2)
    DAMAGES[told](damaged)
    found, bad = newest(folder)
    assert same(found, 1)
    assert len(bad) == 1
    assert bad[0].startswith(f"the checkpoint {damaged} is bad: ")
    assert bad[0].endswith("; it is skipped")
    with pytest.raises(DataError, match=told):
        Checkpoint.open(damaged)
    with CheckpointStore(folder) as store:  # and saving goes on
        put(store, 3, step=2)
        assert same(store.newest(pytest.fail), 3)


def test_a_flipped_bit_anywhere_is_found(folder):
    with CheckpointStore(folder) as store:
        path = store.save(1, {0: {"w": torch.zeros(10)}}, {"epoch": 3}, {})
    chance = random.Random(1)
    for name in ("layer-000.safetensors", "manifest.json"):
        whole = (path / name).read_bytes()
        for at in range(len(whole)) if name == "manifest.json" else chance.sample(range(len(whole)), 100):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(damaged)
            found, bad = newest(folder)
            # White space that became other white space changed nothing.
            assert (found is None and len(bad) == 1) or (json.loads(damaged) == json.loads(whole))
        (path / name).write_bytes(whole)
    assert newest(folder)[0].position == {"epoch": 3}


def test_when_all_are_damaged_there_is_none(folder):
    with CheckpointStore(folder) as store:
        for mark in (1, 2):
            flip(put(store, mark) / "layer-000.safetensors", 70)
    found, bad = newest(folder)
    assert found is None
    assert [text.split(" is bad")[0][-1] for text in bad] == ["2", "1"]


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_would_run_code_is_refused_though_its_sum_is_right(folder, tmp_path, form, version):
    with CheckpointStore(folder) as store:
        path = put(store, 1)
    trap = Malice(str(tmp_path / "ran"))
    file = path / ("layer-000.pt" if version == 1 else "layer-000.safetensors")
    if form == "pickle":
        file.write_bytes(pickle.dumps({"w": trap}))
    else:
        torch.save({"w": trap}, file, _use_new_zipfile_serialization=form == "zip")
    data = file.read_bytes()
    overwrite(
        path / "manifest.json",
        format=version,
        files={file.name: {"bytes": len(data), "crc32": zlib.crc32(data)}},
    )
    found = newest(folder)[0]
    for read in (lambda: dict(found.layers()), *[found.epoch] * (version == 1)):
        with pytest.raises(DataError, match=r"layer-000\..*: .*nothing in it was run; take another checkpoint"):
            read()
    assert not (tmp_path / "ran").exists()


def old_checkpoint(folder, step, layers, losses=None, splits=0, **body):
    """As versions of pipeal before the second format have written it."""
    path = folder / f"step-{step:09d}"
    path.mkdir(parents=True)
    files = {}
    for layer, content in layers.items():
        kept = {"state": content}
        if losses is not None and not layer:
            kept |= {"losses": losses, "splits": splits}
        file = path / f"layer-{layer:03d}.pt"
        torch.save(kept, file)
        data = file.read_bytes()
        files[file.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    body = {"number": step, "step": step, "best": True, "position": {"mark": step}, "state": {}} | body
    (path / "manifest.json").write_text(json.dumps({"manifest": {}}))
    overwrite(path / "manifest.json", format=1, files=files, **body)
    return path


def test_checkpoints_of_the_first_format_are_read_among_others_and_written_again_in_the_second(folder):
    losses = [torch.rand(3, 2), torch.rand(3, 1)]
    old_checkpoint(folder, 1, layers(1), losses, splits=2, state={"text": "x"})
    first = newest(folder)[0]
    with CheckpointStore(folder) as store:
        put(store, 2)
        assert steps(folder) == [1, 2]
        assert same(store.newest(pytest.fail), 2)
        store.make_newest(first)
        put(store, 3)
        assert steps(folder) == [1, 3]
    again = Checkpoint.open(folder / "step-000000001")
    assert (first.format, again.format, first.best, again.best) == (1, 2, True, True)
    assert sorted(os.listdir(again.path)) == [
        "epoch.safetensors",
        "layer-000.safetensors",
        "layer-001.safetensors",
        "manifest.json",
    ]
    assert same(again, 1)
    assert again.epoch()["splits"] == 2
    assert all(map(torch.equal, again.epoch()["losses"], losses))


def test_losses_in_the_file_of_the_first_layer_are_still_read(folder):
    position = Position(batches=3, part=Part(0.5, 3, 12))
    losses = [torch.rand(3, 2), torch.rand(3, 1)]
    state = {"training": position.state(), "data": {"seed": 1}}
    found = ResumedTraining.of(Checkpoint.open(old_checkpoint(folder, 3, layers(3), losses, 2, state=state)))
    assert [torch.equal(*pair) for pair in zip(found.position.losses.values(), losses, strict=True)] == [True, True]
    assert (found.position.totals.splits, found.facts) == (2, {"seed": 1})
    assert [found.states[number]["mark"] for number in (0, 1)] == [3, 3]


def test_a_layer_may_report_no_losses_or_some_batches_only(folder):
    """Such a checkpoint was written amid an epoch, and then refused as none of a training."""
    position = Position(batches=3, part=Part(0.5, 3, 12))
    with CheckpointStore(folder) as store:
        for losses in ({"1": torch.rand(3, 2)}, {"0": torch.rand(3, 2), "1": torch.rand(1, 1)}):
            state = {"training": position.state(), "data": {}}
            store.save(3, layers(3), {}, state, epoch={"losses": losses, "splits": 0})
            found = ResumedTraining.of(newest(folder)[0])
            assert [*map(str, found.position.losses)] == [*losses]
            assert all(map(torch.equal, found.position.losses.values(), losses.values()))


def test_a_checkpoint_may_be_of_some_layers_alone(folder):
    """As a stage that saves its own has it."""
    with CheckpointStore(folder) as store:
        store.save(1, {4: {"w": torch.ones(2)}, 5: {"w": torch.zeros(1)}}, {}, {})
    assert list(newest(folder)[0].layers()) == [4, 5]


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Malice("x"), "layer 3.a.1 is a Malice"),
        ({1}, "is a set"),
        (lambda: None, "is a function"),
        (torch.zeros(1).numpy(), "is a ndarray"),
        (torch.zeros(1).as_subclass(Odd), "is an Odd"),
        ({(1, object()): 2}, "a key of layer 3.a.1.1 is an object"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_anything_is_written(folder, value, told):
    with CheckpointStore(folder) as store:
        put(store, 1)
        with pytest.raises(DataError, match=told):
            store.save(2, {3: {"a": [0, value]}}, {}, {})
        with pytest.raises(TypeError, match="JSON"):
            store.save(2, {}, {"a": object()}, {})
        assert steps(folder) == [1]
        assert not hidden(folder)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(real, good, once):
    """A system call that works so many times, and then not: once, or never again."""
    calls = count()

    def call(*args, **more):
        number = next(calls)
        return full() if number == good or (number > good and not once) else real(*args, **more)

    return call


@pytest.mark.parametrize("once", [True, False], ids=["once", "for good"])
@pytest.mark.parametrize("step", [1, 2], ids=["same step", "new step"])
@pytest.mark.parametrize("place", ["fsync", "rename", "mkdir"])
def test_a_full_disk_is_told_and_leaves_the_folder_as_it_was(folder, monkeypatch, place, step, once):
    places = {"fsync": 5, "rename": 1 + (step == 1), "mkdir": 1}[place]
    with CheckpointStore(folder) as store:
        put(store, 1)
        for good in range(places):
            with monkeypatch.context() as patch:
                patch.setattr(os, place, failing(getattr(os, place), good, once))
                with pytest.raises(DataError) as told:
                    put(store, 9, step=step)
            assert f"step-00000000{step}: No space left on device; make room" in str(told.value)
            if place == "rename" and not once:  # what was renamed could not be renamed back; it is at the next start
                store.close()
                store.claim()
            assert not hidden(folder)
            assert steps(folder) == [1]
            assert same(store.newest(pytest.fail), 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, place, failing(getattr(os, place), places, once))
            put(store, 9, step=step)
        assert same(store.newest(pytest.fail), 9)


LIMITED = """
import resource
with CheckpointStore(sys.argv[1]) as store:
    store.save(1, layers(1), {"mark": 1}, {"text": "x"})
    for limit in (0, 1, 100, 50_000, 80_100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            store.save(2, layers(2), {"mark": 2}, {"text": "xx"})
        except Exception as error:
            print(type(error).__name__, error, sorted(os.listdir(store.folder)))
"""


@pytest.mark.slow
def test_a_disk_that_takes_only_a_part_of_a_file(folder):
    done = subprocess.run([sys.executable, "-c", CHILD + LIMITED, str(folder)], capture_output=True, text=True)
    assert done.stdout.splitlines() == 5 * [
        f"DataError cannot write the checkpoint {folder}/step-000000002: File too large; make room there or make it "
        "writable, or choose another folder ['.lock', 'step-000000001']"
    ]
    assert done.stderr == ""
    found, bad = newest(folder)
    assert same(found, 1)
    assert not bad


@pytest.mark.parametrize("depth", ["folder", "parent"])
def test_a_folder_that_cannot_be_made_is_told(folder, depth):
    place = folder if depth == "folder" else folder.parent
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("a file")
    store = CheckpointStore(folder)
    for act in (store.claim, lambda: put(store, 1)):
        with pytest.raises(DataError, match=r"cannot keep checkpoints in .*; make room there or make it writable"):
            act()
    with pytest.raises(DataError, match=r"cannot read the checkpoints in .*: Not a directory"):
        store.newest(pytest.fail)
    store.close()


def test_an_old_one_that_stays_is_in_nobodys_way(folder, monkeypatch):
    """Symptom: as long as somebody read a file of an old one on a network disk, none was written any more."""
    with CheckpointStore(folder, keep=1) as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            remove = shutil.rmtree
            patch.setattr(shutil, "rmtree", lambda path: full() if "step-000000001" in path.name else remove(path))
            for step in (2, 3, 4):
                with pytest.raises(UntidyError, match=r"is written, but an older one cannot be removed: No space left"):
                    put(store, step)
                assert same(store.newest(pytest.fail), step)
        assert steps(folder) == [4]
        put(store, 5)
    assert not hidden(folder)


def test_a_folder_that_vanished_is_told_and_may_come_back(folder):
    with CheckpointStore(folder) as store:
        put(store, 1)
        shutil.rmtree(folder)
        with pytest.raises(DataError, match="No such file or directory"):
            put(store, 2)
        folder.mkdir()
        put(store, 3)
        assert same(store.newest(pytest.fail), 3)


@pytest.mark.parametrize(("module", "name"), [(shutil, "rmtree"), (os, "rmdir"), (os, "unlink")])
@pytest.mark.parametrize("step", [1, 2], ids=["same step", "new step"])
def test_an_old_one_that_cannot_be_removed_is_told_and_the_new_one_stays(folder, monkeypatch, module, name, step):
    with CheckpointStore(folder, keep=1) as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(DataError, match=r"is written, but an older one cannot be removed: No space left"):
                put(store, 2, step=step)
        assert same(store.newest(pytest.fail), 2)
    with CheckpointStore(folder) as store:
        assert same(store.newest(pytest.fail), 2)
        assert steps(folder) == [step]
        assert not hidden(folder)
        put(store, 3)
        assert same(store.newest(pytest.fail), 3)


HOLD = """
import time
with CheckpointStore(sys.argv[1]) as store:
    store.save(1, layers(1), {"mark": 1}, {"text": "x"})
    if pid := os.fork():
        print("held", pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_ends_however_it_ends(folder):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD + HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as holder:
        forked = int(holder.stdout.readline().split()[1])
        try:
            with pytest.raises(DataError, match=r"another process saves checkpoints in .*; wait for it, or choose"):
                put(CheckpointStore(folder), 2)
            assert same(newest(folder)[0], 1)  # reading is allowed
            holder.kill()
            holder.wait()
            # A loader worker that the killed process had forked may live on for a while: it holds nothing.
            with CheckpointStore(folder) as store:
                put(store, 2)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_nothing_to_keep_is_refused(folder):
    with pytest.raises(ValueError, match="keep is 0, wanted at least 1"):
        CheckpointStore(folder, keep=0)


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("nowhere")])
def test_what_someone_put_in_a_checkpoints_place_gives_way(folder, make):
    """A file there could not be removed as a folder is, and no later checkpoint was ever written."""
    folder.mkdir(parents=True)
    make(folder / "step-000000001")
    with CheckpointStore(folder) as store:
        put(store, 1)
        put(store, 2)
    assert same(newest(folder)[0], 2)
    assert hidden(folder) == []


def test_one_that_is_made_the_newest_is_taken_and_those_after_it_are_rotated_away(folder):
    with CheckpointStore(folder, keep=2) as store:
        for number in (1, 2, 3):
            put(store, number, step=number)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000000002", "step-000000003"]
    with CheckpointStore(folder, keep=2) as store:
        store.make_newest(Checkpoint.open(folder / "step-000000003"))  # it is
        assert store.newest(pytest.fail).number == 3
        store.make_newest(Checkpoint.open(folder / "step-000000002"))
    found, bad = newest(folder)
    assert same(found, 2)
    assert bad == []
    with CheckpointStore(folder, keep=2) as store:
        put(store, 4, step=3)
        put(store, 5, step=4)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000000003", "step-000000004"]


def test_the_best_checkpoint_stays_so_where_a_run_goes_on_from_it(folder):
    with CheckpointStore(folder, keep=1) as store:
        put(store, 1, best=True)
        put(store, 2)
        store.make_newest(Checkpoint.open(folder / "step-000000001"))
        put(store, 3)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000000001", "step-000000003"]


def test_no_file_stays_open_after_a_look(folder):
    """Symptom: a file was closed when it was collected; where an error held on to it, files ran out in the end."""
    states = {0: {"w": torch.ones(3)}, 1: {"w": torch.ones(3)}}
    with CheckpointStore(folder) as store:
        path = store.save(1, states, {}, {})
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        Checkpoint.open(path)
        (path / "layer-001.safetensors").write_bytes(b"other bytes")
        with pytest.raises(DataError, match="truncated"):
            Checkpoint.open(path)
        gc.collect()
    assert [str(one.message) for one in told if "unclosed" in str(one.message)] == []
