"""A file that is either whole or absent: written aside, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from pipeal.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; it takes the name ``path`` when the block ends well.

    Missing folders are made. When the block raises, what was written is removed and an older ``path`` stays.

    Raises:
        DataError: The system refused to write (no space, no permission, no such folder).
    """
    aside = path.with_name(f".{path.name}.{uuid4().hex[:12]}.aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        with aside.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; make room there or choose another folder"
        ) from error
    finally:
        # After the rename there is nothing left to remove; an unusable folder has nothing either.
        if aside.parent.is_dir():
            aside.unlink(missing_ok=True)
