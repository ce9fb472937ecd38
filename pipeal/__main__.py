"""``python -m pipeal``: the command ``pipeal`` where no folder of commands is on the path."""

from pipeal.cli.main import main

main()
