"""Where the stages are: all ways in which a user may say it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import pipeal
from pipeal import AL, BP, ENC, ALPackage, ConfigError, DataError, LabelAE, Pipeline, PlacementError
from pipeal.engine import parse_device
from pipeal.engine.devices import assignment as assigned
from pipeal.planning import Placement
from pipeal.planning import planner as planning
from pipeal.planning.measure.layers import WARM_UP

from .traps import nothing, quick

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("devices", "stages"),
    [
        ("cpu*2", 2),
        ("cpu,cpu,cpu", 3),
        (" cpu * 2 , cpu", 3),
        ("cpu", 1),
        (["cpu", "cpu"], 2),
        (("cpu", CPU), 2),
        (CPU, 1),
        (None, 4),
        ((name for name in ("cpu", "cpu")), 2),
    ],
)
def test_devices_as_on_the_command_line_and_from_python(devices: Any, stages: int) -> None:
    with Pipeline(quick(4), devices) as pipe:
        report = pipe.run(nothing(3))
    assert len(report.stages) == len(pipe.sizes) == stages
    assert sum(pipe.sizes) == 4


@pytest.mark.parametrize(("cores", "layers", "stages"), [(4, 3, 3), (2, 3, 2), (1, 3, 1), (64, 1, 1)])
def test_auto_without_gpus_is_a_stage_for_each_core_and_at_most_for_each_layer(
    monkeypatch: pytest.MonkeyPatch, cores: int, layers: int, stages: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(assigned, "cores", lambda: cores)
    assert len(Pipeline(quick(layers), "auto").sizes) == stages


@pytest.mark.parametrize(("gpus", "wanted"), [(2, ["cuda:0", "cuda:1"]), (8, ["cuda:0", "cuda:1", "cuda:2"])])
def test_auto_takes_all_gpus_that_there_are_layers_for(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = assigned.assign(quick(3), "auto", None, None, pipeal.engine.SCHEDULES["pipelined"])  # type: ignore[arg-type]
    assert list(map(str, found.devices)) == wanted
    assert sum(found.sizes) == 3


def test_gpus_given_by_number_are_those() -> None:
    """Symptom: ``devices=[0, 1]`` would have been the first GPU twice."""
    with patch.object(torch.cuda, "device_count", lambda: 2):
        assert [str(parse_device(number)) for number in (0, 1)] == ["cuda:0", "cuda:1"]
        with pytest.raises(PlacementError, match="'cuda:2' does not exist"):
            parse_device(2)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (2, "devices is 2; expected one name per stage"),
        ("cpu*0", r"devices: found 'cpu\*0', expected auto, or names"),
        ("", "devices: found ''"),
        ("gpu", "'gpu' is not a device; expected 'cpu', 'cuda' or 'cuda:N'"),
        ("cpu*5", "5 stages for 4 layers"),
        ([None, "cpu"], "None is not a device"),
    ],
)
def test_devices_that_are_none(devices: Any, words: str) -> None:
    with pytest.raises(PlacementError, match=words):
        Pipeline(quick(4), devices)


def test_threads_and_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="threads is 0; expected a whole number from 1 to 1024"):
        Pipeline(quick(2), threads=0)
    with pytest.raises(PlacementError, match="sizes is 2; expected the number of layers of each of 2 stages"):
        Pipeline(quick(2), sizes=2)  # type: ignore[arg-type]
    for wrong in ("11", [1.0, 1.0]):
        with pytest.raises(PlacementError, match=r"sizes is .*; expected the number of layers of each of 2 stages"):
            Pipeline(quick(2), sizes=wrong)  # type: ignore[arg-type]


def small() -> ALPackage:
    torch.manual_seed(0)
    return ALPackage(
        [AL(ENC(nn.Linear(6, 6), nn.Linear(6, 3)), LabelAE(nn.Linear(3, 3), nn.Linear(3, 3), 3)), layer(), layer()]
    )


def layer() -> AL:
    return AL(ENC(nn.Linear(6, 6), nn.Linear(6, 3)), pipeal.AE(nn.Linear(3, 3), nn.Linear(3, 3)))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(count)]


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest trials that there are: what is fastest does not matter here."""
    monkeypatch.setattr(planning, "TRIAL_BATCHES", WARM_UP + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("few_batches")
def test_a_users_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeal.planning.planner.cores", lambda: 2)  # on a single one there is nothing to try
    package, trials = small(), []
    before = [value.clone() for value in package.state_dict().values()]
    placement = pipeal.plan(package, iter(batches(3)), threads=1, on_trial=trials.append)
    assert placement in trials
    assert all(map(torch.equal, package.state_dict().values(), before))
    with Pipeline(package, placement) as pipe:
        pipe.run(batches(2))
    assert (pipe.sizes, pipe.threads) == (placement.sizes, placement.threads)
    assert sum(placement.sizes) == 3


def test_what_is_given_goes_before_what_a_plan_says() -> None:
    plan = Placement(["cpu", "cpu"], [1, 3], 7)
    assert (Pipeline(quick(4), plan).sizes, Pipeline(quick(4), plan).threads) == ([1, 3], 7)
    pipe = Pipeline(quick(4), plan, sizes=[2, 2], threads=1)
    assert (pipe.sizes, pipe.threads) == ([2, 2], 1)
    with pytest.raises(PlacementError, match="cover 4 layers, but the package has 3"):
        Pipeline(quick(3), plan)


@pytest.mark.usefixtures("few_batches")
def test_a_plan_wants_batches_that_are_pairs() -> None:
    with pytest.raises(DataError, match="found no batches to plan with"):
        pipeal.plan(small(), [])
    with pytest.raises(PlacementError, match="found 0 layers in the model"):
        pipeal.plan([], batches(1))
    with pytest.raises(DataError, match="found a tensor"):
        pipeal.plan(small(), [torch.randn(8, 6)])
    with pytest.raises(PlacementError, match="'gpu' is not a device"):
        pipeal.plan(small(), batches(1), devices="gpu")


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("devices", ["cpu", "auto", None])
def test_a_plan_goes_through_few_batches_several_times(devices: str | None) -> None:
    layers = [BP(nn.Linear(6, 3), nn.CrossEntropyLoss())]
    assert pipeal.plan(layers, batches(1), devices=devices, threads=1).sizes == [1]
