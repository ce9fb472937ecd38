"""The embedded data set: same for a seed, balanced, learnable but not trivial."""

from __future__ import annotations

import numpy as np

from pipeal.data import Corpus, Vocab, clean, load_text


def test_a_seed_gives_the_same_texts_and_another_gives_others():
    first, again, other = (load_text("toynews", seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.train.texts != other.train.texts
    # Pinned: these words must be the same on every machine and with every numpy.
    assert first.train.texts[0] == FIRST
    assert not set(first.train.texts) & {text for text in first.test.texts if len(text.split()) > 8}


def test_its_shape():
    data = load_text("demo")
    assert (len(data.train), len(data.test), len(data.classes)) == (8_000, 2_000, 4)
    lengths = np.array([len(text.split()) for text in data.train.texts])
    assert (lengths.min(), lengths.max()) == (5, 60)
    assert lengths.std() > 10
    assert np.bincount(data.train.labels).min() > 1_900


def test_a_bag_of_words_gets_most_of_it_right_but_not_all():
    data = load_text("demo")
    vocab = Vocab.build(map(clean, data.train.texts))
    train, test = (bags(split, vocab) for split in (data.train, data.test))
    counts = np.eye(4)[train[1]].T @ train[0] + 1
    scores = test[0] @ np.log(counts / counts.sum(1, keepdims=True)).T
    assert 0.93 <= (scores.argmax(1) == test[1]).mean() <= 0.975


def bags(split, vocab):
    corpus = Corpus.encode(split, vocab, max_len=None)
    counts = np.zeros((len(corpus), len(vocab)))
    np.add.at(counts, (np.repeat(np.arange(len(corpus)), corpus.lengths), corpus.tokens), 1)
    return counts, corpus.labels


FIRST = "Sensor striker spacecraft reactor on during on data."
