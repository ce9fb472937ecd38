"""A folder of the ``transformers`` library, as ``save_pretrained`` leaves it: configuration, weights, what it takes.

Nothing is downloaded, no code that a folder names is run, and no file that could run some is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeal.core.errors import ConfigError, DataError, first_line
from pipeal.core.extras import transformers
from pipeal.core.messages import tell_once


def folder_of(name: str) -> Path:
    """The folder that ``hf:FOLDER`` names."""
    return Path(name.partition(":")[2])


def classifier(folder: Path, classes: int, pad_index: int | None) -> nn.Module:
    """Its classifier in single precision, with its weights where it has some.

    Args:
        folder: It.
        classes: How many there are.
        pad_index: The token that pads; None of images.

    Raises:
        ConfigError: There is no such folder, or it is no such classifier.
        DataError: Its weights cannot be read, or are of another model.
    """
    kind = "AutoModelForImageClassification" if pad_index is None else "AutoModelForSequenceClassification"
    config = folder_config(folder, num_labels=classes)
    config.use_cache = False
    if pad_index is not None:
        config.pad_token_id = pad_index
    if not has_weights(folder):
        return _made(folder, kind, config).float()
    with torch.device("meta"):
        _made(folder, kind, config)  # what it is not is told in the same words
    try:
        model, told = getattr(transformers(), kind).from_pretrained(
            str(folder),
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever the library raises
        raise DataError(f"hf:{folder}: transformers cannot load its weights: {first_line(error)}") from error
    new = sorted({*told["missing_keys"], *(one[0] for one in told["mismatched_keys"])})
    if len(new) >= len(list(model.parameters())):
        raise DataError(
            f"hf:{folder}: its weights are of another model: none is called as one of {type(model).__name__}"
        )
    if new:
        tell_once(f"hf:{folder}: starting at random, as its weights have none of this name and shape: {', '.join(new)}")
    return model.float()


@dataclass(frozen=True)
class TextLimits:
    """What a model of texts takes.

    Attributes:
        vocab_size: Tokens are below it.
        positions: The most tokens of a text; None for any number.
        pad_index: What pads, as its configuration has it.
    """

    vocab_size: int
    positions: int | None
    pad_index: int | None


@cache
def text_limits(name: str) -> TextLimits:
    """Those of ``hf:FOLDER``.

    Raises:
        ConfigError: There is no such folder, or it is no model for texts.
    """
    folder = folder_of(name)
    config = folder_config(folder)
    with torch.device("meta"):
        model = _made(folder, "AutoModelForSequenceClassification", config)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < 1:
        positions = None  # XLNet has -1: any number
    for part_name, part in model.named_modules():
        is_of_places = part_name.endswith("position_embeddings") and isinstance(part, nn.Embedding)
        if positions is not None and is_of_places and part.padding_idx is not None:
            positions = part.num_embeddings - part.padding_idx - 1  # RoBERTa counts places from there
    return TextLimits(model.get_input_embeddings().num_embeddings, positions, getattr(config, "pad_token_id", None))


def folder_config(folder: Path, **changes: Any) -> Any:
    """The configuration of a folder, as ``transformers`` has it.

    Raises:
        ConfigError: There is no such folder, or nothing in it that the library can read.
    """
    library = transformers()
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"model.name: hf:{folder}: {folder} {found}; expected the folder of a transformers model, as "
            "save_pretrained leaves it (names of the Hugging Face Hub are not downloaded)"
        )
    try:
        config = library.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **changes
        )
    except Exception as error:  # whatever the library raises
        raise ConfigError(
            f"model.name: hf:{folder}: transformers cannot read its config.json: {first_line(error)}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.name: hf:{folder}: its config.json has a quantization_config; expected a model of plain numbers, "
            "as quantised ones are not trained"
        )
    _by_pytorch_alone(config, folder)
    return config


_OWN_WAYS = {
    "_attn_implementation": (None, "eager", "sdpa"),
    "_experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}
"""What transformers computes with PyTorch alone, by the attribute of a configuration that chooses."""


def _by_pytorch_alone(config: Any, folder: Path) -> None:
    """Leaves to the library how it computes, where a configuration names kernels, which come from the Hub."""
    for attribute, own in _OWN_WAYS.items():
        if (named := getattr(config, attribute, None)) not in own:
            key = attribute.removeprefix("_")
            tell_once(f"hf:{folder}: {key} {named!r} of its config.json is not taken: kernels are not loaded")
            setattr(config, attribute, None)
    for part in getattr(config, "sub_configs", ()):
        if (of_part := getattr(config, part, None)) is not None:
            _by_pytorch_alone(of_part, folder)


def save_config(name: str, classes: Sequence[str], folder: Path, pad_index: int | None = None) -> None:
    """Leaves the configuration of ``hf:FOLDER``, as it is trained, in another folder.

    Args:
        name: The model's.
        classes: Their names, in order.
        folder: Where to.
        pad_index: The token that pads; None where the inputs are images.

    Raises:
        DataError: It cannot be written.
    """
    config = folder_config(folder_of(name), num_labels=len(classes))
    config.id2label = dict(enumerate(classes))
    config.label2id = {label: number for number, label in enumerate(classes)}
    if pad_index is not None:
        config.pad_token_id = pad_index
    try:
        config.save_pretrained(str(folder))
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}") from error


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, in files that are read.

    Raises:
        DataError: It has them in others alone.
    """
    if any(folder.glob("*.safetensors")):
        return True
    others = sorted(
        path.name for kind in ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ckpt") for path in folder.glob(kind)
    )
    if others:
        raise DataError(
            f"hf:{folder}: its weights are in {others[0]}, which is not read, as such files may run code; expected "
            "safetensors: load it elsewhere and save_pretrained(FOLDER), or remove the file to start untrained"
        )
    return False


def _made(folder: Path, kind: str, config: Any) -> Any:
    what = "texts" if "Sequence" in kind else "images"
    try:
        return getattr(transformers(), kind).from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the library raises
        why = "" if "Unrecognized configuration class" in str(error) else f": {first_line(error)}"
        raise ConfigError(
            f"model.name: hf:{folder}: transformers makes no classifier of {what} of the model type "
            f"{config.model_type!r}{why}"
        ) from error
