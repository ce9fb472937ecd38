"""Trains a vision model: ``python cvmain.py tinyimagenet resnet``. See ``--help``."""

import sys

if __name__ == "__main__":
    try:
        from pipeal.cli.vision import main
    except KeyboardInterrupt:  # the import takes seconds
        sys.exit(130)
    main()
