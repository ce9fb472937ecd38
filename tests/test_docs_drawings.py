"""The drawings of ``docs/`` are those that the script makes of the schedules as they are."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from docs_drawings import FOLDER, drawings

DRAWINGS = drawings()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_as_made(name: str) -> None:
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert kept == DRAWINGS[name], "python scripts/docs_drawings.py makes it again"
    ElementTree.fromstring(kept)


def test_every_drawing_is_shown() -> None:
    page = (FOLDER.parent / "concepts.md").read_text(encoding="utf-8")
    assert {path.name for path in FOLDER.glob("*.svg")} == DRAWINGS.keys()
    assert all(f"(img/{name})" in page for name in DRAWINGS)
