"""The command ``pipeal``: all others under one name."""

from __future__ import annotations

import click

from pipeal import __version__
from pipeal.cli import entry, generate, plan, report, runs, text, vision


@click.group(invoke_without_command=True, context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="pipeal")
@click.pass_context
def command(context: click.Context) -> None:
    """Pipelined model-parallel training without backward locking."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


command.add_command(vision.command, "train-vision")
command.add_command(text.command, "train-text")
command.add_command(report.command, "report")
command.add_command(runs.command, "runs")
command.add_command(generate.command, "generate")
command.add_command(plan.command, "plan")


def main() -> None:
    """The entry point of ``pipeal``."""
    entry.run(command)
