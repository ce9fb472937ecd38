"""The processes of a run: met, compared, watched, and left in order; in between they speak by collectives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pipeal.core.errors import PeerLostError, PipealError, exit_code, first_line
from pipeal.engine.distributed.attempt_store import POLL_S, AttemptStore
from pipeal.engine.distributed.collectives import Collectives
from pipeal.engine.distributed.consistency import code_hash, require_same
from pipeal.engine.distributed.endpoint import LAST_MESSAGES_S, BrokenWireError, Endpoint
from pipeal.engine.distributed.heartbeat import Heartbeat
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.peers import Peer, address_of, interface_towards

_LINGER_S = 15.0
"""When something has failed: how long the others wait for rank 0 to have left, and whoever hosts the store for the
others to have read the last words in it."""

_FOR_EVER = timedelta(days=30)
"""The process groups' own timeout: whether a peer lives is known better here."""


class World(Collectives):
    """All processes of a run, seen from one of them. Opened by :func:`open_world`.

    Attributes:
        launch: What this process was told at its start.
        attempt: Tells this try at the run from those before and after it, which may still be ending.
        store: For whoever builds process groups; a connection of its own.
        attempts: What outlives this attempt; None where the store ends with it.
    """

    def __init__(
        self,
        launch: Launch,
        heartbeat: Heartbeat,
        store: dist.Store,
        attempt: str = "0",
        attempts: AttemptStore | None = None,
    ) -> None:
        super().__init__(heartbeat)
        self.launch = launch
        self.attempt = attempt
        self.store = store
        self.attempts = attempts
        self._has_groups = False
        self._endpoint: Endpoint | None = None
        self._wires = 0

    def meet(self, facts: Mapping[str, Any], let_in: Callable[[], None] = lambda: None) -> None:
        """Waits until all are there, compares what they are about to do, and watches them from then on.

        Args:
            facts: As for :func:`open_world`.
            let_in: Called until all are there.

        Raises:
            PeerLostError: Somebody did not come.
            ConfigError: The facts differ.
        """
        until = monotonic() + self.timeout_s
        same = {"torch": torch.__version__, "the code of pipeal": code_hash(), **facts}
        own = {"peer": asdict(Peer.self()), "facts": same}
        self._heartbeat.call(lambda line: line.set(f"here/{self.rank}", json.dumps(own)))
        keys = [f"here/{rank}" for rank in range(self.size)]

        def look(line: dist.Store) -> list[int]:
            return [rank for rank, key in enumerate(keys) if not line.check([key])]

        while missing := self._heartbeat.call(look):
            if monotonic() > until:
                raise self._absent(missing)
            let_in()
            time.sleep(POLL_S)
        given = [json.loads(one) for one in self._heartbeat.call(lambda line: line.multi_get(keys))]
        self.peers = [Peer(**one["peer"]) for one in given]
        self._heartbeat.watch(self.peers)
        require_same([one["facts"] for one in given])

    def open_groups(self) -> None:
        """Opens the process group of ``torch.distributed`` for all ranks, over Gloo, of which other groups are made, if
        it is not open. All ranks call it at the same time; it takes some 17 round trips.

        Raises:
            PeerLostError: As :meth:`together`.
        """
        if self._has_groups:
            return
        interface = interface_towards(self.launch.address, loopback=self.launch.local_size == self.size)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        store, rank, size = dist.PrefixStore("groups", self.store), self.rank, self.size
        open_all = partial(dist.init_process_group, "gloo", store=store, rank=rank, world_size=size, timeout=_FOR_EVER)
        self.together("connecting all ranks over Gloo", open_all)
        self._has_groups = True

    @property
    def endpoint(self) -> Endpoint:
        """What messages between ranks go through; all ranks ask for it first at the same time.

        Raises:
            PeerLostError: As :meth:`together`.
        """
        if self._endpoint is None:
            near = self.launch.local_size == self.size
            # As Gloo does: the interface that was named, or the one towards rank 0; rank 0's machine goes by the name
            # by which all reach the store.
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
            own = address_of(interface or interface_towards(self.launch.address, loopback=near))
            hosts = (own, own) if own is not None else ("*", self.launch.address)
            self._endpoint = Endpoint(self.rank, self.gather, near=near, hosts=hosts, timeout_s=self.timeout_s)
            self.together("connecting the ranks", self._endpoint.connect)
        return self._endpoint

    def wire_numbers(self, count: int) -> range:
        """Numbers for wires that had none before; all ranks ask for as many, in the same order."""
        first = self._wires
        self._wires += count
        return range(first, self._wires)

    def one_lost(self, among: Collection[int], error: BaseException) -> PeerLostError:
        """As :meth:`peer_lost`, where one of several ranks is behind a connection that broke."""
        until = time.monotonic() + self.patience_s
        while not self.lost.wait(POLL_S) and time.monotonic() < until:
            if (found := self.endpoint.broken(among)) is not None:
                return self.peer_lost(found[0], error)
        return self.peer_lost(None, error)

    def explained(self, error: BaseException) -> BaseException:
        """As :meth:`peer_lost`, where a wire broke; any other error as it is."""
        return self.peer_lost(error.peer, error) if isinstance(error, BrokenWireError) else error

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Raises :class:`PeerLostError` where a wire breaks within, or a connection of a process group."""
        try:
            yield
        except BrokenWireError as error:
            raise self.explained(error) from error
        except RuntimeError as error:
            # Gloo has no class of its own for it, but says in which of its files.
            if "gloo/transport" in str(error) or isinstance(error, dist.DistBackendError):
                raise self.peer_lost(None, error) from error
            raise

    def pass_on(self, signal: int) -> None:
        """Tells rank 0 of a signal that asks this process to end; waits for nothing, and may be called by a handler."""
        self._heartbeat.asked = signal, monotonic()

    def on_signal(self, heard: Callable[[int], None]) -> None:
        """On rank 0, has a function called with the first signal that another rank passes on, on another thread."""
        self._heartbeat.on_asked = heard

    def fail(self, error: BaseException) -> None:
        """Lets the others know why this process ends before its time; does nothing when it leaves in order."""
        root = error if isinstance(error, PeerLostError) else None
        why, rank = (str(root), root.rank) if root else (first_line(error), self.rank)
        self._say_end({"rank": rank, "why": why, "code": exit_code(error)}, _LINGER_S)

    def leave(self) -> None:
        """Leaves in order: the others no longer expect anything from here. A second time does nothing.

        Whoever hosts the store waits until all others have left as well, or are lost.

        Raises:
            PeerLostError: A rank is lost.
        """
        self.close()
        if self._has_groups:
            self._has_groups = False
            self.guarded(dist.destroy_process_group, self.timeout_s, "closing the process groups")
        self._say_end({"left": True}, self.timeout_s)

    def close(self) -> None:
        """Closes the connections for messages; those sent last still arrive."""
        if self._endpoint is not None:
            self._endpoint.close(LAST_MESSAGES_S)

    def _say_end(self, note: Mapping[str, Any], linger_s: float) -> None:
        """The first word counts; the store is kept until the others have had time to read it."""
        with suppress(PipealError, RuntimeError):  # nobody is left to be told
            self._heartbeat.farewell(json.dumps(note))
            if self.rank == 0 and not self.launch.hosted:
                self._heartbeat.linger(range(self.size), linger_s)

    def _let_rank_0_go_first(self) -> None:
        """Who starts processes ends all of them when one ends, and rank 0 has more to put in order than the others."""
        if self.rank:
            with suppress(PipealError, RuntimeError):
                self._heartbeat.linger([0], _LINGER_S)

    def _absent(self, missing: list[int]) -> PeerLostError:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return PeerLostError(
            f"{ranks} of {self.size} did not come within {self.timeout_s:g} s to {self.launch.address}:"
            f"{self.launch.port}; see why on their machines, or give them longer (engine.peer_timeout_s)",
            missing[0],
        )


@contextmanager
def open_world(
    launch: Launch,
    facts: Mapping[str, Any],
    *,
    replicas: int = 1,
    timeout_s: float = 60.0,
) -> Iterator[World]:
    """Meets the other processes of a run, compares what they are about to do, and watches them.

    An exception that leaves the block is told to the others, who then raise :class:`PeerLostError` with it.

    Args:
        launch: Who this process is.
        facts: What must be the same on all ranks, by name, as JSON; versions and the code itself are compared too.
        replicas: How many of the mesh there are.
        timeout_s: How long to wait for the others at the start, and how long one may be silent then.

    Raises:
        PlacementError: The replicas do not divide the ranks.
        PeerLostError: Somebody did not come, or the store where all meet cannot be reached.
        ConfigError: The facts differ; every rank says in what.
    """
    mesh = Mesh.of_world(launch.size, replicas)
    attempt_store = AttemptStore(launch, timeout_s)
    heartbeat = Heartbeat(attempt_store.connect(), launch.rank, mesh, timeout_s, attempt_store.where)
    attempts = attempt_store if launch.hosted else None
    world = World(launch, heartbeat, attempt_store.connect(), attempt_store.attempt, attempts)
    heartbeat.start()
    try:
        world.meet(facts, attempt_store.answer)
        _ = world.endpoint  # from now on any rank may use it alone
        yield world
        world.leave()
    except BaseException as error:
        world.fail(error)
        world._let_rank_0_go_first()
        raise
    finally:
        world.close()
        heartbeat.stop()
        del attempt_store  # and with it the store, where it is hosted here
