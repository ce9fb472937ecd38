"""Links: every item arrives in its order and once, whichever end goes away and comes back."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from dataclasses import replace
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
import zmq

from pipeal.core.errors import ConfigError, DataError, LineError
from pipeal.engine.distributed.send_buffer import SendBuffer
from pipeal.engine.distributed.window import Window
from pipeal.line import outgoing
from pipeal.line.incoming import Incoming
from pipeal.line.items import FRAME_BYTES, Packed
from pipeal.line.link import CONNECTIONS, HEARTBEAT_S
from pipeal.line.outgoing import Outgoing
from pipeal.line.retained import Retained
from tests.line.links import LONG_S, batch, cabled, key_pair, link, number_of, taken, until


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def numbers(begin: int, end: int) -> list[tuple[int, int]]:
    return [(number, number) for number in range(begin, end)]


def test_items_come_in_order_and_once_and_stay_until_they_are_saved() -> None:
    with link() as one:
        sender, receiver = one.send(), one.receive()
        sender._wake_out.send(b"!!")  # as where Ctrl-C came before it was noted
        for number in range(200):
            one.retained.add(batch(number))
            sender.tell()
        assert taken(receiver, 200) == numbers(0, 200)
        assert one.retained.first == 0, "taken is not saved"
        receiver.tell_saved(150)
        until(lambda: one.retained.first == 150)
        assert one.retained.next == 200
        assert receiver.take(0.0) is None


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here: the loopback has no ::1")
def test_a_link_over_ipv6() -> None:
    with link(host="[::1]") as one:
        one.retained.add(batch(0))
        one.send()
        assert taken(one.receive(), 1) == numbers(0, 1)


def test_the_ends_may_be_opened_in_any_order() -> None:
    with link() as one:
        receiver = one.receive()
        sender = one.send()
        until(lambda: sender.connected and receiver.connected)
    with link() as one:
        one.retained.add(batch(0))
        sender = one.send()
        receiver = one.receive()
        assert taken(receiver, 1) == numbers(0, 1)


def test_no_more_are_on_their_way_than_the_window_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first item's round trip says how many; until the peer takes one, each connection carries two."""
    was_open: list[bool] = []
    sent = Window.sent

    def looked_at(window: Window, size: int, now: float) -> None:
        was_open.append(window.is_open)
        sent(window, size, now)

    monkeypatch.setattr(Window, "sent", looked_at)
    with link() as one:
        for number in range(50):
            one.retained.add(batch(number))
        sender, receiver = one.send(), one.receive()
        until(lambda: len(receiver) == 2 and sender.sent >= 2)
        receiver.tell("alive")  # and back: whatever was on the way has arrived
        receiver.tell_saved(0)
        assert (len(receiver), sender.sent, sender.window.is_open) == (2, 2, False)
        assert taken(receiver, 50) == numbers(0, 50)
        # The last may be taken before it is counted. How many the window holds by now is not asked: trips differ.
        until(lambda: sender.sent == 50 and len(sender.window) == 0)
        assert was_open == [True] * 50


@pytest.mark.parametrize("first", [0, 7, 12])
def test_a_receiving_end_that_comes_back_is_sent_what_its_snapshot_has_not(first: int) -> None:
    with link() as one:
        for number in range(20):
            one.retained.add(batch(number))
        one.send()
        receiver = one.receive()
        assert taken(receiver, 12) == numbers(0, 12)
        receiver.close(0)
        again = one.receive(first)
        assert taken(again, 20 - first) == numbers(first, 20)
        until(lambda: one.retained.first == first), "its first words say what it has saved"


def test_a_sending_end_that_comes_back_sends_again_and_what_is_there_is_dropped() -> None:
    """Its snapshot stands at 5, and keeps those from 3 on; the next stage is at 10, and has saved all before 8."""
    with link() as one:
        for number in range(10):
            one.retained.add(batch(number))
        sender, receiver = one.send(), one.receive()
        assert taken(receiver, 10) == numbers(0, 10)
        sender.close(0)
        receiver.tell_saved(8)
        again = Retained(1e9, 3, [batch(3), batch(4)])
        sender = one.send(again)
        until(lambda: sender.connected)
        for number in range(5, 15):
            again.add(batch(number))
            sender.tell()
        assert taken(receiver, 5) == numbers(10, 15)
        assert (again.first, again.next) == (8, 15)


