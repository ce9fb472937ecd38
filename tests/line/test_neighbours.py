"""What a stage says of its neighbours: each comes in a line, and an absence that lasts has one of its own."""

from __future__ import annotations

import re

import pytest

from pipeal.line.neighbours import Neighbour


@pytest.mark.parametrize(("listens", "told"), [(True, "does not answer"), (False, "has not come")])
def test_each_absence_that_lasts_is_told_once_and_each_return(listens: bool, told: str, said: list[str]) -> None:
    """Symptom: a stage behind a firewall, or under a wrong port, was waited for without a word."""
    one = Neighbour(1, "10.0.0.2:7001", listens=listens)
    for away_s in (0.1, 29.0, 31.0, 90.0):
        one.look(connected=False, away_s=away_s)
    (first,) = said
    assert re.fullmatch(rf"stage 1 {told} at 10\.0\.0\.2:7001 for 31 s, and is waited for: .*firewall.*", first)
    for _ in range(3):
        one.look(connected=True, away_s=0.0)
    assert said[1:] == ["stage 1 is there"]
    one.look(connected=False, away_s=5.0)
    one.look(connected=True, away_s=0.0)
    assert said[2:] == ["stage 1 is there"], "short absences are the link's to tell"
    for away_s in (5.0, 40.0):
        one.look(connected=False, away_s=away_s)
    assert len(said) == 4
    assert "for 40 s" in said[-1]
