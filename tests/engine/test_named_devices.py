"""What is settled about GPUs before CUDA begins."""

from __future__ import annotations

import os

import pytest
import torch

from pipeal.engine.devices import all_devices, open_device, parse_device

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(("said", "wanted"), [(None, "32"), ("1", "1")])
@pytest.mark.parametrize("ask", [all_devices, lambda: parse_device("cuda:0"), lambda: parse_device(0)])
def test_cuda_begins_with_as_many_queues_as_it_has(
    ask: object, said: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prediction 10 of the GPU reading: both directions of a rank, averages and stages had eight queues for some twelve
    streams. The number is read when CUDA begins, and so is set before it is asked for anything."""
    found: list[str | None] = []

    def device_count() -> int:
        found.append(os.environ.get(QUEUES))
        return 1

    monkeypatch.setenv(QUEUES, "")  # and back
    monkeypatch.delenv(QUEUES) if said is None else monkeypatch.setenv(QUEUES, said)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert callable(ask)
    ask()
    assert found == [wanted]


def test_after_cuda_has_begun_nothing_is_said_of_its_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "")
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    parse_device("cuda:0")
    open_device("cpu")
    assert QUEUES not in os.environ
