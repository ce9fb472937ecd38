"""The table of a package."""

from __future__ import annotations

import torch
from torch import nn

from pipeal import AE, AL, BP, ENC, ALPackage, LabelAE


def by_hand() -> ALPackage:
    torch.manual_seed(0)
    first = AL(
        ENC(nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5)), nn.Linear(7, 5)),
        LabelAE(nn.Linear(3, 5), nn.Linear(5, 3), 3),
    )
    second = AL(
        ENC(nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)), nn.Linear(4, 5)), AE(nn.Linear(5, 5), nn.Identity())
    )
    return ALPackage([first, second])


def test_counts_are_those_of_the_package() -> None:
    package = by_hand()
    found = package.summary()
    assert [row.parameters for row in found.layers] == [
        {"f": 49, "b": 40, "g": 20, "h": 18},
        {"f": 40, "b": 25, "g": 30, "h": 0},
    ]
    assert (found.effective, found.affiliated) == (package.effective_parameters(), package.affiliated_parameters())
    assert found.effective + found.affiliated == sum(p.numel() for p in package.parameters())


def test_shapes_come_from_a_sample_that_leaves_no_trace() -> None:
    package = by_hand()
    before = {name: value.clone() for name, value in package.state_dict().items()}
    sample, random = torch.randn(4, 6), torch.get_rng_state()
    found = package.summary(sample)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(part.training for part in package.modules())
    assert all(torch.equal(value, before[name]) for name, value in package.state_dict().items())
    assert [str(row.shapes.out[0][0]) for row in found.layers if row.shapes] == [
        "torch.Size([4, 7])",
        "torch.Size([4, 4])",
    ]
    assert [row.cells()[1:3] for row in found.layers] == [("(B, 7)", "(B, 5)"), ("(B, 4)", "(B, 5)")]


def test_a_table_is_aligned_and_ends_in_a_total() -> None:
    lines = str(by_hand().summary(torch.randn(4, 6))).splitlines()
    assert lines[0].split() == ["layer", "f", "gives", "code", "f", "b", "g", "h", "effective", "affiliated", "device"]
    assert lines[2].split() == [
        "0",
        "(B,",
        "7)",
        "(B,",
        "5)",
        "49",
        "40",
        "20",
        "18",
        "67",
        "(53%)",
        "60",
        "(47%)",
        "cpu",
    ]
    assert lines[-1].split() == ["total", "89", "65", "50", "18", "132", "(59%)", "90", "(41%)"]
    for heading in ("code", "device"):
        assert len({lines[row].index("(B, 5)" if heading == "code" else "cpu") for row in (2, 3)}) == 1
        assert lines[2].index("(B, 5)" if heading == "code" else "cpu") == lines[0].index(heading)


def test_layers_of_other_kinds_have_a_row_too() -> None:
    package = ALPackage([BP(nn.Linear(6, 3))])
    assert "(B, 3)" in str(package.summary(torch.randn(2, 6)))
    assert package.summary().layers[0].parameters == {"f": 21}
    assert "?" in str(package.summary())


def test_blocks_by_their_letters() -> None:
    layer, network = by_hand()[0], nn.Linear(6, 3)
    assert layer.blocks() == {"f": layer.enc.f, "b": layer.enc.b, "g": layer.ae.g, "h": layer.ae.h}
    assert BP(network).blocks() == {"f": network}


def test_other_types_and_several_outputs_are_told() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x, x > 0, torch.zeros(7)

    class First(nn.Module):
        def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return x[0]

    package = ALPackage([AL(ENC(Pair(), First()), AE(nn.Identity(), nn.Identity()))])
    row = package.summary(torch.randn(2, 3)).layers[0]
    assert row.cells()[1:3] == ("(B, 3) + (B, 3) bool + (7,)", "(B, 3)")
