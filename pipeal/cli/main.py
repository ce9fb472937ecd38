"""The command ``pipeal``: all others under one name."""

from __future__ import annotations

from importlib import import_module

import click

from pipeal import __version__
from pipeal.cli import entry


@click.group(invoke_without_command=True, context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="pipeal")
@click.pass_context
def command(context: click.Context) -> None:
    """Pipelined model-parallel training without backward locking."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


COMMANDS = {
    "train-vision": "vision",
    "train-text": "text",
    "report": "report",
    "runs": "runs",
    "ask": "ask",
    "generate": "generate",
    "export": "export",
    "plan": "plan",
    "memory": "memory",
    "line": "line",
}
"""By name, the module beside this one whose ``command`` it is: a new command is a file and a line."""

for name, module in COMMANDS.items():
    command.add_command(import_module(f"pipeal.cli.{module}").command, name)


def main() -> None:
    """The entry point of ``pipeal``."""
    entry.run(command)
