"""What the dimensions of a tensor mean, written as in ``"(B, L_word, M_state, 3)"``.

==========  ==============  ==========================================================
collection  module          meaning
==========  ==============  ==========================================================
``B``       ``b``           the batch; once in every annotation
``L_word``  ``l_word``      a length: it differs between samples, and is padded
``M_state`` ``m_state``     a width: any size, equal in all samples
``3``       ``3``           this very size
(none)      ``..``/``.n.``  any number of dimensions, the same ones where the name recurs
==========  ==============  ==========================================================

Names are the writer's own: a module's ``l_seq`` may take a collection's ``L_sequence``. Data of several tensors is
annotated by a dict, tuple or list of such texts, nested as the data is. The notation is that of asym.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pipeal.core.errors import ConfigError, DataError, a_type
from pipeal.data.grouping.nesting import at, leaves, mapped, path

Annotation: TypeAlias = Any
"""The text of an annotation, or a dict, tuple or list of annotations."""

Layout: TypeAlias = Any
"""The same with a :class:`Shape` in the place of each text."""

Kind: TypeAlias = Literal["batch", "length", "width", "fixed", "any"]


@dataclass(frozen=True)
class Dim:
    """One dimension; ``name`` is empty for the batch, and the digits of a fixed size."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return {"batch": "B", "length": f"L_{self.name}", "width": f"M_{self.name}", "any": f".{self.name}."}.get(
            self.kind, self.name
        )


@dataclass(frozen=True)
class Shape:
    """The dimensions of one tensor, in order."""

    dims: tuple[Dim, ...]

    @property
    def batch(self) -> int:
        """Where the batch dimension is."""
        return self.dims.index(Dim("batch"))

    @property
    def lengths(self) -> list[tuple[int, str]]:
        """The length dimensions: where, and whose name. A name may recur, as in pairs of words."""
        return [(place, dim.name) for place, dim in enumerate(self.dims) if dim.kind == "length"]

    @property
    def fixed(self) -> list[tuple[int, int]]:
        """The dimensions of a fixed size: where, and how large."""
        return [(place, int(dim.name)) for place, dim in enumerate(self.dims) if dim.kind == "fixed"]

    @property
    def sample(self) -> Shape:
        """The shape of one sample: without the batch."""
        return Shape(tuple(dim for dim in self.dims if dim.kind != "batch"))

    def spelled_out(self, dims: int) -> Shape:
        """For a tensor of so many dimensions, with widths in the place of ``..``.

        >>> print(parse("(b, l_t, ..)", module=True).spelled_out(4))
        (B, L_t, M_.0, M_.1)
        """
        wild = next((place for place, dim in enumerate(self.dims) if dim.kind == "any"), None)
        if wild is None:
            return self
        count, name = max(0, dims - len(self.dims) + 1), self.dims[wild].name
        widths = tuple(Dim("width", f"{name}.{number}") for number in range(count))
        return Shape(self.dims[:wild] + widths + self.dims[wild + 1 :])

    @property
    def as_module(self) -> str:
        """How a module would write it."""
        return f"({', '.join(str(dim)[0].lower() + str(dim)[1:] for dim in self.dims)})"

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.dims))})"


def parse(annotation: Annotation, *, module: bool = False) -> Layout:
    """Reads an annotation.

    >>> print(parse("(B, L_word, 3)"))
    (B, L_word, 3)

    Args:
        annotation: A text, or a dict, tuple or list of annotations; what was read already passes through.
        module: Whether it is in the small letters of a module.

    Raises:
        ConfigError: No such annotation.
    """

    def read(leaf: Any) -> Shape:
        if not isinstance(leaf, str | Shape):
            raise ConfigError(f"an annotation holds {a_type(leaf)}; wanted texts such as '(B, L_word)'")
        return _read(leaf, module) if isinstance(leaf, str) else leaf

    layout = mapped(read, annotation)
    if next(leaves(layout), None) is None:
        raise ConfigError(f"annotation {annotation!r} is of no tensor; wanted at least one")
    return layout


def shapes_of(layout: Layout) -> list[Shape]:
    """The shapes in a layout, in order."""
    return [shape for _, shape in leaves(layout)]


def length_names(layout: Layout) -> list[str]:
    """The names of all lengths in a layout, each once, as they come."""
    return list(dict.fromkeys(name for shape in shapes_of(layout) for _, name in shape.lengths))


def tensors_of(layout: Layout, data: Any, what: str) -> list[Tensor]:
    """The tensors of ``data``, one for each shape of the layout, in its order.

    Args:
        layout: What is wanted.
        data: Nested as the layout is; further entries of a dict are not looked at.
        what: Names the data in an error.

    Raises:
        DataError: An entry is missing or no tensor, or has another number of dimensions or another fixed size.
    """
    found = []
    for keys, shape in leaves(layout):
        tensor = at(data, keys, what)
        name = what + path(keys)
        if not isinstance(tensor, Tensor):
            raise DataError(f"{name} is {a_type(tensor)}; wanted a tensor of shape {shape}")
        fits = tensor.dim() == len(shape.dims) and all(tensor.shape[place] == size for place, size in shape.fixed)
        if not fits:
            raise DataError(f"{name} has the shape {tuple(tensor.shape)}; its annotation wants {shape}")
        found.append(tensor)
    return found


_DIM = re.compile(
    r"(?P<batch>[Bb])|(?P<length>[Ll]_\w+)|(?P<width>[Mm]_\w+)|(?P<fixed>\d+)|(?P<any>\.\w*\.)|(?P<no>.*)"
)


@lru_cache(maxsize=1024)
def _read(text: str, module: bool) -> Shape:
    form = "(b, l_word, ..)" if module else "(B, L_word, M_state, 3)"
    inside = text.strip()
    if not (inside.startswith("(") and inside.endswith(")")):
        raise ConfigError(f"annotation {text!r}; wanted dimensions in brackets, such as {form!r}")
    dims = []
    for word in inside[1:-1].rstrip(", ").split(","):
        found = _DIM.fullmatch(word.strip())
        kind = found.lastgroup if found else "no"
        # Small letters are a module's; what has no letter is of both, except that data is never "any".
        if kind in ("batch", "length", "width"):
            kind = kind if word.strip()[0].islower() == module else "no"
        if kind in ("no", None) or (kind == "any" and not module):
            raise ConfigError(
                f"annotation {text!r}: {word.strip()!r} is no dimension; wanted words such as in {form!r}"
            )
        dims.append(_dim(kind, word.strip()))
    kinds = [dim.kind for dim in dims]
    if kinds.count("batch") != 1 or kinds.count("any") > 1:
        raise ConfigError(
            f"annotation {text!r} has {kinds.count('batch')} batch dimensions and {kinds.count('any')} of '..'; "
            "wanted one batch dimension, and at most one '..'"
        )
    return Shape(tuple(dims))


def _dim(kind: Any, word: str) -> Dim:
    name = {"batch": "", "length": word[2:], "width": word[2:], "fixed": word, "any": word[1:-1]}[kind]
    return Dim(kind, str(int(name)) if kind == "fixed" else name)