def test_both_ends_away_at_once_and_again_and_again() -> None:
    """Each end goes back to a snapshot of its own; the items between them are those that the first one's keeps."""
    random_ = random.Random(0)
    with link() as one:
        made, saved = 0, 0  # items that the sending end has made, and its own snapshot: the number, and what it keeps
        kept: tuple[int, list[Packed]] = (0, [])
        done, done_saved = 0, 0
        end = monotonic() + LONG_S
        receiver, sender = one.receive(), one.send()
        while done < 300:
            assert monotonic() < end
            what = random_.random()
            if what < 0.55 and made < 320:
                one.retained.add(batch(made))
                sender.tell()
                made += 1
            elif what < 0.85:
                if (found := receiver.take(0.05)) is not None:
                    assert found[0] == found[1].facts["batch"] == done
                    done += 1
            elif what < 0.90:
                first, items = one.retained.all()
                saved, kept = made, (first, list(items))
            elif what < 0.95:
                done_saved = done
                receiver.tell_saved(done)
            elif what < 0.975:
                sender.close(0)
                made = saved
                sender = one.send(Retained(1e9, kept[0], kept[1]))
            else:
                receiver.close(0)
                done = done_saved
                receiver = one.receive(done)
        assert one.retained.first <= done_saved


def test_a_receiving_end_that_lost_its_snapshots_is_told_of_in_one_line() -> None:
    with link() as one:
        for number in range(5):
            one.retained.add(batch(number))
        sender, receiver = one.send(), one.receive()
        taken(receiver, 5)
        receiver.tell_saved(4)
        until(lambda: one.retained.first == 4)
        receiver.close(0)
        lost = one.receive(0)
        until(lambda: lost.failure is not None)
        assert isinstance(lost.failure, DataError)
        assert str(lost.failure) == (
            "stage 0 has no items before 4, which a snapshot here had covered, and this stage asks for 0: it has lost "
            "its newest snapshot; put its folder back, or make a new line that goes on with the run (pipeal line init "
            "--resume RUN)"
        )
        assert sender.failure is None  # it is not at fault, and waits


def test_a_stage_with_too_much_to_keep_asks_the_next_one_for_a_snapshot() -> None:
    with link() as one:
        sender, receiver = one.send(), one.receive()
        until(lambda: sender.connected)
        assert not receiver.wants_snapshot
        sender.ask_for_snapshot()
        until(lambda: receiver.wants_snapshot)
        assert receiver.take(LONG_S) is None, "what waits for items is woken"


@pytest.mark.parametrize("forward", [True, False])
def test_a_stop_passes_in_both_directions(forward: bool) -> None:
    with link() as one:
        sender, receiver = one.send(), one.receive()
        until(lambda: sender.connected and receiver.connected)
        teller, hearer = (sender, receiver) if forward else (receiver, sender)
        teller.stop("stage 7 failed: " + "x" * 5000)
        until(lambda: hearer.failure is not None)
        assert isinstance(hearer.failure, LineError)
        assert str(hearer.failure).startswith("stage 7 failed: xxx")
        assert len(str(hearer.failure)) <= 2000
        if forward:
            with pytest.raises(LineError, match="stage 7 failed"):
                receiver.take(0.0)


@pytest.mark.parametrize("forward", [True, False])
def test_a_stop_reaches_a_neighbour_that_comes_later(forward: bool) -> None:
    """It was said to nobody, and never again."""
    with link() as one:
        teller = one.send() if forward else one.receive()
        teller.stop("why")
        assert not teller.await_told(0.3)
        hearer = one.receive() if forward else one.send()
        assert teller.await_told(LONG_S)
        until(lambda: hearer.failure is not None)
        assert isinstance(hearer.failure, LineError)


