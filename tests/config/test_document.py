"""YAML in, plain values out: what PyYAML would let pass or get wrong is refused or right here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.config import document
from pipeal.core.errors import ConfigError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), values))
def test_dump_and_parse_are_inverse(mapping):
    assert document.parse(document.dump(mapping), source="x") == mapping


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e3", "+1e3", "-1e-3", ".5e1", "1.e2", "1_0e1"])
def test_an_exponent_makes_a_float(text):
    value = document.parse(text, source="x")
    assert isinstance(value, float)
    assert value == float(text)


@pytest.mark.parametrize("text", ["e3", "1e", "a1e3", "1e3a", ".e3", "1e-", "v1e-3"])
def test_what_only_looks_like_an_exponent_is_text(text):
    assert document.parse(text, source="x") == text


def test_text_that_looks_like_a_number_is_dumped_in_quotes():
    """Symptom: a folder named 1e3 came back as 1000.0. Cause: the dumper did not know the loader's resolver."""
    assert document.dump({"out": "1e3"}) == "out: '1e3'\n"


def test_a_repeated_anchor_and_a_merge_are_no_repeated_keys():
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a}"
    assert document.parse(text, source="x") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3", r"f\.yaml:3:1: key 'a' is repeated"),
        ("a: {b: 1, b: 1}", r"f\.yaml:1:11: key 'b' is repeated"),
        ("a: [1", r"f\.yaml:1:6: expected ',' or '\]'.*"),
        ("a:\n\tb: 1", r"f\.yaml:2:1: found character '\\t'.*"),
        ("a: 1\nb: \x00", r"f\.yaml:2:4: found '\\x00', expected text"),
        ("a: !!int ''", r"f\.yaml:1:4: this is no int"),
        ("a: 2020-13-45", r"f\.yaml:1:4: this is no timestamp"),
        ("a: *nobody", r"f\.yaml:1:4: found undefined alias 'nobody'"),
        ("a: !!python/name:os.system x", r"f\.yaml:1:4: could not determine a constructor.*"),
        ("a: 1\n---\na: 2", r"f\.yaml:2:1: but found another document"),
        ("[" * 5000, r"f\.yaml: lists or mappings lie too deep in each other"),
    ],
)
def test_bad_yaml_gives_one_line_with_its_place(text, line):
    with pytest.raises(ConfigError, match=rf"\A{line}\Z"):
        document.parse(text, source="f.yaml")


@given(st.text(alphabet="ab:{}[],&*!|>-?#'\"\n\t \\%@1.e~<=\x00\x85") | st.text())
def test_any_text_is_a_value_or_a_one_line_error(text):
    line = "f.yaml:"
    try:
        document.parse(text, source="f.yaml")
    except ConfigError as error:
        line = str(error)
    assert line.isprintable()
    assert line.startswith("f.yaml:")


@pytest.mark.parametrize("text", ["1:30", "-1:30", "1:30.5", "190:20:30"])
def test_a_number_is_not_counted_in_sixties(text):
    """Symptom: ``--set train.repeat=1:30`` trained 90 times. Cause: YAML 1.1 takes it for a time of day in minutes."""
    assert document.parse(text, source="x") == text
    assert document.parse(document.dump({"out": text}), source="x") == {"out": text}
