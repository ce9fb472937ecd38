"""A name of ``pipeal.data`` that PyTorch or torchvision has, too, means the same."""

from __future__ import annotations

import torch
import torch.utils.data
import torch.utils.data.distributed
import torchvision
import torchvision.datasets
import torchvision.io
import torchvision.models
import torchvision.ops
import torchvision.transforms
import torchvision.transforms.v2

import pipeal
import pipeal.data

OTHERS = (
    torch,
    torch.nn,
    torch.nn.functional,
    torch.optim,
    torch.utils.data,
    torch.utils.data.distributed,
    torchvision,
    torchvision.datasets,
    torchvision.io,
    torchvision.models,
    torchvision.ops,
    torchvision.transforms,
    torchvision.transforms.v2,
)
# Names of its releases, the legacy ones included; it does not install beside a current PyTorch.
TORCHTEXT = {
    *("AG_NEWS", "AmazonReviewFull", "AmazonReviewPolarity", "CC100", "CNNDM", "CoLA", "DATASETS", "DBpedia"),
    *("EnWik9", "IMDB", "IWSLT2016", "IWSLT2017", "MNLI", "MRPC", "Multi30k", "PennTreebank", "QNLI", "QQP", "RTE"),
    *("SQuAD1", "SQuAD2", "SST2", "STSB", "SogouNews", "UDPOS", "WNLI", "WikiText103", "WikiText2", "YahooAnswers"),
    *("YelpReviewFull", "YelpReviewPolarity", "CoNLL2000Chunking", "CharNGram", "FastText", "GloVe", "Vectors"),
    *("Vocab", "build_vocab_from_iterator", "pretrained_aliases", "vocab", "bleu_score", "custom_replace"),
    *("filter_wikipedia_xml", "generate_sp_model", "get_tokenizer", "interleave_keys", "load_sp_model"),
    *("ngrams_iterator", "numericalize_tokens_from_iterator", "sentencepiece_numericalizer"),
    *("sentencepiece_tokenizer", "simple_space_split", "to_map_style_dataset", "AddToken", "BERTTokenizer"),
    *("CLIPTokenizer", "CharBPETokenizer", "GPT2BPETokenizer", "LabelToIndex", "MaskTransform", "PadTransform"),
    *("RegexTokenizer", "SentencePieceTokenizer", "Sequential", "StrToIntTransform", "ToTensor", "Truncate"),
    *("VocabTransform", "Batch", "BucketIterator", "Example", "Field", "Iterator", "LabelField", "NestedField"),
    *("RawField", "ReversibleField", "SubwordField", "TabularDataset", "batch", "pool"),
}
SAME_MEANING = {
    "Vocab": "words and their numbers, as torchtext.vocab.Vocab",
    "Batch": "samples joined for a step, as torchtext's was",
}


def test_no_name_of_theirs_has_another_meaning() -> None:
    """``pipeal.data.BatchSampler`` was a protocol; ``from pipeal.data import *`` hid PyTorch's class."""
    theirs = TORCHTEXT.union(*({name for name in dir(module) if name[0] != "_"} for module in OTHERS))
    assert {name for name in pipeal.data.__all__ if name in theirs} == set(SAME_MEANING)
    assert {name for name in pipeal.__all__ if name in theirs} == {"Dropout"}  # torch.nn's, with its own randomness


def test_all_names_are_there_and_sorted() -> None:
    assert len(set(pipeal.data.__all__)) == len(pipeal.data.__all__)
    for name in pipeal.data.__all__:
        assert hasattr(pipeal.data, name)
