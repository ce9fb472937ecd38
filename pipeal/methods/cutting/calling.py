"""How a batch becomes the arguments of a model.

::

    {"input_ids": ids, "attention_mask": mask} ──► forward(input_ids=ids, attention_mask=mask, use_cache=False)
    (ids, mask) ──► forward(ids, mask)                   ModelOutput(loss=None, logits=answer, …) ──► answer
    (ids, None) ──► forward(ids, None)
    x ──► forward(x, target=None)                        (answer, None) ──► answer
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from pipeal.core.errors import ConfigError
from pipeal.core.messages import tell_once
from pipeal.core.tree import Tree
from pipeal.methods.cutting.answers import answer_of
from pipeal.methods.cutting.probe import probing
from pipeal.methods.cutting.signature import TARGET_NAMES, Takes, absent_from


class Called(nn.Module):
    """A model that takes one argument, the input of a packet, and returns its answer alone.

    Args:
        model: Any module.
        names: Of a dict, the arguments that its values are given as; of a tuple, how many positional arguments it is;
            None where the input is one argument.
        given: Other arguments.
        masks: Which items of the input are masks, and whether they are true on padding, as PyTorch's own are.
        absent: Which items are None, whatever the input has there: a forward that asks can be followed.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] | int | None,
        given: Mapping[str, Any],
        masks: Mapping[str | int, bool] | None = None,
        absent: frozenset[str | int] = frozenset(),
    ) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.given = dict(given)
        self.absent = absent
        self.masks = {key: of_padding for key, of_padding in (masks or {}).items() if key not in self.absent}

    def forward(self, x: Tree) -> Tree:
        """The input of a packet to the answer."""
        if self.names is None:
            out = self.model(x, **self.given)
        elif isinstance(self.names, int):
            out = self.model(*(self._item(x, place) for place in range(self.names)), **self.given)
        else:
            out = self.model(**{name: self._item(x, name) for name in self.names}, **self.given)
        return answer_of(out)

    def _item(self, x: Tree, key: str | int) -> Tree:
        return None if key in self.absent else x[key]


def called(model: nn.Module, sample: Tree) -> Called:
    """How a model takes a sample.

    Raises:
        ConfigError: The forward cannot be called with it, as far as its arguments tell.
    """
    takes = Takes.of(model)
    if takes.by_name(sample):
        left = {key: value for key, value in takes.given.items() if key not in sample}
        return Called(model, tuple(sample), left, _masks(zip(sample, sample, strict=True)), absent_from(sample))
    one = Called(model, None, takes.given)
    if not takes.by_place(sample):
        takes.require_one(sample)
        return one
    if len(takes.required) - len(takes.given) < 2 and _runs(one, sample):  # one argument that is a tuple
        return one
    takes.refuse_kept(sample)
    return Called(model, len(sample), takes.given, _masks(enumerate(takes.places[: len(sample)])), absent_from(sample))


def _masks(names: Iterable[tuple[str | int, str]]) -> dict[str | int, bool]:
    """The arguments called masks, and whether they are true on padding, as PyTorch's ``key_padding_mask`` is. What else
    is called a padding mask is true on words in some libraries and on padding in others, and so is told how it is read.
    """
    found = {}
    for key, name in names:
        if "mask" in name:
            found[key] = "key_padding_mask" in name
            if not found[key] and ("padding_mask" in name or "pad_mask" in name):
                tell_once(
                    f"the argument {name!r} is taken for a mask that is true on words; where it is true on padding, "
                    "call it key_padding_mask, or hand the opposite on",
                    logging.WARNING,
                )
    return found


def why_not(whole: Called) -> str:
    """What may be behind an error of a model's forward, for its message; empty where nothing is known."""
    targets = [key for key in whole.given if key in TARGET_NAMES]
    if targets:
        return (
            f"{type(whole.model).__name__}.forward takes {targets[0]!r}, which is None here, for AL layers get the "
            f"targets by themselves: have it leave the loss out where {targets[0]} is None"
        )
    return ""


def packed(what: str) -> ConfigError:
    """The error for a packed sequence, of which no part of pipeal can tell which rows are whose."""
    return ConfigError(
        f"{what} a PackedSequence, which has no batch first: its rows are of all texts in turn; pass padded texts "
        "(B, T), with a mask where the model takes one, and pack and unpack (pack_padded_sequence, "
        "pad_packed_sequence) within one module"
    )


def _runs(whole: Called, sample: Tree) -> bool:
    try:
        with probing(whole):
            whole(sample)
    except Exception:  # noqa: BLE001  whatever a user's forward raises; where both ways raise, the other one is told
        return False
    return True
