"""A training that is asked to end saves first; a disk that hangs keeps it for some time, not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeal.errors import Interrupted
from pipeal.train import keeper as keeping
from pipeal.train.keeper import CheckpointKeeper
from pipeal.train.position import Position
from pipeal.train.saver import Saver


class Hanging:
    """A store that writes when it is allowed to."""

    folder = "nowhere"

    def __init__(self) -> None:
        self.go = threading.Event()

    def save(self, *_: Any) -> None:
        assert self.go.wait(30)


class Passed:
    """A fence that has passed a layer, and the pipeline that gives it."""

    ended = False
    losses = None
    state = {"w": torch.zeros(1)}  # noqa: RUF012  not changed

    def fence(self) -> Passed:
        return self

    def wait(self) -> dict[int, Passed]:
        return {0: self}


@pytest.fixture
def store() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.go.set()


def leave(saver: Saver) -> None:
    CheckpointKeeper(saver, None, lambda: 143, {}).leave(Passed(), Position())  # type: ignore[arg-type]


def test_it_says_that_it_is_saving_when_that_takes_its_time(store: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "QUIET_S", 0.1)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        store.go.set()

    with Saver(store, say) as saver, pytest.raises(Interrupted, match="and saved"):  # type: ignore[arg-type]
        leave(saver)
    assert said == ["saving; another signal ends the run at once, without its last batches"]


def test_it_leaves_without_a_checkpoint_that_does_not_come(store: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: it waited without end."""
    for name, seconds in (("keeper.QUIET_S", 0.1), ("keeper.PATIENCE_S", 0.3), ("saver.HURRY_S", 0.1)):
        monkeypatch.setattr(f"pipeal.train.{name}", seconds)
    said: list[str] = []
    begin = time.monotonic()
    with (
        pytest.raises(Interrupted, match=r"not saved within 0.3 s; .* from the checkpoint before it"),
        Saver(store, said.append) as saver,  # type: ignore[arg-type]
    ):
        leave(saver)
    assert time.monotonic() - begin < 10
    assert [line.split()[0] for line in said] == ["saving;", "a"], "that, and where to look"
    store.go.set()
    for thread in threading.enumerate():
        if thread.name == "pipeal-saver":
            thread.join(10)
