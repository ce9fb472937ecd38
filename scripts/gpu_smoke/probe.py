"""One probe in a process of its own: ``python -m gpu_smoke.probe module:function ANSWER [--stand-in]``.

A fault of CUDA ends a process, and many figures are of a first time: so no two probes share one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from pkgutil import resolve_name

from gpu_smoke.place import Place


def main(probe: str, answer: str, *stand_in: str) -> None:
    """Writes what it returns as JSON; of several processes the first. One that is stopped shows where it stood."""
    faulthandler.register(signal.SIGTERM, chain=True)
    found = resolve_name(probe)(Place(bool(stand_in)))
    if os.environ.get("RANK", "0") == "0":
        plain = asdict(found) if is_dataclass(found) and not isinstance(found, type) else found
        Path(answer).write_text(json.dumps(plain), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
