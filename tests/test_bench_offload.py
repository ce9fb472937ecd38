"""The offload benchmark looks for depths, and makes what it says of what it has measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benches import BENCH, Benches

KEPT = BENCH / "results" / "offload.json"


@pytest.fixture
def offload(bench: Benches) -> ModuleType:
    return bench["offload"]


@dataclass(frozen=True)
class Training:
    depth: int = 0


@pytest.mark.parametrize("first", [1, 5, 16, 40])
@pytest.mark.parametrize("deepest", [0, 1, 5, 22, 48])
def test_the_deepest_that_trains_is_found(
    offload: ModuleType, first: int, deepest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(training: Training, limit: int) -> dict[str, Any]:
        return {"depth": training.depth, "trains": training.depth <= min(deepest, limit)}

    monkeypatch.setattr(offload, "trains", trains)
    tries = list(offload.searched(Training(), 1000, first))
    assert max((one["depth"] for one in tries if one["trains"]), default=0) == deepest
    assert {"depth": deepest + 1, "trains": False} in tries
    assert len(tries) < 14


def test_batches_begin_with_the_largest_and_are_as_many_as_asked(offload: ModuleType) -> None:
    assert list(offload.batch_sizes([2048, 512], 2, 7)) == [2048] * 4 + [512] * 3
    assert len(list(offload.batch_sizes((2048, 512, 128), 8, 50))) == 50


def test_at_break_even_a_layer_works_as_long_as_it_is_read_and_written(offload: ModuleType) -> None:
    times = {100: 4 * 0.3, 200: 4 * 0.5}  # of 4 layers: 0.1 s, and 0.2 for 100 tokens
    assert offload.break_even(60, 100.0, 300.0, times, 4) == pytest.approx(350)  # 0.8 s


def test_rates_are_of_what_was_written_and_nothing_is_left(offload: ModuleType, tmp_path: Path) -> None:
    assert all(rate > 0 for rate in offload.rates(tmp_path, 1 << 16, 3))
    assert list(tmp_path.iterdir()) == []


def test_a_limit_that_cannot_be_had_is_told(
    offload: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cgroup.ROOT", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="needs root, and control groups of version 1"), offload.MemoryGroup(1 << 20):
        pass


def test_kept_figures_show_what_is_said_of_them(offload: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    offload.show(found)
    out = capsys.readouterr().out
    assert out.count("equal bit for bit") == 2
    assert "False" not in out
    for forms in found["deepest"].values():
        assert forms["AL offloaded"]["depth"] >= 4 * forms["BP, recomputed"]["depth"]
    larger = found["larger"]
    assert larger["bytes"] >= offload.TIMES * found["asked"]["limit"]
    largest = [one for one in larger["took"][2:] if one["tokens"] == 2048]
    assert len(largest) >= 5
    assert sorted(one["offloaded"] / one["in memory"] for one in largest)[len(largest) // 2] <= 2
