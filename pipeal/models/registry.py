"""Models by name, and the form that a spelling of a name asks for.

- ``VGG``, ``Resnet``, ``LSTM``, ``Transformer``, in just these spellings, which are the published ones: the BP form.
- ``VGGAL``, ``resnetal``, ``CharLMAL``, any name with AL at its end, in any case: the AL form.
- ``vgg``, ``ResNet``, ``RESNET``, ``CharLM``, every other spelling: what the mode says, the AL form if it says nothing.

The commands say in one line which form they train.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeal.core.errors import ConfigError, unknown_name
from pipeal.methods.al import BP, ALPackage, LearningRates, OptimizerFactory
from pipeal.methods.al.place_codes import TokenCrossEntropy
from pipeal.models.charlm import LESSON, CharDims, CharLM, CharLMAL
from pipeal.models.text import LSTM, LSTMAL, PUBLISHED, TextDims, Transformer, TransformerAL, Vectors
from pipeal.models.vision import PUBLISHED_VISION, VGG, VGGAL, Resnet, ResnetAL, VisionDims

Mode: TypeAlias = Literal["al", "bp"]

_TEXT = {"lstm": (LSTMAL, LSTM), "transformer": (TransformerAL, Transformer)}
_VISION = {"vgg": (VGGAL, VGG), "resnet": (ResnetAL, Resnet)}
_PUBLISHED_BP = ("LSTM", "Transformer", "VGG", "Resnet")  # the published commands' spellings of their BP forms
_FORMS = {"al": "AL form (local losses)", "bp": "BP form (backpropagation)"}

TEXT_MODELS = tuple(_TEXT)
"""The canonical names of the text models."""
VISION_MODELS = tuple(_VISION)
"""The canonical names of the vision models."""
LANGUAGE_MODELS = ("charlm",)
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


def form_told(model: tuple[str, Mode | None], mode: str) -> str | None:
    """One line on the form that is trained, and how to have the other; None where both are.

    Args:
        model: The canonical name, and the form that its spelling implies.
        mode: What is trained: ``al``, ``bp`` or ``compare``.

    >>> form_told(canonical_vision_model("Resnet"), "bp")
    'training the BP form (backpropagation) of resnet, which that spelling stands for; --mode al trains the AL form'
    >>> form_told(canonical_vision_model("ResNet"), "al")
    'training the AL form (local losses) of resnet; --mode bp trains the BP form'
    """
    name, implied = model
    if mode == "al":
        # The AL form's own spelling refuses the mode bp.
        other = f"{name} --mode bp trains the BP form" if implied == "al" else "--mode bp trains the BP form"
    elif mode == "bp":
        other = "--mode al trains the AL form"
    else:
        return None
    chosen = ", which that spelling stands for" if implied == mode else ""
    return f"training the {_FORMS[mode]} of {name}{chosen}; {other}"


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
        mode: ``al`` or ``bp``; None for what the name implies, else ``al``.
        vocab_size: How many tokens there are.
        classes: How many classes there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        pad_index: The token that pads.
        pretrained: ``(vocab_size, dims.embedding)`` initial word vectors, trained on.

    Returns:
        The AL form's layers; or the BP form as a package of one layer.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    plain, form = _form_of(name, mode, TEXT_MODELS)
    al_form, bp_form = _TEXT[plain]
    if form == "al":
        return al_form(
            vocab_size,
            classes,
            dims=dims,
            lr=lr,
            optimizer=optimizer,
            pad_index=pad_index,
            pretrained=pretrained,
        )
    model = bp_form(vocab_size, classes, dims=dims, pad_index=pad_index, pretrained=pretrained)
    return ALPackage([BP(model, lr=_one_rate(lr), optimizer=optimizer)])


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
        mode: ``al`` or ``bp``; None for what the name implies, else ``al``.
        classes: How many classes there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.

    Returns:
        The AL form's layers; or the BP form as a package of one layer.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    plain, form = _form_of(name, mode, VISION_MODELS)
    al_form, bp_form = _VISION[plain]
    if form == "al":
        return al_form(classes, dims=dims, lr=lr, optimizer=optimizer)
    return ALPackage([BP(bp_form(classes, dims=dims), lr=_one_rate(lr), optimizer=optimizer)])


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
        mode: ``al`` or ``bp``; None for what the name implies, else ``al``.
        characters: How many there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.

    Returns:
        The AL form's layers; or the BP form as a package of one layer.

    Raises:
        ConfigError: The name or mode is unknown, or they contradict each other.
    """
    _, form = _form_of(name, mode, LANGUAGE_MODELS)
    if form == "al":
        return CharLMAL(characters, dims=dims, lr=lr, optimizer=optimizer)
    model = CharLM(characters, dims=dims)
    return ALPackage([BP(model, TokenCrossEntropy(), lr=_one_rate(lr), optimizer=optimizer)])


def _canonical(name: str, known: tuple[str, ...]) -> tuple[str, Mode | None]:
    plain = name.lower().removesuffix("al")
    if plain not in known:
        raise ConfigError(unknown_name("model", name, known))
    if plain != name.lower():
        return plain, "al"
    return plain, ("bp" if name in _PUBLISHED_BP else None)


def _form_of(name: str, mode: Mode | None, known: tuple[str, ...]) -> tuple[str, Mode]:
    """The canonical name, and the form that name and mode together ask for."""
    plain, implied = _canonical(name, known)
    if mode not in ("al", "bp", None):
        raise ConfigError(unknown_name("mode", mode, ("al", "bp")))
    if mode == "bp" and implied == "al":
        raise ConfigError(f"model {name!r} is the AL form, but the mode is 'bp'; ask for {plain!r}")
    return plain, mode or implied or "al"


def _one_rate(lr: LearningRates) -> float:
    if not isinstance(lr, int | float):
        raise ConfigError("the BP form has no sides: give one learning rate, not one per side")
    return lr
