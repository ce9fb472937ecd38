"""What the forward of a model takes, and whether a sample is one argument or several."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeal.core.errors import ConfigError, a_type
from pipeal.core.tree import Tree, describe, shapes_of

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Arguments of a forward that take what is to be learnt; the loss is left out where they are None."""


@dataclasses.dataclass(frozen=True)
class Takes:
    """What the forward of a model takes, as its signature has it.

    Attributes:
        forward: What it is called, for messages.
        places: The arguments that may be given by place.
        required: Those of them that have no default.
        names: The arguments that may be given by name.
        any_number: Whether it takes any number more by place.
        any_name: Whether it takes others by name.
        given: What it gets beside the sample.
    """

    forward: str
    places: Sequence[str]
    required: Sequence[str]
    names: Sequence[str]
    any_number: bool
    any_name: bool
    given: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Takes:
        """What ``model.forward`` takes."""
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {p.kind for p in parameters}
        places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        required = [p.name for p in places if p.default is p.empty]
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        given: dict[str, Any] = {name: None for name in required[1:] if name in TARGET_NAMES}
        if "use_cache" in names:
            given["use_cache"] = False  # what is kept from one text would be taken for the beginning of the next
        return cls(
            forward=f"{type(model).__name__}.forward",
            places=[p.name for p in places],
            required=required,
            names=names,
            any_number=inspect.Parameter.VAR_POSITIONAL in kinds,
            any_name=inspect.Parameter.VAR_KEYWORD in kinds,
            given=given,
        )

    def by_name(self, sample: Tree) -> bool:
        """Whether a sample is a dict of arguments, not an argument itself."""
        if not isinstance(sample, Mapping) or not sample:
            return False
        names = {*self.names}
        if self.any_name and {*self.required} <= {*sample, *self.given}:
            names_one = not self.places or not {*self.places}.isdisjoint(sample)
            names.update(map(str, sample) if names_one else ())
        return names.issuperset(sample)

    def by_place(self, sample: Tree) -> bool:
        """Whether a sample may be a tuple of arguments."""
        if type(sample) is not tuple:
            return False
        return self.any_number or (len(self.places) - len(self.given) >= 2 and len(sample) <= len(self.places))

    def require_one(self, sample: Tree) -> None:
        """Asks that no argument is left to be given beside a sample that is one."""
        needed = [place for place in self.required if place not in self.given]
        if len(needed) > 1:
            raise ConfigError(
                f"{self.forward} takes {', '.join(needed)}, and the sample is {what_is_given(sample)}; pass the inputs "
                f"of a batch as a tuple, ({', '.join(needed)}), or as a dict, "
                f"{{{', '.join(f'{name!r}: …' for name in needed)}}}"
            )

    def refuse_kept(self, sample: Sequence[Tree]) -> None:
        """Asks that no tensor, such as a mask, stands where a model takes what it kept of an earlier text."""
        for place, (argument, value) in enumerate(zip(self.places, sample, strict=False)):
            if argument == "past_key_values" and isinstance(value, Tensor):
                raise ConfigError(
                    f"item {place} of the sample, {describe(shapes_of(value))}, would be taken for {argument} by "
                    f"{self.forward}({', '.join(self.places[: len(sample)])}, …); if it is a mask, make the inputs of "
                    f"batches dicts: {{{self.places[0]!r}: …, 'attention_mask': …}}"
                )


def absent_from(sample: Mapping[str, Tree] | Sequence[Tree]) -> frozenset[str | int]:
    """The arguments, by name or by place, that are None."""
    items = sample.items() if isinstance(sample, Mapping) else enumerate(sample)
    return frozenset(key for key, value in items if value is None)


def what_is_given(sample: Tree) -> str:
    """In a few words, what the input of a batch is: a dict of which names, or a tensor or tuple of which shapes."""
    if isinstance(sample, Mapping):
        return f"a dict of {', '.join(map(str, sample))}"
    return f"{a_type(sample)}, {describe(shapes_of(sample))}"
