"""A module that takes and gives padded batches, and computes them in groups: what an AL layer's ``f`` can be.

::

    (features, mask) ──► lengths ──► groups ──► module, group by group ──► (features, mask), the first order and size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeal.core.errors import ConfigError, DataError, unknown_name
from pipeal.data.grouping.annotated import Annotated, AnnotatedModule, leave_out_of_names
from pipeal.data.grouping.annotation import Dim, Layout, Shape, length_names, parse, shapes_of, tensors_of
from pipeal.data.grouping.collection import DataCollection
from pipeal.data.grouping.groupers import LengthThresholdGrouper, UniGrouper
from pipeal.data.grouping.nesting import build
from pipeal.data.grouping.padders import ValuePadder

__all__ = ["FEATURES", "Grouped"]

FEATURES = ("(b, l_word, ..)", "(b, l_word)")
"""Features with their mask, what text layers hand on: ``(B, T, D)`` and ``(B, T)`` bool."""

TOKENS = "(b, l_word)"
"""What an embedding takes: ``(B, T)``. It gives ``EMBEDDED``, which is :data:`FEATURES` of a width of its own."""

EMBEDDED = ("(b, l_word, m_vector)", "(b, l_word)")
"""What an embedding gives: ``(B, T, D)`` and ``(B, T)`` bool."""


class Grouped(nn.Module):
    """Calls a module on groups of similar length, each cut to its own longest sample.

    In the place of an AL layer's forward block (``enc.f = Grouped(enc.f, thresholds)``) it makes the layer run
    grouped: nothing else of the layer, the pipeline or the schedule needs to know, and the names in its
    ``state_dict`` stay those of the block, so that checkpoints move between both. What it gives has zeros on the
    padding. Dropout inside draws group by group: other masks than ungrouped, and the same under every schedule.

    Which rows go together must be known where Python runs: on a GPU, reading the lengths from the mask waits for it
    once per call. So grouping a layer pays there only where it saves more than the pipeline loses to the wait.

    Args:
        module: Annotated; or any module that takes and gives :data:`FEATURES`, or, with ``pad_index``, that takes
            :data:`TOKENS` and gives :data:`EMBEDDED`.
        thresholds: See :class:`LengthThresholdGrouper`.
        by: The name of the length that decides, in the module's annotation; its first by default.
        pad_index: The token that pads, for a module that takes tokens and no mask.

    Raises:
        ConfigError: Thresholds that are not increasing, an annotation without a length, or no length of that name.
    """

    def __init__(
        self, module: nn.Module, thresholds: Sequence[int], *, by: str | None = None, pad_index: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(module, AnnotatedModule):
            takes, gives = (FEATURES, FEATURES) if pad_index is None else (TOKENS, EMBEDDED)
            module = Annotated(module, takes, gives)
        self.module = module
        leave_out_of_names(self, "module")
        self.pad_index = pad_index
        self._layout: Layout = parse(self.module.get_input_annot(), module=True)
        names = length_names(self._layout)
        if not names:
            raise ConfigError(f"{type(module).__name__} takes no lengths; annotate them as in '(b, l_word)'")
        if by is not None and by not in names:
            raise ConfigError(unknown_name("length", by, names))
        self.grouper = LengthThresholdGrouper(by or names[0], thresholds)

    def forward(self, x: Any) -> Any:
        """Takes and gives what the module does.

        Raises:
            DataError: No mask ``(B, T)`` for a length, and no padding token to make one from.
        """
        tensors = tensors_of(self._layout, x, "the input")
        shapes = [
            shape.spelled_out(tensor.dim()) for tensor, shape in zip(tensors, shapes_of(self._layout), strict=True)
        ]
        layout = build(self._layout, iter(shapes))
        lengths = {name: [self._lengths(name, tensors, shapes)] for name in length_names(layout)}
        batch = DataCollection(layout, data_groups=[build(layout, iter(tensors))], length_info=lengths)
        whole = {
            name: tensor.shape[place]
            for tensor, shape in zip(tensors, shapes, strict=True)
            for place, name in shape.lengths
        }
        batch.regroup(self.grouper, None if self.pad_index is None else _TokenPadder(self.pad_index))
        out = batch.apply(self.module)
        out.regroup(UniGrouper(), padded_to={name: whole[name] for name in out.length_info})
        return out.data_groups[0].value

    def _lengths(self, name: str, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[int]:
        """Where each sample ends, from the mask of that length."""
        plain = Shape((Dim("batch"), Dim("length", name)))
        for tensor, shape in zip(tensors, shapes, strict=True):
            if shape != plain:
                continue
            if tensor.dtype == torch.bool:
                return _ends(tensor)
            if self.pad_index is not None and _holds_tokens(tensor):
                return _ends(tensor != self.pad_index)
        raise DataError(
            f"the input has no bool mask {plain} that says where samples end; add one to it and to the annotation, "
            "or give pad_index for a batch of tokens"
        )

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"thresholds={self.grouper.thresholds}"


class _TokenPadder(ValuePadder):
    """The token that pads where there are tokens; zeros in features and masks."""

    def fill(self, shape: Shape, like: Tensor) -> float | Tensor:
        return super().fill(shape, like) if _holds_tokens(like) else 0


def _holds_tokens(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bool and not tensor.is_floating_point()


def _ends(mask: Tensor) -> list[int]:
    """Behind the last true position of each row; at least 1, since some modules have no answer for an empty text.

    >>> _ends(torch.tensor([[True, False, True, False], [False, False, False, False]]))
    [3, 1]
    """
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return F.pad(mask * position, (1, 0)).amax(1).clamp(min=min(1, mask.shape[1])).tolist()
