"""A wire: one kind of traffic between ranks, in order, each message with a head and the tensors of a tree.

Messages stream: so many may be on their way to a peer as its window allows
(:class:`pipeal.engine.distributed.window.Window`), which grows with the delay. So what is on its way is bounded by
who receives, and a long way costs its delay once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from pipeal.core.tree import Tree
from pipeal.core.tree_codec import Form, put_together, taken_apart
from pipeal.engine.distributed.endpoint import ANSWER, TAKEN, BrokenWireError, Endpoint, Message
from pipeal.engine.distributed.flat import Layout, check_layout, flat, row_for, unflat
from pipeal.engine.execution.channel import Stopped

__all__ = ["BrokenWireError", "Message", "Wire"]


class Wire:
    """One kind of traffic between ranks.

    Args:
        endpoint: This rank's.
        number: Tells the wires apart.
        pinned: Whether tensors are received into pinned memory, from where they go on to a GPU.
        fills: How many messages a peer takes at once into a queue of its own.
    """

    def __init__(self, endpoint: Endpoint, number: int, *, pinned: bool = False, fills: int = 0) -> None:
        self.number = number
        self._endpoint = endpoint
        self._mailbox = endpoint.mailbox(number)
        self._mailbox.fills = fills
        self._pinned = pinned
        self._sending = threading.Lock()  # nothing is sent after the last message
        self._farewelled: set[int] = set()

    def send(self, peer: int, kind: str, facts: Mapping[str, Any], tree: Tree = None) -> None:
        """Sends a message, and waits until the peer's window has room for one more.

        Args:
            peer: The rank it is for.
            kind: What it is about.
            facts: Plain values, which JSON can hold.
            tree: Its tensors are on the CPU, and must not be written to until they have been taken.

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
        layouts, sent = [layout for layout, _ in rows], [row.view(torch.uint8) for _, row in rows]
        with self._sending:
            if peer in self._farewelled:
                raise Stopped
            with self._mailbox.changed:  # before it can be taken
                window = self._mailbox.windows[peer]
                window.sent(sum(row.numel() for row in sent), monotonic())
            try:
                self._endpoint.send(peer, self.number, [kind, facts, form, layouts, True], sent)
            except BaseException:
                with self._mailbox.changed:
                    window.withdraw()  # it is not on its way
                raise
        self._wait(lambda: window.is_open, [peer])

    def post(self, peer: int, kind: str, facts: Mapping[str, Any], *, last: bool = False) -> None:
        """Sends a message without a tree, and waits for nothing. For a peer that always receives.

        Args:
            peer: As for :meth:`send`, as are ``kind`` and ``facts``.
            kind: What it is about.
            facts: Plain values.
            last: Whether the peer receives no more after it: any later :meth:`send` would wait for ever.

        Raises:
            BrokenWireError: The peer is gone.
        """
        with self._sending:
            if last:
                self._farewelled.add(peer)
            self._endpoint.send(peer, self.number, [kind, facts, None, [], False])

    def receive(self, peers: Collection[int]) -> Message:
        """Waits for the head of the next message. Its body must follow: :meth:`body` or :meth:`drop`.

        Args:
            peers: The ranks one of which sends it.

        Raises:
            BrokenWireError: One of them is gone.
            Stopped: This rank has closed its connections.
        """
        messages = self._mailbox.messages
        message: Message = self._wait(lambda: bool(messages), peers, messages.popleft)
        if not message.layouts:
            self.drop(message)
        return message

    def body(self, message: Message) -> Tree:
        """The tree of a message.

        Raises:
            DataError: It holds a class that is not known here, or its tensors are not what its head says.
        """
        for layout, frame in zip(message.layouts, message.frames, strict=True):
            check_layout(layout, len(frame.buffer))
        rows = [row_for(layout, pinned=self._pinned) for layout in message.layouts]
        for row, frame in zip(rows, message.frames, strict=True):
            if row.numel():  # not by PyTorch, which would copy with as many threads as the layers have
                row.view(torch.uint8).numpy()[:] = frame.buffer
        self.drop(message)
        tensors = [unflat(layout, row) for layout, row in zip(message.layouts, rows, strict=True)]
        return put_together(message.form, tensors)

    def drop(self, message: Message) -> None:
        """Lets go of a message: its tensors were copied, or are not wanted, or there is no memory for them."""
        if message.counts and not message.taken:
            with suppress(BrokenWireError):  # what a rank that is gone has sent is taken all the same
                self._endpoint.send(message.source, self.number, [TAKEN, monotonic() - message.at])
        message.taken, message.frames = True, ()

    def answer(self, peer: int, yes: bool) -> None:
        """Lets the sender of a message, which waits in :meth:`hear_answer`, know whether to go on; raises as that."""
        self._endpoint.send(peer, self.number, [ANSWER, yes])

    def hear_answer(self, peer: int) -> bool:
        """Waits for what the receiver of a message says to it.

        Raises:
            BrokenWireError: The peer is gone.
        """
        answers = self._mailbox.answers
        return bool(self._wait(lambda: bool(answers), [peer], answers.popleft))

    def _wait(self, ready: Callable[[], bool], peers: Collection[int], take: Callable[[], Any] = lambda: None) -> Any:
        """Waits until it is so, and takes it; what had come before a peer was gone is still taken."""
        mailbox = self._mailbox
        with mailbox.changed:
            while not ready():
                if mailbox.is_closed:
                    raise Stopped
                if (broken := self._endpoint.broken(peers)) is not None:
                    peer, said = broken
                    raise BrokenWireError(said, peer)
                mailbox.changed.wait()
            return take()
