"""How the dimensions that a module names match those of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeal.core.errors import ConfigError, DataError, unknown_name
from pipeal.data.grouping.annotated import MaskHint
from pipeal.data.grouping.annotation import Dim, Layout, Shape
from pipeal.data.grouping.nesting import at, leaves, mapped, path


@dataclass(frozen=True)
class Match:
    """Which dimensions of a collection a module's names stand for.

    Attributes:
        lengths: The collection's name for each of the module's lengths.
        widths: Its width, or fixed size, for each of the module's widths.
        others: The dimensions that each ``..`` stands for.
    """

    lengths: dict[str, str] = field(default_factory=dict)
    widths: dict[str, Dim] = field(default_factory=dict)
    others: dict[str, tuple[Dim, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: Layout, found: Layout, who: str) -> Match:
        """Holds a module's input layout against a collection's.

        Raises:
            DataError: The collection lacks an input, or has other dimensions there.
        """
        match = cls()
        for keys, shape in leaves(wanted):
            entry = at(found, keys, f"the input of {who}")
            if not isinstance(entry, Shape) or not match._take(shape, entry):
                has = entry if isinstance(entry, Shape) else type(entry).__name__
                known = f" where {match}" if str(match) else ""
                raise DataError(
                    f"{who} takes {shape.as_module} as its input{path(keys)}, the collection has {has}, and the two do "
                    f"not fit{known}; annotate the one as the other"
                )
        return match

    def layout(self, given: Layout, who: str) -> Layout:
        """The collection's layout for what the module gives.

        Raises:
            ConfigError: A length or ``..`` that no input has: where the padding is would be unknown.
        """
        return mapped(lambda shape: self._shape(shape, who), given)

    def mask_hint(self, hint: MaskHint, who: str) -> str | list[str] | None:
        """A module's mask hint, in the collection's names.

        Raises:
            ConfigError: It is none.
            DataError: It names a length that the module does not take.
        """
        if hint is None or hint == "copy":
            return hint
        if not isinstance(hint, Sequence):
            raise ConfigError(f"the mask hint of {who} is {hint!r}; wanted None, 'copy' or a list of names of lengths")
        names = [hint] if isinstance(hint, str) else list(hint)
        for name in names:
            if name not in self.lengths:
                raise DataError(f"the mask of {who}: {unknown_name('length', name, self.lengths)}")
        return [self.lengths[name] for name in names]

    def _shape(self, given: Shape, who: str) -> Shape:
        dims: list[Dim] = []
        for dim in given.dims:
            if (dim.kind == "length" and dim.name not in self.lengths) or (
                dim.kind == "any" and dim.name not in self.others
            ):
                new = Shape((dim,)).as_module
                raise ConfigError(f"{who} gives {given.as_module}, but takes no {new}; a new one cannot begin there")
            if dim.kind == "any":
                dims += self.others[dim.name]
            elif dim.kind == "length":
                dims.append(Dim("length", self.lengths[dim.name]))
            else:
                dims.append(self.widths.get(dim.name, dim) if dim.kind == "width" else dim)
        return Shape(tuple(dims))

    def _take(self, wanted: Shape, found: Shape) -> bool:
        """Notes what the names stand for; False where the shapes do not fit."""
        wild = next((place for place, dim in enumerate(wanted.dims) if dim.kind == "any"), None)
        inner = found.dims
        if wild is not None:
            end = len(found.dims) - (len(wanted.dims) - wild - 1)
            if end < wild:
                return False
            covered = found.dims[wild:end]
            if self.others.setdefault(wanted.dims[wild].name, covered) != covered:
                return False
            inner = found.dims[:wild] + found.dims[end:]
        outer = tuple(dim for dim in wanted.dims if dim.kind != "any")
        return len(outer) == len(inner) and all(map(self._take_dim, outer, inner))

    def _take_dim(self, wanted: Dim, found: Dim) -> bool:
        if wanted.kind == "length":
            return found.kind == "length" and self.lengths.setdefault(wanted.name, found.name) == found.name
        if wanted.kind == "width":
            return found.kind in ("width", "fixed") and self.widths.setdefault(wanted.name, found) == found
        return wanted == found

    def __str__(self) -> str:
        names = [f"l_{mine} is L_{theirs}" for mine, theirs in self.lengths.items()]
        names += [f"m_{mine} is {theirs}" for mine, theirs in self.widths.items()]
        names += [f"{'.' + mine + '.'} is {Shape(theirs)}" for mine, theirs in self.others.items()]
        return ", ".join(names)
