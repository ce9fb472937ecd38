"""What must be the same on every rank, compared before anything is built: a difference is told, not waited for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeal.core.errors import ConfigError

_MOST = 3
"""Differences told; of more, their number."""


@cache
def code_hash() -> str:
    """Of pipeal's source files as they lie on the disk, in hexadecimal."""
    root = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def require_same(facts: Sequence[Mapping[str, Any]]) -> None:
    """Compares the facts of all ranks, in their order, with those of rank 0; every rank finds the same.

    Raises:
        ConfigError: There are differences; the message says of which ranks, and in what.

    >>> require_same([{"train.seed": 0}, {"train.seed": 0}])
    >>> require_same([{"train.seed": 0}, {"train.seed": 1}, {"train.seed": 1}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    pipeal.core.errors.ConfigError: ranks 1, 2 have train.seed 1, rank 0 has 0; start every rank with the same ...
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, other in enumerate(facts):
        for name in sorted({*facts[0], *other}):
            wanted, has = facts[0].get(name, "none"), other.get(name, "none")
            if wanted != has:
                found.setdefault((name, f"{has}", f"{wanted}"), []).append(rank)
    if not found:
        return
    told = [
        f"{_ranks(ranks)} {name} {has}, rank 0 has {wanted}"
        for (name, has, wanted), ranks in list(found.items())[:_MOST]
    ]
    if len(found) > _MOST:
        told.append(f"and {len(found) - _MOST} more")
    raise ConfigError(f"{'; '.join(told)}; start every rank with the same command, on the same code and data")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
