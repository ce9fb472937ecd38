"""Which groups the ranks of a pipeline talk in, what each is told of its GPU, and how they are ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeal.engine.distributed import pipeline as distributed_pipeline
from pipeal.engine.distributed import process_groups as meeting
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.pipeline import DistributedPipeline
from pipeal.engine.distributed.process_groups import Groups, Seat, open_groups

Made = tuple[list[int], str, "torch.device | None"]


class Group:
    """Knows its operations by their names."""

    allreduce, broadcast, send, recv = "allreduce", "broadcast", "send", "recv"


def opened(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, devices: Sequence[str], new_group: Callable[..., Any], rank: int
) -> list[tuple[Any, ...]]:
    """Opens the groups as one rank, of which every one has the device of its number; the connections it makes."""
    connected = []

    def connect(seat: Seat, operation: str, *_: Any, elements: int = 1) -> None:
        connected.append((seat.device, operation, elements))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(meeting, "_connect", connect)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # and back
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "0")
    seats = [Seat(name, f"GPU {number}" if name != "cpu" else None, 0.0) for number, name in enumerate(devices)]
    world: Any = SimpleNamespace(
        rank=rank, size=mesh.size, mesh=mesh, together=lambda _, work: work(), open_groups=lambda: None
    )
    open_groups(world, seats)
    return connected


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        (Mesh(2), ["cuda:1", "cuda:0"]),
        (Mesh(3), ["cpu", "cuda:0", "cuda:1"]),
        (Mesh(2, replicas=2), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (Mesh(1, replicas=2), ["cuda:3", "cuda:2"]),
    ],
)
def test_nccl_is_told_each_ranks_device(monkeypatch: pytest.MonkeyPatch, mesh: Mesh, devices: list[str]) -> None:
    """Symptom: with `--devices cuda:1,cuda:0` the ranks did not connect. Cause: PyTorch gives a group of NCCL that is
    not told otherwise the GPU of the rank's number. All ranks make the same groups, in the same order."""
    by_rank: list[list[Made]] = []
    for rank in range(mesh.size):
        made: list[Made] = []

        def new_group(
            ranks: list[int], timeout: timedelta, backend: str, device_id: torch.device | None = None, made: Any = made
        ) -> Any:
            made.append((ranks, backend, device_id))
            return Group()

        connected = opened(monkeypatch, mesh, devices, new_group, rank)
        assert {device for device, *_ in connected} <= {devices[rank]}
        mine = [one for one in made if rank in one[0]]
        assert {device for _, backend, device in mine if backend == "nccl"} <= {torch.device(devices[rank])}
        assert {device for _, backend, device in made if backend == "gloo"} <= {None}
        by_rank.append(made)
    orders = [[(ranks, backend) for ranks, backend, _ in made] for made in by_rank]
    assert all(order == orders[0] for order in orders)
    over_nccl = [ranks for ranks, backend in orders[0] if backend == "nccl"]
    on_gpus = {rank for rank, device in enumerate(devices) if device != "cpu"}
    pairs = [
        [lower, lower + 1] for lower in range(mesh.size - 1) if mesh.replica_of(lower) == mesh.replica_of(lower + 1)
    ]
    columns = [mesh.column(stage) for stage in range(mesh.stages) if mesh.replicas > 1]
    both_ways = [pair for pair in pairs if on_gpus.issuperset(pair) for _ in range(2)]
    assert over_nccl == [column for column in columns if on_gpus.issuperset(column)] + both_ways


