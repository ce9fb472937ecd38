"""What a wire does when nobody is at its other end, or somebody who has no business there."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis.strategies import floats, integers

from pipeal.core.errors import DataError
from pipeal.engine.devices import Device
from pipeal.engine.distributed import channel as module
from pipeal.engine.distributed.channel import BrokenWireError, Message, Wire
from pipeal.engine.distributed.host_transfer import Carrier
from pipeal.engine.distributed.io_threads import receive_all
from pipeal.engine.distributed.window import Window
from pipeal.engine.distributed.world import World
from pipeal.engine.execution.channel import Stopped

from .ranks import each, ranks


def wires(worlds: list[World]) -> list[Wire]:
    """One between all ranks."""
    return each(worlds, lambda world: Wire(world.endpoint, *world.wire_numbers(1)))  # type: ignore[arg-type]


def test_who_posts_to_a_peer_that_takes_nothing_does_not_wait() -> None:
    """Symptom: the 257th beat to a rank 0 that stood still waited for ever, on the thread that was to see it lost."""
    with ranks(2) as worlds:
        near, far = wires(worlds)
        for number in range(1000):
            near.post(1, "beat", {"number": number})
        assert [far.receive([0]).facts["number"] for _ in range(1000)] == list(range(1000))


def test_a_sender_waits_until_what_it_sent_was_taken() -> None:
    with ranks(2) as worlds:
        near, far = wires(worlds)
        sent: list[int] = []

        def send() -> None:
            for number in range(5):
                near.send(1, "packet", {"number": number}, torch.ones(3))
                sent.append(number)

        sending = threading.Thread(target=send)
        sending.start()
        for number in range(5):
            message = far.receive([0])
            assert message.facts["number"] == number
            assert len(sent) <= 3 * number  # what is on its way at most triples with each that is taken
            far.body(message)
        sending.join(120)
        assert sent == [0, 1, 2, 3, 4]


def taking(window: Window, trip_s: float, step_s: float, packets: int, size: int = 1, begin: float = 0.0) -> float:
    """A sender that never lacks packets, and a peer that takes one each ``step_s``; when it has taken all."""
    now = free = begin
    coming: deque[tuple[float, float]] = deque()
    sent = 0
    while sent < packets or coming:
        while sent < packets and window.is_open:
            window.sent(size, now)
            came = now + trip_s / 2
            free = max(free, came) + step_s
            coming.append((free - step_s + trip_s / 2, free - step_s - came))
            sent += 1
        now, waited_s = coming.popleft()
        window.taken(waited_s, now)
    return now


@settings(max_examples=20, deadline=None)
@given(trip_s=floats(0, 0.5), step_s=floats(0.001, 0.1), least=integers(1, 12))
def test_a_window_keeps_a_peer_busy_over_any_delay_and_holds_three_round_trips_at_most(
    trip_s: float, step_s: float, least: int
) -> None:
    window, packets = Window(least=least), 3000
    assert window.size == least
    begin = taking(window, trip_s, step_s, packets)
    assert max(least, trip_s / step_s) <= window.size <= max(least, 3 * trip_s / step_s + 3)
    end = taking(window, trip_s, step_s, packets, begin=begin)
    assert end - begin <= packets * step_s + trip_s + 1e-6
    before = window.size
    taking(window, 3 * trip_s, step_s, packets, begin=end)  # a queue before a link is no reason for a longer one
    assert window.size <= before + 1


def test_a_window_triples_each_round_trip_until_it_is_wide_enough() -> None:
    """Symptom: it grew by one for each message that a peer had waited for, of a burst the first: 50 packets over 100 ms
    took 12 s."""
    window, sizes, now = Window(), list[int](), 0.0
    for _ in range(5):
        now = taking(window, 0.2, 0.001, window.size, begin=now)
        sizes.append(window.size)
    assert sizes == [3, 9, 26, 70, 157]


def test_a_window_is_bounded_in_bytes() -> None:
    window = Window(least=9)
    window.sent(1 << 27, 0.0)
    assert window.size == 2
    window.taken(0.0, 0.2)
    taking(window, 0.2, 0.001, 100, size=1 << 27, begin=0.2)
    assert window.size == 2


def test_a_window_covers_a_long_way() -> None:
    """As many messages are on their way as the way is long, since who receives them waits for each."""
    with ranks(2) as worlds:
        near, far = wires(worlds)
        window = near._mailbox.windows[1]
        add, late = far._mailbox.add, queue.SimpleQueue[Any]()
        far._mailbox.add = late.put  # type: ignore[method-assign]

        def arrive() -> None:
            """Each a while after it was sent, whatever is behind it."""
            for _ in range(60):
                arrived, due = late.get(), monotonic() + 0.05
                threading.Timer(max(0.0, due - monotonic()), add, [replace(arrived, at=due)]).start()

        def take() -> None:
            for _ in range(60):
                far.body(far.receive([0]))

        threads = [threading.Thread(target=work) for work in (arrive, take)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            near.send(1, "packet", {}, torch.ones(3))
        for thread in threads:
            thread.join(120)
        assert window.size > 4


def test_who_waits_for_a_rank_that_is_gone_is_told_once_what_it_sent_was_taken() -> None:
    with ranks(3) as worlds:
        near, *others = wires(worlds)
        others[0].post(0, "word", {})
        others[1].post(0, "word", {})
        worlds[1].close()
        assert {near.receive([1, 2]).source for _ in range(2)} == {1, 2}
        for attempt in (
            lambda: near.receive([1, 2]),
            lambda: near.send(1, "word", {}),
            lambda: near.hear_answer(1),
            lambda: near.post(1, "word", {}),
        ):
            with pytest.raises(BrokenWireError, match="closed by the peer") as caught:
                attempt()
            assert caught.value.peer == 1
        near.post(2, "word", {})
        assert others[1].receive([0]).kind == "word"


def test_all_waits_end_when_a_rank_closes_its_connections() -> None:
    with ranks(2) as worlds:
        near, _ = wires(worlds)
        found: list[BaseException] = []

        def wait() -> None:
            try:
                near.receive([1])
            except Stopped as error:
                found.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        worlds[0].endpoint.close_wires([near.number])
        waiting.join(120)
        assert len(found) == 1


@contextmanager
def two_machines() -> Iterator[list[World]]:
    """Ranks that each have a machine of their own, as far as they know."""
    with ranks(2) as worlds:
        for world in worlds:
            world.launch = replace(world.launch, local_size=1)
        yield worlds


def test_between_machines_nobody_gets_in_without_a_key_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with two_machines() as worlds:
        near, far = wires(worlds)
        door = worlds[1].endpoint
        assert door.address.startswith("tcp://127.0.0.1:")

        def is_refused() -> bool:
            return any("refused" in record.message for record in caplog.records)

        with zmq.Context() as context, context.socket(zmq.PUSH) as keyless, context.socket(zmq.PUSH) as stranger:
            keyless.linger = stranger.linger = 0
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = door.key.encode()
            for one in (keyless, stranger):
                one.connect(door.address)
                one.send(b'[0, 0, "packet", {}, null, [], false]')
            until = monotonic() + 60
            while not is_refused() and monotonic() < until:
                sleep(0.01)
        near.post(1, "word", {})
        assert far.receive([0]).kind == "word"
    assert is_refused()


def test_a_rank_does_not_speak_for_another() -> None:
    with two_machines() as worlds:
        near, far = wires(worlds)
        worlds[0].endpoint.rank = 1
        near.post(1, "word", {})
        worlds[0].endpoint.rank = 0
        near.post(1, "another", {})
        assert far.receive([0]).kind == "another"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"[" * 100_000],
        [b"[0, 7]"],
        [b'{"a": 1}'],
        [b'[0, "x", []]'],
        [b'[0, 7, "+"]'],
        [b'[0, 7, "+", 1' + b"0" * 400 + b"]"],
        [b'[0, 7, "+", -Infinity]'],
        [b'[0, 7, "word", {}, null, [], false, 0]'],
        [b" " * (1 << 20) + b"[0, 7, null]"],
        [bytes(range(256))],
    ],
    ids=lambda frames: repr(frames[0][:12]),
)
def test_what_is_no_message_is_told_and_let_go(frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    with ranks(2) as worlds:
        near, far = wires(worlds)
        worlds[0].endpoint._push[1].send_multipart(frames)
        near.post(1, "word", {})
        assert far.receive([0]).kind == "word"
    assert [record.message for record in caplog.records if "let go" in record.message]


def test_a_head_that_its_peer_would_refuse_is_refused_where_it_is_made() -> None:
    with ranks(2) as worlds:
        near, _ = wires(worlds)
        with pytest.raises(DataError, match="more than 1048576; put numbers into tensors"):
            near.send(1, "packet", {"x": "x" * (1 << 20)})


@pytest.mark.parametrize("layout", [["float32", [2], None, 2], ["load", [3], None, 3], ["float32", [9], None, 3], 3])
def test_tensors_that_are_not_what_their_head_says_are_refused(layout: Any) -> None:
    with ranks(2) as worlds:
        near, far = wires(worlds)
        worlds[0].endpoint.send(
            1, near.number, ["packet", {}, ["T"], [layout], False], [torch.ones(12).view(torch.uint8)[:12]]
        )
        message = far.receive([0])
        with pytest.raises(DataError):
            far.body(message)
        assert not message.taken


class Heads:
    """A wire from which messages come."""

    def __init__(self, *kinds: str) -> None:
        self._left = [Message(kind, {}, 3, layouts=[["float32", [1], None, 1]]) for kind in kinds]

    def receive(self, peers: Collection[int]) -> Message:
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
    receive_all(heads, {"packet": lambda _: None}, failed.append, drop=refuse, unclosed=unclosed)
    assert seen == ["packet", "packet", "close"]
    assert [type(error) for error in failed] == [DataError] * 3
    assert not unclosed


@pytest.mark.parametrize("carried", [False, True])
def test_what_there_was_no_memory_for_is_taken_all_the_same(carried: bool) -> None:
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

    with ranks(2) as worlds:
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

            receive_all(far, {"state": take}, failed.append, drop=drop_without_memory, unclosed={0})

        threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert [type(error) for error in failed] == [MemoryError]
    assert [len(found) for found in arrived] == [4]  # what came behind it is not mixed up with it
    assert all(map(torch.equal, arrived[0], tree))
