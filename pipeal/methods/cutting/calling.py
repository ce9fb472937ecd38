"""How a batch becomes the arguments of a model, and which part of what it returns is its answer.

::

    {"input_ids": ids, "attention_mask": mask} ──► forward(input_ids=ids, attention_mask=mask, use_cache=False)
    (ids, mask) ──► forward(ids, mask)                   ModelOutput(loss=None, logits=answer, …) ──► answer
    (ids, None) ──► forward(ids, None)
    x ──► forward(x, target=None)                        (answer, None) ──► answer
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeal.core.errors import ConfigError, DataError
from pipeal.core.messages import tell_once
from pipeal.core.tree import Tree, describe, shapes_of
from pipeal.methods.cutting.probe import probing

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Arguments of a forward that take what is to be learnt; the loss is left out where they are None."""

ANSWERS = ("logits", "out", "last_hidden_state")
"""What the answer is called in an output of several fields, the first of these that is there."""


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


class Answer(nn.Module):
    """Takes the answer out of an output of several fields (:func:`answer_of`)."""

    def forward(self, out: Tree) -> Tree:
        """``out`` is what a model returned."""
        return answer_of(out)


def answer_of(out: Any) -> Any:
    """The answer in what a model returns: of a ``ModelOutput``, another dataclass, a dict or a named tuple the field of
    that name, of a tuple the one item that is not None; anything else is the answer itself.

    >>> answer_of({"loss": None, "logits": 3}), answer_of((3, None)), answer_of(3)
    (3, 3, 3)

    Raises:
        ConfigError: There are several fields, and none is called as in :data:`ANSWERS`.
    """
    if type(out) in (tuple, list):
        there = [item for item in out if item is not None]
        return there[0] if len(there) == 1 else out
    fields = fields_of(out)
    if fields is None:
        return out
    there = [name for name, value in fields.items() if value is not None]
    named = [name for name in ANSWERS if name in there]
    if not named and len(there) != 1:
        raise ConfigError(
            f"the model returns a {type(out).__name__} with {', '.join(map(str, there)) or 'no field set'}; expected "
            f"one field, or one called {', '.join(ANSWERS)}: wrap the model in a module that returns its answer"
        )
    return fields[named[0] if named else there[0]]


def has_answer(out: Any) -> bool:
    """Whether :func:`answer_of` finds one."""
    try:
        answer_of(out)
    except ConfigError:
        return False
    return True


def fields_of(out: Any) -> Mapping[str, Any] | None:
    """The fields of a dict, a ``ModelOutput`` or another dataclass, or a named tuple; None of anything else."""
    if isinstance(out, Mapping):
        return out
    if isinstance(out, tuple) and hasattr(out, "_asdict"):
        return out._asdict()
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    return None


def what_is(out: Tree) -> str:
    """Shapes and types for a message, and what holds them where that is no tensor or tuple."""
    shapes = describe(shapes_of(out))
    if fields_of(out) is None:
        return shapes
    return f"a {type(out).__name__} with {', '.join(map(str, fields_of(out) or ()))} ({shapes}), which is no tensor"


def called(model: nn.Module, sample: Tree) -> Called:
    """How a model takes a sample.

    Raises:
        ConfigError: The forward cannot be called with it, as far as its arguments tell.
    """
    takes = _Takes.of(model)
    if takes.by_name(sample):
        left = {key: value for key, value in takes.given.items() if key not in sample}
        return Called(model, tuple(sample), left, _masks(zip(sample, sample, strict=True)), _absent(sample))
    one = Called(model, None, takes.given)
    if not takes.by_place(sample):
        takes.require_one(sample)
        return one
    if len(takes.required) - len(takes.given) < 2 and _runs(one, sample):  # one argument that is a tuple
        return one
    takes.refuse_kept(sample)
    return Called(model, len(sample), takes.given, _masks(enumerate(takes.places[: len(sample)])), _absent(sample))


@dataclasses.dataclass(frozen=True)
class _Takes:
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
    def of(cls, model: nn.Module) -> _Takes:
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


