"""Data sets, models, schedules and augmentations by the names that users give them, without their code, and without
PyTorch.

Commands read names here, so that ``--help`` and a mistyped name answer at once. A data set or model is listed in one
line here; its code finds its canonical name in :mod:`pipeal.data` or :mod:`pipeal.models`.

A spelling of a model may ask for one of its forms:

- ``VGG``, ``Resnet``, ``LSTM``, ``Transformer``, in just these spellings, which are the published ones: the BP form.
- ``VGGAL``, ``resnetal``, ``CharLMAL``, any name with AL at its end, in any case: the AL form.
- ``vgg``, ``ResNet``, ``RESNET``, ``CharLM``, every other spelling: what the mode says, the AL form if it says nothing.

The commands say in one line which form they train.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, TypeAlias, get_args

from pipeal.core.errors import ConfigError, DataError, unknown_name
from pipeal.core.methods import BASELINE, DEFAULT, METHODS

Mode: TypeAlias = str
"""The name of a method, which is the form of a model that it trains: one of :data:`pipeal.core.methods.METHODS`."""

ScheduleName: TypeAlias = Literal["sequential", "backward-overlap", "al-fm", "pipelined", "gpipe", "1f1b"]
"""What may run beside what; :data:`pipeal.engine.SCHEDULES` has those of layers that learn by themselves."""

BACKPROP_SCHEDULES = ("gpipe", "1f1b")
"""Those of backpropagation, whose stages are processes: PyTorch has them (``torch.distributed.pipelining``)."""

LAYER_SCHEDULES = tuple(name for name in get_args(ScheduleName) if name not in BACKPROP_SCHEDULES)
"""All others."""

DEFAULT_SCHEDULE: ScheduleName = "pipelined"

Augmentation: TypeAlias = Literal["none", "basic", "strong"]
"""What training images go through."""

FILE = "file"
"""The data set that is a file of the user's, with a text and a label in each row."""

_FILE_ENDS = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")
_LONGEST = 40
"""Characters of a file's name that the name of a folder has; with a model's and a number it may have 255."""

HF, TORCHVISION = "hf", "torchvision"
"""What the name of a model begins with, before a colon, that another library has: a folder of ``transformers``, or one
of torchvision's models by its name there."""

_OTHERS = {HF: "hf:FOLDER", TORCHVISION: "torchvision:NAME"}
"""How such names look."""

_PUBLISHED_BP = ("LSTM", "Transformer", "VGG", "Resnet")  # the published commands' spellings of their BP forms


