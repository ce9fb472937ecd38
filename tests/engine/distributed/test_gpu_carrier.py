"""In what order a carrier between GPUs waits and speaks, with everything of CUDA and NCCL played."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeal.engine.distributed.channel import BrokenWireError, Message
from pipeal.engine.distributed.nccl_transfer import GpuCarrier


class Played:
    """A GPU, a wire and a pair, which write down what they are asked for. Tensors on the CPU play those on the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda on: SimpleNamespace(device=on, wait_event=self._note("stream waits"))
        )
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        wire: Any = SimpleNamespace(
            send=self._note("head"),
            hear_answer=self._note("hears yes", True),
            answer=self._note("says yes"),
            body=lambda _: (torch.empty(0), torch.empty(0)),
        )
        pair = SimpleNamespace(send=self._operation("send"), recv=self._operation("recv"))
        device: Any = SimpleNamespace(device=torch.device("cpu"), lags=True)
        self.carrier = GpuCarrier(wire, pair, 1, device)

    def _event(self, *, blocking: bool) -> Any:
        assert blocking  # else its thread would keep a core busy
        return SimpleNamespace(record=self._note("mark"), synchronize=self._note("host waits"))

    def _operation(self, name: str) -> Any:
        def begin(rows: list[Tensor], *_: int) -> Any:
            self.done.append(name)
            left = iter([False, False, True])

            def is_completed() -> bool:
                self.done.append("host asks")
                return next(left)

            return SimpleNamespace(is_completed=is_completed, wait=self._note("ended"))

        return begin

    def _note(self, what: str, gives: Any = None) -> Any:
        def note(*_: Any) -> Any:
            self.done.append(what)
            return gives

        return note


def test_what_is_sent_is_ready_before_the_receiver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with CUDA_DEVICE_MAX_CONNECTIONS=1 and predictions on their way back while packets went on, all stood
    still. Cause: streams that waited for what was not ready, in queues that they share with those that it waited for.
    """
    played, ready = Played(monkeypatch), SimpleNamespace()
    played.carrier.send(1, "packet", {}, (torch.ones(3), torch.ones(2)), ready)  # type: ignore[arg-type]
    sent = ["send", *["host asks"] * 3, "ended"]
    assert played.done == [
        *("stream waits", "mark", "host waits"),
        *("head", "hears yes"),
        *(*sent, *sent),
    ]


def test_what_is_handed_on_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no stage's stream waits for another rank: what it waits for is on its own GPU."""
    played = Played(monkeypatch)
    layout = ["float32", [3], None, 3]
    (first, second), ready = played.carrier.body(Message("packet", {"on gpu": [layout, layout]}, 0))
    received = ["recv", *["host asks"] * 3, "ended"]
    assert played.done == ["says yes", *received, *received, "mark"]
    assert (first.shape, second.shape) == ((3,), (3,))
    assert ready is not None


def test_what_an_abort_cut_off_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 9 of the GPU reading: a receive that was cut off may look complete; what it failed with is asked for
    before what arrived is handed on."""
    played = Played(monkeypatch)

    def aborted() -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 1.")

    played.carrier._pair.recv = lambda *_: SimpleNamespace(is_completed=lambda: True, wait=aborted)
    with pytest.raises(BrokenWireError, match="aborted"):
        played.carrier.body(Message("packet", {"on gpu": [["float32", [3], None, 3]]}, 0))
    assert played.done == ["says yes"]
