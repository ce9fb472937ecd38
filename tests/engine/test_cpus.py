"""How many cores a process has: in containers the quota says, not the machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeal import Pipeline
from pipeal.core.options import EngineOptions
from pipeal.engine.devices import cpus, threads
from pipeal.engine.execution.channel import Stopped
from pipeal.engine.execution.worker import SharedProgress, StageThread
from pipeal.engine.schedule import SCHEDULES

from .paper import PaperLayer, World


def in_group(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_others_had_of_the_processors_is_what_this_process_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the affinity mask's alone: idle and waiting for a disk are free, what a host gave to others is not."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    found = []
    for passed, own, *rows in (
        (0.0, 5.0, "0 100 0 50 900 30 0 0 0 0 0", "1 0 0 0 0 0 0 0 0 0 0", "2 0 0 0 0 0 0 0 0 0 0"),
        (10.0, 11.0, "0 500 40 60 1000 80 5 5 40 7 7", "1 999 0 0 0 0 0 0 0 0 0", "2 500 0 0 500 0 0 0 0 0 0"),
    ):
        stat.write_text("\n".join(["cpu 1 2 3", *(f"cpu{row}" for row in rows), "intr 7"]))
        monkeypatch.setattr(cpus, "monotonic", lambda passed=passed: passed)
        monkeypatch.setattr(os, "times", lambda own=own: (own, 0.0, 0.0, 0.0, 99.0))
        found.append(cpus.ProcessorTime.now(tmp_path))
    before, now = found
    assert before is not None
    assert now is not None
    assert (now.cpus, now.busy_s - before.busy_s) == (2, pytest.approx(5.0 + 5.0))
    assert now.others_share(before) == pytest.approx((10.0 - 6.0) / 20.0)
    assert now.others_share(now) == 0.0
    stat.unlink()
    assert cpus.ProcessorTime.now(tmp_path) is None, "a system that does not tell"


V2, V1 = "0::/jobs/mine\n", "4:memory:/jobs/mine\n3:cpu,cpuacct:/jobs/mine\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        (V2, {"sys/fs/cgroup/jobs/mine/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n"}, None),
        # The group around it is tighter; in a container, its own group is what is mounted.
        (V2, {"sys/fs/cgroup/jobs/cpu.max": "50000 100000", "sys/fs/cgroup/jobs/mine/cpu.max": "200000 100000"}, 0.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (V2, {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (V2, {}, None),
        (V2, {"sys/fs/cgroup/jobs/mine/cpu.max": "nonsense\n"}, None),
        (
            V1,
            {
                "sys/fs/cgroup/cpu,cpuacct/jobs/mine/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/jobs/mine/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (V1, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    assert cpus.cpu_quota(in_group(tmp_path, cgroup, files)) == quota


def test_cores_are_the_fewer_of_mask_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with two CPUs' worth of time on a machine of 64 had 64 threads in every operator."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    tight = in_group(tmp_path / "a", V2, {"sys/fs/cgroup/jobs/mine/cpu.max": "150000 100000"})
    wide = in_group(tmp_path / "b", V2, {"sys/fs/cgroup/jobs/mine/cpu.max": "9900000 100000"})
    assert [cpus.cores(root) for root in (tight, wide, tmp_path / "none")] == [2, 8, 8]


@pytest.mark.parametrize(("said", "omp"), [("3", 3), ("3,2", 3), ("", None), ("0", None), ("many", None), ("-2", None)])
def test_threads_heed_the_environment_unless_they_are_asked_for(
    said: str, omp: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    assert cpus.omp_threads() == omp
    one, two = (threads.threads_each(["cpu"] * stages, SCHEDULES["pipelined"]) for stages in (1, 2))
    assert (one, two) == ((omp or 8), min(4, omp or 4))
    assert threads.threads_each(["cpu"] * 2, SCHEDULES["pipelined"], wanted=7) == 7


@pytest.mark.parametrize(
    ("devices", "wanted"), [(["cuda:0"], 1), (["cuda:0"] * 4, 1), (["cuda:0", "cpu"], 8), (["cpu", "cuda:0", "cpu"], 4)]
)
def test_cores_are_shared_among_stages_on_cpus(
    devices: list[str], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prediction 17 of the GPU reading: stages on GPUs took all cores for operators that they hardly have."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    assert threads.threads_each(devices, SCHEDULES["pipelined"]) == wanted


@pytest.mark.parametrize("asked", [None, 1])
@pytest.mark.parametrize(("device", "wanted"), [("cuda:0", 3), ("cpu", 1)])
def test_beside_gpus_the_caller_keeps_its_threads(
    device: str, wanted: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: in a loop over ``sequential`` on a GPU, the user's own data work ran on one core. A plan asks for one
    thread there, too: whoever asks, that is of workers on CPUs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    world = World(gpus=1)
    world.install(monkeypatch)
    torch.set_num_threads(3)
    try:
        with Pipeline([PaperLayer(world)], [device], "sequential", threads=asked) as pipe:
            assert torch.get_num_threads() == wanted
        assert torch.get_num_threads() == 3
        assert pipe.threads == (None if wanted == 3 else 1)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("types", "wanted"), [(["cpu"], 3), (["cuda"], 1), (["cpu", "cuda"], 3)])
def test_the_worker_of_a_gpu_has_one_thread_for_operators(types: list[str], wanted: int) -> None:
    found: list[int] = []

    def get() -> Any:
        found.append(torch.get_num_threads())
        raise Stopped

    stage: Any = SimpleNamespace(number=0, device=SimpleNamespace(types=types))
    before = torch.get_num_threads()
    worker = StageThread("test", stage, SharedProgress(1, []), SimpleNamespace(get=get), EngineOptions(threads=3))  # type: ignore[arg-type]
    worker.start()
    worker.join()
    torch.set_num_threads(before)
    assert found == [wanted]
