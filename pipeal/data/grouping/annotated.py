"""Modules that say which dimensions they take and give, so that what they give can be taken apart again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn

from pipeal.data.grouping.annotation import Annotation

__all__ = ["Annotated", "AnnotatedModule"]

MaskHint: TypeAlias = Literal["copy"] | Sequence[str] | None
"""See :meth:`AnnotatedModule.get_mask_hint`."""


class AnnotatedModule(nn.Module, ABC):
    """A module for :meth:`DataCollection.apply <pipeal.data.grouping.DataCollection.apply>`. Made to be subclassed.

    It is called once per group, as ``module(value)`` or, where it asks for a mask, ``module(value, mask)``. ``value``
    is a padded tensor, or the nested data of the collection. What it gives on padding does not matter.

    Batch normalisation in training is the exception to the law that grouping changes no answer: it takes its mean and
    variance from what it sees at once, here a group (and its padding), and updates its running statistics once per
    group. Layer, group and instance normalisation, and batch normalisation in evaluation, do not depend on it.

    >>> class Lengths(AnnotatedModule):
    ...     def forward(self, x, mask):
    ...         return mask.sum(1)
    ...     def get_input_annot(self):
    ...         return "(b, l_word)"
    ...     def get_output_annot(self):
    ...         return "(b)"
    ...     def get_mask_hint(self):
    ...         return ["word"]
    """

    @abstractmethod
    def get_input_annot(self) -> Annotation:
        """What it takes, in small letters (:mod:`pipeal.data.grouping.annotation`), nested as the data."""

    @abstractmethod
    def get_output_annot(self) -> Annotation:
        """What it gives. Lengths are those of its input."""

    def get_mask_hint(self) -> MaskHint:
        """What mask it takes as its second argument.

        Returns:
            None for no mask; ``"copy"`` for one mask for each tensor of the input, nested and shaped like them; names
            of lengths for one of shape ``(b, l_first, l_second, …)``. Masks are bool, true on what is no padding.
        """
        return None


class Annotated(AnnotatedModule):
    """Any module, with annotations written beside it.

    >>> linear = Annotated(nn.Linear(3, 5), "(b, .., m_in)", "(b, .., m_out)")

    Args:
        module: Takes the value, and the mask if there is a hint.
        input_annot: See :meth:`AnnotatedModule.get_input_annot`.
        output_annot: See :meth:`AnnotatedModule.get_output_annot`.
        mask_hint: See :meth:`AnnotatedModule.get_mask_hint`.

    Its ``state_dict`` is that of the module.
    """

    def __init__(
        self, module: nn.Module, input_annot: Annotation, output_annot: Annotation, mask_hint: MaskHint = None
    ) -> None:
        super().__init__()
        self.module = module
        leave_out_of_names(self, "module")
        self.input_annot = input_annot
        self.output_annot = output_annot
        self.mask_hint = mask_hint

    def forward(self, *value_and_mask: Any) -> Any:
        """Calls the module."""
        return self.module(*value_and_mask)

    def get_input_annot(self) -> Annotation:
        """As given."""
        return self.input_annot

    def get_output_annot(self) -> Annotation:
        """As given."""
        return self.output_annot

    def get_mask_hint(self) -> MaskHint:
        """As given."""
        return self.mask_hint


def leave_out_of_names(wrapper: nn.Module, child: str) -> None:
    """Makes the ``state_dict`` of a module that wraps another one that of the other one.

    Args:
        wrapper: Has nothing to save of its own.
        child: The name of the module in it.
    """
    wrapper.register_state_dict_post_hook(partial(_leave_out, f"{child}."))
    wrapper.register_load_state_dict_pre_hook(partial(_put_in, f"{child}."))


def _leave_out(step: str, _wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + step)]:
        state[prefix + key.removeprefix(prefix + step)] = state.pop(key)


def _put_in(step: str, _wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + step + key.removeprefix(prefix)] = state.pop(key)
