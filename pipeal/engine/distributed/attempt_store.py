"""How the ranks of one attempt find each other in a store that outlives attempts, such as the one torchrun hosts.

::

    knock/<rank>    a word that a rank draws when it comes; the next attempt's replaces it
    let in/<word>   the attempt's name, which rank 0 draws, and answers whoever knocks with
    run             the folder of the run that rank 0 has begun, for later attempts

What an earlier attempt said to its ranks is never taken for this one's: no rank has its words any more. That torchrun
counts its restarts would not do: each machine's counts its own.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from uuid import uuid4

import torch.distributed as dist

from pipeal.core.background import in_background
from pipeal.core.errors import ConfigError, PeerLostError, first_line
from pipeal.engine.distributed.launch import Launch

POLL_S = 0.05
"""How often one who waits for others looks into the store."""

_LATE_S = 5.0
"""How much later than its timeout the store may say itself why it cannot be reached."""

_LOOK_S = 1.0
"""How long a look whether anybody listens at the store's port may take."""


class AttemptStore:
    """The way into an attempt.

    Args:
        launch: Who this process is.
        timeout_s: How long to wait for the store, and for rank 0.

    Attributes:
        attempt: The attempt's name, the same on every rank.

    Raises:
        ConfigError: The store cannot be hosted where the launch says.
        PeerLostError: The store cannot be reached, or rank 0 does not come.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self._launch = launch
        self._timeout_s = timeout_s
        self._server = None if launch.hosted or launch.rank else self._connected(serve=True)
        self._store = self._connected()
        self._answered: dict[int, bytes] = {}
        self.attempt = self._let_in() if launch.rank else uuid4().hex[:12]

    @property
    def where(self) -> str:
        """The store's address."""
        return f"{self._launch.address}:{self._launch.port}"

    def connect(self) -> dist.Store:
        """A connection to the store, which shows this attempt's keys only; raises as this class."""
        return dist.PrefixStore(f"pipeal/{self.attempt}", self._connected())

    def answer(self) -> None:
        """Lets in who has knocked; rank 0 does so until all are there.

        Raises:
            PeerLostError: The store cannot be reached.
        """
        if self._launch.rank == 0:
            with self._reached():
                for rank in range(1, self._launch.size):
                    self._let_other_in(rank)

    def keep_run(self, folder: str) -> None:
        """Lets later attempts know which run this one has begun; raises as :meth:`answer`."""
        with self._reached():
            self._store.set("pipeal/run", folder)

    def kept_run(self) -> str | None:
        """The folder of the run that an earlier attempt has begun, if one has; raises as :meth:`answer`."""
        with self._reached():
            return self._store.get("pipeal/run").decode() if self._store.check(["pipeal/run"]) else None

    def _let_other_in(self, rank: int) -> None:
        if self._store.check([f"pipeal/knock/{rank}"]):
            word = self._store.get(f"pipeal/knock/{rank}")
            if self._answered.get(rank) != word:
                self._store.set(f"pipeal/let in/{word.decode()}", self.attempt)
                self._answered[rank] = word

    def _let_in(self) -> str:
        word, until = uuid4().hex, monotonic() + self._timeout_s
        with self._reached():
            self._store.set(f"pipeal/knock/{self._launch.rank}", word)
        while True:
            with self._reached():
                if self._store.check([f"pipeal/let in/{word}"]):
                    return str(self._store.get(f"pipeal/let in/{word}").decode())
            if monotonic() > until:
                raise PeerLostError(
                    f"rank 0 of {self._launch.size} did not come within {self._timeout_s:g} s to {self.where}; see "
                    "why on its machine, or give it longer (engine.peer_timeout_s)",
                    0,
                )
            sleep(POLL_S)

    def _connected(self, *, serve: bool = False) -> dist.Store:
        to, timeout = self._launch, timedelta(seconds=self._timeout_s)
        make = partial(dist.TCPStore, to.address, to.port, to.size, serve, timeout=timeout, wait_for_workers=False)
        # Left behind where something accepts the connection and says nothing: the store's timeout does not end that.
        made = in_background(make, "pipeal-store")
        with self._reached(serve=serve):
            if not wait([made], self._timeout_s + _LATE_S).done:
                raise RuntimeError(self._silence())
            return made.result()

    def _silence(self) -> str:
        """Why nothing has come of the store: where its port is closed it tries again, past its timeout."""
        try:
            socket.create_connection((self._launch.address, self._launch.port), _LOOK_S).close()
        except ConnectionRefusedError as error:
            return f"nobody listens there: {error.strerror}"
        except OSError as error:  # such as a firewall's silence
            return f"it cannot be reached: {error.strerror or error}"
        return "no store: it accepts connections and says nothing"

    @contextmanager
    def _reached(self, *, serve: bool = False) -> Iterator[None]:
        """Says in words what the store says within, which is often nothing but a line of C++."""
        try:
            yield
        except RuntimeError as error:
            said = f"{first_line(error):.200}"
            if serve:
                raise ConfigError(f"cannot meet at {self.where}: {said}; choose another --master-port") from error
            who = "rank 0" if self._launch.rank else "the store"  # which torchrun hosts, if not rank 0 itself
            raise PeerLostError(
                f"{who} cannot be reached: nobody answers at {self.where} within {self._timeout_s:g} s ({said})",
                0 if self._launch.rank else None,
            ) from error
