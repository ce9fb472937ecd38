"""Trains a text model: ``python nlpmain.py agnews transformer``. See ``--help``."""

import sys

from rich.console import Console

if __name__ == "__main__":
    try:
        with Console(stderr=True).status("loading PyTorch"):  # takes seconds
            from pipeal.cli.text import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
