"""Where what is made out of data files is kept: beside them, or in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(beside: Path) -> Path:
    """``beside`` itself; where it is read-only, ``$XDG_CACHE_HOME/pipeal`` or ``~/.cache/pipeal``."""
    # The mode bits too: for the superuser every folder is writable, also one that is meant to stay as it is.
    if beside.stat().st_mode & 0o222 and os.access(beside, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeal"
