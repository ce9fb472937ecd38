"""The first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pipeal.cli.stopping import StopRequest


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
