"""A disk that does not take offloaded layers: one line, an exit code, nothing left on it; and a plain one that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_full_disk import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="layers are offloaded to a disk on Linux"),
]

LIMITED = """
import resource, sys
from pipeal.cli import entry, text
from pipeal.engine.state import disk_offload
kind, limit = getattr(resource, sys.argv[1]), int(sys.argv[2])
inner = disk_offload.one_by_one
def then_limited(*given):  # of the layers, and not of what loading PyTorch takes
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    return inner(*given)
from pipeal.engine import pipeline
pipeline.one_by_one = then_limited
entry.run(text.command, sys.argv[3:])
"""


def train(folder: Path, offload_folder: Path, *limited: object, layers: int = 3) -> subprocess.CompletedProcess[str]:
    """A run of two batches; the layers are of some 150 KiB."""
    (folder / "text").write_text("to be or not to be that is the question " * 40)
    sizes = {"model.width": 64, "model.heads": 2, "model.block": 8, "model.layers": layers, "data.batch_size": 2}
    sizes |= {"data.steps": 2, "data.estimate_batches": 1, "train.epochs": 1, "engine.threads": 1}
    sets = [f"--set={key}={value}" for key, value in sizes.items()]
    place = ["--set=engine.offload=disk", f"--set=engine.offload_folder={offload_folder}", "--devices=cpu"]
    asked = ["text", "charlm", f"--text={folder / 'text'}", f"--out={folder / 'runs'}", *place, *sets]
    command = ["-c", LIMITED, *map(str, limited)] if limited else ["nlpmain.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command, *asked], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600, env=env
    )


def told(ended: subprocess.CompletedProcess[str], code: int, line: str) -> None:
    """It ended with that code and one line."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    said = [one for one in ended.stderr.splitlines() if one.startswith("pipeal: ")]
    assert len(said) == 1
    assert line in said[0]


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system in memory, by the words of ``mount``."""
    place = tmp_path / "mounted"
    place.mkdir()
    done = subprocess.run(["mount", *request.param, "none", str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root mounts file systems")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def status_of(folder: Path) -> str:
    (found,) = folder.glob("runs/*/status.json")
    status: str = json.loads(found.read_text())["status"]
    return status


@pytest.mark.parametrize("mounted", [["-t", "tmpfs", "-o", "size=300k"]], indirect=True, ids=["tmpfs"])
def test_a_disk_that_is_too_small(mounted: Path, tmp_path: Path) -> None:
    """It is no mistake of the user, as everywhere; the same command goes on where there is room."""
    ended = train(tmp_path, mounted)
    told(ended, 1, f"{mounted}: No space left on device; ")
    assert (
        "MiB more were needed for an offloaded layer, 0 MiB are free; make room there, or name another" in ended.stderr
    )
    assert list(mounted.iterdir()) == []
    assert os.statvfs(mounted).f_bfree == os.statvfs(mounted).f_blocks  # files without names are gone, too
    assert status_of(tmp_path) == "failed"
    (tmp_path / "other").mkdir()
    assert train(tmp_path, tmp_path / "other").returncode == 0


@pytest.mark.parametrize("mounted", [["-t", "tmpfs", "-o", "ro"]], indirect=True, ids=["tmpfs"])
def test_a_folder_that_cannot_be_written_to(mounted: Path, tmp_path: Path) -> None:
    told(train(tmp_path, mounted), 2, "Read-only file system; expected a folder for offloaded layers; name another")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("mounted", [["-t", "ramfs"]], indirect=True, ids=["ramfs"])
def test_a_file_system_that_reserves_no_room(mounted: Path, tmp_path: Path) -> None:
    """The C library writes the bytes instead."""
    ended = train(tmp_path, mounted)
    assert ended.returncode == 0, ended.stderr
    assert list(mounted.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told(train(tmp_path, tmp_path / "file"), 2, "File exists; expected a folder for offloaded layers; name another")
    assert not (tmp_path / "runs").exists()


def test_files_may_not_be_as_large(tmp_path: Path) -> None:
    ended = train(tmp_path, tmp_path / "layers", "RLIMIT_FSIZE", 100_000)
    told(ended, 1, "File too large; ")
    assert "allow larger files (ulimit -f), or name another folder" in ended.stderr
    assert list((tmp_path / "layers").iterdir()) == []


def test_open_files_may_not_be_as_many(tmp_path: Path) -> None:
    ended = train(tmp_path, tmp_path / "layers", "RLIMIT_NOFILE", 60, layers=24)
    told(ended, 2, "Too many open files; ")
    assert "(ulimit -n)" in ended.stderr
    assert list((tmp_path / "layers").iterdir()) == []
