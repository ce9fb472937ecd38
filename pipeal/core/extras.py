"""Libraries that pipeal works without: what is missing is told in one line, with what installs it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from pipeal.core.errors import ConfigError

_OFFLINE = "HF_HUB_OFFLINE"


def transformers() -> Any:
    """The library ``transformers``, which neither downloads anything nor writes into the command's lines.

    Raises:
        ConfigError: It is not installed, or cannot be imported.
    """
    if "transformers" not in sys.modules:
        os.environ.setdefault(_OFFLINE, "1")  # it is read once, while the library is imported
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"model.name: a model hf:FOLDER needs transformers, which cannot be imported ({error}); "
            "pip install transformers, or pipeal[hf]"
        ) from error
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library
