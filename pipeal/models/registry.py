"""Text models by name."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeal.al import BP, ALPackage, LearningRates, OptimizerFactory
from pipeal.errors import ConfigError, unknown_name
from pipeal.models.text import LSTM, LSTMAL, PUBLISHED, TextDims, Transformer, TransformerAL, Vectors

Mode: TypeAlias = Literal["al", "bp"]

_FORMS = {"lstm": (LSTMAL, LSTM), "transformer": (TransformerAL, Transformer)}
_PUBLISHED_BP = ("LSTM", "Transformer")  # the published command's spellings of its BP forms
TEXT_MODELS = tuple(_FORMS)
"""The canonical names."""


def canonical_text_model(name: str) -> tuple[str, Mode | None]:
    """The canonical name of a text model, and the form that its spelling implies.

    >>> canonical_text_model("TransformerAL"), canonical_text_model("lstm")
    (('transformer', 'al'), ('lstm', None))

    Raises:
        ConfigError: There is no such model.
    """
    plain = name.lower().removesuffix("al")
    if plain not in _FORMS:
        raise ConfigError(unknown_name("model", name, _FORMS))
    if plain != name.lower():
        return plain, "al"
    return plain, ("bp" if name in _PUBLISHED_BP else None)


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
    plain, implied = canonical_text_model(name)
    if mode not in ("al", "bp", None):
        raise ConfigError(unknown_name("mode", mode, ("al", "bp")))
    if mode == "bp" and implied == "al":
        raise ConfigError(f"model {name!r} is the AL form, but the mode is 'bp'; ask for {plain!r}")
    al_form, bp_form = _FORMS[plain]
    if (mode or implied) != "bp":
        return al_form(
            vocab_size,
            classes,
            dims=dims,
            lr=lr,
            optimizer=optimizer,
            pad_index=pad_index,
            pretrained=pretrained,
        )
    if not isinstance(lr, int | float):
        raise ConfigError("the BP form has no sides: give one learning rate, not one per side")
    model = bp_form(vocab_size, classes, dims=dims, pad_index=pad_index, pretrained=pretrained)
    return ALPackage([BP(model, lr=lr, optimizer=optimizer)])
