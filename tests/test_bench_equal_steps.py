"""Losses after equally many batches are those of one training, looked at on its way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benches import Benches


@pytest.mark.slow
def test_a_look_on_the_way_changes_nothing(bench: Benches, tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("so it goes, and so it went.\n" * 60, encoding="utf-8")
    task = bench["rung_data"].task_of("charlm", torch.device("cpu"), str(tmp_path))
    setting = bench["rungs"].Setting("bp", "ours", fused=True, engine=True, batch=3)
    seen = bench["equal_steps"].losses_of(task, setting, 0, [1, 3, 4])
    assert seen[-1:] == bench["equal_steps"].losses_of(task, setting, 0, [4])
    assert len(set(seen)) == 3


def test_kinds_differ_in_what_they_say(bench: Benches) -> None:
    kinds = bench["equal_steps"].KINDS
    found = [bench["equal_steps"].setting_of("al", kind) for kind in kinds]
    assert [(one.by_length, one.touched) for one in found] == [(False, False), (True, False), (True, True)]
    assert {(one.operators, one.fused, one.precision) for one in found} == {("ours", True, found[0].precision)}


@pytest.mark.parametrize("after", [["0"], ["3", "2"], ["2", "2"]])
def test_batches_that_do_not_grow_are_refused(
    bench: Benches, capsys: pytest.CaptureFixture[str], after: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench["equal_steps"].main(["lstm", "--after", *after])
    assert "expected growing numbers" in capsys.readouterr().err
