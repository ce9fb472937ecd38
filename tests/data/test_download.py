"""Downloads, really run against a server on loopback."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeal.core import lock
from pipeal.core.errors import DataError
from pipeal.data import download
from pipeal.data.loading.sources import Source, obtain

BODY = bytes(range(256)) * 4000
MD5 = hashlib.md5(BODY).hexdigest()


def test_whole_file_arrives_and_progress_is_told(served, tmp_path):
    served.files["a.bin"] = BODY
    seen = []
    got = download(
        served.address + "a.bin",
        tmp_path / "new" / "a.bin",
        md5=MD5,
        progress=lambda *step: seen.append(step),
    )
    assert got.read_bytes() == BODY
    assert seen[-1] == ("a.bin", len(BODY), len(BODY))
    assert [path.name for path in got.parent.iterdir()] == ["a.bin"]


def test_empty_file_arrives(served, tmp_path):
    served.files["a"] = b""
    assert download(served.address + "a", tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_is_told_and_goes_on(served, tmp_path, ranges):
    served.files["a.bin"] = BODY
    served.cut_after, served.ranges = 300_000, ranges
    target = tmp_path / "a.bin"
    with pytest.raises(DataError, match=r"a\.bin: cut after 300000 of 1024000 bytes; run the same again"):
        download(served.address + "a.bin", target, md5=MD5)
    assert not target.exists()
    served.cut_after = None
    assert download(served.address + "a.bin", target, md5=MD5).read_bytes() == BODY
    assert served.asked[-1] == ("/a.bin", "bytes=300000-")
    assert not (tmp_path / "a.bin.part").exists()


@pytest.mark.parametrize("cut_after", [3 * (100_000 + len("186a0\r\n\r\n")), 250_000])
@pytest.mark.parametrize("md5", [MD5, None])
def test_a_cut_between_or_within_chunks_is_told(served, tmp_path, cut_after, md5):
    """Without a length only the last chunk tells that all is there: what came before a cut was taken for the file."""
    served.files["a.bin"] = BODY
    served.chunk_bytes, served.cut_after = 100_000, cut_after
    target = tmp_path / "a.bin"
    with pytest.raises(DataError, match=r"a\.bin: connection lost \(IncompleteRead.*run the same again"):
        download(served.address + "a.bin", target, md5=md5)
    assert not target.exists()
    served.cut_after = None
    assert download(served.address + "a.bin", target, md5=md5).read_bytes() == BODY


@pytest.fixture
def waits(monkeypatch):
    """Set once a call waits for another one."""
    found = threading.Event()
    monkeypatch.setattr(lock, "sleep", lambda _: found.set())
    return found


@pytest.mark.parametrize("md5", [MD5, None])
def test_two_at_once_fetch_a_file_once(served, tmp_path, waits, md5):
    """They wrote to one part file, and what was left of it could take the name of the whole one."""
    served.files["a.bin"] = BODY
    begun = threading.Event()
    target = tmp_path / "a.bin"

    def until_the_other_waits(*_):
        begun.set()
        waits.wait(60)

    with ThreadPoolExecutor(2) as both:
        first = both.submit(download, served.address + "a.bin", target, md5=md5, progress=until_the_other_waits)
        assert begun.wait(10)
        second = both.submit(download, served.address + "a.bin", target, md5=md5)
        assert first.result().read_bytes() == second.result().read_bytes() == BODY
    assert len(served.asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_two_at_once_fetch_and_unpack_an_archive_once(served, tmp_path, waits):
    """The second one found the archive that the first one was about to remove."""
    served.files["a.zip"] = BODY
    begun = threading.Event()

    def unpack(archive, folder, files):
        begun.set()
        waits.wait(60)
        assert archive.read_bytes() == BODY
        (folder / "a.csv").write_bytes(b"unpacked")

    source = Source(served.address + "a.zip", MD5, ("a.csv",), unpack)

    def once():
        obtain("no a.csv", [source], tmp_path, ["a.csv"], download=True, progress=None)

    with ThreadPoolExecutor(2) as both:
        first = both.submit(once)
        assert begun.wait(10)
        second = both.submit(once)
        first.result()
        second.result()
    assert len(served.asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_without_checksum_a_part_file_is_not_trusted(served, tmp_path):
    served.files["a.bin"] = BODY
    (tmp_path / "a.bin.part").write_bytes(b"something else")
    assert download(served.address + "a.bin", tmp_path / "a.bin").read_bytes() == BODY
    assert served.asked == [("/a.bin", None)]


def test_a_part_that_is_whole_needs_no_network(tmp_path):
    (tmp_path / "a.bin.part").write_bytes(BODY)
    assert download("http://127.0.0.1:9/a.bin", tmp_path / "a.bin", md5=MD5).read_bytes() == BODY


def test_what_has_the_name_survives_a_power_cut(served, tmp_path, monkeypatch):
    """Symptom: the name could be on the disk before what was fetched, and where there is no checksum that was taken."""
    calls = []
    monkeypatch.setattr(os, "replace", lambda *_, real=os.replace: (calls.append("rename"), real(*_)))
    monkeypatch.setattr(
        os, "fsync", lambda file: calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
    )
    served.files["a.bin"] = BODY
    download(served.address + "a.bin", tmp_path / "a.bin")
    assert calls == ["file", "rename", "folder"]


def test_a_part_longer_than_the_file_is_dropped(served, tmp_path):
    served.files["a.bin"] = BODY
    (tmp_path / "a.bin.part").write_bytes(BODY + b"more")
    assert download(served.address + "a.bin", tmp_path / "a.bin", md5=MD5).read_bytes() == BODY


def test_wrong_checksum_removes_the_part_and_keeps_an_older_file(served, tmp_path):
    served.files["a.bin"] = BODY
    (tmp_path / "a.bin").write_bytes(b"old")
    with pytest.raises(DataError, match=f"md5 {MD5}, wanted md5 {'0' * 32}; the bad file is removed"):
        download(served.address + "a.bin", tmp_path / "a.bin", md5="0" * 32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.bin": b"old"}


def test_http_error(served, tmp_path):
    with pytest.raises(DataError, match=re.escape(f"{served.address}gone: HTTP 404 Not Found")):
        download(served.address + "gone", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_refused_connection(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        # It stays bound, and no other process can listen there.
        with pytest.raises(DataError, match=r"no connection to http://127\.0\.0\.1:\d+/a \(.*refused"):
            download(f"http://127.0.0.1:{port}/a", tmp_path / "a")


def test_address_of_no_kind(tmp_path):
    with pytest.raises(DataError, match="no connection to nonsense"):
        download("nonsense", tmp_path / "a")


def test_silent_server(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/a"
        with pytest.raises(DataError, match=r"no connection to .* \(timed out\)"):
            download(url, tmp_path / "a", timeout_s=0.2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk(served, tmp_path):
    served.files["a"] = BODY
    (tmp_path / "a.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot write .*: No space left on device; make room"):
        download(served.address + "a", tmp_path / "a", md5=MD5)
    assert not (tmp_path / "a").exists()


def test_a_file_where_the_folder_should_be(served, tmp_path):
    served.files["a"] = BODY
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataError, match="cannot write"):
        download(served.address + "a", tmp_path / "data" / "a")
