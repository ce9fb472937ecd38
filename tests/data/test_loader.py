"""From a corpus and a sampler to batches of tensors, once per epoch."""

from __future__ import annotations

import pytest
import torch

from pipeal.core.errors import DataError
from pipeal.data import (
    BatchLoader,
    Corpus,
    PlannedBatchSampler,
    Share,
    TokenBudgetBatchSampler,
    Vocab,
    clean,
    load_text,
)


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


def test_it_begins_with_the_batch_that_a_training_stands_before(corpus):
    loader = BatchLoader(corpus, TokenBudgetBatchSampler(corpus.lengths, 512))
    loader.set_epoch(1)
    whole = [batch.indices for batch in loader]
    loader.set_epoch(1, 3)
    assert [batch.indices for batch in loader] == whole[3:]
    assert len(loader) == len(whole), "of the epoch, not of what is left of it"
    loader.set_epoch(1)
    assert [batch.indices for batch in loader] == whole


def test_batches_are_padded_to_the_lengths_that_the_sampler_rounds_up_to(corpus):
    sampler = PlannedBatchSampler(corpus.lengths, 512, shapes=3)
    batches = list(BatchLoader(corpus, sampler))
    assert len({batch.x.shape[1] for batch in batches}) == 3
    for batch, indices in zip(batches, sampler, strict=True):
        assert batch.x.shape == (len(indices), max(sampler.padded_lengths[indices]))
        x, _ = corpus.batch(batch.indices)
        assert torch.equal(batch.x[:, : x.shape[1]], x)
        assert bool((batch.x[:, x.shape[1] :] == corpus.pad_index).all())


def test_a_batch_cannot_be_shorter_than_its_samples(corpus):
    with pytest.raises(DataError, match="a sample of length"):
        corpus.batch([0], int(corpus.lengths[0]) - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shares_of_all_ranks_are_the_batch_and_each_counts_all_of_it(corpus, ranks):
    sampler = TokenBudgetBatchSampler(corpus.lengths, 40)  # some hold one sample
    whole = list(BatchLoader(corpus, sampler))
    shares = [list(BatchLoader(corpus, sampler, share=Share(rank, ranks))) for rank in range(ranks)]
    assert min(map(len, whole)) < ranks < max(map(len, whole))
    for batch, *parts in zip(whole, *shares, strict=True):
        for rank, part in enumerate(parts):
            assert (part.indices, part.tokens, part.padded) == (batch.indices, batch.tokens, batch.padded)
            own = batch.indices if len(batch) < ranks else batch.indices[rank::ranks]
            x, y = corpus.batch(own)
            assert torch.equal(part.x, x)
            assert torch.equal(part.y, y)
