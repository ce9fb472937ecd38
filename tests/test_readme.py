"""What the README shows runs as it stands there, and is as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeal.engine.schedule import SCHEDULES, Action
from pipeal.planning.pure.backprop_schedules import naive, one_f_one_b
from pipeal.planning.pure.simulate import Rules, simulate

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert len(names["package"]) == len(names["pipe"].stages) == 2
    assert names["pipe"].next_batch == 50
    assert names["logits"].shape == (16, 4)


def test_the_commands_are_there() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert f"\n{target}:" in makefile


def drawn(rules: Rules, micro_batches: int = 1, stages: int = 3, slots: int = 72) -> str:
    """Stages over time, the last one on top: forwards as digits of their batch, backwards and updates as ``▒``.

    A forward of a whole batch takes four slots, its backward with the update eight.
    """
    forward = 4 / micro_batches
    costs = {Action.FORWARD: forward, Action.BACKWARD: 2 * forward, Action.UPDATE: 0.0}
    rows = [["·"] * slots for _ in range(stages)]
    for span in simulate(rules, [costs] * stages, batches=8 * micro_batches).spans:
        mark = str(span.batch // micro_batches) if span.action is Action.FORWARD else "▒"
        for slot in range(round(span.begin), min(round(span.end), slots)):
            rows[span.stage][slot] = mark
    return "\n".join(f"stage {stage}  {''.join(row)}" for stage, row in reversed(list(enumerate(rows))))


@pytest.mark.parametrize(
    ("title", "rules", "micro_batches"),
    [
        ("pipeal", SCHEDULES["pipelined"], 1),
        ("backpropagation", naive(), 1),
        ("backpropagation, each batch in four micro-batches (1F1B)", one_f_one_b(4), 4),
    ],
    ids=["pipeal", "naive", "1f1b"],
)
def test_the_picture_is_what_the_schedules_do(title: str, rules: Rules, micro_batches: int) -> None:
    assert f"\n{title}\n{drawn(rules, micro_batches)}\n" in README
