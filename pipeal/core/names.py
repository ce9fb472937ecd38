"""Data sets, models and schedules by the names that users give them, without their code, and without PyTorch.

Commands read names here, so that ``--help`` and a mistyped name answer at once. A data set or model is listed in one
line here; its code finds its canonical name in :mod:`pipeal.data` or :mod:`pipeal.models`.

A spelling of a model may ask for one of its forms:

- ``VGG``, ``Resnet``, ``LSTM``, ``Transformer``, in just these spellings, which are the published ones: the BP form.
- ``VGGAL``, ``resnetal``, ``CharLMAL``, any name with AL at its end, in any case: the AL form.
- ``vgg``, ``ResNet``, ``RESNET``, ``CharLM``, every other spelling: what the mode says, the AL form if it says nothing.

The commands say in one line which form they train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from pipeal.core.errors import ConfigError, DataError, unknown_name
from pipeal.core.methods import BASELINE, COMPARED, DEFAULT, METHODS

Mode: TypeAlias = str
"""The name of a method, which is the form of a model that it trains: one of :data:`pipeal.core.methods.METHODS`."""

ScheduleName: TypeAlias = Literal["sequential", "backward-overlap", "al-fm", "pipelined"]
"""What may run beside what; :data:`pipeal.engine.SCHEDULES` has the schedules."""

Augmentation: TypeAlias = Literal["none", "basic", "strong"]
"""What training images go through."""

_TEXT_SPELLINGS = {
    "agnews": "agnews",
    "dbpedia": "dbpedia",
    "dbpedia14": "dbpedia",
    "imdb": "imdb",
    "toynews": "toynews",
    "demo": "toynews",
    "embedded": "toynews",
}
_IMAGE_SPELLINGS = {
    "tinyimagenet": "tinyimagenet",
    "tinyimagenet200": "tinyimagenet",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "toyimages": "toyimages",
    "demo": "toyimages",
    "embedded": "toyimages",
}
_CORPUS_SPELLINGS = {"shakespeare": "shakespeare", "tinyshakespeare": "shakespeare", "text": "text"}

TEXT_DATASETS = tuple(dict.fromkeys(_TEXT_SPELLINGS.values()))
"""The canonical names of the data sets of classified texts."""
IMAGE_DATASETS = tuple(dict.fromkeys(_IMAGE_SPELLINGS.values()))
"""The canonical names of the data sets of classified images."""
CORPORA = tuple(dict.fromkeys(_CORPUS_SPELLINGS.values()))
"""What a language model is trained on; ``text`` is any file of the user's."""

TEXT_MODELS: Mapping[str, str] = {"lstm": "pipeal.models.text:LSTM", "transformer": "pipeal.models.text:Transformer"}
"""The canonical names of the text models, and where their classes are."""
VISION_MODELS: Mapping[str, str] = {"vgg": "pipeal.models.vision:VGG", "resnet": "pipeal.models.vision:Resnet"}
"""The canonical names of the vision models, and where their classes are."""
LANGUAGE_MODELS: Mapping[str, str] = {"charlm": "pipeal.models.charlm:CharLM"}
"""The canonical names of the language models, and where their classes are."""

_PUBLISHED_BP = ("LSTM", "Transformer", "VGG", "Resnet")  # the published commands' spellings of their BP forms


def canonical_text_name(name: str) -> str:
    """The name behind a published spelling; case, ``_``, ``-`` and spaces do not count.

    >>> [canonical_text_name(name) for name in ("AG_NEWS", "Dbpedia", "IMDb", "demo")]
    ['agnews', 'dbpedia', 'imdb', 'toynews']

    Raises:
        DataError: The name is unknown; the message holds the nearest known one.
    """
    return _canonical_name(name, _TEXT_SPELLINGS, "data set")


def canonical_image_name(name: str) -> str:
    """The name behind a published spelling; case, ``_``, ``-`` and spaces do not count.

    >>> [canonical_image_name(name) for name in ("tinyImageNet", "tiny-imagenet-200", "CIFAR-10", "demo")]
    ['tinyimagenet', 'tinyimagenet', 'cifar10', 'toyimages']

    Raises:
        DataError: The name is unknown; the message holds the nearest known one.
    """
    return _canonical_name(name, _IMAGE_SPELLINGS, "data set")


def canonical_corpus(name: str) -> str:
    """The name behind a spelling of a data set that language models are trained on.

    Raises:
        DataError: It is none.
    """
    return _canonical_name(name, _CORPUS_SPELLINGS, "data set for a language model")


def canonical_model(name: str, known: Iterable[str]) -> tuple[str, Mode | None]:
    """The canonical name of a model, and the form that its spelling implies.

    Args:
        name: As a user wrote it.
        known: The canonical names of its kind, such as :data:`TEXT_MODELS`.

    >>> canonical_model("TransformerAL", TEXT_MODELS), canonical_model("lstm", TEXT_MODELS)
    (('transformer', 'al'), ('lstm', None))
    >>> canonical_model("VGG", VISION_MODELS), canonical_model("CharLM", LANGUAGE_MODELS)
    (('vgg', 'bp'), ('charlm', None))

    Raises:
        ConfigError: There is no such model.
    """
    plain = _plain(name)
    if plain not in known:
        raise ConfigError(unknown_name("model", name, known))
    if plain != name.lower():
        return plain, DEFAULT.name
    return plain, (BASELINE.name if name in _PUBLISHED_BP else None)


def is_language_model(name: str) -> bool:
    """Whether a name is, in any spelling, that of a language model."""
    return _plain(name) in LANGUAGE_MODELS


def contradicts(implied: Mode | None, mode: str | None) -> bool:
    """Whether a mode asks for another form than a spelling stands for.

    The spellings of the BP form go with the mode ``al``, too: they are the published names of the models.

    >>> contradicts("bp", "greedy"), contradicts("bp", "al"), contradicts("al", "bp"), contradicts("al", "compare")
    (True, False, True, False)
    """
    return implied is not None and mode in METHODS and mode not in (implied, DEFAULT.name)


def form_told(model: tuple[str, Mode | None], mode: str) -> str | None:
    """One line on the form that is trained, and how to have the other; None where both are.

    Args:
        model: The canonical name, and the form that its spelling implies.
        mode: What is trained: the name of a method, or ``compare``.

    >>> form_told(canonical_model("Resnet", VISION_MODELS), "bp")
    'training the BP form (backpropagation) of resnet, which that spelling stands for; --mode al trains the AL form'
    >>> form_told(canonical_model("ResNet", VISION_MODELS), "al")
    'training the AL form (local losses) of resnet; --mode bp trains the BP form'
    """
    name, implied = model
    if mode not in METHODS:
        return None
    other = next(method for method in COMPARED if method.name != mode)
    # The AL form's own spelling refuses every other mode.
    spelt = f"{name} " if implied == mode == DEFAULT.name else ""
    chosen = ", which that spelling stands for" if implied == mode else ""
    told = f"training the {METHODS[mode].title} of {name}{chosen}"
    return f"{told}; {spelt}--mode {other.name} trains the {other.label} form"


def _canonical_name(name: str, spellings: Mapping[str, str], kind: str) -> str:
    known = spellings.get(name.lower().translate({ord(mark): None for mark in "_- "}))
    if known is None:
        raise DataError(unknown_name(kind, name, set(spellings.values())))
    return known


def _plain(name: str) -> str:
    return name.lower().removesuffix("al")
