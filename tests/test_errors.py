"""The errors: one family, each also what Python calls it, and one line for a name that nobody knows."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeal
from pipeal.core import errors

KINDS = {
    errors.ConfigError: ValueError,
    errors.DataError: ValueError,
    errors.PlacementError: ValueError,
    errors.ScheduleError: RuntimeError,
    errors.StallError: RuntimeError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_one_of_pipeals_and_one_of_pythons(kind: type[Exception]) -> None:
    error = kind("what was found")
    assert isinstance(error, errors.PipealError)
    assert isinstance(error, KINDS[kind])
    assert str(pickle.loads(pickle.dumps(error))) == "what was found"
    assert getattr(pipeal, kind.__name__) is kind


names = st.text("abcdEFGH-", min_size=1, max_size=10)


shown_whole = st.text(max_size=12).filter(lambda text: len(repr(text)) <= 60)  # what is longer is cut, its escapes too


@given(found=shown_whole, known=st.lists(names, max_size=6, unique=True))
def test_the_line_for_an_unknown_name(found: str, known: list[str]) -> None:
    line = errors.unknown_name("thing", found, known)
    assert len(line.splitlines()) == 1
    assert line.startswith(f"unknown thing {found!r}")
    assert line.endswith(f"(known: {', '.join(sorted(known))})")
    if "did you mean" in line:
        assert any(f"did you mean {name!r}?" in line for name in known)


@given(known=st.lists(names, min_size=1, max_size=6, unique_by=str.lower), data=st.data())
def test_a_slip_of_case_finds_its_name(known: list[str], data: st.DataObject) -> None:
    meant = data.draw(st.sampled_from(known))
    assert f"did you mean {meant!r}?" in errors.unknown_name("thing", meant.swapcase(), known)
