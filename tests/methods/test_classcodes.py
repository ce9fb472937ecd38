"""Label sides that work once for each class: what is learnt is what samples teach one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeal import AE, AL, ENC, ALPackage, ConfigError, DataError, LabelAE, Pipeline
from pipeal.core.tree import tensors
from pipeal.engine import SCHEDULES
from pipeal.engine.state.layer_state import layer_state
from pipeal.methods.al.class_codes import encode_each_class
from pipeal.methods.al.codes import LabelStyle, class_side, recode_side
from pipeal.methods.dropout import Dropout
from pipeal.models import VisionDims, build_text, build_vision
from tests.integration.test_text_exactness import DIMS, batches

CLASSES = 3


def package(style: LabelStyle = "inverse", *, once: bool) -> ALPackage:
    torch.manual_seed(0)

    def layer(wide: int, side: AE) -> AL:
        optimizer: Any = torch.optim.SGD
        return AL(ENC(nn.Sequential(nn.Linear(wide, 7), nn.Tanh()), nn.Linear(7, 5)), side, 0.3, optimizer)

    made = ALPackage([layer(6, class_side(CLASSES, 5, style=style)), layer(7, recode_side(5, 5, style=style))])
    if once:
        encode_each_class(made)
    return made


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = (8, 5, 1, 7)  # of one sample, most classes are missing
    return [(torch.randn(n, 6, generator=draw), torch.randint(CLASSES, (n,), generator=draw)) for n in rows]


@pytest.mark.parametrize("style", ["inverse", "published"])
@pytest.mark.parametrize("options", [{}, {"on_oom": "split"}, {"on_non_finite": "skip"}], ids=str)
def test_losses_gradients_and_answers_are_those_of_the_samples(style: LabelStyle, options: dict[str, Any]) -> None:
    each, once = package(style, once=False), package(style, once=True)
    found = []
    for model in (each, once):
        with Pipeline(model, ["cpu"] * 2, threads=1, **options) as pipe:
            report = pipe.run(data())
            found.append([*report.losses, pipe.predict(data()[0][0]), *model.state_dict().values()])
    for mine, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
    assert list(each.state_dict()) == list(once.state_dict())


@pytest.mark.parametrize("model", ["lstm", "transformer", "resnet", "vgg"])
def test_every_schedule_leaves_the_same_of_every_model(model: str) -> None:
    def trained(schedule: str, stages: int) -> list[Tensor]:
        torch.manual_seed(0)
        if model in ("lstm", "transformer"):
            made, given = build_text(model, vocab_size=50, classes=4, dims=DIMS), batches()[-3:]
        else:
            made = build_vision(model, classes=4, dims=VisionDims(size=16, hidden=6, code=5, width=0.05))
            draw = torch.Generator().manual_seed(1)
            given = [(torch.randn(4, 3, 16, 16, generator=draw), torch.tensor([0, 3, 3, 1])) for _ in range(2)]
        encode_each_class(made)
        with Pipeline(made, ["cpu"] * stages, schedule, threads=1) as pipe:
            losses = pipe.run(given).losses
        return [*losses, *(tensor for layer in made for tensor in tensors(layer_state(layer)))]

    wanted = trained("sequential", 1)
    for schedule in SCHEDULES:
        assert all(map(torch.equal, trained(schedule, 3), wanted)), schedule


def test_a_packet_holds_the_codes_once() -> None:
    y = torch.tensor([0, 2, 2, 1])
    _, (labels, codes) = package(once=True)[0](torch.randn(4, 6), y)
    assert torch.equal(labels, y)
    assert codes.shape == (4, CLASSES, 5)
    assert codes.untyped_storage().nbytes() == CLASSES * 5 * 4


def test_soft_targets_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected \(B,\) class numbers"):
        package(once=True)[0](torch.randn(2, 6), torch.rand(2, CLASSES))


@pytest.mark.parametrize(
    "inside", [nn.Dropout(0.5), Dropout(0.5), nn.BatchNorm1d(5)], ids=["dropout", "our dropout", "batch norm"]
)
def test_a_side_whose_codes_are_not_its_classes_alone_is_refused(inside: nn.Module) -> None:
    side = LabelAE(nn.Sequential(nn.Linear(CLASSES, 5), inside), nn.Linear(5, CLASSES), CLASSES)
    made = ALPackage([AL(ENC(nn.Linear(6, 7), nn.Linear(7, 5)), side)])
    with pytest.raises(ConfigError, match="label side of layer 0 draws numbers or looks at other samples"):
        encode_each_class(made)


def test_dropout_that_drops_nothing_is_none() -> None:
    side = LabelAE(nn.Sequential(nn.Linear(CLASSES, 5), Dropout(0.0)), nn.Linear(5, CLASSES), CLASSES)
    encode_each_class([AL(ENC(nn.Linear(6, 7), nn.Linear(7, 5)), side)])


def test_sides_of_a_class_of_their_own_are_refused_and_nothing_is_changed() -> None:
    class Own(AE):
        pass

    first = AL(ENC(nn.Linear(6, 7), nn.Linear(7, 5)), class_side(CLASSES, 5))
    second = AL(ENC(nn.Linear(7, 7), nn.Linear(7, 5)), Own(nn.Linear(5, 5), nn.Linear(5, 5)))
    with pytest.raises(ConfigError, match="layer 1 is no AL of AE and ENC"):
        encode_each_class([first, second])
    assert type(first.ae) is LabelAE
