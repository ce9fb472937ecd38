"""Trains a text model: ``python nlpmain.py agnews transformer``. See ``--help``."""

import sys

if __name__ == "__main__":
    try:
        from pipeal.cli.text import main
    except KeyboardInterrupt:  # the import takes seconds
        sys.exit(130)
    main()
