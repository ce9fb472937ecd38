"""What flows down the pipeline.

A training example becomes a :class:`Packet`. It visits the layers in order; each trains itself on it (three
actions: forward, backward, update) and hands on a detached packet. The engine knows only the packet and the layers'
protocol, :class:`pipeal.core.protocols.TrainableLayer`.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeal.core.errors import DataError
from pipeal.core.messages import tell_once
from pipeal.core.tree import Tree, tensors


class HandedOver:
    """The tensors of a batch as its caller gave them; they are not kept.

    Args:
        tree: All of them.
    """

    __slots__ = ("_seen",)

    def __init__(self, tree: Tree) -> None:
        self._seen = [(_counter(one), one._version, one._base is not None) for one in tensors(tree)]

    def require_unchanged(self, batch: int) -> None:
        """Refuses what the caller has filled again for a later batch. PyTorch counts what its own operators write: not
        what NumPy does to an array from which a tensor was made; and of a slice, what is written to any part of the
        tensor that it is of, which is told once.

        Raises:
            DataError: One was written to.
        """
        for counter, count, is_slice in self._seen:
            if counter._version == count:
                continue
            if not is_slice:
                raise DataError(
                    f"tensors of batch {batch} were written to after they were handed over, and layers still learn "
                    "from them; hand over new ones for each batch, or clones"
                )
            tell_once(
                "a batch is a slice of a tensor that was written to while layers still learn from the batch; if it was "
                "this slice, they learn from what was written: hand over clones",
                logging.WARNING,
            )


def _counter(tensor: Tensor) -> Tensor:
    """An empty tensor that shares another's count of writes. With a weak reference to that, other threads race: the
    backward of the stage before lets go of it without Python's lock, and of what the reference had just brought."""
    found = tensor.detach()
    with suppress(Exception):  # one that has no empty one of its kind, such as a nested one, is kept
        found.data = tensor.new_empty(0)
    return found


@dataclass(frozen=True, slots=True)
class Packet:
    """One batch on its way through the layers.

    Attributes:
        batch: The batch number, counted from the first batch the model was ever trained on; with the layer's
            number it keys the randomness of a forward.
        x: The input of the next layer, batch first.
        y: The target of the next layer, batch first.
        lr_scale: The factor on every layer's own learning rate for this batch. It travels with the packet, so
            that a change reaches each layer between the same two updates under every schedule.
        updates: Whether layers update after this batch, with what they have gathered since their last update; else
            they go on gathering.
        sequence: The packet's place in its pipeline's life, counted from 0.
        ready: When its tensors may be read; None where they already may.
        handed_over: What the caller gave; None where that was another process.
    """

    batch: int
    x: Tree
    y: Tree
    lr_scale: float = 1.0
    updates: bool = True
    sequence: int = 0
    ready: torch.cuda.Event | None = None
    handed_over: HandedOver | None = None