def _absent(sample: Mapping[str, Tree] | Sequence[Tree]) -> frozenset[str | int]:
    """The arguments, by name or by place, that are None."""
    items = sample.items() if isinstance(sample, Mapping) else enumerate(sample)
    return frozenset(key for key, value in items if value is None)


def what_is_given(sample: Tree) -> str:
    """In a few words, what the input of a batch is: a dict of which names, or a tensor or tuple of which shapes."""
    if isinstance(sample, Mapping):
        return f"a dict of {', '.join(map(str, sample))}"
    return f"a {type(sample).__name__}, {describe(shapes_of(sample))}"


class Arguments:
    """Whether the inputs of batches are one tensor or several, by place or by name, as of a sample.

    Args:
        sample: A tensor; a tuple or a dict of several. Which of these a model needs, it alone knows.
        model: What takes it; a dict may be its arguments by their names, or be one itself.
    """

    def __init__(self, sample: Tree, model: object) -> None:
        self._words = what_is_given(sample)
        self._kind = _kind_of(sample)
        self._count = len(sample) if self._kind is tuple else 1
        takes = _Takes.of(model) if isinstance(model, nn.Module) else None
        self._places = () if takes is None else tuple(takes.places)
        by_name = takes is not None and takes.by_name(sample)
        by_place = takes is not None and takes.by_place(sample)
        self._absent = _absent(sample) if by_name or by_place else frozenset()
        self._names = tuple(name for name in sample if name not in self._absent) if by_name else ()

    def require(self, x: Tree) -> None:
        """Asks that an input is like the sample.

        Raises:
            DataError: One is a tensor, a dict or something else where the other is not, or an argument is missing, or
                given where the sample has None.
        """
        if _kind_of(x) is not self._kind or any(name not in x for name in self._names):
            raise self._refusal(what_is_given(x))
        if self._absent:
            for key, value in x.items() if isinstance(x, Mapping) else enumerate(x):
                if key in self._absent and value is not None:
                    raise DataError(
                        f"item {key!r} of the input is given, and was None in the sample of from_bp, so that it would "
                        "change nothing; convert with a sample that has it"
                    )

    def gathered(self, x: Tree, more: Sequence[Tree], named: Mapping[str, Tree]) -> Tree:
        """The input of a batch, of arguments that are it, or those that the model takes.

        Args:
            x: The first, or that of this name; None where there is none.
            more: Others by place.
            named: Others by name.

        Raises:
            DataError: They are neither.
        """
        if x is None and not more and not named:
            raise self._refusal("missing")
        if more or named or _kind_of(x) is not self._kind:
            x = self._bound(x, more, named)
        self.require(x)
        return x

    def _bound(self, x: Tree, more: Sequence[Tree], named: Mapping[str, Tree]) -> Tree:
        """Arguments as the sample has them: a tuple of all, a dict of all, or the one that there is."""
        is_dict, wanted = self._kind is Mapping, self._places[: self._count]
        by_place = (x, *more) if more or x is not None else ()
        if len(by_place) == 1 and ((is_dict and not self._names) or named.keys() & {*self._places[:1]}):
            by_place, named = (), {"x": x, **named}  # it is not the first, but called so
        if not is_dict and not named and len(by_place) == self._count:
            return by_place if self._kind is tuple else by_place[0]
        places = self._places[: len(by_place)]
        bound = {**dict(zip(places, by_place, strict=False)), **named}
        if is_dict:
            fits = {*self._names, *self._absent}.issuperset(places)
        else:
            needed = {place for number, place in enumerate(wanted) if number not in self._absent}
            fits = len(wanted) == self._count and needed <= bound.keys() <= {*wanted}
        if not fits or len(bound) < len(by_place) + len(named):
            raise self._refusal(f"{len(by_place)} arguments by place and {len(named)} by name")
        if is_dict:
            return bound
        values = tuple(bound.get(place) for place in wanted)
        return values if self._kind is tuple else values[0]

    def _refusal(self, found: str) -> DataError:
        return DataError(
            f"the input is {found}; expected what the sample of from_bp was, {self._words}, with any number of rows"
        )


def _kind_of(x: Tree) -> type:
    return next((kind for kind in (Tensor, Mapping) if isinstance(x, kind)), tuple)


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