def test_a_pytorch_whose_groups_take_no_device_is_told_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.6 is: it takes the GPU of the first tensor."""
    made = []

    def new_group(ranks: list[int], timeout: timedelta, backend: str) -> Any:
        made.append((ranks, backend))
        return Group()

    opened(monkeypatch, Mesh(2), ["cuda:1", "cuda:0"], new_group, 0)
    assert made == [([0, 1], "nccl"), ([0, 1], "nccl")]


def test_replicas_connect_for_little_and_for_as_much_as_they_send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_group(ranks: list[int], timeout: timedelta, backend: str, device_id: Any = None) -> Any:
        return Group()

    found = opened(monkeypatch, Mesh(1, replicas=2), ["cuda:0", "cuda:1"], new_group, 1)
    much = meeting.BUCKET_BYTES // torch.float32.itemsize
    assert found == [("cuda:1", name, count) for count in (1, much) for name in ("allreduce", "broadcast")]


def groups_of(*aborts: Callable[[], None]) -> Groups:
    """Pairs whose backends end as given."""
    pairs: Any = {}
    for lower, abort in enumerate(aborts):
        pairs[lower, False] = SimpleNamespace(_get_backend=lambda _, abort=abort: SimpleNamespace(abort=abort))
    return Groups(pairs=pairs)


def test_groups_end_all_at_once() -> None:
    """Symptom: an abort waits until the device is free, which the kernel of the next group held up."""
    together = threading.Barrier(3)
    ended: list[int] = []

    def abort() -> None:
        together.wait(120)
        ended.append(1)

    groups_of(abort, abort, abort).abort(20)
    assert len(ended) == 3


def test_nobody_waits_for_the_end_of_a_group_for_ever() -> None:
    released = threading.Event()

    def abort() -> None:
        released.wait(120)

    since = monotonic()
    groups_of(abort).abort(0.1)
    assert monotonic() - since < 60
    released.set()
    for thread in threading.enumerate():
        if thread.name == "pipeal-abort":
            thread.join(120)


def test_what_the_end_of_a_group_fails_with_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def fail() -> None:
        raise RuntimeError("NCCL communicator was aborted")

    groups_of(fail, lambda: ended.append("the other")).abort(20)
    assert ended == ["the other"]
    assert printed == []


@pytest.mark.parametrize(("said", "wanted"), [(None, "0"), ("1", "1")])
def test_nccls_own_watchers_end_no_process(monkeypatch: pytest.MonkeyPatch, said: str | None, wanted: str) -> None:
    """Prediction 13 of the GPU reading: NCCL's heartbeat monitor ends a process before it can say whom it lost. Both
    are told before the first group is made."""
    found: list[tuple[str | None, str | None]] = []
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    for name, value in zip(names, ("1", said), strict=True):
        monkeypatch.setenv(name, "")  # and back
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: found.append(tuple(map(os.environ.get, names))))
    meeting.gpu_group([0], Seat("cuda:0", "the only one", 0.0))
    assert found == [("0", wanted)]


def test_a_rank_settles_on_its_gpu_before_it_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 12 of the GPU reading: streams come after that, and NCCL, and everything that names no GPU."""
    said: list[str] = []

    def open_device(device: torch.device) -> Any:
        said.append(f"opened {device}")
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(f"settled on {device}"))
    monkeypatch.setattr(distributed_pipeline, "open_device", open_device)
    with pytest.raises(InterruptedError):
        DistributedPipeline([], SimpleNamespace(), "cuda:1")
    assert said == ["settled on cuda:1", "opened cuda:1"]


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        ({"uuid": "MIG-1", "pci_domain_id": 0, "pci_bus_id": 65, "pci_device_id": 0}, "here 0:65:0"),
        ({"uuid": "MIG-2", "pci_domain_id": 0, "pci_bus_id": 65, "pci_device_id": 0}, "here 0:65:0"),
        ({"uuid": "GPU-1"}, "GPU-1"),
        ({}, "cuda:1"),
    ],
)
def test_a_gpu_is_known_by_its_place_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], wanted: str
) -> None:
    """Prediction 11 of the GPU reading: two parts of one GPU (MIG) have identifiers of their own, and NCCL, which looks
    at the bus, ends with "duplicate GPU"."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    assert meeting.gpu_of(torch.device("cuda:1"), "here") == wanted


@pytest.mark.cuda
def test_this_machines_gpus_have_places_of_their_own() -> None:
    places = [meeting.gpu_of(torch.device("cuda", number), "here") for number in range(torch.cuda.device_count())]
    assert len({*places}) == len(places)
