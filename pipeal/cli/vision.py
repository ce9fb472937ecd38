"""``python cvmain.py <dataset> <model>``: trains a vision model."""

from __future__ import annotations

from typing import Any, get_args

import click

from pipeal.cli import entry
from pipeal.cli.options import offered, setting, training_options
from pipeal.core.names import VISION, Augmentation


@click.command(context_settings={"max_content_width": 110, "show_default": False})
@click.argument("dataset", shell_complete=offered(VISION.datasets))
@click.argument("model", shell_complete=offered(VISION.models))
@training_options(
    setting("data.size", "--size", type=int, help="Side of the images, in pixels; default: 32."),
    setting(
        "data.augmentation",
        "--augmentation",
        shell_complete=offered(get_args(Augmentation)),
        help="Of training images: none, basic or strong; default: the experiment's.",
    ),
    setting("data.batch_size", "--batch-size", type=int, help="Images per training batch; default: the experiment's."),
)
def command(dataset: str, model: str, **given: Any) -> None:
    """Trains MODEL on DATASET, and shows how it went.

    DATASET is tinyimagenet, cifar10, cifar100, or toyimages, which needs no download. MODEL is vgg, resnet,
    torchvision:NAME, or hf:FOLDER, a folder of transformers; the published spellings choose the form: VGG and Resnet
    the BP form, VGGAL and ResnetAL the AL form.
    """
    data, named = VISION.dataset(dataset), VISION.model(model)
    with entry.loading():
        from pipeal.run.train import train

    train("vision", data, named, **given)


def main() -> None:
    """The entry point of ``cvmain.py``."""
    entry.run(command)
