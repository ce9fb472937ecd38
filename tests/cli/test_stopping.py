"""The first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from pipeal.core.errors import Interrupted, WorkerError
from pipeal.data import Batch
from pipeal.run.stopping import Stoppable, StopRequest, worker_failures
from pipeal.training.trainer import Leave


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_does_what_it_always_did(number: signal.Signals, code: int) -> None:
    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(number, end)
    try:
        with StopRequest() as stop:
            assert stop.code() is None
            os.kill(os.getpid(), number)
            assert stop.code() == code
            with pytest.raises(Ended):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)


def test_in_another_thread_it_hears_nothing() -> None:
    found = []

    def listen() -> None:
        with StopRequest() as stop:
            found.append(stop.code())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None]


class Ended(Exception):
    pass


def end(*_: object) -> None:
    raise Ended


@pytest.fixture
def ending() -> Iterator[None]:
    """Either signal raises ``Ended``, as outside of the tests they end the process."""
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ending")
def test_a_signal_that_comes_before_both_are_listened_for_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: it was heard, but the handlers of before were not given back, and the second one ended nothing."""
    install = signal.signal

    def and_send(number: int, handler: object) -> object:
        before = install(number, handler)  # type: ignore[arg-type]
        if number == signal.SIGINT and handler is not end:
            os.kill(os.getpid(), signal.SIGINT)
        return before

    monkeypatch.setattr(signal, "signal", and_send)
    with StopRequest() as stop:
        monkeypatch.undo()
        assert stop.signal == signal.SIGINT
        for number in (signal.SIGTERM, signal.SIGINT):
            assert signal.getsignal(number) is end


@pytest.mark.usefixtures("ending")
def test_what_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: Ctrl-C in a terminal stopped runs that a script had started there in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.code() == 143
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.usefixtures("ending")
def test_the_handler_of_another_language_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: "signal handler must be signal.SIG_IGN, …" at the end, for it cannot be set again from here."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else known(number))
    with StopRequest() as stop:
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT


class Failing:
    """Batches whose workers are gone."""

    def __init__(self, stop: StopRequest, number: signal.Signals | None) -> None:
        self.stop, self.number = stop, number

    def __iter__(self) -> Iterator[Batch]:
        self.stop.signal = self.number
        raise WorkerError("a worker process died")
        yield

    def __len__(self) -> int:
        return 1

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("number", "error"), [(None, WorkerError), (signal.SIGTERM, Leave)])
def test_batches_that_fail_after_the_request_are_the_end(number: signal.Signals | None, error: type[Exception]) -> None:
    stop = StopRequest()
    with pytest.raises(error):
        list(Stoppable(Failing(stop, number), stop))


@pytest.mark.parametrize(("number", "error"), [(None, WorkerError), (signal.SIGTERM, Interrupted)])
def test_the_death_of_a_worker_is_named_wherever_it_is_told(
    number: signal.Signals | None, error: type[Exception]
) -> None:
    """PyTorch raises it in a handler of SIGCHLD, in the middle of anything."""
    stop = StopRequest()
    stop.signal = number
    with pytest.raises(error), worker_failures(stop, "the same command"):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="something else"), worker_failures(stop, "the same command"):
        raise RuntimeError("something else")
