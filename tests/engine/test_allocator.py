"""What the C library is told; the pages that it saves are measured by ``scripts/bench/allocator.py``."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from pipeal.engine.devices import allocator

TRIM, MMAP, ARENAS = -1, -3, -8
"""``M_TRIM_THRESHOLD``, ``M_MMAP_THRESHOLD`` and ``M_ARENA_MAX`` of glibc's ``malloc.h``."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Stands in for glibc: takes thresholds of any size, and keeps what it is told."""
    told: dict[int, int] = {}

    def mallopt(what: int, value: int) -> int:
        told[what] = value
        return 1

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    return told


def test_large_blocks_stay_and_all_threads_share_one_heap(library: dict[int, int]) -> None:
    """Symptom: 6,338 pages were given back after every batch of a language model of 128 texts.

    Cause: other threads than the first have heaps of their own, which are given back whatever the thresholds.
    """
    assert allocator.keep_freed_memory()
    assert library == {MMAP: 2**30, TRIM: 2**31 - 1, ARENAS: 1}


def test_how_many_heaps_there_may_be_is_what_the_user_has_said(
    library: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert allocator.keep_freed_memory()
    assert library == {MMAP: 2**30, TRIM: 2**31 - 1}


def test_an_old_glibc_is_told_what_it_takes(monkeypatch: pytest.MonkeyPatch, library: dict[int, int]) -> None:
    """It refuses thresholds over 32 MiB."""

    def mallopt(what: int, value: int) -> int:
        if what == MMAP and value > 2**25:
            return 0
        library[what] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert allocator.keep_freed_memory()
    assert library[MMAP] == 2**25


@pytest.mark.parametrize("refused", [TRIM, MMAP, ARENAS])
def test_what_is_refused_is_said(refused: int, monkeypatch: pytest.MonkeyPatch, library: dict[int, int]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda what, _: int(what != refused)))
    assert not allocator.keep_freed_memory()


def test_another_c_library_changes_nothing(monkeypatch: pytest.MonkeyPatch, library: dict[int, int]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not allocator.keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
    assert library == {}
