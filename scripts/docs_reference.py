"""A hook of mkdocs: fills the pages of the reference from the code, where they have a line such as these.

``<!-- reference: configuration -->``
    Every key of a run, from the dataclasses of :mod:`pipeal.config`.
``<!-- reference: commands -->``
    Every command with its options, as click has them.
``<!-- reference: api MODULE -->``
    Every public name of a module, for mkdocstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from itertools import groupby
from typing import Any, get_type_hints

import click
from docs_markup import MARKER, linked, names_of, places, public_names

from pipeal.cli.main import command as pipeal_command
from pipeal.config import LanguageConfig, RunConfig, TextConfig, VisionConfig
from pipeal.config.document import dump
from pipeal.config.load import wanted

KINDS: Mapping[str, type[RunConfig]] = {
    "Texts": TextConfig,
    "Images": VisionConfig,
    "A language model": LanguageConfig,
}
TRAINING = ("train-text", "train-vision")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts what is made of the code in the place of each marker."""
    return MARKER.sub(lambda match: MAKERS[match[1]](*filter(None, [match[2]])), markdown)


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: Dotted.
        takes: In words.
        default: In YAML.
        does: What it does, in Markdown.
        owner: The dataclass that explains it.
    """

    name: str
    takes: str
    default: str
    does: str
    owner: type

    @property
    def section(self) -> str:
        """The dotted name of the section that it is in."""
        return self.name.rpartition(".")[0]


def keys(schema: type, values: Any = None, path: str = "") -> Iterator[Key]:
    """Every key of a kind of run, section by section, its own before those of the sections in it.

    Raises:
        KeyError: No docstring has an entry for a key.
    """
    values = schema() if values is None else values
    kinds, entries = get_type_hints(schema, include_extras=True), explained(schema)
    for field in sorted(fields(schema), key=lambda field: is_dataclass(kinds[field.name])):
        kind, value, name = kinds[field.name], getattr(values, field.name), f"{path}{field.name}"
        if is_dataclass(kind):
            yield from keys(kind, value, f"{name}.")  # type: ignore[arg-type]
        else:
            owner, text = entries[field.name]
            does = linked(re.sub(r"\bNone\b", "null", text), _path(owner))  # what YAML calls it
            yield Key(name, wanted(kind), _yaml(value), does, owner)


def explained(schema: type) -> dict[str, tuple[type, str]]:
    """Of each attribute that its docstring, or that of a base, explains: the class, and the entry in one line."""
    found: dict[str, tuple[type, str]] = {}
    for owner in reversed(schema.__mro__):
        _, _, listed = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")
        own, _, _ = listed.partition("\n\n")  # what another heading stands over
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", own, flags=re.MULTILINE):
            found[name] = owner, " ".join(text.split())
    return found


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return dump({"key": value}).removeprefix("key: ").strip()


def parts() -> Iterator[tuple[str, str, list[Key]]]:
    """Yields the parts of the list of keys: a title, what begins the anchors of its keys, and the keys.

    First come those that every kind of run has alike, then those of each kind.
    """
    kinds = {title: list(keys(schema)) for title, schema in KINDS.items()}
    first, *others = kinds.values()
    alike = [key for key in first if all(key in listed for listed in others)]
    yield "Every run", "", alike
    for title, listed in kinds.items():
        yield title, f"{title.lower().split()[-1]}.", [key for key in listed if key not in alike]


def configuration() -> str:
    """All keys."""
    options = {
        (parameter.name or "").replace("__", "."): parameter.opts[-1]
        for name in TRAINING
        for parameter in pipeal_command.commands[name].params
        if isinstance(parameter, click.Option)
    }
    lines = []
    for title, prefix, listed in parts():
        lines += [f"## {title}", ""]
        for section, members in groupby(listed, key=lambda key: key.section):
            own = list(members)
            if section:
                lines += [f"### `{section}` {{ #{prefix}{section} }}", "", _intro(own[0].owner), ""]
            for key in own:
                option = f"; option `{options[key.name]}`" if key.name in options else ""
                lines += [f'<span id="{prefix}{key.name}"></span>`{key.name}`']
                lines += [f":   *{key.takes}; default* `{key.default}`{option}", "", f"    {key.does}", ""]
    return "\n".join(lines)


def _intro(owner: type) -> str:
    """What the docstring of a section says before it lists the keys."""
    text = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")[0]
    return linked(text.strip(), _path(owner))


def _path(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def commands() -> str:
    """All commands."""
    settings = {key.name for schema in KINDS.values() for key in keys(schema)}
    return "\n".join(line for name, one in all_commands() for line in _command(name, one, settings))


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yields every command that does something, with its whole name."""
    for name, one in pipeal_command.commands.items():
        if isinstance(one, click.Group):
            yield from ((f"pipeal {name} {below}", command) for below, command in one.commands.items())
        else:
            yield f"pipeal {name}", one


def _command(name: str, one: click.Command, settings: set[str]) -> Iterator[str]:
    context = click.Context(one, info_name=name, **one.context_settings)
    yield from (f"## `{name}` {{ #{anchor(name)} }}", "")
    yield from ("```", " ".join([name, *one.collect_usage_pieces(context)]), "```", "")
    yield from (plain(inspect.cleandoc(one.help or "")), "")
    for option in one.get_params(context):
        record = option.get_help_record(context)
        if record is None or not isinstance(option, click.Option):  # the text explains the arguments
            continue
        spelt, does = record
        key = (option.name or "").replace("__", ".")
        sets = f" Sets `{key}`." if name.removeprefix("pipeal ") in TRAINING and key in settings else ""
        yield from (f'<span id="{anchor(name, option.opts[-1])}"></span>`{spelt}`', f":   {plain(does)}{sets}", "")


def anchor(command: str, option: str = "") -> str:
    """Where a command, or one of its options, stands on its page."""
    return command.replace(" ", "-") + option


def plain(text: str) -> str:
    """A text of a command, none of whose letters is markup but backticks."""
    parts = text.split("`")
    return "`".join(
        part if inside % 2 else re.sub(r"([*_\[])", r"\\\1", part).replace("<", "&lt;")
        for inside, part in enumerate(parts)
    )


def api(module: str) -> str:
    """The public names of a module, as a list of links and each for mkdocstrings; links to those of an outer module."""
    room, own = import_module(module), public_names()[module]
    elsewhere = [places()[id(getattr(room, name))] for name in names_of(room) if name not in own]
    links = ", ".join(f"[`{place}`][{place}]" for place in elsewhere)
    listed = ", ".join(f"[`{name}`][{module}.{name}]" for name in own)
    lines = [f"Names of `{module}`{f', which also has {links}' if links else ''}: {listed}.", ""]
    return "\n".join([*lines, *(f"::: {module}.{name}\n" for name in own)])


MAKERS = {"configuration": configuration, "commands": commands, "api": api}


def anchors() -> Iterator[str]:
    """Yields where each key, command, option and public name stands."""
    for _, prefix, listed in parts():
        yield from (prefix + key.name for key in listed)
    for name, one in all_commands():
        yield anchor(name)
        yield from (anchor(name, option.opts[-1]) for option in one.params if isinstance(option, click.Option))
    for module, names in public_names().items():
        yield from (f"{module}.{name}" for name in names)
