"""Who has no key, and whatever a peer may send: refused in bounded words, while the training goes on untouched."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq

from pipeal import __version__
from pipeal.engine.distributed.sockets import HEAD_BYTES
from pipeal.line.items import BEGIN, KINDS, Item, Packed
from pipeal.line.link import Keys
from tests.line.frames import Frame
from tests.line.links import LINE, LONG_S, Link, batch, key_pair, link, taken, until

MESSAGES = 10_000
LINES = 14
"""The first ten refusals, and the 100th, 1,000th and 10,000th; a word about a peer that comes or goes."""


class Speaker:
    """A socket with which a test says what it likes, with any keys or none."""

    def __init__(self, kind: int, keys: Keys | None, *, serves: bool = False) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            if serves:
                self.socket.curve_server = True
            else:
                self.socket.curve_serverkey = keys.peer.encode()

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> list[bytes]:
        assert self.socket.poll(int(1000 * LONG_S))
        found: list[bytes] = self.socket.recv_multipart()
        return found

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@contextmanager
def speaker(kind: int, keys: Keys | None, address: str, *, serves: bool = False) -> Iterator[Speaker]:
    made = Speaker(kind, keys, serves=serves)
    (made.socket.bind if serves else made.socket.connect)(f"tcp://{address}")
    try:
        yield made
    finally:
        made.close()


def stranger(one: Link, how: str) -> Any:
    """Something that tries to get in."""
    unknown = Keys(*key_pair(), one.early.peer)
    wrong = Keys(one.early.public, one.early.secret, key_pair()[0])
    keys = {"no key": None, "an unknown key": unknown, "the wrong server's key": wrong}[how]
    return speaker(zmq.DEALER, keys, one.address)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("no key", "a connection without this stage's key, or without any, was refused"),
        ("an unknown key", "a connection with an unknown key"),
        ("the wrong server's key", "a connection without this stage's key, or without any, was refused"),
        ("no ZeroMQ", "a connection of something that is no stage of this line was refused"),
    ],
)
def test_a_stranger_is_refused_in_one_line_and_the_line_goes_on(how: str, told: str, said: list[str]) -> None:
    with link() as one:
        sender, receiver = one.send(), one.receive()
        for number in range(10):
            one.retained.add(batch(number))
        assert taken(receiver, 10) == [(number, number) for number in range(10)]
        if how == "no ZeroMQ":
            with socket.create_connection(("127.0.0.1", one.port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
                until(lambda: any(told in line for line in said))
        else:
            with stranger(one, how) as other:
                other.socket.reconnect_ivl = -1
                other.socket.send(greeting(1)[0])
                until(lambda: any(told in line for line in said))
        assert sum(told in line for line in said) == len(said), said
        for number in range(10, 20):
            one.retained.add(batch(number))
            sender.tell()
        assert taken(receiver, 10) == [(number, number) for number in range(10, 20)]


def test_a_stranger_that_tries_for_ever_fills_no_log(said: list[str]) -> None:
    with link() as one:
        receiver = one.receive()
        unknown = Keys(*key_pair(), one.early.peer)
        for count in range(120):
            with speaker(zmq.DEALER, unknown, one.address):
                until(lambda count=count: receiver.refusals._count > count)  # type: ignore[misc]
        assert 11 <= len(said) <= LINES
        assert said[10].endswith("100 were refused so far, and not all are told")


def test_a_server_with_another_key_is_sent_nothing(said: list[str]) -> None:
    """Somebody has taken the address of stage 1, or its file was made anew."""
    with link() as one:
        one.retained.add(batch(0))
        other = Keys(*key_pair(), one.early.public)
        with speaker(zmq.ROUTER, other, one.address, serves=True) as server:
            sender = one.send()
            until(lambda: said)
            assert not server.socket.poll(500)
            assert not sender.connected
        assert len(said) == 1
        assert said[0].startswith(f"stage 1 at {one.address} refuses this stage's key, or has another one; both need")
        assert taken(one.receive(), 1) == [(0, 0)]


@pytest.mark.parametrize(("line", "stage"), [("another line", 0), (LINE, 1), (LINE, 2)])
def test_a_stage_of_another_line_or_another_place_is_refused(line: str, stage: int, said: list[str]) -> None:
    """With the keys of this one: the files of a line were mixed up."""
    with link() as one:
        one.line = line
        sender = one.send(stage=stage)
        receiver = one.receive(line=LINE)
        until(lambda: said)
        assert f"stage {stage} of the line {line!r} came, stage 0 of {LINE!r} was expected" in said[0]
        assert not receiver.connected
        assert not sender.connected


def test_another_version_is_told_and_taken(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.line.outgoing.__version__", "9.9\nfake line")
    with link() as one:
        one.retained.add(batch(0))
        one.send()
        assert taken(one.receive(), 1) == [(0, 0)]
    assert said[0] == f"stage 0 has pipeal '9.9\\nfake line', this one {__version__}: bits may differ"


def test_old_messages_of_an_earlier_connection_are_dropped() -> None:
    with link() as one:
        receiver = one.receive()
        with speaker(zmq.DEALER, one.early, one.address) as peer:
            peer.say(*greeting(4))
            until(lambda: receiver.connected)
            for session in (3, 5, 0):
                peer.say(*item(0, session=session))
                peer.say(json.dumps(["stop", session, "a word from elsewhere"]).encode())
            for _ in range(3):  # and what is said again
                peer.say(*item(0, session=4))
            peer.say(*item(1, session=4))
            assert taken(receiver, 2) == [(0, 0), (1, 1)]
            assert receiver.take(0.0) is None
            assert receiver._waiting_bytes == 0
            assert receiver.failure is None


def test_a_greeting_that_comes_late_takes_no_link_away(said: list[str]) -> None:
    """Symptom: what a connection still had on its way when it broke came after its successor's greeting, and the stage
    before ended, since "another process speaks as stage 0"."""
    with link() as one:
        receiver = one.receive()
        with (
            speaker(zmq.DEALER, one.early, one.address) as late,
            speaker(zmq.DEALER, one.early, one.address) as live,
        ):
            late.say(*greeting(9, sessions=1))
            assert heard(late, "want") == [9, 0]
            live.say(*greeting(20, sessions=2))
            assert heard(live, "want") == [20, 0]
            late.say(*greeting(10, sessions=1))
            late.say(*item(0, 20))
            assert taken(receiver, 1) == [(0, 0)]
            live.say(*greeting(30, life=8, sessions=1))  # that process has ended; another one came
            assert heard(live, "replaced") == [20]
            assert heard(live, "want") == [30, 1]
            late.say(*greeting(11, sessions=3))
            assert heard(late, "replaced") == [11]
            live.say(*item(1, 30))
            assert taken(receiver, 1) == [(1, 1)]
            assert not said


def test_a_next_stage_that_says_anything_is_not_away() -> None:
    """Symptom: where a session waited for much that was on its way, a stage with wait_s ended as if it were alone."""
    with link() as one, speaker(zmq.ROUTER, one.late, one.address, serves=True) as peer:
        sender = one.send()
        who, _ = peer.hear()
        sender._lost_at -= 1000.0
        assert sender.lost_s > 900.0
        peer.say(who, json.dumps(["alive", 1]).encode())
        until(lambda: sender.lost_s < 900.0)
        assert not sender.connected


def test_an_item_that_comes_before_another_waits_for_it() -> None:
    with link() as one:
        receiver = one.receive()
        with (
            speaker(zmq.DEALER, one.early, one.address) as first,
            speaker(zmq.DEALER, one.early, one.address) as second,
        ):
            first.say(*greeting(1, connections=2))
            assert heard(first, "want") == [1, 0]
            for number in (1, 3, 5, 9):  # 7 was refused, or lost
                second.say(*item(number))
            assert heard(first, "again") == [1]
            assert len(receiver) == 0
            for number in (0, 2):
                first.say(*item(number))
            assert taken(receiver, 4) == [(number, number) for number in range(4)]
            first.say(*greeting(2, connections=2))
            assert heard(first, "want") == [2, 4]
            second.say(*item(5, 1))  # of the session before
            first.say(*item(4, 2))
            assert taken(receiver, 1) == [(4, 4)]
            assert receiver.take(0.0) is None
            second.say(*item(5, 2))
            assert taken(receiver, 1) == [(5, 5)]
            assert receiver._waiting_bytes == 0


def test_items_far_ahead_without_a_tensor_fill_no_memory() -> None:
    """Symptom: a peer that left one out filled memory with the heads of others, which no stage ever takes. Cause: bytes
    of tensors alone counted as room."""
    with link() as one:
        receiver = one.receive(room_bytes=50_000)
        with speaker(zmq.DEALER, one.early, one.address) as peer:
            peer.say(*greeting(1, connections=2))
            facts = {"begun": "", "asked": "x" * 20_000, "config": "", "blueprint": {}, "facts": {}, "batches": 0}
            packed = Packed.of(Item(BEGIN, facts, {}))
            for number in range(1, 20, 2):
                peer.say(json.dumps(["item", 1, number, *packed.head()]).encode())
            peer.say(*item(0))
            assert taken(receiver, 1) == [(0, 0)]
            assert len(receiver._early) + len(receiver) == 2
            for number in (2, 4):
                peer.say(*item(number))
            assert [found[0] for _ in range(4) if (found := receiver.take(LONG_S)) is not None] == [1, 2, 3, 4]
            assert heard(peer, "again") == [1]


def heard(peer: Speaker, kind: str) -> list[Any]:
    """What a peer is told of that kind, next."""
    while (words := json.loads(peer.hear()[0]))[0] != kind:
        pass
    return list(words[1:])


def greeting(
    session: int, connections: int = 1, *, life: int = 7, sessions: int | None = None, begun: str | None = None
) -> list[bytes]:
    """A life's so many-th session; by default as many as its number says."""
    words = ["hello", session, LINE, 0, __version__, connections, life, sessions or session, begun]
    return [json.dumps(words).encode()]


