"""Models by name, and the form that a spelling of a name asks for.

- ``VGG``, ``Resnet``, ``LSTM``, ``Transformer``, in just these spellings, which are the published ones: the BP form.
- ``VGGAL``, ``resnetal``, ``CharLMAL``, any name with AL at its end, in any case: the AL form.
- ``vgg``, ``ResNet``, ``RESNET``, ``CharLM``, every other spelling: what the mode says, the AL form if it says nothing.

The commands say in one line which form they train.
"""

from __future__ import annotations

from typing import TypeAlias

from pipeal.core.errors import ConfigError, unknown_name
from pipeal.core.methods import BASELINE, COMPARED, DEFAULT, METHODS
from pipeal.methods import Network, make_layers
from pipeal.methods.al import ALPackage, LearningRates, OptimizerFactory
from pipeal.models.charlm import LESSON, CharDims, CharLM
from pipeal.models.text import LSTM, PUBLISHED, TextDims, Transformer, Vectors
from pipeal.models.vision import PUBLISHED_VISION, VGG, Resnet, VisionDims

Mode: TypeAlias = str
"""The name of a method, which is the form of a model that it trains: one of :data:`pipeal.core.methods.METHODS`."""

_TEXT = {"lstm": LSTM, "transformer": Transformer}
_VISION = {"vgg": VGG, "resnet": Resnet}
_LANGUAGE = {"charlm": CharLM}
_PUBLISHED_BP = ("LSTM", "Transformer", "VGG", "Resnet")  # the published commands' spellings of their BP forms

TEXT_MODELS = tuple(_TEXT)
"""The canonical names of the text models."""
VISION_MODELS = tuple(_VISION)
"""The canonical names of the vision models."""
LANGUAGE_MODELS = tuple(_LANGUAGE)
"""The canonical names of the language models."""


def canonical_text_model(name: str) -> tuple[str, Mode | None]:
    """The canonical name of a text model, and the form that its spelling implies.

    >>> canonical_text_model("TransformerAL"), canonical_text_model("lstm")
    (('transformer', 'al'), ('lstm', None))

    Raises:
        ConfigError: There is no such model.
    """
    return _canonical(name, TEXT_MODELS)


def canonical_vision_model(name: str) -> tuple[str, Mode | None]:
    """The canonical name of a vision model, and the form that its spelling implies.

    >>> canonical_vision_model("ResnetAL"), canonical_vision_model("VGG"), canonical_vision_model("vgg")
    (('resnet', 'al'), ('vgg', 'bp'), ('vgg', None))

    Raises:
        ConfigError: There is no such model.
    """
    return _canonical(name, VISION_MODELS)


def canonical_language_model(name: str) -> tuple[str, Mode | None]:
    """The canonical name of a language model, and the form that its spelling implies.

    >>> canonical_language_model("CharLM"), canonical_language_model("charlmAL")
    (('charlm', None), ('charlm', 'al'))

    Raises:
        ConfigError: There is no such model.
    """
    return _canonical(name, LANGUAGE_MODELS)


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

    >>> form_told(canonical_vision_model("Resnet"), "bp")
    'training the BP form (backpropagation) of resnet, which that spelling stands for; --mode al trains the AL form'
    >>> form_told(canonical_vision_model("ResNet"), "al")
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


def build_text(
    name: str,
    mode: Mode | None = None,
    *,
    vocab_size: int,
    classes: int,
    dims: TextDims = PUBLISHED,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    pad_index: int = 0,
    pretrained: Vectors | None = None,
) -> ALPackage:
    """A text classifier, ready to train; takes ``(B, T)`` tokens, padded on the right, and ``(B,)`` classes.

    Args:
        name: ``lstm`` or ``transformer``, in any case; ``LSTMAL`` and ``TransformerAL`` ask for the AL
            form, and ``LSTM`` and ``Transformer``, in just this case, for the BP form, as published.
        mode: The name of a method, such as ``al`` or ``bp``; None for what the name implies, else ``al``.
        vocab_size: How many tokens there are.
        classes: How many classes there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        pad_index: The token that pads.
        pretrained: ``(vocab_size, dims.embedding)`` initial word vectors, trained on.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    plain, form = _form_of(name, mode, TEXT_MODELS)
    network = _TEXT[plain].network(vocab_size, classes, dims=dims, pad_index=pad_index, pretrained=pretrained)
    return _package(form, network, lr, optimizer)


def build_vision(
    name: str,
    mode: Mode | None = None,
    *,
    classes: int,
    dims: VisionDims = PUBLISHED_VISION,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
) -> ALPackage:
    """An image classifier, ready to train; takes ``(B, C, S, S)`` images and ``(B,)`` classes.

    Args:
        name: ``vgg`` or ``resnet``, in any case; ``VGGAL`` and ``ResnetAL`` ask for the AL form, and ``VGG`` and
            ``Resnet``, in just this case, for the BP form, as published.
        mode: The name of a method, such as ``al`` or ``bp``; None for what the name implies, else ``al``.
        classes: How many classes there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    plain, form = _form_of(name, mode, VISION_MODELS)
    return _package(form, _VISION[plain].network(classes, dims=dims), lr, optimizer)


def build_language(
    name: str,
    mode: Mode | None = None,
    *,
    characters: int,
    dims: CharDims = LESSON,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
) -> ALPackage:
    """A language model, ready to train; takes ``(B, T)`` characters and the ``(B, T)`` that come next.

    Args:
        name: ``charlm``, in any case; ``CharLMAL`` asks for the AL form.
        mode: The name of a method, such as ``al`` or ``bp``; None for what the name implies, else ``al``.
        characters: How many there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, or they contradict each other.
    """
    plain, form = _form_of(name, mode, LANGUAGE_MODELS)
    return _package(form, _LANGUAGE[plain].network(characters, dims=dims), lr, optimizer)


def _canonical(name: str, known: tuple[str, ...]) -> tuple[str, Mode | None]:
    plain = _plain(name)
    if plain not in known:
        raise ConfigError(unknown_name("model", name, known))
    if plain != name.lower():
        return plain, DEFAULT.name
    return plain, (BASELINE.name if name in _PUBLISHED_BP else None)


def _plain(name: str) -> str:
    return name.lower().removesuffix("al")


def _form_of(name: str, mode: Mode | None, known: tuple[str, ...]) -> tuple[str, Mode]:
    """The canonical name, and the form that name and mode together ask for."""
    plain, implied = _canonical(name, known)
    if mode is not None and mode not in METHODS:
        raise ConfigError(unknown_name("mode", mode, tuple(METHODS)))
    if implied is not None and contradicts(implied, mode):
        label = METHODS[implied].label
        raise ConfigError(f"model {name!r} is the {label} form, but the mode is {mode!r}; ask for {plain!r}")
    return plain, mode or implied or DEFAULT.name


def _package(form: Mode, network: Network, lr: LearningRates, optimizer: OptimizerFactory | None) -> ALPackage:
    return ALPackage(make_layers(form, network, lr, optimizer))
