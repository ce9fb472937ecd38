"""How a line stands, in a file and on the way to the next stage."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipeal.core.errors import DataError
from pipeal.line import status as module
from pipeal.line.status import STATUS_FILE, StageStatus, Status, read_status, stages_before, status_table

ONE = StageStatus(
    stage=0, state="working", items=7, batches=6, saved=4, saved_at=100.0, retained=3, retained_mib=0.5, waiting=2,
    window=4, before="-", after="connected",
)  # fmt: skip


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test moves."""
    at = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: at[0])
    monkeypatch.setattr(module, "time", lambda: at[0])
    return at


def test_it_is_written_each_second_and_at_once_where_asked(tmp_path: Path, now: list[float]) -> None:
    status, passed = Status(tmp_path, 1), list[Any]()
    below = {"0": asdict(ONE)}

    def tell(batches: int, **options: bool) -> None:
        status.tell(lambda: replace(ONE, stage=1, batches=batches), below, passed.append, **options)

    tell(10)
    now[0] += 0.5
    tell(15)
    assert [one.batches for one in read_status(tmp_path)] == [6, 10]
    now[0] += 1.5
    tell(30)
    own = read_status(tmp_path)[1]
    assert (own.batches, own.rate, own.at) == (30, 10.0, 1002.0)
    now[0] += 0.25
    tell(30, at_once=True)
    assert [sorted(stages) for stages in passed] == [["0", "1"]] * 3
    assert passed[-1]["1"]["rate"] == 0


def test_a_stage_that_is_started_again_still_shows_those_that_have_left(tmp_path: Path, now: list[float]) -> None:
    """Symptom: of a line whose first stage was done, a restarted last stage showed no row."""

    def told_by(stage: int, below: dict[str, Any]) -> None:
        Status(tmp_path, stage).tell(lambda: replace(ONE, stage=stage), below, None)

    told_by(2, {"0": asdict(replace(ONE, state="finished")), "1": {**asdict(ONE), "stage": 1}})
    told_by(2, {"1": {**asdict(ONE), "stage": 1, "batches": 9}})
    assert [(one.stage, one.state, one.batches) for one in read_status(tmp_path)] == [
        (0, "finished", 6),
        (1, "working", 9),
        (2, "working", 6),
    ]
    told_by(1, {})
    assert [one.stage for one in read_status(tmp_path)] == [0, 1]


def test_stages_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    stages = {str(number): {**asdict(ONE), "stage": number} for number in (10, 9, 2, 0)}
    (tmp_path / STATUS_FILE).write_text(json.dumps({"stages": stages}))
    found = read_status(tmp_path)
    assert [one.stage for one in found] == [0, 2, 9, 10]
    table = status_table(found)
    assert all(word in table for word in ("working", "connected", "item 4"))


def test_all_stages_are_held_against_what_the_first_one_counts() -> None:
    table = status_table([replace(ONE, total=8), replace(ONE, stage=1, batches=5)])
    assert "6 of 8" in table
    assert "5 of 8" in table


def test_a_status_without_a_snapshot_has_a_table_too() -> None:
    assert "-" in status_table([replace(ONE, saved=None, saved_at=None)])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stages": []}', '{"stages": {"x": {}}}', '{"stages": {"0": {}}}'])
def test_a_file_that_is_no_status_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(DataError, match="is not what a stage of a line writes") as error:
        read_status(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_status_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name the folder of a stage"):
        read_status(tmp_path)


def test_a_disk_that_takes_nothing_is_told_once_and_stops_nothing(
    tmp_path: Path, now: list[float], said: list[str]
) -> None:
    """A full disk ended the stage by its status, while a snapshot that could not be written was only told."""
    status, passed = Status(tmp_path, 0), list[Any]()
    in_the_way = (tmp_path / STATUS_FILE).with_suffix(".aside")
    in_the_way.mkdir()
    for _ in range(3):
        now[0] += 2
        status.tell(lambda: ONE, {}, passed.append)
    assert len(passed) == 3, "the next stage hears of it all the same"
    assert said == [f"{tmp_path / STATUS_FILE}: Is a directory; the training goes on"]
    in_the_way.rmdir()
    now[0] += 2
    status.tell(lambda: ONE, {}, None)
    assert read_status(tmp_path)[0].items == 7


@pytest.mark.parametrize("ahead_s", [-7200.0, 0.0, 7200.0])
def test_what_a_peer_tells_has_the_times_of_the_clock_here(ahead_s: float, now: list[float]) -> None:
    """Symptom: a snapshot of just now was hours old, or was to come, where the clock of its machine was off."""
    there = now[0] + ahead_s
    before = {
        "0": asdict(replace(ONE, at=there - 3, saved_at=there - 60)),
        "1": asdict(replace(ONE, stage=1, at=there, saved_at=None)),
    }
    found = stages_before(2, before)
    assert [(one["at"], one["saved_at"]) for one in found.values()] == [(997.0, 940.0), (1000.0, None)]
    assert status_table([replace(ONE, at=1001.0, saved_at=1002.0)]).count(" 0 s ago") == 2, "a clock was set back"


def test_what_a_peer_tells_is_looked_at(now: list[float]) -> None:
    good = {"0": asdict(replace(ONE, at=now[0])), "1": asdict(replace(ONE, stage=1, at=now[0]))}
    assert stages_before(2, json.loads(json.dumps(good))) == good
    assert stages_before(2, {}) == {}
    bad: list[Any] = [
        None, [], "0", {"2": good["0"]}, {"a": good["0"]}, {"-1": good["0"]}, {"00": good["0"]}, {"0": None},
        {"0": {}}, {"0": {**good["0"], "state": "x" * 41}}, {"0": {**good["0"], "before": "\x1b[2J"}},
        {"0": {**good["0"], "items": -1}}, {"0": {**good["0"], "items": "7"}}, {"0": {**good["0"], "window": 2**70}},
    ]  # fmt: skip
    for one in bad:
        with pytest.raises(ValueError, match=r"."):
            stages_before(2, one)


def test_what_a_peer_tells_beside_is_not_passed_on(now: list[float]) -> None:
    """A status as long as a head may be, to which the next stage added its own, was too long for that one's peer."""
    told = asdict(replace(ONE, at=now[0]))
    assert stages_before(1, {"0": {**told, "more": "x" * 100_000}}) == {"0": told}
