"""Two machines with a cable between them: the cable is cut, then a machine loses all its processes; nothing is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from time import monotonic, sleep

import pytest

from pipeal.cli import text
from tests.integration.netns import Machine, machines, why_not
from tests.integration.processes import LONG_S, checkpoints, environment, held_texts, torchrun, until
from tests.integration.test_distributed import one_process, texts
from tests.integration.test_resume import assert_same

TIMEOUT_S = 15.0
MARGIN_S = 180.0
"""For the process to end, and for torchrun to see it, on a machine that has other things to do."""


@dataclass(frozen=True)
class Node:
    """torchrun on a machine, and the file of its words."""

    machine: Machine
    process: Popen[str]
    log: Path


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with machines() as made:
        yield made


@contextmanager
def job(two: list[Machine], folder: Path, *arguments: str) -> Iterator[list[Node]]:
    """torchrun on either machine."""
    folder.mkdir()
    with ExitStack() as open_now:
        nodes = []
        for number, machine in enumerate(two):
            log = folder / f"{machine.name}.txt"
            words = open_now.enter_context(log.open("w"))
            where = ("--nnodes=2", f"--node-rank={number}", f"--master-addr={two[0].address}", "--master-port=29500")
            command = [*torchrun(1, *where), *arguments]
            said = {"stdout": words, "stderr": words, "env": environment(PYTHONFAULTHANDLER="1")}
            nodes.append(Node(machine, machine.start(*command, **said), log))
        try:
            yield nodes
        finally:
            for machine in two:
                machine.kill_all()
            for node in nodes:
                node.process.wait()


@pytest.mark.slow
def test_a_job_over_two_machines_survives_both(
    two: list[Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (*texts(tmp_path, "lstm"), "--epochs=12", f"--set=engine.peer_timeout_s={TIMEOUT_S}")
    alone = one_process(text.command, capsys, tmp_path / "alone", *arguments)
    folder = tmp_path / "many" / alone.name
    script, gate = held_texts(tmp_path, epochs=6)  # and the job after it later, with batches to save before
    command = (str(script), *arguments, f"--out={tmp_path / 'many'}")
    here, there = two

    def until_it_saves(nodes: list[Node], before: set[str]) -> None:
        until(lambda: checkpoints(folder) - before or any(node.process.poll() is not None for node in nodes))
        assert all(node.process.poll() is None for node in nodes), [node.log.read_text() for node in nodes]

    with job(two, tmp_path / "first", *command) as nodes:
        until_it_saves(nodes, set())
        there.unplug()
        gate.touch()
        near, far = (ended(node) for node in nodes)
        assert re.search(r"pipeal: rank 0: rank 1 \(stage 1\) on there has given no sign of life for 15 s", near), near
        assert re.search(r"pipeal: rank 1: rank 0 \(stage 0\) on here cannot be reached: .* not answered for 15 s", far)
    there.plug_in()

    gate.unlink()
    held_texts(tmp_path, epochs=12)
    before = checkpoints(folder)
    with job(two, tmp_path / "second", *command) as nodes:
        until_it_saves(nodes, before)
        there.kill_all()
        gate.touch()
        near = ended(nodes[0])
        assert re.search(r"pipeal: rank 0: .*rank 1 \(stage 1\) on there", near), near
        assert "AL goes on after " in near

    there.run("mount", "-t", "tmpfs", "none", str(tmp_path / "many"))  # no file system that both see
    with job(two, tmp_path / "third", *command) as nodes:
        for node in nodes:
            assert node.process.wait(LONG_S) == 0, node.log.read_text()
        near = nodes[0].log.read_text()
        assert "AL goes on after " in near
        assert f"{folder} is not seen by rank 1: rank 0 writes their layers" in near
    assert_same(alone, folder)
    assert not here.processes()


def ended(node: Node) -> str:
    """What a machine's processes said, all of which have to be gone in time; those that are not say where they are."""
    begin = monotonic()
    try:
        code = node.process.wait(TIMEOUT_S + MARGIN_S)
    except TimeoutExpired:
        for number in node.machine.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGABRT)
        sleep(2)
        pytest.fail(f"still there on {node.machine.name}: {node.log.read_text()}")
    assert code == 1, node.log.read_text()
    assert monotonic() - begin < TIMEOUT_S + MARGIN_S
    return node.log.read_text()
