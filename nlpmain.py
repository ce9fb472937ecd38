"""Trains a text model: ``python nlpmain.py agnews transformer``. See ``--help``."""

from pipeal.cli.text import main

if __name__ == "__main__":
    main()
