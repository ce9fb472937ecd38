from __future__ import annotations

import pytest
import torch

from pipeal.engine.devices import fastest_precision

INSTRUCTIONS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.mark.parametrize("here", [(), *((name,) for name in INSTRUCTIONS), INSTRUCTIONS])
def test_bf16_on_a_cpu_with_instructions_for_it(here: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTIONS:
        monkeypatch.setattr(torch.cpu, name, lambda known=name in here: known, raising=False)
    assert fastest_precision("cpu") == ("bf16" if here else "fp32")


def test_stages_of_several_kinds_have_what_is_fast_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them decided: in another order of the same devices, numbers were others."""
    capabilities = {"cuda:0": (8, 0), "cuda:1": (7, 0), "cuda:2": (9, 0)}
    monkeypatch.setattr("pipeal.engine.devices.named.parse_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    for name in INSTRUCTIONS:
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    cases = ((["cuda:0", "cuda:2"], "bf16"), (["cuda:0", "cuda:1"], "fp32"), (["cuda:2", "cpu"], "fp32"))
    for devices, wanted in cases:
        assert fastest_precision(*devices) == fastest_precision(*reversed(devices)) == wanted


def test_fp32_where_pytorch_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTIONS:
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert fastest_precision("cpu") == "fp32"
