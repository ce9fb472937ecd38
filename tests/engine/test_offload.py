"""Layers in mapped files: the same bits, and in memory only what is at work."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, Pipeline, PlacementError
from pipeal.core.host_memory import status_bytes
from pipeal.core.options import EngineOptions
from pipeal.engine.state import disk_offload, mapped_file
from pipeal.engine.state.mapped_file import MappedFile
from pipeal.engine.state.saved import Saved
from pipeal.engine.state.stateful import stateful

from .cases import ORDERS, cosine, outcome, reference
from .test_exactness import RICH, run
from .test_failures import notes_of

WIDE = 32


def layer(number: int = 0) -> AL:
    torch.manual_seed(number)
    block = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU())
    return AL(ENC(block, nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), 0.01)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, WIDE, generator=draw), torch.randn(8, WIDE, generator=draw)) for _ in range(count)]


def kept(package: ALPackage) -> list[Tensor]:
    """Weights, buffers and what optimizers keep, but for counters."""
    found = [*package.parameters(), *package.buffers()]
    for one in package:
        for optimizer in stateful(one)[0].values():
            found += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor for tensor in found if tensor.nbytes >= 1024]


@pytest.fixture
def all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are moved, too."""
    monkeypatch.setattr(mapped_file, "_SMALL", 1)


@pytest.mark.usefixtures("all_of_it")
@pytest.mark.parametrize("name", ["sequential", "pipelined", "al-fm/layer"])
def test_offloaded_layers_learn_the_same(name: str, tmp_path: Path) -> None:
    wanted = reference(RICH)
    for sizes in ([4], [1, 3], [1, 1, 1, 1]):
        found = run(RICH, ORDERS[name], sizes, offload="disk", offload_folder=tmp_path)
        assert found.differences(wanted) == [], sizes


@pytest.mark.usefixtures("all_of_it")
@pytest.mark.parametrize(
    "options",
    [{"on_non_finite": "skip"}, {"on_oom": "split"}, {"precision": "bf16"}, {"recompute": "blocks"}],
    ids=str,
)
def test_with_what_else_is_around_a_layer(options: dict[str, Any], tmp_path: Path) -> None:
    def trained(**more: Any) -> Any:
        package = RICH.build()
        with Pipeline(package, "cpu*2", seed=RICH.seed, threads=1, **options, **more) as pipe:
            report = pipe.run(RICH.batches(), cosine, updates=lambda batch: batch % 2 == 1)
        return outcome(package, report.losses, [])

    assert trained(offload="disk", offload_folder=tmp_path).differences(trained()) == []


def test_what_a_layer_keeps_is_in_its_file_and_the_folder_stays_empty(tmp_path: Path) -> None:
    package = ALPackage([layer(number) for number in range(3)])
    with Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches())
        (stage,) = pipe.stages
        assert stage.offloaded is not None
        for index, one in enumerate(package):
            file = stage.offloaded._files[index]
            tensors = kept(ALPackage([one]))
            assert len(tensors) == 4 + 2 * 4  # four matrices, and two moments of each
            assert all(file.holds(tensor) for tensor in tensors)
            assert all(parameter.grad is None for parameter in one.parameters())
        assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipeal-offload")]
    assert package.infer(batches(1)[0][0]).isfinite().all()  # after the pipeline, the package is as any other


def test_a_generator_makes_each_layer_after_the_one_before_is_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    take = MappedFile.take
    monkeypatch.setattr(MappedFile, "take", lambda self, tensors: (steps.append("file"), take(self, tensors))[1])

    def one_by_one() -> Iterator[AL]:
        for number in range(3):
            steps.append("made")
            yield layer(number)

    pipe = Pipeline(one_by_one(), "cpu", "sequential", threads=1, offload="disk", offload_folder=tmp_path)
    assert steps == ["made", "file"] * 3
    whole = ALPackage([layer(number) for number in range(3)])
    with pipe:
        pipe.run(batches())
    with Pipeline(whole, "cpu", "sequential", threads=1) as other:
        other.run(batches())
    mine = [value for stage in pipe.stages for _, one in stage.layers for value in one.state_dict().values()]
    assert all(map(torch.equal, mine, whole.state_dict().values()))


def test_snapshots_are_of_their_moment_and_lie_in_files_of_their_own(tmp_path: Path) -> None:
    package = ALPackage([layer(number) for number in range(2)])
    with Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches())
        wanted = {name: value.clone() for name, value in package.state_dict().items()}
        snapshot = pipe.snapshot()
        pipe.run(batches())
        found = snapshot.wait(60)
    for index in range(2):
        for name, value in found[index].state["module"].items():
            assert torch.equal(value, wanted[f"{index}.{name}"])
    assert not torch.equal(package.state_dict()["0.enc.f.0.weight"], wanted["0.enc.f.0.weight"])


