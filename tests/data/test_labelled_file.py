"""A user's own texts: columns by name, classes out of the labels, and one line with file and line for each mistake."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import TextSplit, load_text, load_text_file, published_max_len
from pipeal.data.text import rows

CSV = 'id,text,label\n1,"One, ""two""\nlines",b\n\n2,three,a\n3,four,b\n'


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_rows_of_csv_and_lines_of_json_are_the_same_texts(tmp_path: Path) -> None:
    lines = [
        {"text": 'One, "two"\nlines', "label": "b"},
        {"label": "a", "text": "three"},
        {"text": "four", "label": "b"},
    ]
    json_lines = "\n\n".join(json.dumps(line) for line in lines)
    paths = [
        written(tmp_path, "a.csv", CSV),
        written(tmp_path, "a.CSV.gz", gzip.compress(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode())),
        written(tmp_path, "a.jsonl", json_lines),
        written(tmp_path, "a.jsonl.gz", gzip.compress(json_lines.encode())),
    ]
    for path in paths:
        data = load_text_file(path, path)
        assert data.name == "file"
        assert data.classes == ("a", "b")
        assert [text.split() for text in data.train.texts] == [["One,", '"two"', "lines"], ["three"], ["four"]]
        assert data.train.labels == data.test.labels == [1, 0, 1]


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_other_line_ends_are_rows_too(end: str, tmp_path: Path) -> None:
    """Spreadsheets of old Macs end lines with a carriage return alone, which csv took for a part of a field."""
    for name, content in (("x.csv", CSV), ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n' * 2)):
        plain = load_text_file(written(tmp_path, name, content), test_share=0.3)
        path = written(tmp_path, f"other-{name}", content.replace("\n", end))
        other = load_text_file(path, test_share=0.3)
        assert [text.split() for text in other.train.texts] == [text.split() for text in plain.train.texts]
        assert (other.train.labels, other.classes) == (plain.train.labels, plain.classes)
    path = written(tmp_path, "broken.csv", end.join(["text,label", "a,1", '"b\rc",2', "d"]))
    with pytest.raises(DataError, match=r"broken.csv, line 5: 1 columns, wanted 2"):
        load_text_file(path)


def test_a_field_may_be_as_long_as_a_book_but_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than 131,072 characters were refused as quotes left open."""
    text = "word " * 40_000
    path = written(tmp_path, "x.csv", f"text,label\n{text},1\nb,2\nc,1\nd,2\n")
    assert text.strip() in load_text_file(path, test_share=0.25).train.texts
    before = csv.field_size_limit(1_000)
    try:
        monkeypatch.setattr(rows, "LONGEST_FIELD", 1_000)
        with pytest.raises(DataError, match=r"x.csv, line 2: a field of more than 1,000 characters; close a quote"):
            load_text_file(path)
    finally:
        csv.field_size_limit(before)


def test_several_columns_are_joined_in_the_order_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", "body,topic,title\nB,7,T\n,8,U\n")
    data = load_text_file(path, path, text=("title", "body"), label="topic")
    assert data.train.texts == ["T B", "U"]
    assert load_text_file(path, path, text=("body", "title"), label="topic").train.texts == ["B T", "U"]


def test_classes_are_the_labels_numbers_by_value_and_words_by_letters(tmp_path: Path) -> None:
    rows = [
        '{"text": "x", "label": ' + label + "}" for label in ("10", '"9"', '" word "', '"Other"', "true", "-1", "0.5")
    ]
    path = written(tmp_path, "x.jsonl", "\n".join(rows))
    data = load_text_file(path, path)
    assert data.classes == ("-1", "9", "10", "0.5", "Other", "true", "word")
    assert data.train.labels == [2, 1, 6, 4, 5, 0, 3]


def test_a_test_file_may_be_of_the_other_kind_and_lack_classes(tmp_path: Path) -> None:
    path, test = written(tmp_path, "x.csv", CSV), written(tmp_path, "t.jsonl", '{"text": "only", "label": "b"}\n')
    data = load_text_file(path, test)
    assert (len(data.train), data.test) == (3, TextSplit(["only"], [1]))


