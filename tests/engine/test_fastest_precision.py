from __future__ import annotations

import pytest
import torch

from pipeal.engine.device import fastest_precision

INSTRUCTIONS = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.mark.parametrize("here", [(), *((name,) for name in INSTRUCTIONS), INSTRUCTIONS])
def test_bf16_on_a_cpu_with_instructions_for_it(here: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTIONS:
        monkeypatch.setattr(torch.cpu, name, lambda known=name in here: known, raising=False)
    assert fastest_precision("cpu") == ("bf16" if here else "fp32")


def test_fp32_where_pytorch_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTIONS:
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert fastest_precision("cpu") == "fp32"