def item(number: int, session: int = 1, **changes: Any) -> list[bytes]:
    packed = batch(number)
    words = ["item", session, number, *packed.head()]
    return [json.dumps(words).encode(), *(bytes(frame) for frame in packed.frames())]


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, 10**400, -(2**63), 0.5, 1e308, float("nan"), float("inf"), "", "x" * 50,
    "\x00\x1b[2J\n", "float32", "T", [], [[]], {}, {"a": {}}, ["t"], ["T"], ["v", "cuda"], ["y", "float32"], ["b", "="],
    ["r", "os:system", ["x", 1]], ["p", "a:b", None],
)  # fmt: skip
"""What JSON can hold and is not what should be there."""


def mutated(draw: random.Random, value: Any) -> Any:
    """A value with something in it replaced, left out or doubled."""
    if isinstance(value, list) and value and draw.random() < 0.8:
        at, made = draw.randrange(len(value)), list(value)
        how = draw.random()
        if how < 0.15:
            del made[at]
        elif how < 0.3:
            made.insert(at, draw.choice(JUNK))
        else:
            made[at] = mutated(draw, made[at])
        return made
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        made = dict(value)
        if draw.random() < 0.3:
            del made[key]
        else:
            made[key] = mutated(draw, made[key])
        return made
    return draw.choice(JUNK)


