"""A trained model ``hf:FOLDER`` as a folder that ``transformers`` loads, with the tokenizer it was trained with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeal.core.atomic import replacing_folder
from pipeal.core.errors import ConfigError
from pipeal.core.extras import transformers
from pipeal.core.methods import METHODS, Method
from pipeal.core.names import HF, source_of
from pipeal.core.protocols import TURN
from pipeal.models.hf_folder import folder_of
from pipeal.models.imported import head_of
from pipeal.run.build_text import TextModels
from pipeal.run.build_vision import VisionModels
from pipeal.run.opening import made_ready
from pipeal.run.trained import Trained


def write_folder(trained: Trained, path: Path) -> str:
    """Writes the folder, loads it with ``AutoModel…``, and holds that against the run's model.

    Its hidden states are those of the run's model. Its logits are, too, where the answer is one linear map of them, as
    in backpropagation; else the folder has no weights of a head.

    Args:
        trained: The run of a model ``hf:FOLDER``.
        path: Where to; an empty folder or one of a model may be there.

    Returns:
        What is to be said of it.

    Raises:
        ConfigError: The run is of another model, or something else is in the place of the folder.
        DataError: The system refused to write.
        AssertionError: What was written is not the run's model.
    """
    name = trained.config.model.name
    if source_of(name) != HF:
        raise ConfigError(
            f"{trained.folder}: its model is {name}, which transformers does not have; expected the run of a model "
            "hf:FOLDER, or --to safetensors or torch-export"
        )
    _require_replaceable(path, folder_of(trained.models.config.model.name))
    network, has_head = trained_network(trained)
    model: Any = network.model
    with replacing_folder(path) as aside:
        kept = folder_of(trained.models.config.model.name)
        for file in kept.iterdir():
            if file.is_file() and file.name != "config.json":
                shutil.copy(file, aside / file.name)
        head = None if has_head else head_of(model, len(trained.classes or ()))
        weights = {
            key: tensor for key, tensor in model.state_dict().items() if head is None or not key.startswith(f"{head}.")
        }
        model.save_pretrained(str(aside), state_dict=weights)
        _require_same(model, trained, aside, weights, has_head=has_head)
    auto, method = _auto(trained), METHODS[trained.config.train.mode]
    if has_head:
        return f"{auto}.from_pretrained loads it, with the hidden states and the logits of the run's model"
    return (
        f"{auto}.from_pretrained loads it, with the hidden states of the run's model; answers of "
        f"{method.label} go through {way_of(method)}, which it does not have: "
        "its head is new"
    )


def _require_replaceable(path: Path, kept: Path) -> None:
    """Asks that nothing is lost with what is in the folder's place but another export."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise ConfigError(f"{path}: is there, and no folder of a model; name another --out")
    written = {file.name for file in kept.iterdir()} | {"config.json", "generation_config.json"}
    others = sorted(
        entry.name
        for entry in path.iterdir()
        if not entry.is_file() or (entry.name not in written and not entry.name.startswith("model"))
    )
    if others:
        raise ConfigError(f"{path}: holds {', '.join(others[:3])}, which no export writes; name another --out")


def trained_network(trained: Trained) -> tuple[nn.Module, bool]:
    """The other library's network with the weights of a run, and whether it answers as the run's model does.

    It is in evaluation mode.
    """
    models, config = trained.models, trained.config
    assert isinstance(models, TextModels | VisionModels)
    imported, options = models.imported(config.train.mode)
    network = imported.network()
    head = head_of(network, models.classes)
    own = None if head is None else network.get_submodule(head)
    layers = list(
        made_ready(imported.layers(config.train.mode, network=network, **options), config, states=trained.states)
    )
    if head is not None and own is not None:
        linear = _linear_of(layers[-1])
        same = linear is not None and [*map(_shape, linear.parameters())] == [*map(_shape, own.parameters())]
        if isinstance(network.get_submodule(head), nn.Identity):  # the method has heads of its own
            network.set_submodule(head, linear if same and linear is not None else own)
    network.eval()
    x = trained.inputs(3, trained.longest)
    with torch.no_grad():
        found, wanted = network(x), trained.package.infer(x)
    return network, found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _linear_of(layer: Any) -> nn.Linear | None:
    """The one linear map that a layer answers by."""
    turn = layer.blocks().get(TURN) if hasattr(layer, "blocks") else None
    maps = [] if turn is None else [part for part in turn.modules() if isinstance(part, nn.Linear)]
    return maps[0] if len(maps) == 1 else None


def _shape(parameter: nn.Parameter) -> torch.Size:
    return parameter.shape


def _require_same(model: Any, trained: Trained, folder: Path, weights: Any, *, has_head: bool) -> None:
    """Loads the folder, and holds all of it against the model.

    Raises:
        AssertionError: They differ.
    """
    read = (
        getattr(transformers(), _auto(trained))
        .from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        .eval()
    )
    found = {name: tensor for name, tensor in read.state_dict().items() if name in weights}
    torch.testing.assert_close(found, weights, rtol=0, atol=0, equal_nan=True)
    x = trained.inputs(2, trained.longest)
    key = "pixel_values" if isinstance(trained.models, VisionModels) else "input_ids"
    with torch.no_grad():
        one, other = (each(**{key: x}, output_hidden_states=True) for each in (read, model))
    torch.testing.assert_close(one.hidden_states, other.hidden_states)
    if has_head:
        torch.testing.assert_close(one.logits, other.logits)


def _auto(trained: Trained) -> str:
    of_images = isinstance(trained.models, VisionModels)
    return "AutoModelForImageClassification" if of_images else "AutoModelForSequenceClassification"


def way_of(method: Method) -> str:
    """What the answers of a method that trains parts go through, beside the network."""
    return "bridges and h" if method.has_labels else "a head of the method's own"
