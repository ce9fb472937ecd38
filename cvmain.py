"""Trains a vision model: ``python cvmain.py tinyimagenet resnet``. See ``--help``."""

import sys

from rich.console import Console

if __name__ == "__main__":
    try:
        with Console(stderr=True).status("loading PyTorch"):  # takes seconds
            from pipeal.cli.vision import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
