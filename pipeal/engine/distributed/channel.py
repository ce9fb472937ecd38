"""A wire: messages between ranks over a gloo group, in order, each a head and the tensors of a tree.

::

    head    one frame of 512 bytes with a JSON text, or its length and the text behind it
    body    each tensor by itself, from and into the memory where it lies, in pieces of at most 4 MiB: whoever has no
            memory for it takes it all the same, piece after piece into one that was put by

A send ends when the receiver has taken the message, so that what is on its way is bounded by who receives. Nothing is
polled: whoever waits here for a certain peer waits in gloo, which knows at once when that peer's process ends; whoever
waits for any is told of no peer's end. Such waits belong on threads of their own.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeal.core.errors import first_line
from pipeal.core.tree import Tree
from pipeal.core.tree_codec import Form, put_together, taken_apart
from pipeal.engine.distributed.flat import Layout, bytes_of, flat, row_for, unflat
from pipeal.engine.execution.channel import Stopped

FRAME = 512
_PIECE = 1 << 22
_LENGTH = 4
_TAGS = 4  # of a frame, of a text that does not fit into it, of tensors, of an answer
_EVER = timedelta(days=365)  # gloo's own limit would end a wait for the next batch of a slow loader
_POSTED = 256
_PATIENCE_S = 5.0


class BrokenWireError(Exception):
    """A peer is gone.

    Args:
        said: What the connection said.
        peer: Its rank; None where any might have sent.
    """

    def __init__(self, said: str, peer: int | None) -> None:
        super().__init__(said)
        self.peer = peer


@dataclass
class Message:
    """What was received.

    Attributes:
        kind: What it is about.
        facts: Plain values.
        source: The rank it is from.
        form: Describes its tree.
        layouts: Of the tensors that follow.
        taken: Whether those were received.
    """

    kind: str
    facts: Mapping[str, Any]
    source: int
    form: Form = None
    layouts: list[Layout] = field(default_factory=list)
    taken: bool = False


class Wire:
    """One kind of traffic between ranks.

    Args:
        group: A gloo group of all ranks.
        number: Tells the wires of a group apart.
        pinned: Whether tensors are received into pinned memory, from where they go on to a GPU.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, *, pinned: bool = False) -> None:
        self.group = group
        self._tag = 1 + _TAGS * number
        self._pinned = pinned
        self._scrap = torch.empty(_PIECE, dtype=torch.uint8)  # now: when it is needed there may be no memory left
        self._sending = threading.Lock()
        self._farewelled: set[int] = set()
        self._posted: deque[tuple[Any, int, Tensor]] = deque()

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree = None) -> None:
        """Sends a message and waits until it has been taken; from one thread at a time, others wait.

        Args:
            peer: The rank it is for.
            kind: What it is about.
            facts: Plain values, which JSON can hold.
            tree: Its tensors are on the CPU, and nobody writes to them meanwhile.

        Raises:
            DataError: The tree holds what cannot be sent; nothing was.
            Stopped: The peer has had the last message, and receives no more.
            BrokenWireError: The peer is gone.
        """
        form, tensors = taken_apart(tree)
        self.send_rows(peer, kind, facts, form, [flat(tensor) for tensor in tensors])

    def send_rows(
        self, peer: int, kind: str, facts: Mapping[str, Any], form: Form, rows: Sequence[tuple[Layout, Tensor]]
    ) -> None:
        """As :meth:`send`, of a tree that was taken apart and whose tensors are rows on the CPU already."""
        frame, text = _framed(kind, facts, form, [layout for layout, _ in rows])
        with self._sending:
            if peer in self._farewelled:
                raise Stopped
            works = [self._isend(frame, peer, 0)]
            if text is not None:
                works.append(self._isend(text, peer, 1))
            works += [self._isend(piece, peer, 2) for _, row in rows for piece in _pieces(row)]
            for work in works:
                _wait(work, peer)

    def post(self, peer: int, kind: str, facts: Mapping[str, Any], *, last: bool = False) -> None:
        """Sends a message without a tree, and does not wait for it. For a peer that always receives.

        Args:
            peer: As for :meth:`send`, as are ``kind`` and ``facts``.
            kind: What it is about.
            facts: Plain values.
            last: Whether the peer receives no more after it: any later :meth:`send` would wait for ever.

        Raises:
            BrokenWireError: The peer is gone, or does not take what came before.
        """
        if not self._sending.acquire(timeout=_PATIENCE_S):
            raise BrokenWireError(f"a message before it was not taken within {_PATIENCE_S:g} s", peer)
        try:
            if last:
                self._farewelled.add(peer)
            for part, row in enumerate(_framed(kind, facts, None, [])):
                if row is not None:
                    self._posted.append((self._isend(row, peer, part), peer, row))
            if len(self._posted) > _POSTED:
                self._settle(_PATIENCE_S, _POSTED // 2)
        finally:
            self._sending.release()

    def settle(self, within_s: float) -> None:
        """Waits until all that was posted has been taken.

        Raises:
            BrokenWireError: A peer is gone, or has not taken it in time.
        """
        with self._sending:
            self._settle(within_s, 0)

    def _settle(self, within_s: float, but: int) -> None:
        """Of all but the last few. A send of gloo cannot be asked whether it is done, and breaks when it is waited for
        no longer: another thread waits."""
        due = [self._posted.popleft() for _ in range(len(self._posted) - but)]
        broken: list[BrokenWireError] = []
        waited_for: int | None = None  # to be named when there is no more time

        def wait() -> None:
            nonlocal waited_for
            try:
                for work, waited_for, _ in due:
                    _wait(work, waited_for)
            except BrokenWireError as error:
                broken.append(error)

        waiting = threading.Thread(target=wait, name="pipeal-settling", daemon=True)
        waiting.start()
        waiting.join(within_s)
        if broken:
            raise broken[0]
        if waiting.is_alive():
            raise BrokenWireError(f"messages were not taken within {within_s:g} s", waited_for)

    def receive(self, peer: int | None) -> Message:
        """Waits for the head of the next message, of a rank or of any. Its body must follow: :meth:`body`
        or :meth:`drop`.

        Raises:
            BrokenWireError: The peer is gone.
        """
        frame = torch.empty(FRAME, dtype=torch.uint8)
        if peer is None:
            with breaking(None):
                work: Any = self.group.recv_anysource([frame], self._tag)
            _wait(work, None)
            source = int(work._source_rank())
        else:
            _wait(self._irecv(frame, peer, 0), peer)
            source = peer
        raw = frame.numpy().tobytes()
        length = int.from_bytes(raw[:_LENGTH], "little")
        if length <= FRAME - _LENGTH:
            text = raw[_LENGTH : _LENGTH + length]
        else:
            row = torch.empty(length, dtype=torch.uint8)
            _wait(self._irecv(row, source, 1), source)
            text = row.numpy().tobytes()
        kind, facts, form, layouts = json.loads(text)
        return Message(kind, facts, source, form, layouts)

    def body(self, message: Message) -> Tree:
        """Receives the tensors of a message, and gives its tree.

        Raises:
            DataError: It holds a class that is not known here.
            BrokenWireError: The peer is gone.
        """
        rows = [row_for(layout, pinned=self._pinned) for layout in message.layouts]
        message.taken = True  # and not before there is memory: somebody has to receive them
        for work in [self._irecv(piece, message.source, 2) for row in rows for piece in _pieces(row)]:
            _wait(work, message.source)
        tensors = [unflat(layout, row) for layout, row in zip(message.layouts, rows, strict=True)]
        return put_together(message.form, tensors)

    def drop(self, message: Message) -> None:
        """Receives the tensors of a message that nobody wants, or that there is no memory for; takes none itself.

        Raises:
            BrokenWireError: The peer is gone.
        """
        message.taken = True
        for layout in message.layouts:
            for left in range(bytes_of(layout), 0, -_PIECE):
                _wait(self._irecv(self._scrap[:left], message.source, 2), message.source)

    def answer(self, peer: int, yes: bool) -> None:
        """Lets the sender of a message, which waits in :meth:`hear_answer`, know whether to go on; raises as that."""
        _wait(self._isend(torch.tensor([yes]), peer, 3), peer)

    def hear_answer(self, peer: int) -> bool:
        """Waits for what the receiver of a message says to it.

        Raises:
            BrokenWireError: The peer is gone.
        """
        said = torch.empty(1, dtype=torch.bool)
        _wait(self._irecv(said, peer, 3), peer)
        return bool(said)

    def _isend(self, row: Tensor, peer: int, part: int) -> Any:
        with breaking(peer):
            return self.group.send([row], peer, self._tag + part)

    def _irecv(self, row: Tensor, peer: int, part: int) -> Any:
        with breaking(peer):
            return self.group.recv([row], peer, self._tag + part)


@contextmanager
def breaking(peer: int | None) -> Iterator[None]:
    """Raises what a connection says within as a :class:`BrokenWireError`."""
    try:
        yield
    except RuntimeError as error:
        raise BrokenWireError(first_line(error), peer) from error


def _wait(work: Any, peer: int | None) -> None:
    with breaking(peer):
        work.wait(_EVER)


def _pieces(row: Tensor) -> Iterator[Tensor]:
    """A row as bytes, in the order in which they travel."""
    return (piece for piece in row.view(torch.uint8).split(_PIECE) if piece.numel())


def _framed(kind: str, facts: Mapping[str, Any], form: Form, layouts: list[Layout]) -> tuple[Tensor, Tensor | None]:
    """A head as a frame, and the text behind it where that is too long."""
    text = json.dumps([kind, facts, form, layouts], separators=(",", ":")).encode()
    begin = len(text).to_bytes(_LENGTH, "little")
    if len(text) <= FRAME - _LENGTH:
        return torch.frombuffer(bytearray((begin + text).ljust(FRAME, b"\0")), dtype=torch.uint8), None
    frame = torch.frombuffer(bytearray(begin.ljust(FRAME, b"\0")), dtype=torch.uint8)
    return frame, torch.frombuffer(bytearray(text), dtype=torch.uint8)