@dataclass(frozen=True)
class Names:
    """The names of one kind of data, and of the models for it.

    Attributes:
        datasets: The canonical names of data sets, and where each is described; nowhere, if it is the user's own.
        spellings: Their other names, in small letters without ``_``, ``-`` and spaces, and the canonical ones.
        models: The canonical names of models, and where their classes are.
        sources: Other libraries whose models are for such data, too.
    """

    datasets: Mapping[str, str]
    spellings: Mapping[str, str]
    models: Mapping[str, str]
    sources: tuple[str, ...] = ()

    def dataset(self, name: str) -> str:
        """The canonical name of a data set; case, ``_``, ``-`` and spaces do not count.

        >>> [TEXT.dataset(name) for name in ("AG_NEWS", "Dbpedia", "IMDb", "demo")]
        ['agnews', 'dbpedia', 'imdb', 'toynews']
        >>> [VISION.dataset(name) for name in ("tinyImageNet", "tiny-imagenet-200", "CIFAR-10", "demo")]
        ['tinyimagenet', 'tinyimagenet', 'cifar10', 'toyimages']
        >>> TEXT.dataset("my/reviews.csv")
        'file'

        Raises:
            DataError: The name is unknown, and the message holds the nearest known one; or it is for other models.
        """
        known = self._dataset(name)
        if known is not None:
            return known
        others = [model for other in _KINDS.values() if other.has_dataset(name) for model in other.models]
        if others:
            expected = f"expected {', '.join(self.datasets)} for {' and '.join(self.models)}"
            raise DataError(f"{name} is for {' and '.join(others)}; {expected}")
        raise DataError(unknown_name("data set", name, self.datasets))

    def _dataset(self, name: str) -> str | None:
        """The canonical name of a data set of this kind; None if there is none."""
        if FILE in self.datasets and is_file(name):
            return FILE
        plain = name.lower().translate({ord(mark): None for mark in "_- "})
        known = self.spellings.get(plain, plain)
        return known if known in self.datasets else None

    def load_dataset(self, name: str) -> Any:
        """What describes a data set, out of its module; raises as :meth:`dataset`."""
        return resolve_name(self.datasets[self.dataset(name)])

    def has_dataset(self, name: str) -> bool:
        """Whether a name is, in any spelling, that of such data."""
        return self._dataset(name) is not None

    def model_names(self) -> list[str]:
        """The canonical names of models, and how those of other libraries' look.

        >>> VISION.model_names()
        ['vgg', 'resnet', 'hf:FOLDER', 'torchvision:NAME']
        """
        return [*self.models, *(_OTHERS[source] for source in self.sources)]

    def has_model(self, name: str) -> bool:
        """Whether a name is, in any spelling, that of a model for such data."""
        return source_of(name) in self.sources if source_of(name) else _plain(name) in self.models

    def model(self, name: str) -> tuple[str, Mode | None]:
        """The canonical name of a model, and the form that its spelling implies.

        >>> TEXT.model("lstm"), LANGUAGE.model("CharLM")
        (('lstm', None), ('charlm', None))
        >>> TEXT.model("TransformerAL") == ("transformer", DEFAULT.name), VISION.model("VGG") == ("vgg", BASELINE.name)
        (True, True)
        >>> TEXT.model("hf:models/bert-tiny/")
        ('hf:models/bert-tiny', None)

        Raises:
            ConfigError: There is no such model.
        """
        source = source_of(name)
        if source is not None:
            if source not in self.sources:
                others = " and ".join(kind for kind, one in _KINDS.items() if source in one.sources)
                raise ConfigError(
                    f"{name}: a model of {source} is for {others}; expected {', '.join(self.model_names())}"
                )
            named = name[len(source) + 1 :]
            if not named:
                wanted = "the folder of a transformers model" if source == HF else "a name of torchvision.models"
                raise ConfigError(f"model {name!r} names none; expected {_OTHERS[source]}, {wanted}")
            return f"{source}:{os.path.normpath(os.path.expanduser(named)) if source == HF else named}", None
        check_has_model(name, self)
        plain = _plain(name)
        if plain != name.lower():
            return plain, DEFAULT.name
        return plain, (BASELINE.name if name in _PUBLISHED_BP else None)


TEXT = Names(
    {
        "agnews": "pipeal.data.text.agnews:AGNEWS",
        "dbpedia": "pipeal.data.text.dbpedia:DBPEDIA",
        "imdb": "pipeal.data.text.imdb:IMDB",
        "toynews": "pipeal.data.text.toynews:TOYNEWS",
        FILE: "",
    },
    {"dbpedia14": "dbpedia", "demo": "toynews", "embedded": "toynews"},
    {"lstm": "pipeal.models.text:LSTM", "transformer": "pipeal.models.text:Transformer"},
    (HF,),
)
"""Classified texts."""

WITH_HEADS = ("transformer",)
"""Those of its models that have attention heads, whose number divides the width of a word vector."""

VISION = Names(
    {
        "tinyimagenet": "pipeal.data.images.tinyimagenet:TINYIMAGENET",
        "cifar10": "pipeal.data.images.cifar:CIFAR10",
        "cifar100": "pipeal.data.images.cifar:CIFAR100",
        "toyimages": "pipeal.data.images.toyimages:TOYIMAGES",
    },
    {"tinyimagenet200": "tinyimagenet", "demo": "toyimages", "embedded": "toyimages"},
    {"vgg": "pipeal.models.vision:VGG", "resnet": "pipeal.models.vision:Resnet"},
    (HF, TORCHVISION),
)
"""Classified images."""

