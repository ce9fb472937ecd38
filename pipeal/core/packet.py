"""What flows down the pipeline.

A training example becomes a :class:`Packet`. It visits the layers in order; each trains itself on it (three
actions: forward, backward, update) and hands on a detached packet. The engine knows only the packet and the layers'
protocol, :class:`pipeal.core.protocols.TrainableLayer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeal.core.tree import Tree


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
    """

    batch: int
    x: Tree
    y: Tree
    lr_scale: float = 1.0
    updates: bool = True
    sequence: int = 0
    ready: torch.cuda.Event | None = None
