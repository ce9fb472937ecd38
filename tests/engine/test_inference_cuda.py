"""The laws of inference on a GPU; one is enough, several stages may share it."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import nn

from pipeal import AE, AL, ENC, ALPackage, LabelAE, Pipeline
from pipeal.engine.inference.exit_policy import ExitPolicy, confidence
from pipeal.training.exits import exit_costs

pytestmark = pytest.mark.cuda

WIDE, CODE, CLASSES = 64, 16, 5
PLACEMENTS = {
    "one stage": ["cuda:0"],
    "four stages on one GPU": ["cuda:0"] * 4,
    "cpu, cuda, cpu": ["cpu", "cuda:0", "cpu"],
    "cuda, cpu, cuda": ["cuda:0", "cpu", "cuda:0"],
}


def package() -> ALPackage:
    torch.manual_seed(0)
    sides: list[AE] = [LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)]
    sides += [AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE)) for _ in range(3)]
    return ALPackage([AL(ENC(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, CODE)), side) for side in sides])


def inputs() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDE, generator=draw) for rows in [512] * 11 + [3]]


@pytest.mark.parametrize("devices", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("exit_at", [None, 1, 3])
def test_batch_after_batch_gives_the_bits_of_one_at_a_time(devices: list[str], exit_at: int | None) -> None:
    pipe = Pipeline(package(), devices, threads=torch.get_num_threads())
    for x, logits in zip(inputs(), pipe.predict_each(inputs(), exit_at), strict=True):
        assert torch.equal(logits, pipe_of_its_own(devices).predict(x, exit_at))


def pipe_of_its_own(devices: list[str]) -> Pipeline:
    """The same model once more: while a pipeline predicts it does nothing else."""
    return Pipeline(package(), devices)


@pytest.mark.parametrize("devices", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_sample_leaves_with_the_answer_of_its_exit(devices: list[str]) -> None:
    pipe = Pipeline(package(), devices)
    by_exit = [torch.stack(exits) for exits in pipe.predict_exits(inputs())]
    middle = [float(confidence(one, 1.0).median()) for one in by_exit[0]]
    policy = ExitPolicy((middle[0], inf, middle[2], 0.0), (1.0,) * 4)
    for wanted, answer in zip(by_exit, pipe.predict_each(inputs(), policy=policy), strict=True):
        rows = torch.arange(len(answer.exits), device=answer.exits.device)
        torch.testing.assert_close(answer.logits, wanted[answer.exits - 1, rows], atol=1e-4, rtol=1e-4)
        assert set(answer.exits.tolist()) <= {1, 3, 4}


def test_answers_may_be_used_on_a_stream_of_the_callers_own() -> None:
    pipe = Pipeline(package(), ["cuda:0"] * 2)
    wanted = [pipe.predict(x).sum() for x in inputs()]
    with torch.cuda.stream(torch.cuda.Stream()):
        found = [logits.sum() for logits in pipe.predict_each(x.cuda() for x in inputs())]
    torch.cuda.synchronize()
    assert torch.equal(torch.stack(found), torch.stack(wanted))


def images(rows: int, seed: int) -> torch.Tensor:
    """As a loader hands them on: pinned, channels last."""
    x = torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last).pin_memory()


def convolutions() -> ALPackage:
    torch.manual_seed(0)

    def encoder(wide: int) -> ENC:
        f = nn.Sequential(nn.Conv2d(wide, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        return ENC(f, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CODE)))

    first = LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES)
    second = AE(nn.Linear(CODE, CODE), nn.Linear(CODE, CODE))
    return ALPackage([AL(encoder(3), first), AL(encoder(8), second)]).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0"] * 2, ["cpu", "cuda:0"]], ids=["one", "two", "mixed"])
def test_predictions_between_batches_leave_batch_norm_and_training_alone(devices: list[str]) -> None:
    data = [(images(rows, rows), torch.arange(rows) % CLASSES) for rows in (16, 16, 7)]
    inputs = [x for x, _ in data]

    def trained(*, predicts: bool) -> list[torch.Tensor]:
        model = convolutions()
        with Pipeline(model, devices) as pipe:
            for batch in data:
                pipe.submit(*batch)
                if predicts:
                    before = [value.clone() for value in drained(pipe, model)]
                    streamed = list(pipe.predict_each(inputs))
                    assert all(torch.equal(one, pipe.predict(x)) for x, one in zip(inputs, streamed, strict=True))
                    assert all(map(torch.equal, drained(pipe, model), before))
                    assert all(part.training for part in model.modules())
        return [value.cpu() for value in model.state_dict().values()]

    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        assert all(map(torch.equal, trained(predicts=True), trained(predicts=False)))
    finally:
        torch.backends.cudnn.deterministic = before


def drained(pipe: Pipeline, model: ALPackage) -> list[torch.Tensor]:
    pipe.drain()
    return list(model.state_dict().values())


def test_costs_are_those_on_the_cpu() -> None:
    x = inputs()[0]
    on_cpu = exit_costs(package(), x)
    assert exit_costs(package().cuda(), x) == on_cpu
    lstm = LSTMFirst()
    assert exit_costs([layer(lstm)], torch.randn(4, 7, 10)) == exit_costs([layer(lstm).cuda()], torch.randn(4, 7, 10))


class LSTMFirst(nn.Module):
    """The fused operator of a recurrent network is another one on each device."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 6, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].mean(1)


def layer(f: nn.Module) -> AL:
    return AL(ENC(f, nn.Linear(12, CODE)), LabelAE(nn.Linear(CLASSES, CODE), nn.Linear(CODE, CLASSES), CLASSES))
