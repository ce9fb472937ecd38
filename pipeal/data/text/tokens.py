"""Texts to numbers by the tokenizer of a folder of ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from pipeal.core.errors import DataError, first_line
from pipeal.core.extras import transformers

__all__ = ["FolderTokenizer"]

_AT_ONCE = 1_000
"""Texts that are given to it together, which its threads divide among them."""


class FolderTokenizer:
    """A tokenizer with what a padded batch needs.

    Args:
        folder: That of the model.
        pad_index: What pads where the tokenizer does not say; None where the model does not, either.

    Attributes:
        pad_index: The token that pads.
        longest: The most tokens that a text may have, as far as the tokenizer says.

    Raises:
        ConfigError: The library is missing.
        DataError: The folder has no tokenizer, or nothing pads.
    """

    def __init__(self, folder: Path, pad_index: int | None = None) -> None:
        library = transformers()
        try:
            self._own: Any = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever the library raises: OSError, ValueError, KeyError, of its own
            raise _none_in(folder, first_line(error)) from error
        # By the model type alone the library makes one that knows no word.
        files = [*self._own.vocab_files_names.values()] or ["tokenizer_config.json"]
        if not any((folder / name).is_file() for name in ("tokenizer.json", *files)):
            raise _none_in(folder, f"there is no {' or '.join(dict.fromkeys(('tokenizer.json', *files)))}")
        found = [self._own.pad_token_id, pad_index, self._own.eos_token_id]
        pads = next((token for token in found if token is not None), None)
        if pads is None:
            raise DataError(f"the tokenizer in {folder} has no token that pads, nor one for the end; set its pad_token")
        self.pad_index: int = pads
        self.longest: int = self._own.model_max_length
        special = [self._own.unk_token_id, self._own.eos_token_id, pads]
        self._of_nothing: int = next(token for token in special if token is not None)

    def __len__(self) -> int:
        return len(self._own)

    @property
    def fingerprint(self) -> str:
        """Tells tokenizers apart: a check sum of the tokens and their numbers."""
        known = sorted(self._own.get_vocab().items())
        return f"{crc32(repr(known).encode()):08x}"

    def encode(self, texts: Sequence[str], max_len: int | None) -> Iterator[list[int]]:
        """The tokens of each text, with what the tokenizer puts around a text; of one without any, the unknown one.

        Args:
            texts: As they were read.
            max_len: Texts are cut so that they have at most so many, with what is put around them.
        """
        rest = iter(texts)
        while some := list(islice(rest, _AT_ONCE)):
            found = self._own(
                some, truncation=max_len is not None, max_length=max_len, add_special_tokens=True, padding=False
            )["input_ids"]
            yield from (tokens or [self._of_nothing] for tokens in found)

    def save(self, folder: Path) -> None:
        """Leaves its files in a folder."""
        try:
            self._own.save_pretrained(str(folder))
        except OSError as error:
            raise DataError(f"cannot write {folder}: {error.strerror or error}") from error


def _none_in(folder: Path, why: str) -> DataError:
    return DataError(
        f"{folder} has no tokenizer that transformers can load ({why}); expected its files, such as tokenizer.json, "
        "beside config.json: save it there with tokenizer.save_pretrained"
    )
