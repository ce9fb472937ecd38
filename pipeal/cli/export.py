"""``pipeal export RUN --to …``: a trained model in a form that others read."""

from __future__ import annotations

import click

from pipeal.cli import entry
from pipeal.cli.options import PATH

FORMS = ("safetensors", "torch-export", "hf")


@click.command(context_settings={"max_content_width": 110})
@click.argument("run", type=PATH)
@click.option("--to", type=click.Choice(FORMS), required=True, help="What becomes of it.")
@click.option(
    "--out",
    type=PATH,
    metavar="PATH",
    help="What to write, or a folder to write into; default: in RUN, under a usual name.",
)
@click.option("--force", is_flag=True, help="Replace what is there already.")
def command(run: str, to: str, out: str | None, force: bool) -> None:
    """Leaves the model that the training in the folder RUN has, for others to load.

    safetensors has its weights by name; torch-export is a program of inference, which needs no pipeal; hf, for a model
    hf:FOLDER, is a folder that transformers loads.

    RUN is a folder such as runs/agnews-transformer-al-001, whose newest checkpoint is taken; of a comparison, name
    the form, such as …/al; or it is that of one checkpoint, …/checkpoints/step-000001500.
    """
    with entry.loading():
        from pipeal.run.export import export

    export(run, to, out, force=force)
