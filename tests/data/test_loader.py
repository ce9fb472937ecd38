"""From a corpus and a sampler to batches of tensors, once per epoch."""

from __future__ import annotations

import pytest
import torch

from pipeal.data import BatchLoader, Corpus, TokenBudgetBatchSampler, Vocab, clean, load_text


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    train = load_text("demo").train
    texts = [clean(text) for text in train.texts[:200]]
    return Corpus.from_tokens(texts, train.labels[:200], Vocab.build(texts), max_len=40, classes=4)


def test_an_epoch_holds_every_sample_once_with_the_right_counts(corpus):
    loader = BatchLoader(corpus, TokenBudgetBatchSampler(corpus.lengths, 512), pin_memory=True)
    loader.set_epoch(2)
    batches = list(loader)
    assert len(loader) == len(batches)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(200))
    for batch in batches:
        x, y = corpus.batch(batch.indices)
        assert torch.equal(batch.x, x)
        assert torch.equal(batch.y, y)
        assert batch.padded == x.numel() <= 512
        assert batch.tokens == int((x != corpus.pad_index).sum())
        assert len(batch) == len(y)
        assert batch.x.is_pinned() == torch.cuda.is_available()
    assert sum(batch.tokens for batch in batches) == len(corpus.tokens)


def test_the_epoch_reaches_the_sampler(corpus):
    loader = BatchLoader(corpus, TokenBudgetBatchSampler(corpus.lengths, 512))
    first = [batch.indices for batch in loader]
    assert [batch.indices for batch in loader] == first
    loader.set_epoch(1)
    assert [batch.indices for batch in loader] != first
