"""Cleaning, and the numbering of words."""

from __future__ import annotations

import json
import pickle
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import STOP_WORDS, Vocab, clean


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Great<br /><br />FILM, <i>really</i>!", ["great", "film", "really"]),
        ('to &lt;A HREF="http://x.y/z?a=b"&gt;Oil&lt;/A&gt; up', ["oil"]),
        ("the country #39;s  quot;best&quot; bank&#39;s", ["country", "best", "bank"]),
        ("costs #36;10 &amp; more &#x27;now&nbsp;", ["costs", "10"]),
        ("a < b and c > d", ["b", "c"]),
        ("snake_case co-op 3.5", ["snake", "case", "co", "op", "3", "5"]),
        ("Café naïve — “quoted” 東京", ["café", "naïve", "quoted", "東京"]),
        # Marks upon letters are no letters to \\w, and cut these words to pieces.
        ("हिन्दी में लिखा", ["हिन्दी", "में", "लिखा"]),
        ("السَّلَامُ עִבְרִית", ["السَّلَامُ", "עִבְרִית"]),
        ("cafe\u0301 nai\u0308ve İstanbul", ["café", "naïve", "i\u0307stanbul"]),
        ("𑄌𑄋𑄴𑄟𑄳𑄦", ["𑄌𑄋𑄴𑄟𑄳𑄦"]),
        # What only says how a word looks: joiners and variation selectors.
        ("ශ්\u200dරී 1\ufe0f\u20e3 ❤\ufe0f love \u0338sun", ["ශ්රී", "1", "love", "sun"]),
        ("not good, no!", ["not", "good", "no"]),
        ("isn't it? Of the...", []),
        ("", []),
    ],
)
def test_clean(text, words):
    assert clean(text) == words


def test_stop_words_are_kept_on_demand():
    assert clean("It isn't the end", drop_stop_words=False) == ["it", "isn", "t", "the", "end"]


@given(st.text())
def test_words_are_letters_with_marks_and_digits_and_cleaning_them_again_changes_nothing(text):
    words = clean(text, drop_stop_words=False)
    assert all(re.fullmatch(r"[^\W_]+", word) for word in words if word.isascii())
    assert all(word[0].isalnum() and unicodedata.is_normalized("NFC", word) for word in words)
    assert all(char.isalnum() or unicodedata.category(char) in ("Mn", "Mc") for word in words for char in word)
    assert clean(" ".join(words), drop_stop_words=False) == words
    assert clean(text) == [word for word in words if word not in STOP_WORDS]


@given(st.text(st.characters(max_codepoint=126)))
def test_the_fast_way_of_ascii_texts_gives_what_the_other_gives(text):
    assert clean(text + " é", drop_stop_words=False) == [*clean(text + " ", drop_stop_words=False), "é"]


def test_frequent_words_first_and_ties_by_the_alphabet():
    vocab = Vocab.build([["b", "c", "a"], ["c", "a"], ["d", "<unk>"]])
    assert vocab.words == ("<pad>", "<unk>", "a", "c", "b", "d")
    assert (vocab.pad_index, vocab.unk_index, len(vocab)) == (0, 1, 6)
    assert vocab["c"] == 3
    assert vocab["nobody"] == 1
    assert "c" in vocab
    assert "nobody" not in vocab


@given(st.lists(st.lists(st.text("abc", min_size=1, max_size=2))), st.integers(3, 9), st.integers(1, 3), st.randoms())
def test_size_frequency_and_independence_of_order(texts, size, frequency, random):
    vocab = Vocab.build(texts, max_size=size, min_frequency=frequency)
    flat = [word for text in texts for word in text]
    assert len(vocab) <= size
    assert all(flat.count(word) >= frequency for word in vocab.words[2:])
    random.shuffle(texts)
    assert Vocab.build(texts, max_size=size, min_frequency=frequency) == vocab


