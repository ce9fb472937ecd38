"""Worker processes: signals to a whole process group are not for them, their parent's are, and its end is theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from pipeal.data.loading.workers import serve_parent, starting_workers, worker_context, worker_failure

FEEDS = """
import multiprocessing, signal, sys
import numpy as np
from pipeal.data import CheckpointableLoader, ImageBatches, ImageSplit, NativeCheckpointableIterator
from pipeal.data import ParallelMapIterator

split = ImageSplit(np.zeros((40, 8, 8, 3), np.uint8), np.zeros(40, np.int64))
images = ImageBatches(split, batch_size=1, mean=(0, 0, 0), std=(1, 1, 1), workers=2)
numbers = CheckpointableLoader(NativeCheckpointableIterator(range(40)), num_workers=2)
mapped = ParallelMapIterator(NativeCheckpointableIterator(range(40)), abs, 2, 2, start_method="fork")
feeds = [iter(images), iter(numbers), mapped]
first = [next(feed) for feed in feeds]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: None)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
sys.stdin.readline()
print(*(1 + sum(1 for _ in feed) for feed in feeds), flush=True)
numbers.close(); mapped.close(); images.close()
"""


@contextmanager
def feeding() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process in a session of its own with three feeds under way, and the six processes that work for it."""
    command = [sys.executable, "-c", FEEDS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


def alive(pids: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("gone", "Z")]


def until_gone(pids: list[int], within_s: float = 120.0) -> list[int]:
    until = monotonic() + within_s
    while alive(pids) and monotonic() < until:
        sleep(0.02)
    return alive(pids)


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process who sent it a signal")


@pytest.mark.slow
@linux
def test_signals_to_the_process_group_end_no_worker() -> None:
    """Symptom: Ctrl-C ended the loader's workers too, and the run with "a worker died" before it could save."""
    with feeding() as (process, pids):
        assert len(pids) == 6
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)
        sleep(0.2)
        assert alive(pids) == pids
        out, _ = process.communicate("go on\n", timeout=600)
        assert out.split() == ["40", "40", "40"]
        assert process.returncode == 0
    assert until_gone(pids) == []


@pytest.mark.slow
def test_workers_end_with_a_parent_that_was_killed() -> None:
    with feeding() as (process, pids):
        assert len(pids) == 6
        process.kill()
        assert until_gone(pids) == []


def serve(born: Any, begin: Any, ready: Any) -> None:
    born.set()
    begin.wait(120)
    serve_parent()
    ready.set()
    sleep(60)


def send(number: signal.Signals, pid: int) -> None:
    """From a process that is not the parent."""
    subprocess.run([sys.executable, "-c", f"import os; os.kill({pid}, {int(number)})"], check=True)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_obeys_its_parent_alone_from_its_birth_on(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    born, begin, ready = context.Event(), context.Event(), context.Event()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    worker = context.Process(target=serve, args=(born, begin, ready))
    with starting_workers(method):
        worker.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    try:
        assert born.wait(120)
        send(signal.SIGTERM, worker.pid)  # before it has had time to do anything about it
        send(signal.SIGINT, worker.pid)
        begin.set()
        assert ready.wait(120)
        send(signal.SIGTERM, worker.pid)
        worker.join(0.3)
        assert worker.is_alive()
        worker.terminate()
        worker.join(120)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "worker process .*died.*pid"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "killed by signal: Killed"),
        (
            RuntimeError(
                "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
                "are out of shared memory. Please try to raise your shared memory limit."
            ),
            "no shared memory is left.*/dev/shm",
        ),
        (RuntimeError("unable to write to file </torch_7_1_0>: No space left on device (28)"), "no shared memory"),
        (RuntimeError("Pin memory thread exited unexpectedly"), "worker process .*died"),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible"), "ulimit -n"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("DataLoader worker (pid(s) 7) exited unexpectedly"), None),
    ],
)
def test_what_pytorch_says_of_dead_workers_is_named(error: Exception, words: str | None) -> None:
    found = worker_failure(error)
    if words is None:
        assert found is None
    else:
        with pytest.raises(type(found), match=words):
            raise found


def hand_over(queue: Any) -> None:
    queue.put(torch.zeros(3))
    queue.close()
    queue.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named() -> None:
    """Symptom: "Connection reset by peer", with a traceback."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=hand_over, args=(queue,))
    worker.start()
    worker.join(120)
    with pytest.raises((OSError, EOFError)) as caught:
        queue.get(timeout=600)
    failure = worker_failure(caught.value)
    assert failure is not None
    assert "a worker process that prepares batches died" in str(failure)
    assert worker_failure(ConnectionResetError("of somebody else")) is None


ROBBED = """
import multiprocessing, os, signal
from time import sleep
import numpy as np
from pipeal.data import ImageBatches, ImageSplit
from pipeal.core.errors import WorkerError

split = ImageSplit(np.zeros((40, 8, 8, 3), np.uint8), np.zeros(40, np.int64))
batches = iter(ImageBatches(split, batch_size=1, mean=(0, 0, 0), std=(1, 1, 1), workers=1))
next(batches)
(worker,) = multiprocessing.active_children()
os.kill(worker.pid, signal.SIGKILL)
os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet taken note of
sleep(0.1)
print("writes on", flush=True)
try:
    for _ in batches:
        pass
