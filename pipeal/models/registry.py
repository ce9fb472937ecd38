"""Builds models by name, in the form that a spelling or a mode asks for; the names are in :mod:`pipeal.core.names`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from pipeal.core.errors import ConfigError, unknown_name
from pipeal.core.methods import DEFAULT, METHODS
from pipeal.core.names import LANGUAGE, TEXT, VISION, Mode, Names, contradicts
from pipeal.core.protocols import TrainableLayer
from pipeal.methods import make_layers
from pipeal.methods.al import ALPackage, LearningRates, OptimizerFactory
from pipeal.models.charlm import LESSON, CharDims
from pipeal.models.text import PUBLISHED, TextDims, Vectors
from pipeal.models.vision import PUBLISHED_VISION, VisionDims
from pipeal.models.weights import with_weights


def build_text(
    name: str,
    mode: Mode | None = None,
    *,
    vocab_size: int,
    classes: int,
    dims: TextDims = PUBLISHED,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    method_options: Mapping[str, Any] | None = None,
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
        method_options: Those of the method's own, as its ``make_layers`` has them.
        pad_index: The token that pads.
        pretrained: ``(vocab_size, dims.embedding)`` initial word vectors, trained on.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    sizes: dict[str, Any] = {"dims": dims, "pad_index": pad_index, "pretrained": pretrained}
    how: dict[str, Any] = {"lr": lr, "optimizer": optimizer, "method_options": method_options}
    return ALPackage(model_layers(TEXT, name, mode, vocab_size, classes, **how, **sizes))


def build_vision(
    name: str,
    mode: Mode | None = None,
    *,
    classes: int,
    dims: VisionDims = PUBLISHED_VISION,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    method_options: Mapping[str, Any] | None = None,
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
        method_options: Those of the method's own, as its ``make_layers`` has them.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, they contradict each other, or sizes do not fit.
    """
    how: dict[str, Any] = {"lr": lr, "optimizer": optimizer, "method_options": method_options}
    return ALPackage(model_layers(VISION, name, mode, classes, dims=dims, **how))


def build_language(
    name: str,
    mode: Mode | None = None,
    *,
    characters: int,
    dims: CharDims = LESSON,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    method_options: Mapping[str, Any] | None = None,
) -> ALPackage:
    """A language model, ready to train; takes ``(B, T)`` characters and the ``(B, T)`` that come next.

    Args:
        name: ``charlm``, in any case; ``CharLMAL`` asks for the AL form.
        mode: The name of a method, such as ``al`` or ``bp``; None for what the name implies, else ``al``.
        characters: How many there are.
        dims: The sizes.
        lr: The learning rate; the AL form also takes one per side, ``{"enc": …, "ae": …}``.
        optimizer: Called as ``optimizer(parameter_groups, lr=…)``; fused Adam if None.
        method_options: Those of the method's own, as its ``make_layers`` has them.

    Returns:
        The layers of that form; of the BP form, one.

    Raises:
        ConfigError: The name or mode is unknown, or they contradict each other.
    """
    how: dict[str, Any] = {"lr": lr, "optimizer": optimizer, "method_options": method_options}
    return ALPackage(model_layers(LANGUAGE, name, mode, characters, dims=dims, **how))


def model_layers(
    names: Names,
    name: str,
    mode: Mode | None = None,
    *sizes: Any,
    lr: LearningRates = 1e-3,
    optimizer: OptimizerFactory | None = None,
    method_options: Mapping[str, Any] | None = None,
    weights: str | None = None,
    **options: Any,
) -> Iterator[TrainableLayer]:
    """The layers of such a model, each made when it is asked for: so that a model larger than memory never is whole.

    Args:
        names: The kind of model: ``TEXT``, ``VISION`` or ``LANGUAGE`` of :mod:`pipeal.core.names`.
        name: As for :func:`build_text` and its like; also ``mode``, ``lr``, ``optimizer`` and ``method_options``.
        sizes: As the ``network()`` of the model's class takes them, as are ``options``.
        weights: A safetensors file that the network begins with, by the names of its BP form.

    Raises:
        ConfigError: As :func:`build_text`; where sizes do not fit, from the first layer on; or ``weights`` are not of
            this network.
        DataError: ``weights`` cannot be read.
    """
    model, form = _form_of(name, mode, names)
    network = model.network(*sizes, **options)
    if weights is not None:
        network = with_weights(network, weights)
    return make_layers(form, network, lr, optimizer, **(method_options or {}))


def _form_of(name: str, mode: Mode | None, names: Names) -> tuple[Any, Mode]:
    """The class that a name stands for, and the form that name and mode together ask for."""
    plain, implied = names.model(name)
    if mode is not None and mode not in METHODS:
        raise ConfigError(unknown_name("mode", mode, tuple(METHODS)))
    if implied is not None and contradicts(implied, mode):
        label = METHODS[implied].label
        raise ConfigError(f"model {name!r} is the {label} form, but the mode is {mode!r}; ask for {plain!r}")
    return resolve_name(names.models[plain]), mode or implied or DEFAULT.name
