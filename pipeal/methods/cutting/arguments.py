"""What the inputs of batches must be like: one tensor or several, by place or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pipeal.core.errors import DataError
from pipeal.core.tree import Tree
from pipeal.methods.cutting.signature import Takes, absent_from, what_is_given


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
        takes = Takes.of(model) if isinstance(model, nn.Module) else None
        self._places = () if takes is None else tuple(takes.places)
        by_name = takes is not None and takes.by_name(sample)
        by_place = takes is not None and takes.by_place(sample)
        self._absent = absent_from(sample) if by_name or by_place else frozenset()
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
            raise self._refusal(f"given as arguments, {len(by_place)} by place and {len(named)} by name")
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
