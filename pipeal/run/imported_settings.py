"""What a run of a model of another library is told unless its user says otherwise: no file in ``configs/`` is for it.

The data and the training are as the file of the data set has them for a model of pipeal's own; what follows from the
model is found in its folder.
"""

from __future__ import annotations

from typing import Any

from pipeal.config import RunConfig, VisionConfig, find_config, read_config
from pipeal.core.names import HF, source_of
from pipeal.models.hf_folder import folder_config, folder_of, has_weights

_LIKE = {True: "resnet", False: "transformer"}
"""Of images, and of texts: the model whose file is taken."""

_BRIDGES = {"x_hid": 256, "y_hid": 128}
"""Of images: the published 1000 and 700 are for features of 512 channels."""

FINE_TUNING_RATE = 1e-4
"""Of a network that begins with weights: at the usual 0.001 it would soon have lost them."""


def usual_settings(schema: type[RunConfig], dataset: str, model: str, *, with_file: bool) -> dict[str, Any]:
    """A nested mapping, as of a YAML file.

    Args:
        schema: What is configured.
        dataset: The canonical name of the data set.
        model: That of the model.
        with_file: Whether the data set's own file counts; it does not where the user names one.

    Raises:
        ConfigError: There is no such folder.
        DataError: Its weights are in files that are not read.
    """
    is_vision = issubclass(schema, VisionConfig)
    path = find_config(dataset, _LIKE[is_vision]) if with_file else None
    found = {key: value for key, value in read_config(path).items() if key != "model"} if path is not None else {}
    if is_vision:
        found["model"] = dict(_BRIDGES)
    if source_of(model) != HF:
        return found
    folder = folder_of(model)
    config = folder_config(folder)
    size = getattr(config, "image_size", None)
    sides = {*size} if isinstance(size, list | tuple) else {size}
    if is_vision and len(sides) == 1 and size is not None:
        found["data"] = {**found.get("data", {}), "size": sides.pop()}
    if has_weights(folder):
        train = found.get("train", {})
        found["train"] = {**train, "lr": {**train.get("lr", {}), "base": FINE_TUNING_RATE}}
    return found
