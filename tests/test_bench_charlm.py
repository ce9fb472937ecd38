"""The table of charlm.py says what it trained, and sets beside each other only what can be."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benches import BENCH, Benches


@pytest.fixture(scope="module")
def charlm(bench: Benches) -> ModuleType:
    return bench["charlm"]


@given(steps=st.integers(1, 5000), most=st.integers(1, 400))
def test_as_many_steps_are_trained_as_were_asked_for(charlm: ModuleType, steps: int, most: int) -> None:
    """2,097 were, under a title that said 2,100: of nine epochs, each had a ninth rounded down."""
    epochs, each = charlm.in_epochs(steps, most)
    assert epochs * each == steps
    assert 1 <= each <= most


def made(seed: int, loss: float) -> dict[str, Any]:
    told = {"machine": {"cores": 2}, "precision": "bf16", "threads": 1}
    return told | {"seed": seed, "validation": [loss + 0.1, loss], "train": loss - 0.1, "parameters": [10, 2]}


def test_an_idea_of_more_seeds_than_its_rival_is_shown_by_those_they_share(
    charlm: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default was shown as the mean over two seeds, beside rivals of one."""
    ideas = {"bp": [made(0, 1.5)], "wide": [made(0, 1.7), made(1, 1.2)], "lower": [made(1, 1.4), made(2, 1.6)]}
    charlm.show({"steps": 20, "ideas": ideas})
    out = capsys.readouterr().out
    (wide,) = re.findall(r"^.*\bwide\b.*the default.*$", out, re.MULTILINE)
    assert re.search(r"\b1\.700\b.*\+0\.200.*1\.800 1\.700.*1\.600.*\b0\b", wide)
    (lower,) = re.findall(r"^.*half the learning rate.*$", out, re.MULTILINE)
    assert re.search(r"\b1\.500\b.*\b1 2\b", lower)  # there is no rival: all it has
    assert "wide, seed 1: val loss 1.200" in out
    assert out.count("cores 2  bf16, 1 threads") == 1


def test_all_ideas_are_shown_by_the_seeds_that_all_have(charlm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: two rows were means over two seeds, and others of one stood between them."""
    ideas = {"bp": [made(0, 1.5), made(1, 1.4)], "wide": [made(0, 1.7), made(1, 1.2)], "codes": [made(0, 1.6)]}
    charlm.show({"steps": 20, "ideas": ideas})
    out = capsys.readouterr().out
    for name, loss in (("bp", "1.500"), ("wide", "1.700"), ("codes", "1.600")):
        assert re.search(rf"^\| {name} .*\| +{loss} \|.*\| +0 +\|$", out, re.MULTILINE), out
    assert "bp, seed 1: val loss 1.400" in out


def test_the_docs_have_the_numbers_that_the_script_prints(
    charlm: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """They had one seed's, where the script printed the mean of two."""
    page = (BENCH.parents[1] / "docs" / "language-model.md").read_text(encoding="utf-8")
    for column, name in enumerate(("charlm.json", "charlm-4000.json")):
        charlm.show(charlm.json.loads((BENCH / "results" / name).read_text(encoding="utf-8")))
        printed = {
            cells[0]: cells[3]
            for line in capsys.readouterr().out.splitlines()
            if len(cells := [cell.strip() for cell in line.strip("| ").split("|")]) > 3
        }
        rows = {
            "bp": "BP, four blocks",
            "bp-1": "BP, one block",
            "wide": "AL, one block per layer (default)",
            "wide-halves": "AL, two blocks per layer",
            "deep": "AL, a block in each bridge but the last",
            "deep-halves": "AL, two blocks per layer, a block in the first's bridge",
            "codes": "AL, codes as wide as the features",
            "narrow": "AL, codes of 32",
            "slow-labels": "AL, the label side a tenth as fast",
            "lower": "AL, half the learning rate",
            "published": "AL, the published form",
        }
        for idea, title in rows.items():
            (told,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|(.*)\|$", page, re.MULTILINE)
            assert told[column].strip() == printed.get(idea, ""), (name, idea)
