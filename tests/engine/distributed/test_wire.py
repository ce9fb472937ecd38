"""What a wire does when nobody is at its other end."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pipeal.core.errors import DataError
from pipeal.engine.devices import Device
from pipeal.engine.distributed import channel as module
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.io_threads import receive_all
from pipeal.engine.distributed.world import World

from .ranks import each, ranks


def wires(worlds: list[World]) -> list[Wire]:
    """One between all ranks."""

    def connect(world: World) -> Wire:
        store = dist.PrefixStore("wire", world.store)
        group = dist.ProcessGroupGloo(store, world.rank, len(worlds), timedelta(seconds=30))
        return Wire(group, 0)  # type: ignore[arg-type]

    return each(worlds, connect)  # type: ignore[return-value]


def test_who_posts_to_a_peer_that_takes_nothing_gives_up() -> None:
    """Symptom: the 257th beat to a rank 0 that stood still waited for ever, on the thread that was to see it lost."""
    with ranks(2) as worlds, patch.object(module, "_PATIENCE_S", 0.2):
        near, far = wires(worlds)
        begin = monotonic()

        def post() -> None:
            for number in range(400):
                near.post(1, "beat", {"number": number})

        with pytest.raises(BrokenWireError, match=r"messages were not taken within 0\.2 s") as caught:
            post()
        assert caught.value.peer == 1
        assert monotonic() - begin < 60
        while (number := far.receive(0).facts["number"]) < module._POSTED:
            pass  # nothing of it is lost
        assert number == module._POSTED


def test_posts_that_are_taken_never_run_into_that() -> None:
    with ranks(2) as worlds, patch.object(module, "_PATIENCE_S", 60.0):
        near, far = wires(worlds)
        taking = threading.Thread(target=lambda: [far.receive(0) for _ in range(1000)])
        taking.start()
        for number in range(1000):
            near.post(1, "beat", {"number": number})
        near.settle(30)
        taking.join(120)
        assert not taking.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("silent", [1, 2])
def test_who_takes_nothing_is_named_and_not_who_was_written_to_first(silent: int) -> None:
    """Symptom: of posts to many the first one's rank was named as lost, which had taken its own long before."""
    with ranks(3) as worlds:
        near, *others = wires(worlds)
        for peer in (1, 2, 1, 2):
            near.post(peer, "close", {})
        taking = threading.Thread(target=lambda: [others[2 - silent].receive(0) for _ in range(2)])
        taking.start()
        with pytest.raises(BrokenWireError, match=r"messages were not taken within 3 s") as caught:
            near.settle(3)
        assert caught.value.peer == silent
        taking.join(120)
        assert not taking.is_alive()
        for _ in range(2):
            others[silent - 1].receive(0)  # which ends the wait


class Heads:
    """A wire from which messages come."""

    def __init__(self, *kinds: str) -> None:
        self._left = [Message(kind, {}, 3, layouts=[["float32", [1], None, 1]]) for kind in kinds]

    def receive(self, peer: int | None) -> Message:
        return self._left.pop(0)


def test_a_message_whose_tree_cannot_be_dropped_fails_the_rank_and_not_the_thread_that_takes_messages() -> None:
    """Else whoever sends the next one would wait for it to be taken."""
    failed: list[BaseException] = []
    seen: list[str] = []

    def refuse(message: Message) -> None:
        seen.append(message.kind)
        raise DataError("a container that this process does not know")

    unclosed = {3}
    heads: Any = Heads("packet", "packet", "close")
    receive_all(heads, 3, {"packet": lambda _: None}, failed.append, drop=refuse, unclosed=unclosed)
    assert seen == ["packet", "packet", "close"]
    assert [type(error) for error in failed] == [DataError] * 3
    assert not unclosed


def test_a_message_behind_one_that_is_not_taken_is_given_up() -> None:
    """Symptom: a rank whose cable was cut while it sent a layer's state to rank 0 never ended: its last words waited
    for that state to be taken."""
    with ranks(2) as worlds:
        near, far = wires(worlds)
        sending = threading.Thread(target=near.send, args=(1, "state", {}, torch.ones(3)))
        sending.start()
        begin = monotonic()
        with patch.object(module, "_PATIENCE_S", 0.2):
            while not near._sending.locked():
                assert monotonic() - begin < 60
            with pytest.raises(BrokenWireError, match=r"a message before it was not taken within 0\.2 s"):
                near.post(1, "close", {})
        assert torch.equal(far.body(far.receive(0)), torch.ones(3))  # type: ignore[arg-type]
        sending.join()


@pytest.mark.parametrize("piece", [1 << 22, 8])
@pytest.mark.parametrize("carried", [False, True])
def test_what_there_was_no_memory_for_is_taken_all_the_same(piece: int, carried: bool) -> None:
    """Symptom: it counted as received, so that nobody dropped it; later, whoever dropped it asked for the same memory
    once more, in vain. Its sender waited for ever."""
    failed: list[BaseException] = []
    tree = (
        torch.ones(3, dtype=torch.float64),
        torch.zeros(0),
        torch.rand(7) > 0.5,
        torch.ones(2, 5, dtype=torch.int16),
    )
    arrived: list[Any] = []

    with ranks(2) as worlds, patch.object(module, "_PIECE", piece):
        near, far = wires(worlds)

        def send() -> None:
            for number in range(2):
                near.send(1, "state", {"number": number}, tree)
            near.send(1, "close", {})

        def take(message: Message) -> None:
            fails = patch.object(module, "row_for", side_effect=MemoryError)
            with nullcontext() if message.facts["number"] else fails:
                arrived.append(far.body(message))

        def receive() -> None:
            drop = Carrier(far, Device(torch.device("cpu"))).drop if carried else far.drop

            def drop_without_memory(message: Message) -> None:
                with patch.object(module, "row_for", side_effect=MemoryError):
                    drop(message)

            receive_all(far, 0, {"state": take}, failed.append, drop=drop_without_memory, unclosed={0})

        threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert [type(error) for error in failed] == [MemoryError]
    assert [len(found) for found in arrived] == [4]  # what came behind it is not mixed up with it
    assert all(map(torch.equal, arrived[0], tree))
