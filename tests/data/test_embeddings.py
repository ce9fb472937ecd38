"""Vector files: both formats, the binary form, what is wrong with a line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeal.core.errors import DataError
from pipeal.data import Vocab, find_vectors, list_vectors, load_vectors, vectors_from_torchtext
from pipeal.data.text.vector_file import VectorFile

VOCAB = Vocab(["<pad>", "<unk>", "oil", "a b", "7", "nobody"])
ROWS = "oil 1 2 -3.5\na b 4 5 6\n7 0.5 0 1e-2\nother 7 8 9\noil 0 0 0\n"


@pytest.fixture
def glove(tmp_path) -> Path:
    path = tmp_path / "glove.txt"
    path.write_text(ROWS)
    return path


def check(table):
    assert table.found == 3
    assert table.weight.dtype == np.float32
    assert table.weight.shape == (6, 3)
    expected = np.array([[1, 2, -3.5], [4, 5, 6], [0.5, 0, 0.01]], dtype=np.float32)
    assert np.array_equal(table.weight[2:5], expected)
    assert not table.weight[0].any()
    assert table.weight[[1, 5]].all()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("header", ["", "5 3\n"])
@pytest.mark.parametrize("zipped", [True, False])
def test_both_formats(tmp_path, cache, header, zipped):
    # fastText ends its lines with a space.
    content = (header + (ROWS.replace("\n", " \n") if header else ROWS)).encode()
    path = tmp_path / ("v.gz" if zipped else "v")
    path.write_bytes(gzip.compress(content) if zipped else content)
    for _ in range(2):
        check(load_vectors(path, VOCAB, 3, cache=cache))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_number_as_the_first_word_is_a_word(tmp_path):
    (tmp_path / "v").write_text("7 1 2 3\n")
    assert load_vectors(tmp_path / "v", VOCAB, cache=False).weight[4].tolist() == [1, 2, 3]


@pytest.mark.parametrize("cache", [True, False])
def test_a_file_without_vectors_is_told(tmp_path, cache):
    """All words got random vectors; a cache that was asked for was blamed instead, and the disk."""
    (tmp_path / "v").write_text("5 3\n")
    with pytest.raises(DataError, match=r"v: no vectors under the header; fetch the file again"):
        load_vectors(tmp_path / "v", VOCAB, cache=tmp_path / "mine" if cache else False)
    (tmp_path / "v").write_text("5 0\noil\n")  # ended in a ZeroDivisionError
    with pytest.raises(DataError, match=r"v, line 1: vectors of dimension 0; fetch the file again"):
        load_vectors(tmp_path / "v", VOCAB, cache=cache)


def test_the_second_time_the_text_is_not_read(glove, monkeypatch):
    first = load_vectors(glove, VOCAB)
    monkeypatch.setattr(VectorFile, "rows", lambda _: pytest.fail("read the text again"))
    assert np.array_equal(load_vectors(glove, VOCAB).weight, first.weight)
    assert isinstance(VectorFile(glove).cached().matrix, np.memmap)


def test_a_changed_file_is_read_again_and_the_old_form_removed(glove, tmp_path):
    load_vectors(glove, VOCAB)
    glove.write_text(ROWS.replace("oil 1 2 -3.5", "oil 9 9 9999"))
    os.utime(glove, (1, 1))
    assert load_vectors(glove, VOCAB).weight[2].tolist() == [9, 9, 9999]
    assert [path.name for path in tmp_path.iterdir()] == [glove.name]


def test_a_changed_file_leaves_one_form_and_those_of_other_files(glove, tmp_path):
    """Forms of equal names from different folders lie in one folder now."""
    cache, other = tmp_path / "mine", tmp_path / "other" / glove.name
    other.parent.mkdir()
    other.write_text(ROWS.replace("oil 1 2 -3.5", "oil 7 7 7"))
    load_vectors(glove, VOCAB, cache=cache)
    (left := cache / f".{next(cache.iterdir()).name[:40]}.0.aside").touch()  # by a kill
    os.utime(left, (1, 1))
    load_vectors(other, VOCAB, cache=cache)
    assert left.exists(), "it is of the first"
    glove.write_text(ROWS + "more 1 1 1\n")
    check(load_vectors(glove, VOCAB, cache=cache))
    assert load_vectors(other, VOCAB, cache=cache).weight[2].tolist() == [7, 7, 7]
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("end", ["f32", "words"])
def test_half_a_binary_form_is_made_again(glove, tmp_path, end):
    cache = tmp_path / "mine"
    load_vectors(glove, VOCAB, cache=cache)
    (form,) = cache.glob(f"*.{end}")
    form.write_bytes(b"\xff" + form.read_bytes()[:-4])
    check(load_vectors(glove, VOCAB, cache=cache))


def test_without_a_cache_folder_the_text_is_read_each_time(glove, tmp_path, monkeypatch, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check(load_vectors(glove, VOCAB))
    assert len(said) == 1
    assert said[0].startswith(f"{glove.name}: its vectors are made each time: cannot write")
    with pytest.raises(DataError, match="cannot write"):  # it was asked for
        load_vectors(glove, VOCAB, cache=tmp_path / "file")


def test_random_vectors_follow_the_seed_and_the_spread_of_those_found(tmp_path):
    words = [f"w{i}" for i in range(200)]
    random = np.random.default_rng(0)
    rows = [" ".join([word, *map(str, random.normal(0, 3, 20))]) for word in words]
    (tmp_path / "v").write_text("\n".join(rows) + "\n")
    vocab = Vocab(["<pad>", "<unk>", *words, *(f"n{i}" for i in range(200))])
    one, same, other = (load_vectors(tmp_path / "v", vocab, cache=False, seed=seed).weight for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one[202:], other[202:])
    assert one[202:].std() == pytest.approx(3, rel=0.1)


def test_words_with_odd_characters_survive_the_binary_form(tmp_path):
    words = ["a\rb", "c\x85d", "e\u2028f", "g\xa0h"]
    (tmp_path / "v").write_bytes("".join(f"{word} 1 2\n" for word in words).encode())
    table = load_vectors(tmp_path / "v", Vocab(["<pad>", "<unk>", *words]))
    assert table.found == 4


def test_no_word_found(tmp_path):
    (tmp_path / "v").write_text("other 1 2\n")
    for cache in (False, True):
        table = load_vectors(tmp_path / "v", VOCAB, cache=cache)
        assert table.found == 0
        assert table.weight[1:].all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"oil 1 2\n", r"line 1: vectors of dimension 2, wanted 3; choose another"),
        (b"oil 1 2 3 4\n", r"line 1: vectors of dimension 4, wanted 3"),
        (b"5 300\noil 1\n", r"line 2: vectors of dimension 300, wanted 3"),
        (b"oil 1 2 3\ngas 1 2\n", r"v, line 2: 2 numbers after the word, wanted 3"),
        (b"oil 1 2 3\n 1 2 3\n", r"v, line 2: 3 numbers|v, line 2"),
        (b"oil 1 2 3\n\noil 1 2 3\n", r"v, line 2: 0 numbers after the word, wanted 3"),
        (b"oil 1 2 3\noil 1 x 3\n", r"v, line 2: could not convert string to float: 'x'"),
        (b"oil 1 2 3\noil 1 nan 3\n", r"v, line 2: a number that is not finite"),
        (b"oil 1 2 3\ngas\xff 1 2 3\n", r"v, line 2: byte 0xff at place 4 is not UTF-8"),
        (b"", r"v, line 1: ''; wanted a word and its vector"),
        (b"not vectors at all\n", r"v, line 1: 'not vectors at all'; wanted"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "v").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_vectors(tmp_path / "v", VOCAB, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*/v: No such file"):
        load_vectors(tmp_path / "v", VOCAB)


@pytest.mark.parametrize("folder", ["", "glove", "embedding"])
def test_published_files_are_found(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("glove.twitter.27B.50d.txt", "glove.6B.50d-part.txt.gz", "wiki-news-300d-1M.vec"):
        (tmp_path / folder / name).touch()
    assert find_vectors(tmp_path, dim=50).name == "glove.6B.50d-part.txt.gz"
    assert find_vectors(tmp_path, "fasttext").name == "wiki-news-300d-1M.vec"
    with pytest.raises(DataError, match=r"no glove vectors of dimension 300 \(.*\) in .*; fetch https://.*glove"):
        find_vectors(tmp_path)
    with pytest.raises(DataError, match="unknown kind of vectors 'glov'; did you mean 'glove'"):
        find_vectors(tmp_path, "glov")


def test_vectors_that_lie_there_are_listed(tmp_path):
    assert list_vectors(tmp_path) == list_vectors(tmp_path / "nothing") == {}
    (tmp_path / "glove").mkdir()
    names = ("glove.twitter.27B.50d.txt", "glove.6B.50d.txt", "glove.6B.100d.txt.gz", "notes-50d.txt", "glove.txt")
    for name in names:
        (tmp_path / "glove" / name).touch()
    (tmp_path / "wiki-news-300d-1M.vec").touch()
    assert {key: path.name for key, path in list_vectors(tmp_path).items()} == {
        ("glove", 50): "glove.6B.50d.txt",
        ("glove", 100): "glove.6B.100d.txt.gz",
        ("fasttext", 300): "wiki-news-300d-1M.vec",
    }


@pytest.mark.data
def test_real_glove(real_data, tmp_path):
    vocab = Vocab(["<pad>", "<unk>", "the", "oil"])
    for dim in (25, 50):
        table = load_vectors(find_vectors(real_data, dim=dim), vocab, dim, cache=tmp_path)
        assert table.found == 2
        assert table.weight.shape == (4, dim)


def test_torchtext_vectors():
    matrix = torch.tensor([[1.0, 2, 3], [4, 5, 6]], requires_grad=True)
    table = vectors_from_torchtext(SimpleNamespace(stoi={"x": 0, "oil": 1}, vectors=matrix, dim=3), VOCAB)
    assert table.found == 1
    assert table.weight[2].tolist() == [4, 5, 6]
    with pytest.raises(DataError, match="dict is no torchtext vectors object"):
        vectors_from_torchtext({}, VOCAB)
    with pytest.raises(DataError, match=r"shape \(2, 3\), wanted \(2, 4\)"):
        vectors_from_torchtext(SimpleNamespace(stoi={"x": 0, "oil": 1}, vectors=matrix, dim=4), VOCAB)
