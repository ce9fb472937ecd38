"""Ranks that meet, speak, and are lost: whatever happens to one, all others know it by name, and no wait is endless."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from threading import Event, Timer
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from pipeal.core.errors import ConfigError, Interrupted, PeerLostError
from pipeal.engine.distributed import heartbeat as heartbeat
from pipeal.engine.distributed.endpoint import BrokenWireError
from pipeal.engine.distributed.heartbeat import Loss
from pipeal.engine.distributed.launch import Launch
from pipeal.engine.distributed.peers import Peer, _state, is_gone
from pipeal.engine.distributed.world import World, open_world
from tests.engine.distributed.ranks import TIMEOUT_S, Wire, each, rank_of, ranks, store_port

SOON_S = 10 * TIMEOUT_S


def lost(world: World) -> str:
    """What a rank says of the loss that it comes to know."""
    assert world.lost.wait(SOON_S)
    with pytest.raises(PeerLostError) as found:
        world.check()
    return str(found.value)


def test_what_rank_0_tells_all_others_hear_in_order_and_what_all_give_all_get() -> None:
    with ranks(3) as worlds:

        def speak(world: World) -> list[object]:
            said: list[object] = [{"begin": 1}, [2, None], "three"]
            if world.rank:
                return [world.hear() for _ in said]
            for one in said:
                world.tell(one)
            return said

        first, *others = each(worlds, speak)
        assert all(other == first for other in others)
        assert each(worlds, lambda world: world.gather(world.rank**2)) == [[0, 1, 4]] * 3


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (BrokenWireError("the peer has gone", 3), 3),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1"),
            None,
        ),
        (RuntimeError("no such file: /data/gloo/x.pt"), "as it is"),
        (ConfigError("see GLOO_SOCKET_IFNAME"), "as it is"),
    ],
)
def test_only_connections_that_broke_are_told_as_a_lost_rank(error: Exception, rank: object) -> None:
    """Symptom: an error of a layer that merely named Gloo was told a minute later, as a connection that had broken."""
    world: Any = SimpleNamespace(peer_lost=lambda rank, error: PeerLostError(f"{rank}: {error}", rank))
    world.explained = partial(World.explained, world)
    with pytest.raises((PeerLostError, type(error))) as found, World.naming_lost(world):
        raise error
    if rank == "as it is":
        assert found.value is error
    else:
        assert (type(found.value), found.value.rank, found.value.__cause__) == (PeerLostError, rank, error)


@pytest.mark.slow
def test_a_signal_that_one_rank_gets_reaches_rank_0_once() -> None:
    with ranks(3) as worlds:
        heard: list[int] = []
        worlds[0].on_signal(heard.append)
        worlds[1].pass_on(15)
        worlds[2].pass_on(15)
        until = monotonic() + SOON_S
        while not heard and monotonic() < until:
            sleep(0.02)
        sleep(3 * worlds[0]._heartbeat.every_s)
        assert heard == [15]


def test_ranks_that_are_about_to_do_different_things_all_say_the_same_of_it() -> None:
    with store_port() as port, rank_of(0, 2, port) as zero, rank_of(1, 2, port) as one:
        errors = each([zero, one], lambda world: world.meet({"train.seed": world.rank, "model.name": "lstm"}))
        assert all(isinstance(error, ConfigError) for error in errors)
        assert str(errors[0]) == str(errors[1])
        assert str(errors[0]).startswith("rank 1 has train.seed 1, rank 0 has 0; ")


@pytest.mark.slow
def test_whoever_does_not_come_is_named_on_every_rank() -> None:
    with (
        store_port() as port,
        rank_of(0, 4, port, timeout_s=TIMEOUT_S) as zero,
        rank_of(2, 4, port, timeout_s=TIMEOUT_S) as two,
    ):
        begin = monotonic()
        for error in each([zero, two], lambda world: world.meet({})):
            assert isinstance(error, PeerLostError)
            assert f"ranks 1, 3 of 4 did not come within {TIMEOUT_S:g} s to 127.0.0.1:{port}" in str(error)
        assert monotonic() - begin < SOON_S


def test_a_store_that_nobody_hosts_is_told_within_the_timeout() -> None:
    launch = Launch(1, 2, 1, 2, "127.0.0.1", 1, hosted=True)
    wanted = r"rank 0 cannot be reached: nobody answers at 127\.0\.0\.1:1 within 1 s"
    with pytest.raises(PeerLostError, match=wanted), open_world(launch, {}, timeout_s=1.0):
        pass


@pytest.mark.parametrize("which", [0, 2])
def test_a_rank_that_fails_says_why_before_it_leaves(which: int) -> None:
    with ranks(4, replicas=2) as worlds:
        begin = monotonic()
        worlds[which].fail(ValueError("too wide\nby far"))
        for world in worlds:
            if world.rank != which:
                assert lost(world).endswith(
                    f"{world.mesh.name_of(which)} on {world.peers[0].host} ended: ValueError: too wide"
                )
        assert monotonic() - begin < SOON_S


def test_a_chain_of_failures_names_its_first_and_ends_with_its_code() -> None:
    with ranks(3) as worlds:
        worlds[1].fail(PeerLostError("rank 2 (stage 2) broke off", 2, 143))
        assert lost(worlds[0]) == lost(worlds[2]) == "rank 2 (stage 2) broke off"
        with pytest.raises(PeerLostError) as found:
            worlds[0].check()
        assert (found.value.rank, found.value.code) == (2, 143)


def test_a_rank_that_falls_silent_is_lost_after_the_timeout() -> None:
    with ranks(3, timeout_s=TIMEOUT_S) as worlds:
        worlds[2]._heartbeat.stop()
        begin = monotonic()
        for world in worlds[:2]:
            assert f"rank 2 (stage 2) on {world.peers[2].host} has given no sign of life" in lost(world)
        assert 0.5 * TIMEOUT_S < monotonic() - begin < SOON_S


def test_a_process_that_is_gone_from_this_machine_is_lost_at_once() -> None:
    with ranks(3) as worlds:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            one = replace(worlds[0].peers[1], pid=process.pid, born=_born(process.pid))
            peers = [worlds[0].peers[0], one, worlds[0].peers[2]]
            for world in (worlds[0], worlds[2]):
                world._heartbeat.watch(peers)
            assert not is_gone(one)
            worlds[0].check()
        for world in (worlds[0], worlds[2]):
            assert f"ended: without a word; its process {one.pid} is gone" in lost(world)


def test_the_number_of_a_process_that_was_given_again_is_not_the_process() -> None:
    me = Peer.self()
    assert not is_gone(me)
    assert is_gone(replace(me, born="1"))
    assert not is_gone(replace(me, born="1", machine="another"))


@pytest.mark.slow
def test_whoever_left_in_order_is_not_lost() -> None:
    with ranks(3, timeout_s=TIMEOUT_S) as worlds:
        worlds[1].leave()
        worlds[1]._heartbeat.stop()
        assert not worlds[0].lost.wait(2 * TIMEOUT_S)
        worlds[2].check()


def test_who_still_waits_for_a_rank_that_left_in_order_is_told() -> None:
    """It is no loss, so that nothing ended the wait."""
    with ranks(3) as worlds:
        worlds[1].leave()
        for error in each([worlds[0], worlds[2]], lambda world: world.gather("who else?")):
            assert isinstance(error, PeerLostError)
            assert str(error).startswith(f"rank 1 (stage 1) on {worlds[0].peers[1].host} has left")
        worlds[0].leave()
        with pytest.raises(PeerLostError, match=r"rank 0 \(stage 0\) on .* has left"):
            worlds[2].hear()


def test_what_a_rank_gave_before_it_left_counts() -> None:
    with ranks(2) as worlds:
        worlds[0].tell("leave")
        worlds[0].leave()
        assert worlds[1].hear() == "leave"


def test_whoever_hosts_the_store_waits_for_all_but_the_lost_to_have_read_why() -> None:
    """Symptom: rank 0 said that rank 1 was lost, and left with the store; rank 2 then said that rank 0 was lost."""
    with patch.object(heartbeat, "_LAST_WORDS_S", SOON_S), ranks(3) as worlds:
        worlds[0]._heartbeat.conclude(Loss(1, "rank 1 is silent"))
        begin = monotonic()
        worlds[0]._heartbeat.farewell('{"left": true}')
        Timer(0.5, worlds[2].leave).start()
        worlds[0]._heartbeat.linger(range(3), 600)
        assert worlds[2].store.get("end/2") != b"-"
        assert monotonic() - begin < SOON_S  # and not for rank 1


@pytest.mark.slow
def test_a_machine_too_busy_to_look_in_time_knows_of_a_silent_rank_nevertheless() -> None:
    """Symptom: on a machine where every look around came a second late, nobody was ever lost."""
    with patch.object(heartbeat, "_TICK_S", 1.2), ranks(2, timeout_s=TIMEOUT_S) as worlds:
        worlds[1]._heartbeat.stop()
        assert "has given no sign of life" in lost(worlds[0])


@pytest.mark.slow
def test_what_all_ranks_do_together_has_a_limit_and_names_who_is_not_done_with_it() -> None:
    """Symptom: behind a firewall that drops what it does not know, a run stood still at its start for two hours."""
    blocked = Event()
    with ranks(3, timeout_s=TIMEOUT_S) as worlds:
        errors = each(worlds, lambda world: world.together("connecting", blocked.wait if world.rank else bool))
        blocked.set()
        assert errors[0] is False
        for error in errors[1:]:
            assert isinstance(error, PeerLostError)
            assert f"connecting was not done within {TIMEOUT_S:g} s; not done with it: rank 1 (stage 1)" in str(error)
            assert "rank 2 (stage 2)" in str(error)
            assert "rank 0" not in str(error)
        assert [error.rank for error in errors[1:]] == [2, 1]  # type: ignore[union-attr]


def test_what_fails_together_names_who_is_not_done_with_it() -> None:
    def refuse() -> None:
        raise RuntimeError("Connection refused\nby far")

    with ranks(2) as worlds:
        first, second = each(worlds, lambda world: world.together("connecting", refuse if world.rank else bool))
        assert first is False
        assert "connecting failed: RuntimeError: Connection refused; not done with it: rank 1 " in str(second)


@pytest.mark.slow
def test_behind_a_wire_that_is_cut_both_sides_name_the_other() -> None:
    """Nothing breaks: packets just stop, and the thread that speaks with the store waits in a system call."""
    with store_port() as port:
        wire = Wire(port)
        try:
            with (
                rank_of(0, 2, port, timeout_s=TIMEOUT_S) as zero,
                rank_of(1, 2, wire.port, timeout_s=TIMEOUT_S) as one,
            ):
                each([zero, one], lambda world: world.meet({}))
                wire.cut()
                begin = monotonic()
                near, far = each([zero, one], lambda world: world.gather("at last"))
                assert monotonic() - begin < SOON_S
                assert "rank 1 (stage 1)" in str(near)
                assert "no sign of life" in str(near)
                assert "rank 0 (stage 0)" in str(far)
                assert f"has not answered for {TIMEOUT_S:g} s" in str(far)
                wire.close()
        finally:
            wire.close()


def test_a_store_that_goes_away_is_the_loss_of_rank_0() -> None:
    with store_port() as port:
        wire = Wire(port)
        with rank_of(0, 2, port) as zero, rank_of(1, 2, wire.port) as one:
            each([zero, one], lambda world: world.meet({}))
            wire.close()
            assert "rank 0 (stage 0)" in lost(one)


def test_a_store_that_says_nothing_of_its_error_is_the_loss_of_rank_0() -> None:
    """Symptom: an IndexError, of a text that has no first line."""
    with ranks(2) as worlds, patch.object(worlds[1]._heartbeat, "_beat", side_effect=RuntimeError()):
        assert lost(worlds[1]).endswith("gave up the connection (RuntimeError)")


def test_who_asked_the_store_as_it_went_away_is_told_of_that_loss() -> None:
    """Symptom: now and then the store's own error, with all its stack: the thread that knew better was not yet done."""

    def ask(line: object) -> None:
        raise RuntimeError("Connection reset")

    with ranks(2) as worlds:
        calm, conclude = worlds[1]._heartbeat, worlds[1]._heartbeat.conclude
        late = patch.object(calm, "conclude", lambda loss: (sleep(0.3), conclude(loss)))
        with late, pytest.raises(PeerLostError, match=r"gave up the connection \(RuntimeError: Connection reset\)"):
            calm.call(ask)


def test_a_broken_connection_is_blamed_on_what_its_peer_said() -> None:
    with patch.object(World, "patience_s", SOON_S), ranks(2) as worlds:  # as a user has it, a busy machine is too late
        worlds[1].fail(Interrupted("asked to end", 143))
        blamed = worlds[0].peer_lost(1, RuntimeError("Connection closed by peer"))
        assert "rank 1 (stage 1)" in str(blamed)
        assert str(blamed).endswith("ended: Interrupted: asked to end")
        assert blamed.code == 143
        assert str(blamed.__cause__) == "Connection closed by peer"


def test_what_may_block_for_ever_is_given_up_when_a_peer_is_lost() -> None:
    blocked = Event()
    with ranks(2) as worlds:
        worlds[1].fail(ValueError("no"))
        with pytest.raises(PeerLostError):
            worlds[0].guarded(blocked.wait)
        blocked.set()


def _born(pid: int) -> str:
    found = _state(pid)
    assert found is not None
    return found[1]
