"""A corpus gives back what was put in, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeal.core.errors import ConfigError, DataError
from pipeal.data import Corpus, TextSplit, Vocab

WORDS = [f"w{i}" for i in range(8)]
VOCAB = Vocab(["<unk>", *WORDS[:5], "<pad>"])
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=6), min_size=1, max_size=12)


@given(TEXTS, st.one_of(st.none(), st.integers(1, 7)), st.data())
def test_a_batch_is_each_sample_alone_and_padding(texts, max_len, data):
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(texts), max_size=len(texts)))
    corpus = Corpus.from_tokens(texts, labels, VOCAB, max_len=max_len, classes=4)
    indices = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1))
    x, y = corpus.batch(indices)
    expected = [[VOCAB[word] for word in texts[i]][:max_len] or [VOCAB.unk_index] for i in indices]
    width = max(map(len, expected))
    assert x.tolist() == [row + [VOCAB.pad_index] * (width - len(row)) for row in expected]
    assert y.tolist() == [labels[i] for i in indices]
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert corpus.lengths[indices].tolist() == [len(row) for row in expected]
    assert corpus.lengths.dtype == corpus.labels.dtype == corpus.offsets.dtype == np.int64
    assert corpus.tokens.dtype == np.int32
    assert len(corpus) == len(texts)


def test_encode_cleans_and_empty_texts_keep_one_unknown_word():
    split = TextSplit(["W1, the <b>w2</b>!", "The of...", "w7 w1"], [0, 2, 1])
    corpus = Corpus.encode(split, VOCAB, max_len=10)
    assert corpus.batch([0, 1, 2])[0].tolist() == [[2, 3], [0, 6], [0, 2]]
    assert corpus.classes == 3
    whole = Corpus.encode(split, VOCAB, max_len=10, drop_stop_words=False)
    assert whole.lengths.tolist() == [3, 2, 2]
    assert Corpus.encode(split, VOCAB, max_len=1, classes=5).classes == 5


@pytest.mark.parametrize(
    ("labels", "arguments", "error", "message"),
    [
        ([0, 2], {"classes": 2}, DataError, r"sample 1: label 2 out of range, wanted 0\.\.1"),
        ([-1, 0], {}, DataError, r"sample 0: label -1 out of range, wanted 0\.\.0"),
        ([0], {}, DataError, "2 texts, but 1 labels"),
        ([0, 0], {"max_len": 0}, ConfigError, "max_len 0, wanted at least 1"),
    ],
)
def test_bad_input(labels, arguments, error, message):
    with pytest.raises(error, match=message):
        Corpus.from_tokens([["w1"], ["w2"]], labels, VOCAB, **{"max_len": None, **arguments})


def test_nothing_to_encode():
    with pytest.raises(DataError, match="no texts to encode"):
        Corpus.encode(TextSplit([], []), VOCAB, max_len=None)


def test_bad_indices():
    corpus = Corpus.from_tokens([["w1"], ["w2"]], [0, 0], VOCAB, max_len=None)
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=r"wanted 0\.\.1"):
            corpus.batch([0, wrong])
    with pytest.raises(DataError, match="a batch of no samples"):
        corpus.batch([])


def test_a_subset_holds_the_same_samples_in_the_order_given():
    vocab = Vocab.build([["a", "b", "c"]])
    corpus = Corpus.from_tokens([["a"], ["b", "c"], ["c", "a", "b"]], [0, 1, 1], vocab, max_len=None)
    part = corpus.subset([2, 0])
    assert part.lengths.tolist() == [3, 1]
    for mine, theirs in zip(part.batch([0, 1]), corpus.batch([2, 0]), strict=True):
        assert torch.equal(mine, theirs)
