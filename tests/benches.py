"""The programs of ``scripts/bench`` as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


class Benches(dict[str, ModuleType]):
    """By their names, each imported when it is first asked for."""

    def __missing__(self, name: str) -> ModuleType:
        self[name] = import_module(name)
        return self[name]


@contextmanager
def benches() -> Iterator[Benches]:
    """Within it they go by their names, as they call each other. To pytest, ``tests/methods`` is called so, too."""
    names = {path.stem for path in BENCH.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    threads = torch.get_num_threads()
    sys.path.insert(0, str(BENCH))
    try:
        yield Benches()
    finally:
        sys.path.remove(str(BENCH))
        torch.set_num_threads(threads)
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(others)