@pytest.mark.parametrize("forward", [True, False])
def test_a_stop_that_was_said_is_not_heard_yet(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: on a busy machine a stage stopped its line and left, and the one before waited for it without end.
    Cause: that one had not read the word, and ZeroMQ dropped it with the connection."""
    listens, hears = Event(), Incoming if forward else Outgoing
    with cabled() as (_, cable, sender, receiver):
        until(lambda: sender.connected and receiver.connected)
        understand = hears._understand

        def understands(end: Any, *words: Any) -> None:
            assert listens.wait(LONG_S)
            understand(end, *words)

        monkeypatch.setattr(hears, "_understand", understands)
        teller, hearer = (sender, receiver) if forward else (receiver, sender)
        teller.stop("why")
        was_heard = teller.await_told(0.3)
        cable.cut()
        listens.set()
        assert not was_heard
        assert teller.await_told(LONG_S)
        assert isinstance(hearer.failure, LineError)
        hearer.stop("why")
        assert hearer.await_told(0.0), "who told it need not be told"


def test_what_was_said_last_arrives_although_the_end_is_closed_at_once() -> None:
    with link() as one:
        sender, receiver = one.send(), one.receive()
        until(lambda: sender.connected and receiver.connected)
        sender.bye()
        sender.close()
        until(lambda: receiver.bye)


def test_who_says_bye_hears_that_it_may_go_in_whatever_session() -> None:
    with cabled() as (_, cable, sender, receiver):
        until(lambda: sender.connected and receiver.connected)
        sender.bye()
        until(lambda: receiver.bye)
        assert not sender.parted
        cable.cut()
        receiver.bye = False  # it had ended before it kept that
        until(lambda: receiver.bye)
        receiver.part()
        until(lambda: sender.parted)
        assert not receiver.left
        sender.leave()
        until(lambda: receiver.left)


def test_an_item_that_was_refused_is_asked_for_although_none_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: both ends were connected, and waited. Cause: that an item was missing showed by a later one."""
    arrived, refused = Packed.arrived, Event()

    def arrives(head: Any, *rest: Any) -> Packed:
        if not refused.is_set() and head[1]["batch"] == 3:
            refused.set()
            raise RuntimeError("can't allocate memory")
        return arrived(head, *rest)

    monkeypatch.setattr(Packed, "arrived", arrives)
    with link() as one:
        for number in range(4):
            one.retained.add(batch(number))
        one.send()
        assert taken(one.receive(), 4) == numbers(0, 4)
    assert refused.is_set()


@pytest.mark.usefixtures("held_up")
def test_items_that_are_refused_twice_end_the_stage() -> None:
    """As where largest_mib was raised on one machine alone: they were refused without end, in some lines of the log."""
    with link(connections=2) as one:
        sender, receiver = one.send(), one.receive(largest_bytes=100_000)
        until(lambda: sender._over == 2)
        one.retained.add(batch(0))
        for number in (1, 2):
            one.retained.add(batch(number, elements=100_000))
        for number in range(3, 20):
            one.retained.add(batch(number))
        assert taken(receiver, 1) == numbers(0, 1)
        until(lambda: receiver.failure is not None)
        with pytest.raises(
            DataError, match=r"item [12] of stage 0 was refused twice: a tensor of an item reaches over 400000"
        ):
            receiver.take(0.0)


def test_neighbours_of_two_beginnings_are_told_apart_when_they_meet_and_later() -> None:
    with link() as one:
        receiver = one.receive(5)
        receiver.begun = "one"
        sender = one.send()
        until(lambda: sender.connected and receiver.connected)
        receiver.tell_saved(5)  # of another beginning, as the sender does not know yet
        sleep(0.3)
        one.retained.add(batch(0))
        assert one.retained.first == 0
        sender.set_begun("another")
        until(lambda: receiver.failure is not None)
        assert "stage 0 has begun the line again" in str(receiver.failure)
        receiver.close(0)
        again = one.receive(5)
        again.begun = "one"
        until(lambda: again.failure is not None)
        again.close(0)
        same = one.receive(5)
        same.begun = "another"
        until(lambda: same.connected)
        assert same.failure is None


def test_an_end_says_for_how_long_the_other_has_been_away() -> None:
    with link() as one:
        sender = one.send()
        until(lambda: sender.lost_s > 0.02)
        receiver = one.receive()
        until(lambda: sender.connected and receiver.connected)
        assert (sender.lost_s, receiver.lost_s) == (0, 0)
        receiver.close(0)
        until(lambda: sender.lost_s > 0.02)
        receiver = one.receive()
        until(lambda: receiver.connected)
        sender.close(0)
        until(lambda: receiver.lost_s > 0.02)


def test_a_second_process_that_speaks_as_the_same_stage_ends_the_first(said: list[str]) -> None:
    """The first one stood still without a word: what it sent was dropped."""
    with link() as one:
        for number in range(5):
            one.retained.add(batch(number))
        first, receiver = one.send(), one.receive()
        assert taken(receiver, 5) == numbers(0, 5)
        try:
            second = one.send(Retained(1e9, 0, [batch(number) for number in range(8)]))
            until(lambda: first.failure is not None)
            assert isinstance(first.failure, DataError)
            assert "another process speaks as stage 0 to stage 1" in str(first.failure)
            assert taken(receiver, 3) == numbers(5, 8)
            assert second.failure is None
        finally:
            first.close(0)


def test_a_connection_that_breaks_and_comes_back_ends_nothing() -> None:
    """What a cut cable does, at any byte. A connection that a process has made anew is not one of another process."""
    with cabled() as (one, cable, sender, receiver):
        for number in range(60):
            one.retained.add(batch(number, 2000))
            sender.tell()
            if number % 10 == 9:
                cable.cut()
        assert taken(receiver, 60) == numbers(0, 60)
        with cable.away():
            until(lambda: not sender.connected)
            receiver.tell_saved(60)  # there is no connection; it is said again when there is one
        until(lambda: one.retained.first == 60)
        assert sender.failure is None


def test_a_connection_that_breaks_amid_an_item_keeps_no_stage_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: stages waited for each other without end. Cause: ZeroMQ dropped the first word of the new session, as if
    it were the rest of the item."""
    monkeypatch.setattr(outgoing, "AGAIN_S", 1e9)
    send, amid, gone = zmq.Socket.send, Event(), Event()

    def held(self: zmq.Socket, data: Any, flags: int = 0, **how: Any) -> Any:
        if flags & zmq.SNDMORE and len(memoryview(data)) == FRAME_BYTES and not amid.is_set():
            amid.set()
            assert gone.wait(LONG_S)
            sender._monitors[0].poll()  # it says that the connection has broken
            sleep(0.1)  # and soon after nothing is taken any more
        return send(self, data, flags, **how)

    with link() as one:
        sender, receiver = one.send(), one.receive()
        until(lambda: sender.connected)
        monkeypatch.setattr(zmq.Socket, "send", held)
        one.retained.add(batch(0, FRAME_BYTES))
        sender.tell()
        assert amid.wait(LONG_S)
        receiver.close(0)
        gone.set()
        assert taken(one.receive(), 1) == numbers(0, 1)


@pytest.mark.parametrize("other", ["web", "key"])
def test_what_answered_at_the_address_before_keeps_no_stage_away(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: stages waited for each other without end. Cause: ZeroMQ gives up where something else answers, or where
    the key is refused, as by a stage that was started with old files."""
    monkeypatch.setattr(outgoing, "AGAIN_S", 0.3)
    with link() as one:
        one.retained.add(batch(0))
        if other == "web":
            with socket.create_server(("127.0.0.1", one.port)) as server:
                sender = one.send()
                for _ in range(2):  # given up, and tried again
                    server.settimeout(LONG_S)
                    taker, _ = server.accept()
                    with taker:
                        taker.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
                        taker.settimeout(LONG_S)
                        with suppress(ConnectionResetError):
                            while taker.recv(1000):
                                pass
        else:
            known, one.late = one.late, replace(one.late, peer=key_pair()[0])
            old, sender = one.receive(), one.send()
            until(lambda: sender._told_refused)
            old.close(0)
            one.late = known
        assert taken(one.receive(), 1) == numbers(0, 1)
        assert sender.failure is None


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send buffers hold up all connections, however many there are."""
    monkeypatch.setattr(SendBuffer, "look", lambda self, now: True)


@pytest.mark.usefixtures("held_up")
@pytest.mark.parametrize("connections", [1, 3])
def test_items_of_several_connections_come_in_order_and_once_though_single_ones_break(connections: int) -> None:
    """Whichever breaks or comes, and whenever: what was on its way over it comes again, and what came over others does
    not."""
    random_ = random.Random(connections)
    with cabled(connections=connections) as (one, cable, sender, receiver):
        until(lambda: sender.connected)
        done = 0
        for number in range(200):
            one.retained.add(batch(number, random_.choice((3, 5000))))
            sender.tell()
            if random_.random() < 0.02:
                cable.cut(random_)
            if random_.random() < 0.5 and (found := receiver.take(0.0)) is not None:
                assert found[0] == number_of(found[1]) == done
                done += 1
        assert taken(receiver, 200 - done) == numbers(done, 200)
        assert receiver.take(0.0) is None
        assert sender.failure is None
        assert receiver.failure is None
        until(lambda: len(sender.window) == 0), "no item is counted as on its way for ever"
        until(lambda: cable.count == connections)


def test_a_connection_that_is_not_held_up_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: over 80 Mbit/s and 100 ms four connections lost 17 % of their packets, and the line 18 % of its rate."""
    looks: list[float] = []
    monkeypatch.setattr(SendBuffer, "look", lambda self, now: bool(looks.append(now)))
    with cabled() as (one, cable, sender, receiver):
        for number in range(30):
            one.retained.add(batch(number, 20_000))
            sender.tell()
        assert taken(receiver, 30) == numbers(0, 30)
        until(lambda: len(looks) > 5)
        assert cable.count == 1


@pytest.mark.usefixtures("held_up")
def test_a_link_goes_on_over_the_connections_that_stand() -> None:
    """Symptom: one that came once, and never again, as behind a firewall that counts, kept a link waiting for ever."""
    with cabled() as (one, cable, sender, receiver):
        until(lambda: sender._over == 3 and sender.connected)
        cable.most = 2
        cable.cut_newest()
        for number in range(30):
            one.retained.add(batch(number, 20_000))
            sender.tell()
        assert taken(receiver, 30) == numbers(0, 30)
        assert sender._over == 2
        cable.most = 3
        until(lambda: sender._over == 3 and sender.connected)
        one.retained.add(batch(30))
        sender.tell()
        assert taken(receiver, 1) == numbers(30, 31)


def test_what_was_taken_in_an_earlier_session_is_not_said_in_a_new_one() -> None:
    """Symptom: an answer to an item of before ended the shortest round trip at nothing, and the window with it."""
    with link() as one:
        sender, receiver = one.send(), one.receive()
        one.retained.add(batch(0))
        sender.tell()
        assert taken(receiver, 1) == numbers(0, 1)
        until(lambda: sender.sent == 1 and len(sender.window) == 0)
        sender.window.sent(1, monotonic())
        receiver.tell("taken", 0.0, receiver._session - 1)
        one.retained.add(batch(1))
        sender.tell()
        assert taken(receiver, 1) == numbers(1, 2)
        receiver.tell_saved(2)
        until(lambda: one.retained.first == 2)
        assert len(sender.window) == 1, "one answer to two"


@pytest.mark.usefixtures("held_up")
def test_items_travel_over_all_connections() -> None:
    with cabled() as (one, cable, sender, receiver):
        until(lambda: cable.count == 3 and sender.connected and sender._over == 3)
        for number in range(30):
            one.retained.add(batch(number, 20_000))
        assert taken(receiver, 30) == numbers(0, 30)
        assert all(count > 10 * 80_000 for count in cable.bytes_sent()), cable.bytes_sent()


def test_a_piece_on_each_connection_arrives_within_a_heartbeat_over_half_a_megabit_per_second() -> None:
    """Symptom: over 1.6 Mbit/s a link of four connections was lost every ten seconds, and nothing arrived. Cause: four
    pieces of 512 KiB shared the rate, each took ten seconds, and a connection that brings nothing for eight is lost."""
    assert CONNECTIONS * FRAME_BYTES <= 4 * HEARTBEAT_S * 64 * 1024


def test_items_beyond_the_room_are_let_go_and_come_again() -> None:
    """The window of a peer that means well holds them back; memory is bounded where a peer does not."""
    size = batch(0, 100).size
    with link() as one:
        for number in range(40):
            one.retained.add(batch(number, 100))
        sender = one.send()
        sender.window.size = 40
        receiver = one.receive(room_bytes=3 * size)
        until(lambda: sender.connected)
        sender.window.size = 40
        sender.tell()
        until(lambda: sender.sent == 40)
        until(lambda: len(receiver))
        for number in range(40):
            # One more than there is room for, where those after it came first.
            assert receiver._waiting_bytes <= 4 * size
            assert taken(receiver, 1) == [(number, number)]


def test_a_port_in_use_is_told_in_one_line_and_leaves_no_thread() -> None:
    with link() as one:
        one.receive()
        with pytest.raises(ConfigError, match=r"the port is in use; end what listens there"):
            Incoming(1, one.address, one.late, one.line, 0, largest_bytes=1, room_bytes=1)
