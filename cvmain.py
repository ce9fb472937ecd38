"""Trains a vision model: ``python cvmain.py tinyimagenet resnet``. See ``--help``."""

from pipeal.cli.vision import main

if __name__ == "__main__":
    main()
