"""YAML text to plain values and back, without the traps of PyYAML.

Five of them: ``1e-3`` would be text, ``1:30`` would be 90 and ``010`` 8, the last of two equal keys would win silently,
and an ill-formed tagged scalar would raise whatever Python raised first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from pipeal.core.errors import ConfigError

_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_NOT_BY_TENS = re.compile(r":|^[-+]?0[0-9_]+$")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """The safe loader that refuses a repeated key, counts by tens, and says where a value is ill-formed."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag = str(super().resolve(kind, value, implicit))
        otherwise = tag in _NUMBERS and bool(implicit[0]) and _NOT_BY_TENS.search(str(value))
        return "tag:yaml.org,2002:str" if otherwise else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is repeated", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            what = f"this is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """The safe dumper that quotes what :class:`_Loader` would take for a number, and repeats what is shared."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # In any other style PyYAML writes a NEL (U+0085) bare and reads it back as a space.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)

# The dumper asks the same question ("would this be a number if bare?") before it leaves off the quotes.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str, *, source: str) -> Any:
    """The value that a YAML text stands for.

    Args:
        text: One YAML document.
        source: Where the text comes from; errors begin with ``source:line:column:``.

    Raises:
        ConfigError: The text is not YAML, or repeats a key.

    >>> parse("{base: 1e-3}", source="x.yaml")
    {'base': 0.001}
    >>> parse("[1:30, 010, 0]", source="x.yaml")
    ['1:30', '010', 0]
    >>> parse("a: 1\\na: 2", source="x.yaml")
    Traceback (most recent call last):
    ...
    pipeal.core.errors.ConfigError: x.yaml:2:1: key 'a' is repeated
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        words = (error.problem, None if error.problem_mark else error.context)
        raise ConfigError(f"{where}: {' '.join(' '.join(filter(None, words)).split())}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise ConfigError(f"{source}:{line}:{column}: found {chr(error.character)!r}, expected text") from None
    except RecursionError:
        raise ConfigError(f"{source}: lists or mappings lie too deep in each other") from None


def dump(values: Mapping[str, Any]) -> str:
    """YAML text that :func:`parse` reads back to the same values; tuples become lists."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
