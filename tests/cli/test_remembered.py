"""What was tried is not tried again for a week: where it is kept, what it is for, and what is not believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeal.config import TextConfig, VisionConfig, load_config
from pipeal.planning.placement import Placement
from pipeal.run.build_text import text_experiment
from pipeal.run.build_vision import vision_experiment
from pipeal.run.choices import choose
from pipeal.run.remembered import RENEWED_AFTER_S, PlacementCache, key_of

TAKEN = Placement(["cpu", "cpu"], [3, 1], 2)


def test_a_choice_is_remembered_for_a_week_with_its_date_and_the_load(tmp_path: Path, said: list[str]) -> None:
    now = [1_000_000.0]
    memory = PlacementCache(tmp_path, now=lambda: now[0], load=lambda: 3.25)
    assert memory.recall("key") is None
    memory.keep("key", replace(TAKEN, seconds_per_batch=1.0))
    found = memory.recall("key")
    assert found is not None
    assert found.placement == TAKEN
    assert str(found).startswith("remembered from 1970-01-1")
    assert str(found).endswith(", load 3.2")
    now[0] += RENEWED_AFTER_S - 1
    assert memory.recall("key") is not None
    assert PlacementCache(tmp_path, retry=True, now=lambda: now[0]).recall("key") is None
    now[0] += 2
    assert memory.recall("key") is None
    assert memory.recall("another") is None
    now[0] = 999_999.0  # the clock was ahead
    assert memory.recall("key") is None
    assert not said


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"devices": ["cpu"], "sizes": [1, 2], "threads": 1, "since": 0, "load": null}', "\udcff"],
)
def test_a_damaged_file_is_told_in_a_line_and_written_again(text: str, tmp_path: Path, said: list[str]) -> None:
    memory = PlacementCache(tmp_path)
    (tmp_path / "key.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert memory.recall("key") is None
    (line,) = said
    assert "\n" not in line
    assert ("is not remembered: " if "\udcff" in text else "is made again") in line
    memory.keep("key", TAKEN)
    found = memory.recall("key")
    assert found is not None
    assert found.placement == TAKEN


def test_what_cannot_be_kept_is_told_and_no_more(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    PlacementCache(tmp_path / "file").keep("key", TAKEN)
    assert len(said) == 1
    assert said[0].startswith("what was found is not remembered: cannot write")


def test_it_is_of_a_model_of_batches_and_of_settings() -> None:
    small, wide = nn.Linear(3, 4), nn.Linear(3, 5)
    few, many = [(torch.zeros(8, 3), None)], [(torch.zeros(64, 3), None)]
    keys = [
        key_of(small, few, "al", 1),
        key_of(wide, few, "al", 1),
        key_of(small, many, "al", 1),
        key_of(small, few, "bp", 1),
        key_of(small, few, "al", 2),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(nn.Linear(3, 4), [(torch.ones(8, 3), None)], "al", 1) == keys[0]


def test_a_choice_is_of_a_model_also_in_what_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with convolutions in one layout was remembered for the other."""
    tried: list[bool] = []

    def place(package: Any, *_: Any, on_trial: Any, **__: Any) -> Placement:
        tried.append(True)
        on_trial(Placement(["cpu"], [len(package)], 1, 0.5))
        return Placement(["cpu"], [len(package)], 1, 0.5)

    monkeypatch.setattr("pipeal.run.choices.place", place)
    for layout in ("true", "false") * 2:
        small = [
            "dataset=toyimages",
            "model.width=0.125",
            "model.x_hid=8",
            "model.y_hid=8",
            f"model.channels_last={layout}",
        ]
        config = load_config(VisionConfig, overrides=small, values={"engine": {"devices": "auto"}})
        experiment = vision_experiment(config)
        choose(experiment, "al", cache=PlacementCache(tmp_path))
    assert len(tried) == 2


def measurements(devices: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is measured from now on: each time that it would have been, ``devices`` are added to the list."""
    calls: list[str] = []

    def measured(*_: Any, on_step: Any, **options: Any) -> Placement:
        calls.append(devices)
        on_step("trying", 0.0, 1.0)
        taken = Placement(["cpu", "cpu"], [3, 1], 1, 0.5)
        options.get("on_trial", lambda _: None)(taken)
        return taken

    for name in ("place", "fit"):
        monkeypatch.setattr(f"pipeal.run.choices.{name}", measured)
    return calls


@pytest.mark.parametrize("devices", ["auto", "cpu,cpu"])
def test_the_second_run_tries_nothing_and_says_so(
    devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    calls = measurements(devices, monkeypatch)
    config = load_config(TextConfig, overrides=["dataset=toynews"], values={"engine": {"devices": devices}})
    experiment = text_experiment(config)
    memory = PlacementCache(tmp_path)
    chosen = [choose(experiment, "al", cache=memory).engine for _ in "ab"]
    assert chosen[0] == chosen[1]
    (kept,) = tmp_path.iterdir()
    for wrong in ({"sizes": [3, 2]}, {"threads": 5_000}):  # a run would end with them, at each command again
        before = kept.read_text()
        kept.write_text(json.dumps(json.loads(before) | wrong))
        assert choose(experiment, "al", cache=memory).engine == chosen[0]
        assert calls.pop() == devices, "tried again"
    assert (chosen[0].sizes, len(calls)) == ((3, 1), 1)
    lines = [line for line in said if line.startswith("AL on")]
    assert lines[0].endswith("now)")
    assert "(remembered from " in lines[1]
    assert lines[1].endswith("; --retry tries again)" if devices == "auto" else "; --retry measures again)")
    choose(experiment, "al", cache=PlacementCache(tmp_path, retry=True))
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "other"),
    [("auto", "engine.schedule=al-fm"), ("cpu,cpu", "engine.schedule=al-fm"), ("cpu,cpu", "engine.sizes=[2,2]")],
)
def test_another_schedule_or_other_sizes_are_another_choice(
    devices: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measurements(devices, monkeypatch)
    for asked in ([], [other], [], [other]):
        overrides = ["dataset=toynews", *asked]
        config = load_config(TextConfig, overrides=overrides, values={"engine": {"devices": devices}})
        cache = PlacementCache(tmp_path)
        choose(text_experiment(config), "al", cache=cache)
    assert calls == [devices] * 2, "each was measured once, and remembered"
