"""What a wire does when nobody is at its other end."""

from __future__ import annotations

import threading
from datetime import timedelta
from time import monotonic
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipeal.engine.distributed import wire as module
from pipeal.engine.distributed.wire import BrokenWireError, Wire
from pipeal.engine.distributed.world import World

from .ranks import each, ranks


def test_a_message_behind_one_that_is_not_taken_is_given_up() -> None:
    """Symptom: a rank whose cable was cut while it sent a layer's state to rank 0 never ended: its last words waited
    for that state to be taken."""
    with ranks(2) as worlds:

        def connect(world: World) -> dist.ProcessGroup:
            return dist.ProcessGroupGloo(dist.PrefixStore("wire", world.store), world.rank, 2, timedelta(seconds=30))

        here, there = each(worlds, connect)
        near, far = Wire(here, 0), Wire(there, 0)  # type: ignore[arg-type]
        sending = threading.Thread(target=near.send, args=(1, "state", {}, torch.ones(3)))
        sending.start()
        begin = monotonic()
        with patch.object(module, "_PATIENCE_S", 0.2):
            while not near._sending.locked():
                assert monotonic() - begin < 5
            with pytest.raises(BrokenWireError, match=r"a message before it was not taken within 0\.2 s"):
                near.post(1, "close", {})
        assert torch.equal(far.body(far.receive(0)), torch.ones(3))  # type: ignore[arg-type]
        sending.join()
