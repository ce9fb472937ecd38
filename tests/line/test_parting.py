"""What a stage keeps of its neighbours' ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeal.line.parting import LEFT, PARTED, Partings


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"7f3a", b"7f3a ", b"7f3a par", b"7f3a \xff\xfe", b"0000 parted"])
def test_a_damaged_word_counts_for_nothing_and_is_kept_again(damage: bytes, tmp_path: Path) -> None:
    """Symptom: a UnicodeDecodeError, as of a bug, of bytes that are no text; and half a word was as good as one."""
    partings = Partings(tmp_path, "7f3a")
    (tmp_path / "parting-1").write_bytes(damage)
    assert partings.of(1) == ""
    partings.keep(1, PARTED)
    assert partings.of(1) == PARTED
    partings.keep(1, LEFT)
    partings.keep(1, PARTED)
    assert Partings(tmp_path, "7f3a").of(1) == LEFT
