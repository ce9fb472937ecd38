"""Docstrings as Markdown: roles of Sphinx become links or code, doctests and literal blocks become blocks of code.

Also an extension of griffe, which reads docstrings for mkdocstrings (``mkdocs.yml``): it does this to each of them.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from functools import cache
from importlib import import_module
from inspect import isclass, isroutine
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import griffe

DOCS = Path(__file__).parents[1] / "docs"
MARKER = re.compile(r"^<!-- reference: (\w+)(?: ([\w.]+))? -->$", flags=re.MULTILINE)
"""A line of a page in ``docs/`` that gives way to what is made for it."""
_ROLE = re.compile(r":(?:class|func|data|mod|meth|attr|exc):`(?:([^`<]+) <)?(~?)([\w.]+)>?`")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)


@cache
def public_modules() -> tuple[str, ...]:
    """The modules that pages of ``docs/`` ask for, outer ones first."""
    asked = [
        module
        for page in sorted(DOCS.glob("*.md"))
        for what, module in MARKER.findall(page.read_text(encoding="utf-8"))
        if what == "api"
    ]
    return tuple(sorted(asked, key=lambda module: module.count(".")))


@cache
def public_names() -> dict[str, tuple[str, ...]]:
    """The names that each of these modules has and no outer one, in order."""
    found: dict[str, tuple[str, ...]] = {}
    seen: set[int] = set()
    for module in public_modules():
        room = import_module(module)
        found[module] = tuple(name for name in names_of(room) if id(getattr(room, name)) not in seen)
        seen.update(id(getattr(room, name)) for name in found[module] if _has_home(getattr(room, name)))
    return found


def names_of(module: ModuleType) -> list[str]:
    """Those of its ``__all__``, or else its classes, its functions, and the constants that it gives a type."""
    own, typed = f"{module.__name__}.", inspect.get_annotations(module)
    return sorted(
        getattr(module, "__all__", None)
        or (
            name
            for name, value in vars(module).items()
            if name[0] != "_" and (name in typed or (_has_home(value) and f"{value.__module__}.".startswith(own)))
        )
    )


def _has_home(value: object) -> bool:
    """Whether it is one thing wherever it is named, unlike a small number."""
    return isclass(value) or isroutine(value)


@cache
def places() -> dict[int, str]:
    """Where each public class or function stands in the reference, by identity."""
    return {
        id(value): f"{module}.{name}"
        for module, names in public_names().items()
        for name in names
        if _has_home(value := getattr(import_module(module), name))
    }


def linked(text: str, scope: str) -> str:
    """Its roles as links to the reference, or as code where that has no such name.

    Args:
        text: Part of a docstring.
        scope: The dotted path of the class or module that the docstring is of.
    """

    def shown(match: re.Match[str]) -> str:
        title, short, target = match.groups()
        name = title or (target.rpartition(".")[2] if short else target)
        place = _place(target, scope)
        return f"[`{name}`][{place}]" if place else f"`{name}`"

    return _ROLE.sub(shown, text)


def _place(target: str, scope: str) -> str | None:
    """Where a name stands in the reference, as seen from a class or module."""
    parts = scope.split(".")
    for path in (".".join((*parts[:end], target)) for end in range(len(parts), -1, -1)):
        for module, names in public_names().items():  # of constants only the path is known
            if path.removeprefix(f"{module}.") in names:
                return path
        try:
            value = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError):
            continue
        if id(value) in places():
            return places()[id(value)]
        owner, _, name = path.rpartition(".")
        home = pkgutil.resolve_name(owner) if owner else None
        above = places().get(id(home))
        if above is None or name[0] == "_":
            return above
        # Of a class the reference shows the methods and properties that it defines itself and explains, but no fields,
        # whose defaults may have docstrings.
        is_shown = name not in inspect.get_annotations(home) and getattr(vars(home).get(name), "__doc__", None)
        return f"{above}.{name}" if is_shown else above
    return None


def markdown(text: str, scope: str) -> str:
    """A whole docstring, dedented, as Markdown."""
    text = re.sub(r"^([ \t]*)::\n", r"\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    text = _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
    return linked(text, scope)


try:
    from griffe import Extension
except ImportError:  # an extra; without it there is no site to be built, and the rest works
    pass
else:

    class Markup(Extension):
        """Makes Markdown of each docstring of pipeal."""

        def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
            """Called for each module, class, function and attribute that has been read."""
            if obj.docstring:
                scope = obj.path if obj.is_class or obj.is_module else obj.parent.path if obj.parent else ""
                obj.docstring.value = markdown(obj.docstring.value, scope)
