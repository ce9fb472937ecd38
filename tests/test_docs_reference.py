"""Pages of the reference are made of the code: every key, option and public name of pipeal is on them, explained."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from types import FunctionType

import click
import pytest
from docs_check import Page
from docs_content import on_page_content
from docs_markup import DOCS, linked, markdown, names_of, public_modules, public_names
from docs_reference import (
    KINDS,
    all_commands,
    anchors,
    api,
    commands,
    configuration,
    explained,
    on_page_markdown,
    parts,
    plain,
)

import pipeal
import pipeal.data
from pipeal.cli.main import command
from pipeal.config import all_values
from pipeal.config.methods import MethodsConfig
from tests.test_docs import NAMES

PAGES = {page.stem: on_page_markdown(page.read_text(encoding="utf-8")) for page in DOCS.glob("*.md")}


def test_every_key_is_explained_with_its_type_and_default() -> None:
    shown = {(prefix + key.name): key for _, prefix, listed in parts() for key in listed}
    wanted = {title: all_values(schema()) for title, schema in KINDS.items()}
    for title, values in wanted.items():
        prefix = f"{title.lower().split()[-1]}."
        for name, value in values.items():
            key = shown.get(name) or shown[prefix + name]
            assert key.does
            assert key.takes
            if value is None or isinstance(value, (bool, str)):
                assert key.default == {None: "null", True: "true", False: "false"}.get(value, value)
            assert f'<span id="{name}"></span>' in PAGES["configuration"] or prefix + name in PAGES["configuration"]


def test_a_key_of_every_run_is_listed_once_and_one_of_a_kind_with_it() -> None:
    page = configuration()
    assert page.count("`train.lr.base`\n") == 1
    assert page.count("`model.x_hid`\n") == 2  # of texts and of images, with other defaults
    assert "*true or false; default* `true`" in page
    assert "*a list of methods, such as [al, bp]; default* `[al, bp]`; option `--methods`" in page


def test_a_key_without_an_entry_in_a_docstring_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = KINDS["Texts"]
    monkeypatch.setattr(schema.__mro__[1], "__doc__", "One run.")
    with pytest.raises(KeyError, match="dataset"):
        configuration()


def test_the_options_of_methods_are_listed_for_python() -> None:
    """Symptom: ``method_options`` takes them, and no page that a reader of the repository has said which there are."""
    rows = [
        f"| `{section.name}` | `{one.name}` | `{getattr(own, one.name)!r}` | {explained(type(own))[one.name][1]} |"
        for section in fields(MethodsConfig)
        for own in [getattr(MethodsConfig(), section.name)]
        for one in fields(own)
    ]
    wanted = "\n".join(rows).replace("``", "`")
    section = PAGES["python"].partition("## Options of methods\n")[2].partition("\n## ")[0]
    assert "\n".join(re.findall(r"^\| `.*", section, flags=re.MULTILINE)) == wanted, f"expected\n{wanted}"


def test_every_command_and_option_is_there() -> None:
    page = commands()
    found = dict(all_commands())
    assert {name.split()[1] for name in found} == command.commands.keys()
    assert {"pipeal line init", "pipeal line run", "pipeal line status"} <= found.keys()
    for name, one in found.items():
        section = page.partition(f"## `{name}` ")[2].partition("\n## ")[0]
        for option in one.params:
            if isinstance(option, click.Option):
                assert all(spelling in section for spelling in option.opts)
                assert option.help
                assert plain(option.help) in section


def test_an_option_says_which_key_it_sets() -> None:
    section = commands().partition("## `pipeal train-text` ")[2]
    assert "Passes over the training data; default: the experiment's. Sets `train.epochs`." in section


def test_every_public_name_is_there_once_or_linked() -> None:
    assert {"pipeal", "pipeal.data", "pipeal.engine", "pipeal.methods", "pipeal.models"} <= {*public_modules()}
    assert public_names()["pipeal"] == tuple(sorted(pipeal.__all__))
    api_pages = "\n".join(text for name, text in PAGES.items() if name.startswith("api"))
    for module in public_modules():
        for name in names_of(import_module(module)):
            own = f"::: {module}.{name}\n"
            assert own in api_pages or re.search(rf"`{re.escape(module)}`, which also has .*\.{name}\]", api_pages)
    placed = re.findall(r"^::: (\S+)$", api_pages, flags=re.MULTILINE)
    assert len(placed) == len(set(placed)) >= len(pipeal.__all__) + len(pipeal.data.__all__)


def test_a_name_that_a_page_tells_of_is_in_the_reference() -> None:
    """Names of classes, functions and constants; those of modules are for readers of the code."""
    known = {f"{module}.{name}" for module in public_modules() for name in names_of(import_module(module))}
    lost = [
        name
        for name in NAMES
        if not any(name == one or name.startswith(f"{one}.") for one in known)
        and not _is_module(name)
        and linked(f":func:`{name}`", "pipeal") == f"`{name}`"
    ]
    assert lost == []


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_every_public_class_and_function_has_a_docstring() -> None:
    bare = [
        f"{module}.{name}"
        for module, names in public_names().items()
        for name in names
        if isinstance(value := getattr(import_module(module), name), (type, FunctionType)) and not value.__doc__
    ]
    assert bare == []


def test_places_are_distinct() -> None:
    listed = list(anchors())
    assert len(listed) == len(set(listed))


def test_a_link_needs_a_place() -> None:
    assert linked(":class:`~pipeal.engine.pipeline.Pipeline`", "pipeal") == "[`Pipeline`][pipeal.Pipeline]"
    assert linked(":meth:`run`", "pipeal.engine.pipeline.Pipeline") == "[`run`][pipeal.Pipeline.run]"
    assert linked(":meth:`any title <pipeal.Pipeline.run>`", "pipeal") == "[`any title`][pipeal.Pipeline.run]"
    field = "`linear`][pipeal.methods.Network]"  # whose default, a class of PyTorch, has a docstring
    assert linked(":attr:`linear`", "pipeal.methods.network.Network") == f"[{field}"
    assert linked(":func:`pipeal.training.learning_rate.usual_course`", "pipeal").startswith("`pipeal.training")
    assert api("pipeal.engine").startswith("Names of `pipeal.engine`, which also has [`pipeal.ExitPolicy`]")


def test_a_docstring_becomes_markdown() -> None:
    docstring = "Adds one, as :func:`pipeal.plan`::\n\n    a | b\n\n>>> 1 + 1\n2\n\nThe end."
    page = "Adds one, as [`pipeal.plan`][pipeal.plan]:\n\n    a | b\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThe end."
    assert markdown(docstring, "pipeal") == page


def test_a_long_name_in_a_table_may_break_after_a_dot() -> None:
    long, short = "<code>engine.execution.watch_dog=1</code>", "<code>run.find_run</code>"
    assert on_page_content("<code>--max-len INTEGER</code>") == '<code class="option">--max-len INTEGER</code>'
    assert on_page_content("<td>1 ± 2.5, 3 %</td>") == "<td>1&nbsp;±&nbsp;2.5, 3&nbsp;%</td>"
    html = on_page_content(f"<p>{long} (<code>int</code>\n)</p><table><td>{long}, {short}</td></table>")
    broken = "<code>engine.<wbr>execution.<wbr>watch_<wbr>dog=1</code>"
    assert html == f"<p>{long} (<code>int</code>)</p><table><td>{broken}, {short}</td></table>"


def test_a_text_of_a_command_is_no_markup_but_for_its_backticks() -> None:
    assert plain("cpu*4, as `a*b` has it") == "cpu\\*4, as `a*b` has it"
    assert plain("[1<=x]") == "\\[1&lt;=x]"  # a backslash before < would be seen


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://elsewhere.org/a.js"></script>',
        '<link rel="stylesheet" href="//elsewhere.org/a.css">',
        '<img src="http://elsewhere.org/a.png">',
        "<style>@import 'https://elsewhere.org/font.css'</style>",
        '<p style="background: url(https://elsewhere.org/a.png)">',
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_what_a_page_asks_another_host_for_is_found(page: str) -> None:
    assert Page(page).foreign


def test_links_to_other_hosts_are_no_requests() -> None:
    page = Page('<h2 id="a"><a href="https://elsewhere.org">x</a></h2><script src="a.js"></script>')
    assert page.foreign == []
    assert "a" in page.anchors
