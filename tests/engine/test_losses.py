"""The local losses of a stage, as they are kept until somebody asks."""

from __future__ import annotations

import pytest
import torch

from pipeal import LayerError
from pipeal.engine.runner.losses import LossLog


def test_losses_stay_in_the_order_of_batches_however_many_there_are() -> None:
    """They are joined a thousand at a time, and when a snapshot comes by."""
    log, batches = LossLog(), 2500
    wanted = torch.stack((torch.arange(batches), -torch.arange(batches)), 1).float()
    for number, losses in enumerate(wanted):
        if number == 1700:
            assert torch.equal(log.so_far(3), wanted[:1700])  # type: ignore[arg-type]
        log.add(3, list(losses))
    assert log.so_far(4) is None
    (found,) = log.take().values()
    assert torch.equal(found, wanted)
    assert log.take() == {}


def test_another_number_of_losses_than_before_is_refused() -> None:
    """Rows of three and of one became rows of two; others were a shape error that named no layer."""
    log, (one, *more) = LossLog(), torch.zeros(3).unbind()
    log.add(3, [one, *more])
    log.add(4, [one])
    with pytest.raises(LayerError, match="layer 3 reports 1 losses for this batch, but 3 before"):
        log.add(3, [one])
    log.take()
    log.add(3, [one])