def test_saved_and_loaded(tmp_path: Path) -> None:
    package = ALPackage([layer(number) for number in range(2)])
    with Pipeline(package, "cpu*2", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches())
        pipe.save(tmp_path / "half")
        pipe.run(batches())
    other = ALPackage([layer(number + 7) for number in range(2)])
    with Pipeline.load(tmp_path / "half", other, "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches())
    assert all(map(torch.equal, kept(other), kept(package)))


def test_what_is_loaded_goes_into_the_files_and_again_into_the_same_places(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {"threads": 1, "offload": "disk", "offload_folder": tmp_path}

    package = ALPackage([layer(number) for number in range(2)])
    with Pipeline(package, "cpu", **settings()) as pipe:
        pipe.run(batches())
        pipe.save(tmp_path / "half")
        pipe.run(batches())
    pipe.save(tmp_path / "whole")  # while it is closed, from its files
    other = ALPackage([layer(number + 7) for number in range(2)])
    pipe = Pipeline(other, "cpu", **settings())
    (stage,) = pipe.stages
    assert stage.offloaded is not None
    sizes = []
    for _ in range(6):
        pipe.load(tmp_path / "half")
        files = [stage.offloaded._files[index] for index in range(2)]
        assert all(
            file.holds(tensor) for file, one in zip(files, other, strict=True) for tensor in kept(ALPackage([one]))
        )
        sizes.append([file.size for file in files])
    assert sizes == [sizes[0]] * 6, "what lies in a file is written in place"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipeal-offload")]
    with pipe:
        pipe.run(batches())
    assert all(map(torch.equal, kept(other), kept(package)))
    pipe.load(tmp_path / "whole")
    assert all(map(torch.equal, kept(other), kept(package)))
    made = (layer(number + 7) for number in range(2))
    loaded = Pipeline.load(tmp_path / "whole", made, "cpu", **settings())
    assert all(map(torch.equal, kept(ALPackage([one for _, one in loaded.stages[0].layers])), kept(package)))


@pytest.mark.parametrize("after", range(8))
def test_of_what_does_not_find_room_while_it_is_loaded_all_or_nothing_is_there(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ALPackage([layer(number) for number in range(3)])
    with Pipeline(package, "cpu", threads=1) as pipe:
        pipe.run(batches())
        pipe.save(tmp_path / "model")
    other = ALPackage([layer(number + 7) for number in range(3)])
    pipe = Pipeline(other, "cpu", threads=1, offload="disk", offload_folder=tmp_path)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    allocate, calls = os.posix_fallocate, []

    def full(*where: int) -> None:
        calls.append(where)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*where)

    monkeypatch.setattr(os, "posix_fallocate", full)
    if after < 6:  # for each layer, room for what it has, and for what its optimizers get
        with pytest.raises(
            DataError, match=r"No space left on device; .*name another folder by offload_folder"
        ) as told:
            pipe.load(tmp_path / "model")
        assert "does not fit the model" not in str(told.value)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        assert not any(optimizer.state for one in other for optimizer in stateful(one)[0].values())
    monkeypatch.undo()
    pipe.load(tmp_path / "model")
    assert all(map(torch.equal, kept(other), kept(package)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is counted on Linux")
def test_a_saved_file_is_mapped_and_takes_no_memory(tmp_path: Path) -> None:
    """It was read as a whole, beside the layers that it was for."""
    wide = nn.Linear(2048, 2048)
    Saved(3, 0, [{"module": {"weight": wide.weight.detach()}}] * 1).write(tmp_path / "model")
    before = status_bytes("RssAnon")
    found = Saved.read(tmp_path / "model").layers[0]["module"]["weight"]
    assert torch.equal(found, wide.weight)
    assert status_bytes("RssAnon") - before < 8 * 2**20 < found.nbytes


def test_tensors_keep_their_shape_and_their_strides(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    images = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    gaps = torch.randn(64, 64)[:, ::2]
    halves = torch.randn(600).bfloat16()
    before = [one.clone() for one in (images, gaps, halves)]
    stride = images.stride()
    file.take(zip("abc", (images, gaps, halves), strict=True))
    assert all(map(torch.equal, (images, gaps, halves), before))
    assert (file.holds(images), file.holds(gaps), file.holds(halves)) == (True, False, True)
    assert images.stride() == stride
    file.let_go()
    file.write()
    assert all(map(torch.equal, (images, gaps, halves), before))
    copy = file.copy(images)
    images.zero_()
    assert torch.equal(copy, before[0])


def test_a_disk_that_is_too_small_is_told_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    package = ALPackage([layer(number) for number in range(2)])
    before = [tensor.clone() for tensor in package.state_dict().values()]
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DataError, match=r"No space left on device; [\d.]+ MiB more were needed for an offloaded layer"
        ):
            Pipeline(package, threads=1, offload="disk", offload_folder=tmp_path)
    assert all(map(torch.equal, package.state_dict().values(), before))
    pipe = Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)  # the optimizers' states do not fit
    with pytest.raises(DataError, match="or name another folder by offload_folder") as caught, pipe:
        pipe.run(batches())
    assert "update of stage 0, layer 0 (AL), batch 0" in notes_of(caught.value)


@pytest.mark.parametrize(("layers", "count"), [(3, 4), (1, 1)])  # of the one only the last write can fail
def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, count: int) -> None:
    package = [layer(number) for number in range(layers)]
    pipe = Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=tmp_path)

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(DataError, match=r"an offloaded layer: .*Input/output error"), pipe:
        pipe.run(batches(count))


def test_a_folder_that_takes_no_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a folder for offloaded layers"):
        Pipeline([layer()], offload="disk", offload_folder=tmp_path / "file" / "sub")


def test_what_does_not_go_with_it_is_refused() -> None:
    for schedule, options in (("al-fm", {}), ("pipelined", {"within_stage": "stage"}), ("backward-overlap", {})):
        with pytest.raises(ConfigError, match="needs layers that end one before the next"):
            Pipeline([layer()], None, schedule, offload="disk", **options)
    with pytest.raises(ConfigError, match="not for stages on cuda; use 'host'"):
        EngineOptions(offload="disk").check_layout(kinds=["cuda", "cpu"])


class Odd(AL):
    """Keeps what is replaced, shared or sparse."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
        if kind == "shared":
            block[2].weight = nn.Parameter(block[0].weight.data)
            block.register_buffer("seen", block[0].weight.detach()[:16])
        super().__init__(ENC(block, nn.Linear(WIDE, WIDE)), AE(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), 0.01)
        if kind == "sparse":
            self.register_buffer("eye", torch.eye(WIDE).to_sparse())
        self.register_buffer("mean", torch.zeros(WIDE, WIDE))
        self.register_buffer("before", torch.zeros(WIDE, WIDE))

    def update(self) -> None:
        super().update()
        self.before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * self.enc.b.weight.detach()


@pytest.mark.parametrize("kind", ["plain", "shared", "sparse"])
def test_what_shares_memory_or_is_replaced_learns_the_same(kind: str, tmp_path: Path) -> None:
    found = []
    for options in ({}, {"offload": "disk", "offload_folder": tmp_path}):
        one = Odd(kind)
        with Pipeline([one], "cpu", threads=1, **options) as pipe:
            pipe.run(batches(12))
        found.append([value.to_dense() for value in one.state_dict().values()])
        if options:
            file = pipe.stages[0].offloaded._files[0]  # type: ignore[union-attr]
            assert file.size < 40 * WIDE * WIDE * 4
    assert all(map(torch.equal, *found))


def test_many_layers_take_few_descriptors(tmp_path: Path) -> None:
    package = ALPackage([layer(number) for number in range(6)])
    before = len(os.listdir("/proc/self/fd"))
    with Pipeline(package, "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches(3))
        in_training = len(os.listdir("/proc/self/fd")) - before
        snapshot = pipe.snapshot()
        pipe.drain()
        snapshot.wait(60)
        assert in_training <= 4 * 6
        assert len(os.listdir("/proc/self/fd")) - before - in_training <= 3 * 6
        pipe.run(batches(20))
        assert len(os.listdir("/proc/self/fd")) - before - in_training <= 3 * 6


def test_snapshots_have_storages_of_their_own_size(tmp_path: Path) -> None:
    """A file of a checkpoint kept the whole mapping as bytes without a shape."""
    with Pipeline([layer()], "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches(1))
        found = pipe.snapshot().wait(60)
    for value in found[0].state["module"].values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_layers_that_share_weights_are_refused_and_keep_what_they_have(tmp_path: Path) -> None:
    package = [layer(0), layer(1)]
    package[1].enc.b.weight = package[0].enc.b.weight
    before = [tensor.clone() for one in package for tensor in one.state_dict().values()]
    with pytest.raises(PlacementError, match="layers 0 and 1 share the parameter"):
        Pipeline(package, threads=1, offload="disk", offload_folder=tmp_path)
    assert all(map(torch.equal, before, (tensor for one in package for tensor in one.state_dict().values())))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be read ended the process by a signal."""
    pipe = Pipeline([layer(number) for number in range(3)], "cpu", threads=1, offload="disk", offload_folder=tmp_path)

    def broken(number: int) -> int:
        raise OSError(number, os.strerror(number))

    for sendfile, told in (
        (lambda *_: broken(errno.EIO), "Input/output error"),
        (lambda *_: 0, "Input/output error"),  # cut short by someone
        (lambda *_: broken(errno.EMFILE), r"Too many open files; .*\(ulimit -n\)"),
    ):
        monkeypatch.setattr(os, "sendfile", sendfile)
        with pytest.raises(DataError, match=f"an offloaded layer: {told}"), pipe:
            pipe.run(batches())


def test_a_layer_is_read_whole_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    send = os.sendfile

    def in_pieces(out: int, source: int, offset: int, count: int) -> int:
        read.append((source, offset))
        return send(out, source, offset, min(count, 5000))

    monkeypatch.setattr(os, "sendfile", in_pieces)
    with Pipeline([layer(0), layer(1)], "cpu", threads=1, offload="disk", offload_folder=tmp_path) as pipe:
        pipe.run(batches(3))
        home = pipe.stages[0].offloaded
        assert isinstance(home, disk_offload.DiskOffload)
        for file in home._files.values():
            pieces = {offset for source, offset in read if source == file._file.fileno()}
            assert pieces == set(range(0, file.size, 5000))
