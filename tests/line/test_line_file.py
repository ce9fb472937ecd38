"""The file of a line and its keys: what is made can be read, and each misfit is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from pipeal.config import document
from pipeal.core.errors import ConfigError
from pipeal.line.line_file import LineFile, key_path, keys_of, make_line, plain, read_line


def made(folder: Path, stages: int = 3, **settings: Any) -> LineFile:
    addresses = [f"host-{number}.example:{4000 + number}" for number in range(1, stages)]
    return make_line(folder, "text", {"train": {"epochs": 2}}, addresses, settings)


def rewritten(folder: Path, change: Any) -> Path:
    """The file of a new line, with a change."""
    content = plain(made(folder))
    change(content)
    path = folder / "line.yaml"
    path.write_text(document.dump(content))
    return path


def test_what_is_made_is_read_back_and_keys_fit_each_other(tmp_path: Path) -> None:
    line = made(tmp_path / "new" / "line", wait_s=3.5, snapshot_s=2.0)
    folder = tmp_path / "new" / "line"
    assert read_line(folder / "line.yaml") == line
    assert (line.wait_s, line.snapshot_s) == (3.5, 2.0)
    assert [stage.address for stage in line.stages] == [None, "host-1.example:4001", "host-2.example:4002"]
    text = (folder / "line.yaml").read_text()
    for number in range(3):
        path = key_path(folder, number)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().strip() not in text, "the file for every machine holds no secret"
    ours, theirs = (keys_of(line, key_path(folder, one), one, 1 - one) for one in (0, 1))
    assert (ours.peer, theirs.peer) == (theirs.public, ours.public)
    assert ours.secret != theirs.secret


def test_lines_have_names_and_keys_of_their_own(tmp_path: Path) -> None:
    one, two = made(tmp_path / "1"), made(tmp_path / "2")
    assert one.line != two.line
    assert len({stage.key for line in (one, two) for stage in line.stages}) == 6


def test_a_line_that_is_there_stays(tmp_path: Path) -> None:
    made(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="there is a line already; name another folder with --out"):
        made(tmp_path)
    (tmp_path / "line.yaml").unlink()
    with pytest.raises(ConfigError, match=r"cannot write the line's keys .*File exists"):
        made(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after == {name: content for name, content in before.items() if name != "line.yaml"}


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":4000", "host:0", "host:65536", "host:99999", "host:port", "user@host:4000", "a b:4000",
     "host/path:4000", "tcp://host:4000", "a;b:4000", "*:4000", "host:4000\n", "-host:4000", "_host:4000", ".:4000",
     "..:4000", ".host:4000", "a..b:4000", f"{'a' * 64}.example:4000"],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anything_is_written(address: str, tmp_path: Path) -> None:
    """``host:99999`` was written, and ended in a traceback of the stage before, where it connects; ``a..b:4000`` of
    the one that listens."""
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        make_line(tmp_path / "line", "text", {}, [address], {})
    assert not (tmp_path / "line").exists()


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "127.0.0.1:65535", "gpu-3.cluster_a.example:4000", "gpu.example.:4000", "[fd00::2]:7001"],
)
def test_addresses(address: str, tmp_path: Path) -> None:
    assert make_line(tmp_path, "text", {}, [address], {}).stages[1].address == address


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda line: line.update(colour="red"), "colour"),
        (lambda line: line.pop("kind"), "kind is missing"),
        (lambda line: line.update(line=7), "line: "),
        (lambda line: line.update(stages="three"), "stages: "),
        (lambda line: line["stages"].append({"key": "x" * 40}), "stages.3.address: found None"),
        (lambda line: line["stages"][1].update(address="nowhere"), "stages.1.address: found 'nowhere'"),
        (lambda line: line["stages"][1].update(port=3), "stages.1.port"),
        (lambda line: line["stages"][2].update(key="short"), "stages.2.key: found 'short'"),
        (lambda line: line["stages"][2].update(key="~" * 40), "stages.2.key: "),
        (lambda line: line.update(stages=line["stages"][:1]), "stages: found 1, expected at least 2"),
        (lambda line: line.update(wait_s=0), "wait_s: "),
        (lambda line: line.update(snapshot_s=-1), "snapshot_s: "),
        (lambda line: line.update(snapshot_s=float("nan")), "snapshot_s: "),
        (lambda line: line.update(retain_mib=float("inf")), "retain_mib: "),
        (lambda line: line.update(largest_mib="much"), "largest_mib: "),
        (lambda line: line.update(config=[1]), "config: "),
    ],
)
def test_each_misfit_is_told_in_one_line_with_its_place(change: Any, told: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path, change)
    with pytest.raises(ConfigError) as error:
        read_line(path)
    assert str(error.value).startswith(f"{path}")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "just words", "- a\n- list", "line: [", "line: a\nline: b", "\x00", "a: !!python/name:os.system"]
)
def test_a_file_that_is_none_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "line.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line\.yaml") as error:
        read_line(path)
    assert "\n" not in str(error.value)
    assert "LineFile" not in str(error.value), "a class of ours is nothing to its reader"


def test_a_file_that_is_not_there_or_a_folder_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "line.yaml", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read: .*; pipeal line init makes one"):
            read_line(path)


def test_what_is_refused_leaves_no_key(tmp_path: Path) -> None:
    """Symptom: once the key that was in the way had been removed, another one was, which the refused try had left."""
    other = key_path(tmp_path, 1)
    other.write_text("another")
    with pytest.raises(ConfigError, match=r"cannot write the line's keys .*File exists"):
        made(tmp_path)
    assert [*tmp_path.iterdir()] == [other]
    other.unlink()
    assert made(tmp_path) == read_line(tmp_path / "line.yaml")


def test_a_key_of_another_stage_or_of_none_is_refused(tmp_path: Path) -> None:
    line = made(tmp_path)
    with pytest.raises(ConfigError, match="it is not the key of stage 1 of this line"):
        keys_of(line, key_path(tmp_path, 2), 1, 0)
    broken = key_path(tmp_path, 1)
    for content in ("", "x" * 40, zmq.curve_keypair()[0].decode(), "\xff" * 40):
        broken.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match="it is not the key of stage 1 of this line") as error:
            keys_of(line, broken, 1, 0)
        assert content == "" or content not in str(error.value), "a secret is shown to nobody"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_key_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    line = made(tmp_path)
    path = key_path(tmp_path, 1)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read it; chmod 600 {path}"):
        keys_of(line, path, 1, 0)


def test_a_key_that_is_not_there_is_told(tmp_path: Path) -> None:
    line = made(tmp_path)
    with pytest.raises(ConfigError, match="No such file or directory; copy it from where the line was made"):
        keys_of(line, tmp_path / "stage-9.key", 1, 0)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the line's keys .*; choose another --out"):
        made(tmp_path / "taken" / "line")
