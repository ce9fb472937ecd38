"""Thin packets over ranks: the bits of one process, and few bytes on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeal import Pipeline
from pipeal.core.options import PacketFormat
from pipeal.engine import SCHEDULES
from pipeal.engine.distributed.channel import Wire
from pipeal.engine.distributed.pipeline import DistributedPipeline, serve
from pipeal.engine.distributed.world import World
from pipeal.engine.inference.exit_policy import ExitPolicy

from ..cases import Case, cases, cuts, predictions_by_hand, reference
from ..test_thin_packets import batches, package
from .lines import on_each, thread_ranks, with_pipe
from .processes import run as run_processes
from .test_exactness import PAIRS, RICH, run, trained
from .test_predictions import CASE, TUPLES
from .test_replicas import EXACT, shares, state, train

KINDS: list[Any] = [kind for kind in get_args(PacketFormat) if kind != "as_is"]


@given(case=cases(), data=st.data())
@settings(max_examples=6)
def test_random_packages_on_random_ranks(case: Case, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, min(4, len(case.layers))), label="stages")
    sizes = data.draw(st.sampled_from(list(cuts(len(case.layers), stages))), label="sizes")
    schedule = data.draw(st.sampled_from(list(SCHEDULES)), label="schedule")
    kind = data.draw(st.sampled_from(KINDS), label="packet")
    with thread_ranks(stages) as worlds:
        found = run(worlds, case, schedule, sizes, packet=kind)
    assert found.differences(reference(case, kind)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [CASE, TUPLES], ids=["dynamic", "tuples"])
def test_every_way_to_predict_gives_what_one_process_gives(case: Case, kind: PacketFormat) -> None:
    inputs = [x for x, _ in case.batches()]
    wanted = [predictions_by_hand(case.build(), x, kind) for x in inputs]
    policy = ExitPolicy((0.42, 0.4, 2.0, 0.0), (1.0, 0.5, 1.0, 1.0))
    with Pipeline(case.build(), ["cpu"] * 2, threads=1, packet=kind) as pipe:
        early = list(pipe.predict_each(inputs, policy=policy))
    with thread_ranks(3) as worlds:
        packages = [case.build() for _ in worlds]

        def ask(pipe: DistributedPipeline) -> tuple[Any, Any, Any]:
            return (
                list(pipe.predict_exits(inputs)),
                list(pipe.predict_each(inputs)),
                list(pipe.predict_each(inputs, policy=policy)),
            )

        exits, last, left = with_pipe(worlds, packages, ask, packet=kind, sizes=[2, 1, 1])
    for by_exit, found, one in zip(wanted, exits, last, strict=True):
        assert all(map(torch.equal, by_exit, found))
        assert torch.equal(by_exit[-1], one)
    for found, answer in zip(left, early, strict=True):
        assert torch.equal(found.exits, answer.exits)
        assert torch.equal(found.logits, answer.logits)


def test_replicas_round_as_one_process_does() -> None:
    """A row is one sample's: a share of a batch is rounded as in the whole."""
    parts, whole = shares(EXACT, 3), EXACT.build()
    with Pipeline(whole, threads=1, seed=4, packet="int8") as pipe:
        report = pipe.run(EXACT.batches(), lambda batch: 1.0)
    with thread_ranks(4, replicas=2) as worlds:
        packages = [EXACT.build() for _ in worlds]
        (found,) = train(worlds, packages, parts, packet="int8", sizes=[2, 1])
        one, other = (state(worlds, packages, replica) for replica in range(2))
    assert one.differences(other) == []
    for mine, theirs in zip(report.losses, found.losses, strict=True):
        torch.testing.assert_close(mine[0], theirs[0])


def bytes_sent(kind: PacketFormat, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """By the kind of message, what was sent from stage to stage as payload."""
    found: dict[str, list[int]] = {}
    send = Wire.send_rows

    def counted(self: Wire, peer: int, what: str, facts: Any, form: Any, rows: Any) -> None:
        if what in ("packet", "leg") and facts.get("way", "up") == "up":
            found.setdefault(what, []).append(sum(row.nbytes for _, row in rows))
        send(self, peer, what, facts, form, rows)

    monkeypatch.setattr(Wire, "send_rows", counted)

    def work(world: World) -> None:
        chosen: dict[str, Any] = {"threads": 1, "packet": kind, "stall_timeout_s": 60.0}
        if world.rank:
            return serve(package(2, 64), world, **chosen)
        with DistributedPipeline(package(2, 64), world, **chosen) as pipe:
            pipe.run(data)
            pipe.predict(data[0][0])
        return None

    data = batches(3, wide=64)
    with thread_ranks(2) as worlds:
        on_each(worlds, work)
    monkeypatch.setattr(Wire, "send_rows", send)
    return found


def test_the_wire_carries_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {kind: bytes_sent(kind, monkeypatch) for kind in get_args(PacketFormat)}
    whole = 6 * 64 * 4
    assert sent["as_is"] == {"packet": [2 * whole] * 3, "leg": [whole]}
    assert sent["bf16"] == {"packet": [whole] * 3, "leg": [whole // 2]}
    for kind in ("int8", "int8-stochastic"):
        assert sent[kind] == {"packet": [2 * 6 * (64 + 4)] * 3, "leg": [6 * (64 + 4)]}
        assert sent[kind]["packet"][0] <= 0.27 * sent["as_is"]["packet"][0]


def line(world: World) -> list[list[str]]:
    """One pipeline after the other; what differs from one process, on rank 0."""
    found = []
    for kind in KINDS:
        for case in (RICH, PAIRS):
            left = trained(world, case.build(), case, "pipelined", packet=kind)
            found.append([] if left is None else left.differences(reference(case, kind)))
    return found


@pytest.mark.slow
def test_four_processes_leave_what_one_leaves(tmp_path: Path) -> None:
    assert run_processes(line, 4, tmp_path)[0] == [[]] * 6
