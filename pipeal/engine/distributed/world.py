"""The processes of a run: met, compared, watched, and left in order."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import torch.distributed as dist

from pipeal.engine.distributed.facts import own_facts, require_same
from pipeal.engine.distributed.heart import Heart
from pipeal.engine.distributed.interface import interface_towards
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.mesh import Mesh
from pipeal.engine.distributed.peers import Peer
from pipeal.errors import ConfigError, PeerLostError, PipealError, exit_code, first_line

T = TypeVar("T")

_POLL_S = 0.05
_LINGER_S = 5.0
"""How long whoever hosts the store waits for the others to have read the last words in it."""

_GO_FIRST_S = 15.0
"""How long the others wait for rank 0 to have left, when something has failed."""

_FOR_EVER = timedelta(days=30)
"""The process groups' own timeout: whether a peer lives is known better here."""


class World:
    """All processes of a run, seen from one of them. Opened by :func:`open_world`.

    Attributes:
        rank: This one's number.
        size: How many there are.
        mesh: Who is which stage of which replica.
        launch: What this process was told at its start.
        timeout_s: How long a peer may be silent before it counts as lost.
        store: For whoever builds process groups; a connection of its own.
        lost: Set as soon as a peer is known to be lost; :meth:`check` then says which.
        peers: The processes, by rank.
    """

    def __init__(self, launch: Launch, mesh: Mesh, timeout_s: float, heart: Heart, store: dist.Store) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self.mesh = mesh
        self.launch = launch
        self.timeout_s = timeout_s
        self.store = store
        self.lost = heart.lost
        self.peers: list[Peer] = []
        self._heart = heart
        self._gathered = self._said = 0
        self._has_groups = False

    @property
    def name(self) -> str:
        """This process as messages name it."""
        return self.mesh.name_of(self.rank)

    def meet(self, facts: Mapping[str, Any]) -> None:
        """Waits until all are there, compares what they are about to do, and watches them from then on.

        Raises:
            PeerLostError: Somebody did not come.
            ConfigError: The facts differ.
        """
        until, missing = monotonic() + self.timeout_s, list(range(self.size))
        self._heart.call(lambda line: line.set(f"here/{self.rank}", "1"))
        while missing := [rank for rank in missing if not self._is_here(rank)]:
            if monotonic() > until:
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                raise PeerLostError(
                    f"{ranks} of {self.size} did not come within {self.timeout_s:g} s to {_where(self.launch)}; see "
                    "why on their machines, or give them longer (engine.peer_timeout_s)",
                    missing[0],
                )
            time.sleep(_POLL_S)
        given = self.gather({"peer": asdict(Peer.self()), "facts": own_facts(facts)})
        self.peers = [Peer(**other["peer"]) for other in given]
        self._heart.watch(self.peers)
        require_same([other["facts"] for other in given])

    def open_groups(self, cuda: bool) -> None:
        """Opens the process groups of ``torch.distributed``: Gloo between CPUs, and NCCL between GPUs."""
        if self.launch.local_size == self.size:
            interface = interface_towards(self.launch.address)
        else:
            interface = interface_towards(self.launch.address, loopback=False)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

        def open_groups() -> None:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo",
                store=dist.PrefixStore("groups", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=_FOR_EVER,
            )

        self.guarded(open_groups)
        self._has_groups = True

    @property
    def patience_s(self) -> float:
        """How long it may take until the end of a peer is known, where its machine still runs: some heartbeats."""
        return min(4 * self._heart.every_s, self.timeout_s)

    def check(self) -> None:
        """Returns while all peers live, as far as is known; never waits.

        Raises:
            PeerLostError: One does not.
        """
        self._heart.check()

    def blame(self, rank: int, error: BaseException) -> PeerLostError:
        """The error to raise where a connection to a peer broke: what is known of that peer's end, if it said why.

        Waits for its word a few heartbeats long.

        Args:
            rank: The peer at the other end.
            error: What the connection said.
        """
        if self.lost.wait(self.patience_s):
            try:
                self.check()
            except PeerLostError as known:
                known.__cause__ = error
                return known
        where = f" on {self.peers[rank].host}" if self.peers else ""
        lost = PeerLostError(f"the connection to {self.mesh.name_of(rank)}{where} broke: {first_line(error)}", rank)
        lost.__cause__ = error
        return lost

    def guarded(self, work: Callable[[], T]) -> T:
        """Does on a thread of its own what may block for ever, such as making a process group.

        The thread is left behind, blocked, when a peer is lost.

        Raises:
            PeerLostError: A peer was lost before it was done.
            Exception: What ``work`` raised.
        """
        found: list[T] = []
        failed: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:  # noqa: BLE001  raised where it was called
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=run, name=f"pipeal-guarded-{self.rank}", daemon=True).start()
        while not done.wait(_POLL_S):
            self.check()
        if failed:
            raise failed[0]
        return found[0]

    def tell(self, message: Any) -> None:
        """Says something, as JSON, that every other rank is to :meth:`hear`; for rank 0."""
        self._said += 1
        key, text = f"said/{self._said}", json.dumps(message)
        self._heart.call(lambda line: line.set(key, text))

    def hear(self) -> Any:
        """Waits for the next thing that rank 0 tells; for all others.

        Raises:
            PeerLostError: A peer was lost before.
        """
        self._said += 1
        return json.loads(self._get(f"said/{self._said}"))

    def gather(self, value: Any) -> list[Any]:
        """What all ranks give here, as JSON, by rank; all of them must call it, in the same order.

        Raises:
            PeerLostError: A peer was lost before it gave its own.
        """
        self._gathered += 1
        text, keys = json.dumps(value), [f"given/{self._gathered}/{rank}" for rank in range(self.size)]
        self._heart.call(lambda line: line.set(keys[self.rank], text))
        return [json.loads(self._get(key)) for key in keys]

    def pass_on(self, signal: int) -> None:
        """Tells rank 0 of a signal that asks this process to end; waits for nothing, and may be called by a handler."""
        self._heart.asked = signal, monotonic()

    def on_signal(self, heard: Callable[[int], None]) -> None:
        """On rank 0, has a function called with the first signal that another rank passes on, on another thread."""
        self._heart.on_asked = heard

    def fail(self, error: BaseException) -> None:
        """Lets the others know why this process ends before its time; does nothing when it leaves in order."""
        root = error if isinstance(error, PeerLostError) else None
        why, rank = (str(root), root.rank) if root else (first_line(error), self.rank)
        self._say_end({"rank": rank, "why": why, "code": exit_code(error)})

    def leave(self) -> None:
        """Leaves in order: the others no longer expect anything from here. A second time does nothing."""
        if self._has_groups:
            self._has_groups = False
            self.guarded(dist.destroy_process_group)
        self._say_end({"left": True})

    def _say_end(self, note: Mapping[str, Any]) -> None:
        """The first word counts; the store is kept until the others have had time to read it."""
        with suppress(PipealError, RuntimeError):  # nobody is left to be told
            self._heart.farewell(json.dumps(note))
            if self.rank == 0 and not self.launch.hosted:
                self._heart.linger(range(self.size), _LINGER_S)

    def _let_rank_0_go_first(self) -> None:
        """Who starts processes ends all of them when one ends, and rank 0 has more to put in order than the others."""
        if self.rank:
            with suppress(PipealError, RuntimeError):
                self._heart.linger([0], _GO_FIRST_S)

    def _get(self, key: str) -> str:
        while True:
            found = self._heart.call(lambda line: line.get(key) if line.check([key]) else None)
            if found is not None:
                return str(found.decode())
            self.check()
            time.sleep(_POLL_S)

    def _is_here(self, rank: int) -> bool:
        return self._heart.call(lambda line: line.check([f"here/{rank}"]))


