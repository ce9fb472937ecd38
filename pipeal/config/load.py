"""From a YAML file, command-line values and ``--set`` to one checked configuration.

    defaults  <  usual values  <  YAML file  <  values  <  --set a.b=value

Each source is flattened to its leaves, dotted path by dotted path, so that a later source replaces single
values and an error can tell where its value came from.
"""

from __future__ import annotations

import datetime
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache, partial, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipeal.config import document
from pipeal.config.schema import RunConfig
from pipeal.core.errors import ConfigError, did_you_mean, nearest
from pipeal.core.names import FILE

REMOVED: Mapping[str, tuple[object, str]] = {
    "engine.cuda_graphs": (False, "CUDA graphs were removed after commit 05345d3"),
    "model.label_codes": ("per-sample", "label sides once for each class saved nothing and were removed"),
}
"""Keys of earlier versions: the default that each had, with which it is passed over, and why no other value goes."""

_LIKE = {"text": "shakespeare", FILE: "agnews"}
"""Data sets that are files of the user's, and whose configuration fits them."""

_DEEPEST = 12
"""Dots of a path; a file may be nested without end."""

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""What checks a schema's values; to make it takes as long as to check hundreds of configurations."""

_fields: Callable[[Any], Mapping[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""The types of a schema's keys."""

_OVERRIDE = "--set "
"""How errors in what it was given begin."""

_PACKAGE = Path(__file__).parents[1]
_Config = TypeVar("_Config", bound=RunConfig)


def load_config(
    schema: type[_Config],
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    usual: Mapping[str, Any] | None = None,
) -> _Config:
    """Merges all sources over the defaults and checks the result.

    Args:
        schema: What comes out: :class:`pipeal.config.TextConfig` or :class:`pipeal.config.VisionConfig`.
        path: A YAML file of the shape of ``schema``; None for the defaults.
        overrides: What ``--set`` was given: ``a.b=value``, the value in YAML. The last one wins.
        values: A nested mapping, such as command-line options; leave out what was not given.
        usual: Another one, which all of these go before.

    Raises:
        ConfigError: One line with the source and the dotted path of the key.

    >>> from pipeal.config import TextConfig
    >>> load_config(TextConfig, overrides=["train.lr.base=1e-2"]).train.lr.base
    0.01
    """
    given: dict[str, tuple[Any, str]] = {}
    for source, mapping in [("", usual), *_sources(path, values, overrides)]:
        given.update({leaf: (value, source) for leaf, value in _checked(mapping, schema, source)})
    try:
        return _adapter(schema).validate_python(nested({leaf: value for leaf, (value, _) in given.items()}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        leaf, kind = _wanted_at(schema, first["loc"])
        value, source = given[leaf]
        if first["type"] == "value_error":  # a check of the key's own, in its own words
            raise ConfigError(f"{source}{leaf}: {first['ctx']['error']}") from None
        raise ConfigError(
            f"{source}{leaf}: found {_shown(value)}, expected {wanted(kind)}{_hint(value, kind)}"
        ) from None


def given_keys(
    schema: type[RunConfig], *, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> frozenset[str]:
    """The dotted path of every key that the command line gives.

    Args:
        schema: What :func:`load_config` is asked for.
        overrides: As given there.
        values: As given there.

    Raises:
        ConfigError: As there.

    >>> from pipeal.config import TextConfig
    >>> sorted(given_keys(TextConfig, overrides=["train.lr={base: 1e-2, end: 0}"]))
    ['train.lr.base', 'train.lr.end']
    """
    return frozenset(
        leaf for source, mapping in _sources(None, values, overrides) for leaf, _ in _checked(mapping, schema, source)
    )


def dump_config(config: RunConfig) -> str:
    """YAML text of every value; :func:`load_config` reads it back to an equal configuration."""
    return document.dump(asdict(config))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values at dotted paths as mappings in each other.

    >>> nested({"train.epochs": 3, "train.lr.base": 0.1, "out": "runs"})
    {'train': {'epochs': 3, 'lr': {'base': 0.1}}, 'out': 'runs'}
    """
    whole: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        section = whole
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return whole


def leaves(mapping: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted path and the value of each leaf of nested mappings, whatever keys they have.

    >>> dict(leaves({"model": {"name": "lstm", "parts": 2}, "dataset": "agnews"}))
    {'model.name': 'lstm', 'model.parts': 2, 'dataset': 'agnews'}
    """
    for key, value in mapping.items():
        dotted = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value and dotted.count(".") < _DEEPEST:
            yield from leaves(value, dotted)
        else:
            yield dotted, value


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted path of a configuration, which has it."""
    return reduce(getattr, key.split("."), config)


def all_values(config: RunConfig) -> dict[str, Any]:
    """Every key of a configuration, dotted, with its value.

    >>> from pipeal.config import TextConfig
    >>> all_values(TextConfig())["train.lr.decay"]
    'cosine'
    """
    return dict(_checked(asdict(config), type(config), ""))


def is_left_over(key: str, value: object) -> bool:
    """Whether a key is one that earlier versions had, at the default that it had.

    >>> is_left_over("engine.cuda_graphs", False), is_left_over("engine.cuda_graphs", True)
    (True, False)
    """
    return key in REMOVED and (type(value), value) == (type(REMOVED[key][0]), REMOVED[key][0])


def find_config(dataset: str, model: str) -> Path | None:
    """The file ``<dataset>-<model>.yaml`` that comes with pipeal, if there is one.

    Of a data set that is the user's own file it is that of a published one: Shakespeare's, or AG News'.
    """
    # A wheel carries the files inside the package; in a checkout they lie beside it.
    shipped = _PACKAGE / "_configs"
    folder = shipped if shipped.is_dir() else _PACKAGE.parent / "configs"
    path = folder / f"{_LIKE.get(dataset, dataset)}-{model}.yaml"
    return path if path.is_file() else None


def read_config(path: str | Path) -> Mapping[str, Any]:
    """What a YAML file holds, unchecked.

    Raises:
        ConfigError: It cannot be read, or is no YAML.
    """
    return document.parse(_read(path), source=str(path)) or {}


def _sources(
    path: str | Path | None, values: Mapping[str, Any] | None, overrides: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yields each source's name, as errors begin with it, and its nested mapping; the weakest first."""
    if path is not None:
        yield f"{path}: ", document.parse(_read(path), source=str(path))
    yield "", values
    for key, value in map(parsed_override, overrides):
        yield _OVERRIDE, nested({key: value})


def parsed_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of what ``--set`` was given; the key may be that of a section.

    Raises:
        ConfigError: It is no key, ``=`` and YAML.
    """
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"--set {override!r}: expected a key, '=' and a value, such as train.epochs=3")
    return dotted.strip(), document.parse(text, source=f"--set {_printable(dotted)}")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a YAML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a path with a zero byte
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def _checked(
    mapping: Any, schema: type, source: str, path: str = "", root: type | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and the value of each leaf. The schema, not the mapping, says how deep to go."""
    root = root or schema
    if mapping is None and source != _OVERRIDE:  # an empty document, or a section whose every line is a comment
        return
    keys = _fields(schema)
    if not isinstance(mapping, Mapping):
        where = f"{source}{path}: " if path else source
        raise ConfigError(f"{where}found {_shown(mapping)}, expected a mapping with keys of {', '.join(keys)}")
    for key, value in mapping.items():
        dotted = f"{path}.{key}" if path else str(key)
        if is_left_over(dotted, value):
            continue
        if dotted in REMOVED:
            before, why = REMOVED[dotted]
            raise ConfigError(
                f"{source}{dotted}: found {_shown(value)}, but {why}; expected {_shown(before)}, or no key"
            )
        if key not in keys:
            near = _nearest(root, str(key), path, list(keys))
            hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(keys)}"
            raise ConfigError(f"{source}{_printable(dotted)}: unknown key; {hint}")
        if is_dataclass(keys[key]):
            yield from _checked(value, keys[key], source, dotted, root)
        else:
            yield dotted, value


def _nearest(root: type, key: str, path: str, siblings: list[str]) -> str | None:
    """The dotted path that was probably meant: the same name in another section, or else a near neighbour."""
    for dotted in _paths(root):
        if dotted.rpartition(".")[2] == key.lower():
            return dotted
    near = nearest(key, siblings, likeness=0.7)
    return ".".join(filter(None, (path, near))) if near else None


def _paths(schema: type, path: str = "") -> Iterator[str]:
    for key, kind in _fields(schema).items():
        yield path + key
        if is_dataclass(kind):
            yield from _paths(kind, f"{path}{key}.")  # type: ignore[arg-type]


def _wanted_at(schema: type, location: Sequence[int | str]) -> tuple[str, Any]:
    """The dotted path of the leaf at or above a pydantic location, and the type of what belongs there."""
    kind: Any = schema
    names: list[str] = []
    while is_dataclass(kind):
        names.append(str(location[len(names)]))
        kind = _fields(kind)[names[-1]]
    return ".".join(names), kind


def wanted(kind: Any) -> str:
    """What a type accepts, in words.

    >>> wanted(Literal["words", "tokens"])
    'words or tokens'
    """
    if get_origin(kind) is Annotated:
        return next(str(field.description) for field in kind.__metadata__)
    if get_origin(kind) is Literal:
        *names, last = map(str, get_args(kind))
        return f"{', '.join(names)} or {last}"
    if get_origin(kind) in (Union, types.UnionType):
        return ", or ".join(map(wanted, get_args(kind)))
    return "null"


def _shown(value: Any) -> str:
    """A value as its author wrote it, in one line of bounded length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    return str(value) if isinstance(value, datetime.date) else _printable(_short.repr(value))


def _hint(value: Any, kind: Any) -> str:
    """The name that was probably meant, or what YAML made of an unquoted text, where text was wanted."""
    if isinstance(value, str):
        return did_you_mean(value, _names_of(kind), likeness=0.8)  # else int8 for int4, which was meant
    belongs = wanted(kind)
    if "number" in belongs or belongs.startswith("true") or isinstance(value, (list, tuple, Mapping)) or value is None:
        return ""
    if isinstance(value, bool):
        return f" (a bare yes, no, on or off is {_shown(value)} in YAML: put it in quotes)"
    return " (put it in quotes to make it text)"


def _names_of(kind: Any) -> list[str]:
    """The names that a type accepts; none where it is no choice among names."""
    if get_origin(kind) is Literal:
        return [value for value in get_args(kind) if isinstance(value, str)]
    return [name for each in get_args(kind) for name in _names_of(each)]


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