LANGUAGE = Names(
    {"shakespeare": "pipeal.data.text.characters:find_shakespeare", "text": ""},
    {"tinyshakespeare": "shakespeare"},
    {"charlm": "pipeal.models.charlm:CharLM"},
)
"""Texts that a language model is trained on; ``text`` is any file of the user's."""


def is_file(dataset: str) -> bool:
    """Whether what stands for a data set is the name of a file of labelled texts, whether there is one or not.

    >>> is_file("my/reviews.csv"), is_file("Reviews.JSONL.gz"), is_file("agnews")
    (True, True, False)
    """
    return dataset.lower().endswith(_FILE_ENDS)


_KINDS = {"texts": TEXT, "images": VISION, "language models": LANGUAGE}


def check_has_model(model: str, *kinds: Names) -> None:
    """Refuses a name that is that of a model of no kind.

    Raises:
        ConfigError: It is.
    """
    if not any(kind.has_model(model) for kind in kinds):
        raise ConfigError(unknown_name("model", model, {name for kind in kinds for name in kind.model_names()}))


def source_of(model: str) -> str | None:
    """The library that has a model of this name; None for pipeal.

    >>> source_of("hf:models/bert-tiny"), source_of("torchvision:vit_b_16"), source_of("lstm")
    ('hf', 'torchvision', None)
    """
    before, colon, _ = model.partition(":")
    return before if colon and before in (HF, TORCHVISION) else None


def as_file_name(model: str) -> str:
    """The name of a model as a part of that of a folder.

    >>> as_file_name("lstm"), as_file_name("hf:models/bert tiny"), as_file_name("torchvision:vit_b_16")
    ('lstm', 'hf-bert_tiny', 'torchvision-vit_b_16')
    """
    source = source_of(model)
    return model if source is None else f"{source}-{_fit(os.path.basename(os.path.abspath(model[len(source) + 1 :])))}"


def stem_of(file: str) -> str:
    """The name of a file of labelled texts, without its ending, as a part of that of a folder.

    >>> stem_of("my/reviews.csv"), stem_of("old reviews.v2.JSONL.gz"), stem_of("/data/评论.csv")
    ('reviews', 'old_reviews.v2', 'file')
    """
    name = os.path.basename(file)
    end = next((end for end in _FILE_ENDS if name.lower().endswith(end)), "")
    return _fit(name[: len(name) - len(end)]).lstrip(".-_")[:_LONGEST] or FILE  # hidden, or read as an option


def contradicts(implied: Mode | None, mode: str | None) -> bool:
    """Whether a mode asks for another form than a spelling stands for.

    The spellings of the BP form go with the mode ``al``, too: they are the published names of the models.

    >>> al, bp = DEFAULT.name, BASELINE.name
    >>> contradicts(bp, al), contradicts(al, bp), contradicts(al, "compare")
    (False, True, False)
    """
    return implied is not None and mode in METHODS and mode not in (implied, DEFAULT.name)


def form_told(model: tuple[str, Mode | None], mode: str) -> str | None:
    """One line on the form that is trained, and how to have the other; None where both are.

    Args:
        model: The canonical name, and the form that its spelling implies.
        mode: What is trained: the name of a method, or ``compare``.

    >>> form_told(VISION.model("Resnet"), BASELINE.name)
    'training the BP form (backpropagation) of resnet, which that spelling stands for; --mode al trains the AL form'
    >>> form_told(VISION.model("ResNet"), DEFAULT.name)
    'training the AL form (local losses) of resnet; --mode bp trains the BP form'
    """
    name, implied = model
    if mode not in METHODS:
        return None
    other = BASELINE if mode == DEFAULT.name else DEFAULT
    # The AL form's own spelling refuses every other mode.
    spelt = f"{name} " if implied == mode == DEFAULT.name else ""
    chosen = ", which that spelling stands for" if implied == mode else ""
    told = f"training the {METHODS[mode].title} of {name}{chosen}"
    return f"{told}; {spelt}--mode {other.name} trains the {other.label} form"


def _fit(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _plain(name: str) -> str:
    return name.lower().removesuffix(DEFAULT.name)