@pytest.mark.parametrize(("frequency", "words"), [(1, "cba"), (2, "cb"), (3, "c"), (4, "")])
def test_a_word_has_to_occur_so_often(frequency, words):
    vocab = Vocab.build([["a", "b", "c"], ["b", "c"], ["c"]], min_frequency=frequency)
    assert vocab.words == ("<pad>", "<unk>", *words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_size": 2}, "max_size 2 leaves no room beside the 2 specials"),
        ({"min_frequency": 0}, "min_frequency 0, wanted at least 1"),
        ({"specials": ("<pad>",)}, "wanted at least two"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Vocab.build([["a"]], **arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["<pad>", "<unk>", "a", "a"], "'a' is there 2 times"),
        (["<unk>", "a"], "no '<pad>' for padding"),
        (["<pad>", "a"], "no '<unk>' for unknown words"),
    ],
)
def test_bad_words(words, message):
    with pytest.raises(DataError, match=message):
        Vocab(words)


def test_one_word_for_padding_and_unknown():
    with pytest.raises(DataError, match="wanted two words"):
        Vocab(["x"], pad="x", unk="x")


def test_saved_loaded_and_pickled(tmp_path):
    vocab = Vocab.build([["Ä", "東京"]], specials=("[PAD]", "[UNK]", "[CLS]"))
    vocab.save(tmp_path / "new" / "vocab.json")
    assert Vocab.load(tmp_path / "new" / "vocab.json") == vocab
    assert pickle.loads(pickle.dumps(vocab)) == vocab
    assert hash(pickle.loads(pickle.dumps(vocab))) == hash(vocab)
    assert vocab != Vocab(["<pad>", "<unk>"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["vocab.json"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps({"format": "other"}), json.dumps({"format": "pipeal-vocab-1"})]
)
def test_a_file_that_is_no_vocabulary(tmp_path, text):
    path = tmp_path / "vocab.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"vocab\.json: (not a saved vocabulary|format 'other', wanted)"):
        Vocab.load(path)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*vocab\.json: No such file"):
        Vocab.load(tmp_path / "vocab.json")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*vocab\.json"):
        Vocab(["<pad>", "<unk>"]).save(tmp_path / "file" / "vocab.json")


class FakeTorchtext:
    def __init__(self, words, default):
        self.words, self.default = words, default

    def get_itos(self):
        return self.words

    def get_stoi(self):
        return {word: index for index, word in enumerate(self.words)}

    def get_default_index(self):
        return self.default


def test_torchtext_vocabularies_keep_their_numbers():
    vocab = Vocab.from_torchtext(FakeTorchtext(["the", "<unk>", "<pad>"], 1))
    assert (vocab.words, vocab.pad_index, vocab.unk_index) == (("the", "<unk>", "<pad>"), 2, 1)
    assert Vocab.from_torchtext(FakeTorchtext(["the", "<unk>", "<pad>"], None)) == vocab
    assert Vocab.from_torchtext(FakeTorchtext(["[P]", "?", "a"], 1), pad="[P]").unk_index == 1
    assert Vocab.from_torchtext(FakeTorchtext(["<unk>", "<pad>"], -1), unk="<unk>").unk_index == 0


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (FakeTorchtext(["<unk>"], 0), "no '<pad>' for padding"),
        (FakeTorchtext(["<pad>"], None), "no '<unk>' for unknown words"),
        (["<pad>", "<unk>"], "list is no torchtext vocabulary"),
        (FakeTorchtext(["<pad>", "<unk>", "last"], -1), "default index is -1, which is no word's of 3"),
        (FakeTorchtext(["<pad>", "<unk>", "last"], 3), "default index is 3, which is no word's of 3"),
        (FakeTorchtext(["<pad>", "<unk>", "last"], 1.0), "default index is 1.0, which is no word's of 3"),
    ],
)
def test_torchtext_vocabularies_that_lack_something(found, message):
    with pytest.raises(DataError, match=message):
        Vocab.from_torchtext(found)