def fuzz(draw: random.Random, expected: int, session: int) -> list[bytes]:
    """A message that is none, or one that must not change anything; ``expected`` is the item that comes next."""
    head, *frames = item(expected, session)
    words = json.loads(head)
    how = draw.randrange(12)
    if how == 0:
        return [draw.randbytes(draw.randrange(200)), *frames]
    if how == 1:
        return [b"[" * draw.choice((10, 1000, 100_000))]
    if how == 2:
        return [json.dumps(draw.choice(JUNK)).encode(), *frames]
    if how == 3:  # frames that are missing, too many, or too long
        return [head, *draw.choice(([], frames[:1], [*frames, b"1"], [frames[0], frames[1] + b"1"], [b"", b""]))]
    if how == 4:  # numbers of long ago and of never
        return item(draw.choice((0, expected - 1, expected // 2)), session) if expected else [b""]
    if how == 5:
        words[2] = draw.choice((expected + 1, expected + 10**6, 2**62, -1, -(2**40), str(expected), float("nan")))
        return [json.dumps(words).encode(), *frames]
    if how == 6:
        return item(expected, draw.choice((session + 1, session - 1, -1, 2**40)))
    if how == 7:  # spread over as much memory as there is, or repeated without end
        far = draw.choice(([[3], [2**45], 3], [[3, 2**45], [1, 0], 3], [[2**62, 0, 2**62], None, 3], [[3], [-1], 3]))
        words[6][0] = ["float32", *far]
        return [json.dumps(words).encode(), *frames]
    if how == 8:
        kind = draw.choice(
            (*KINDS, "hello", "status", "taken", "want", "saved", "alive", "replaced", "begun", "x", None)
        )
        return [json.dumps([kind, session, *(draw.choice(JUNK) for _ in range(draw.randrange(4)))]).encode()]
    if how == 9 and draw.random() < 0.05:
        return [b'["item",' + b"1," * (HEAD_BYTES // 2) + b"1]"]
    if how == 10:  # a form that nests as deep as one may, and one that torch itself refuses
        words[5] = draw.choice((nested(draw.choice((60, 300, 800))), ["t", ["T"], ["T"], ["v", "nowhere"]]))
        return [json.dumps(words).encode(), *frames]
    while (found := mutated(draw, words)) == words:
        pass
    return [json.dumps(found).encode(), *frames]


def nested(levels: int) -> list[Any]:
    form: list[Any] = ["T"]
    for _ in range(levels):
        form = ["t", form, ["T"]]
    return form


def is_harmless(frames: list[bytes]) -> bool:
    """Whether a word is none that a peer may say to end or change the line, which any one that has the key can."""
    try:
        words = json.loads(frames[0])
        return not (isinstance(words, list) and words and words[0] in ("stop", "bye", "save"))
    except (ValueError, RecursionError):
        return True


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError


@pytest.mark.parametrize(
    ("seed", "messages"), [(0, 1000), *(pytest.param(seed, MESSAGES, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_what_a_known_peer_sends_harms_neither_items_nor_memory(seed: int, messages: int, said: list[str]) -> None:
    """10,000 messages of a stage with the right key, on its own connection; every 50th is the item that comes next.

    Several ended the thread at the socket: RuntimeError of a device or a shape that torch refuses; as much memory as
    two elements far apart say they need; a status as long as a head may be.
    """
    draw, session = random.Random(seed), 1
    with link() as one:
        receiver = one.receive(largest_bytes=4 * HEAD_BYTES)  # a head that is too long is read, and refused
        with speaker(zmq.DEALER, one.early, one.address) as peer:
            peer.say(*greeting(session))
            begin = 0.0
            for count in range(messages):
                expected = receiver._expected
                if count % 50 == 49:
                    peer.say(*item(expected, session))
                    assert taken(receiver, 1) == [(expected, expected)]
                else:
                    frames = fuzz(draw, expected, session)
                    if is_harmless(frames) and not takes_it(frames, expected, session):
                        peer.say(*frames)
                if count == messages // 10:
                    begin = resident_mib()
            expected = receiver._expected
            peer.say(*item(expected, session))
            assert taken(receiver, 1) == [(expected, expected)]
        assert expected == messages // 50
        assert receiver.is_alive()
        assert receiver.failure is None
        assert resident_mib() - begin < 64
        assert receiver.refusals._count > messages // 2
        refusals = [line for line in said if "was refused" in line]
        assert 11 <= len(refusals) <= LINES
        assert all("\n" not in line and line.isprintable() and len(line) < 400 for line in said)


def takes_it(frames: list[bytes], expected: int, session: int) -> bool:
    """Whether fuzz has by chance made an item that is one, such as one with another learning rate."""
    try:
        words = json.loads(frames[0])
        if words[:3] != ["item", session, expected]:
            return False
        Packed.arrived(words[3:], list(map(Frame, frames[1:])), 4 * HEAD_BYTES)
        return True
    except Exception:  # noqa: BLE001  the same that the thread at the socket must bear
        return False


def test_too_large_a_frame_or_head_ends_that_connection_alone() -> None:
    with link() as one:
        receiver = one.receive(largest_bytes=HEAD_BYTES)
        with speaker(zmq.DEALER, one.early, one.address) as peer:
            peer.say(*greeting(1))
            until(lambda: receiver.connected)
            peer.say(*item(0))
            assert taken(receiver, 1) == [(0, 0)]
            events = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.say(*item(1), bytes(2 * HEAD_BYTES))
            assert events.poll(int(1000 * LONG_S)), "the connection is closed before the frame is read"
            peer.socket.disable_monitor()
            events.close(0)
        one.retained.add(batch(0))
        one.retained.add(batch(1))
        one.send()
        assert taken(receiver, 1) == [(1, 1)]


def test_what_the_next_stage_says_harms_nothing(said: list[str]) -> None:
    """10,000 words of a stage with the right key to the one before."""
    draw = random.Random(0)
    with link() as one:
        for number in range(20):
            one.retained.add(batch(number))
        with speaker(zmq.ROUTER, one.late, one.address, serves=True) as peer:
            sender = one.send()
            who, head = peer.hear()
            session = json.loads(head)[1]
            peer.say(who, json.dumps(["want", session, 3]).encode())
            peer.say(who, json.dumps(["saved", session, 3]).encode())
            until(lambda: sender.connected)
            began = monotonic()
            for _ in range(MESSAGES):
                kind = draw.choice(("want", "taken", "saved", "alive", "x", None, 7, []))
                words: Any = [kind, session, *(draw.choice(JUNK) for _ in range(draw.randrange(4)))]
                if kind == "want":
                    words = ["want", session, draw.choice((-1, "0", 2**70, True, None, 5.0))]
                elif kind == "saved":
                    words = ["saved", session, draw.choice((-1, "0", 2**70, True, None, 10**6, 2**61))]
                peer.say(who, draw.choice((json.dumps(words).encode(), draw.randbytes(30), b"[" * 10_000)))
                if sender.failure is not None:
                    break
            peer.say(who, json.dumps(["saved", session, 4]).encode())
            until(lambda: one.retained.first == 4 or sender.failure is not None)
            assert sender.failure is None
            assert sender.is_alive()
            assert one.retained.next == 20
            assert monotonic() - began < LONG_S
        assert 11 <= sum("was refused" in line for line in said) <= LINES
        assert taken(one.receive(4), 16) == [(number, number) for number in range(4, 20)]