except WorkerError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_worker_that_died_is_told_of_where_a_batch_is_waited_for_and_nowhere_else() -> None:
    """Symptom: PyTorch's handler raised a second time, while the first failure was being written down."""
    done = subprocess.run([sys.executable, "-c", ROBBED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "writes on"
    assert "a worker process that prepares batches died" in second


LOOKING = """
import os, signal, sys, threading, time
import numpy as np
from pipeal.data import CheckpointableLoader, ImageBatches, ImageSplit, MapIterator, NativeCheckpointableIterator

def look(event):
    while True:
        event.is_set()

def die_as_it_looks(*_):
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:  # of PyTorch's loop in a worker
        frame = frame.f_back
    threading.Thread(target=look, args=(frame.f_locals["done_event"],), daemon=True).start()
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

class Split(ImageSplit):
    images = die_as_it_looks

split = Split(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, np.int64))
for _ in range(3):
    numbers = MapIterator(NativeCheckpointableIterator(range(4)), die_as_it_looks)
    images = ImageBatches(split, batch_size=1, mean=(0, 0, 0), std=(1, 1, 1), workers=1, start_method="fork")
    for feed in CheckpointableLoader(numbers, 1, multiprocessing_context="fork"), images:
        try:
            list(feed)
        except Exception as error:
            print(type(error).__name__)
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_as_it_looks_whether_it_is_done_is_told_of() -> None:
    """Symptom: it kept the lock of PyTorch's event, and the loader waited for that for ever, twice."""
    done = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["RuntimeError", "WorkerError"] * 3


HALF = """
import os, signal, struct, sys, threading, time
from multiprocessing.util import Finalize
import torch
from pipeal.data import CheckpointableLoader, MapIterator, NativeCheckpointableIterator, ParallelMapIterator

def results():
    frame = sys._getframe()
    while not {"data_queue", "result_queue"} & frame.f_locals.keys():  # of PyTorch's loop in a worker, and of a pool's
        frame = frame.f_back
    return frame.f_locals.get("data_queue") or frame.f_locals["result_queue"]

def die_halfway(item):
    if item == 2:
        time.sleep(0.5)  # so that none of its threads sends anything
        os.write(results()._writer.fileno(), struct.pack("!i", 1000) + b"not a thousand bytes")
        os.kill(os.getpid(), signal.SIGKILL)
    return item

def feed(how):
    numbers = NativeCheckpointableIterator(range(9))
    if how in ("loader", "pinned", "closed pinned"):
        pinned = "pinned" in how
        if pinned and not torch.cuda.is_available():  # its thread is PyTorch's, what that calls does nothing
            import torch.utils.data._utils.pin_memory as module
            module.pin_memory = lambda data, device=None: data
            torch.accelerator.is_available = torch.cuda.is_available = lambda: True
            torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
            torch.accelerator.current_device_index = torch.cuda.current_device = lambda: 0
            torch.accelerator.set_device_index = torch.cuda.set_device = lambda *_: None
        mapped = MapIterator(numbers, long if how == "closed pinned" else die_halfway)
        return CheckpointableLoader(mapped, 2, multiprocessing_context="fork", pin_memory=pinned)
    mapped = ParallelMapIterator(numbers, die_halfway, 2, 1, start_method="fork")
    if how == "pool behind a pool":  # whose processes hold the first one's pipe
        return ParallelMapIterator(mapped, abs, 2, 1, start_method="fork")
    return mapped

def long(item):
    time.sleep(3.0 if how == "closed pinned" else 1.0)
    return item

def of_which_one_fails_at_its_end(_, number):
    if number:
        return MapIterator(NativeCheckpointableIterator(range(15)), long)
    def fail(lock=results()._wlock):
        if how == "served, and locked":
            lock.acquire()
        os._exit(3)
    Finalize(None, fail, exitpriority=-10)  # after all that the queue has to send
    return NativeCheckpointableIterator(range(1))

how = sys.argv[1]
try:
    if how == "closed pool":
        with feed(how) as pool:
            next(pool), next(pool)
            time.sleep(1.5)
    elif how == "closed pinned":
        threading.excepthook = lambda failed: print(failed.thread.name)
        with feed(how) as loader:
            next(iter(loader))  # a worker sleeps over the next item while the loader is closed
    elif how.startswith("served"):
        print(len(list(CheckpointableLoader(of_which_one_fails_at_its_end, 2, multiprocessing_context="fork"))))
    else:
        list(feed(how))
except Exception as error:
    print(type(error).__name__)
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("loader", ["RuntimeError"]),
        ("pinned", ["RuntimeError"]),
        ("pool", ["BrokenProcessPool"]),
        ("pool behind a pool", ["BrokenProcessPool"]),
        ("closed pool", []),
        ("closed pinned", []),  # its watch looked into a closed pipe, and ended with a traceback
        ("served", ["16"]),  # its end was no death
        ("served, and locked", ["RuntimeError"]),
    ],
)
def test_a_worker_that_is_killed_halfway_through_a_message_is_told_of(how: str, told: list[str]) -> None:
    """Symptom: the rest was waited for for ever, since others could have written it."""
    done = subprocess.run([sys.executable, "-c", HALF, how], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*told, "ended"]


def wait_for(event: Any) -> None:
    while not event.is_set():
        sleep(0.001)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(other, marks=pytest.mark.slow) for other in ("spawn", "forkserver"))]
)
def test_what_is_set_is_seen_by_workers_however_they_start(method: str) -> None:
    context: Any = worker_context(method)
    event = context.Event()
    worker = context.Process(target=wait_for, args=(event,))
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    event.set()
    worker.join(120)
    assert worker.exitcode == 0