@given(count=st.integers(2, 60), share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_a_drawn_share_covers_the_file_once_and_is_always_the_same(
    tmp_path_factory: pytest.TempPathFactory, count: int, share: float, seed: int
) -> None:
    rows = "".join(f"text {n},{n % 2}\n" for n in range(count))
    path = written(tmp_path_factory.mktemp("drawn"), "x.csv", f"text,label\n{rows}")
    tests = round(count * share)
    if not 0 < tests < count:
        with pytest.raises(DataError, match=f"of its {count} texts is {tests} to test on"):
            load_text_file(path, test_share=share, seed=seed)
        return
    assume(tests < count // 2)  # else all texts of a class may be drawn
    data = load_text_file(path, test_share=share, seed=seed)
    assert len(data.test) == tests
    both = [
        *zip(data.train.texts, data.train.labels, strict=True),
        *zip(data.test.texts, data.test.labels, strict=True),
    ]
    assert sorted(both) == sorted((f"text {n}", n % 2) for n in range(count))
    again = load_text_file(path, test_share=share, seed=seed)
    assert (again.train, again.test) == (data.train, data.test)


def test_another_seed_draws_other_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(100)))
    one, other = (set(load_text_file(path, seed=seed).test.texts) for seed in (0, 1))
    assert len(one) == len(other) == 20
    assert one != other


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", "", r"x\.csv, line 1: no column 'text' in the header, which is empty; name the columns with"),
        ("x.csv", "text,label\n\n", r"x\.csv: holds no texts; wanted one in each row, under a header"),
        ("x.csv", "body,label\nb,1\n", r"x\.csv, line 1: no column 'text' .*'body', 'label'; .*--text-column"),
        ("x.csv", "text,label,text\na,1,b\n", r"line 1: 2 columns 'text' in the header"),
        (
            "x.csv",
            "text,label\na,1\nb,c,2\n",
            r"x\.csv, line 3: 3 columns, wanted 2 as in the header \('text', 'label'\)",
        ),
        ("x.csv", "text,label\na,1\nb\n", r"x\.csv, line 3: 1 columns, wanted 2"),
        ("x.csv", 'text,label\n"a\nb",1\n"open,2\nc,1\n', r"x\.csv, line 4: .*quote left open"),
        ("x.csv", "text,label\na,1\n ,2\n", r"line 3: text is empty; fill in or delete it"),
        ("x.csv", "text,label\na,1\nb, \n", r"line 3: label is empty; fill in or delete it"),
        ("x.csv", "text,label\na,1\nb,1\n", r"x\.csv: every label is '1'; wanted at least two classes"),
        ("x.csv", b"text,label\na,1\ncaf\xe9,2\n", r"x\.csv, line 3: byte 0xe9 at place 4 is not UTF-8; convert"),
        ("x.csv", "text,label\na,1\n".encode("utf-16"), r"x\.csv, line 1: byte 0xff at place 1 is not UTF-8"),
        ("x.csv.gz", b"text,label\na,1\n", r"x\.csv\.gz: broken gzip file after line 0"),
        ("x.jsonl", "", r"x\.jsonl: holds no texts; wanted one in each row$"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text": \n', r"x\.jsonl, line 2: no JSON \(.*\); wanted an object"),
        ("x.jsonl", "[" * 100_000, r"x\.jsonl, line 1: no JSON"),
        ("x.jsonl", '{"text": "a", "label": ' + "9" * 5_000 + "}", r"line 1: "),
        ("x.jsonl", '["a", 1]\n', r'line 1: \["a", 1\]; wanted an object such as {"text": "…", "label": "…"}'),
        ("x.jsonl", '{"text": "a", "topic": 1}\n', r"line 1: no key 'label', it has 'text', 'topic'; name the columns"),
        ("x.jsonl", '{"text": 5, "label": 1}\n', r"line 1: text is 5, wanted a text in quotes"),
        ("x.jsonl", '{"text": "a", "label": null}\n', r"line 1: label is null, wanted a word or a number"),
        ("x.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n', r"line 2: label is NaN, wanted a word"),
        ("x.jsonl", '{"text": "a", "label": -Infinity}\n', r"line 1: label is -Infinity, wanted a word or a number"),
        ("x.jsonl", '{"text": "a", "label": ["b"]}\n', r'line 1: label is \["b"\], wanted a word or a number'),
        ("x.jsonl", '{"text": "a", "label": "\\ud800"}\n', r"line 1: half of a character"),
        ("x.tsv", "text\tlabel\n", r"x\.tsv: expected a name that ends in \.csv or \.jsonl"),
    ],
)
def test_a_malformed_file_is_named_with_the_line(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(DataError, match=told) as error:
        load_text_file(path, path)
    assert "\n" not in str(error.value).replace("\\n", "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"text": "text"}, r"text is 'text'; wanted a list of columns, such as \['text'\]"),
        ({"text": ["label", "text"]}, "the label's column, 'label', is one of the text, .*--label-column"),
        ({"test_share": float("nan")}, "test_share is nan; wanted a share from 0 to 1"),
        ({"test_share": 1.5}, "test_share is 1.5; wanted"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_text_file(written(tmp_path, "x.csv", CSV), **options)


def test_a_class_of_which_no_text_is_left_to_train_on_is_told(tmp_path: Path) -> None:
    rows = ["text,label", *(f"a{n},x" for n in range(9)), "b,rare"]
    path = written(tmp_path, "x.csv", "\n".join(rows))
    with pytest.raises(DataError, match=r"x\.csv: of 1 classes all texts were drawn to test on"):
        load_text_file(path, test_share=0.9)  # one text is left to train on


def test_a_missing_file_and_a_label_unknown_to_training_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", CSV)
    with pytest.raises(DataError, match=r"cannot read .*none\.csv: No such file"):
        load_text_file(tmp_path / "none.csv")
    test = written(tmp_path, "t.csv", "text,label\ny,b\nz,c\n")
    with pytest.raises(DataError, match=r"t\.csv, line 3: label 'c' is not in .*x\.csv, which has 'a', 'b'$"):
        load_text_file(path, test)


def test_little_is_held_beside_the_texts(tmp_path: Path) -> None:
    """Each row's label and place were kept as texts of their own until all were read: twice as much as short texts."""
    rows = "".join(f"a short text {n},class {n % 4}\n" for n in range(3_000))
    path = written(tmp_path, "x.csv", f"text,label\n{rows}")
    test = written(tmp_path, "t.csv", "text,label\na,class 1\n")
    load_text_file(path, test)  # what is made once
    tracemalloc.start()
    try:
        data = load_text_file(path, test)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    texts = sum(map(sys.getsizeof, data.train.texts))
    assert peak < 2 * texts, f"{peak:,} bytes for {texts:,} of texts"


def test_a_file_is_no_published_data_set() -> None:
    with pytest.raises(DataError, match=r"x\.csv is no published data set; .* load_text_file"):
        load_text("x.csv")
    assert published_max_len("x.csv") == 128