@contextmanager
def open_world(
    launch: Launch,
    facts: Mapping[str, Any],
    *,
    replicas: int = 1,
    cuda: bool = False,
    timeout_s: float = 60.0,
) -> Iterator[World]:
    """Meets the other processes of a run, compares what they are about to do, and watches them.

    An exception that leaves the block is told to the others, who then raise :class:`PeerLostError` with it.

    Args:
        launch: Who this process is.
        facts: What must be the same on all ranks, by name, as JSON; versions and the code itself are compared too.
        replicas: How many of the mesh there are.
        cuda: Whether tensors travel between GPUs as well, one for each process of a machine.
        timeout_s: How long to wait for the others at the start, and how long one may be silent then.

    Raises:
        PlacementError: The replicas do not divide the ranks, or there are fewer GPUs than processes.
        PeerLostError: Somebody did not come, or the store where all meet cannot be reached.
        ConfigError: The facts differ; every rank says in what.
    """
    mesh = Mesh.of_world(launch.size, replicas)
    server = None
    if launch.rank == 0 and not launch.hosted:
        server = _connect(launch, timeout_s, serve=True)
    heart = Heart(_connect(launch, timeout_s), launch.rank, mesh, timeout_s, _where(launch))
    world = World(launch, mesh, timeout_s, heart, _connect(launch, timeout_s))
    heart.start()
    try:
        try:
            world.meet(facts)
            world.open_groups(cuda)
            yield world
        except BaseException as error:
            world.fail(error)
            world._let_rank_0_go_first()
            raise
        world.leave()
    finally:
        heart.stop()
        del server


def _connect(launch: Launch, timeout_s: float, *, serve: bool = False) -> dist.Store:
    """A connection to the store; a run that was started again does not see what the one before left there."""
    try:
        store = dist.TCPStore(
            launch.address,
            launch.port,
            launch.size,
            serve,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if serve:
            raise ConfigError(f"cannot meet at {_where(launch)}: {said:.200}; choose another --master-port") from error
        raise PeerLostError(
            f"rank 0 cannot be reached: nobody answers at {_where(launch)} within {timeout_s:g} s ({said:.200})", 0
        ) from error
    return dist.PrefixStore(f"pipeal/{launch.attempt}", store)


def _where(launch: Launch) -> str:
    return f"{launch.address}:{launch.port}"
