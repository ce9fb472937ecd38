"""The batch that a layer could not learn from, left in a file for a look."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeal.core.atomic import replacing
from pipeal.core.errors import NonFiniteError, PipealError, add_note, first_line
from pipeal.data import EpochBatches
from pipeal.training.position import Position


def keep_batch(error: NonFiniteError, batches: EpochBatches, position: Position, folder: Path) -> None:
    """Writes ``non-finite-batch-N.pt``, and adds to the error where it is and which samples the batch held.

    Args:
        error: Names the batch.
        batches: The training batches; what is being read of them ends.
        position: Where the training stands, in the same epoch.
        folder: Where to.
    """
    if not (error.losses or error.is_to_blame):
        return  # one of the batches before it did it
    batches.set_epoch(position.epoch, error.batch - (position.batches - position.part.batches))
    batch = next(iter(batches))
    few = ", ".join(map(str, batch.indices[:10])) + (", …" if len(batch.indices) > 10 else "")
    path = folder / f"non-finite-batch-{error.batch:09d}.pt"
    kept = {"x": batch.x, "y": batch.y, "indices": batch.indices, "layer": error.layer, "losses": error.losses}
    try:
        with replacing(path) as aside:
            torch.save(kept, aside)
    except (PipealError, RuntimeError) as second:  # PyTorch says of a full disk that it is a RuntimeError
        add_note(error, f"the batch (training samples {few}) could not be kept: {first_line(second)}")
        return
    add_note(error, f"the batch is kept in {path} (training samples {few}); look at it")
