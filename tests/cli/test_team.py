"""What rank 0 and the others settle before anything is read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer

from pipeal.config import EngineConfig, LanguageConfig, TextConfig, load_config
from pipeal.core.errors import PlacementError
from pipeal.core.modules import module_of
from pipeal.engine.devices import parse_device
from pipeal.engine.distributed.world import World
from pipeal.engine.pipeline import Pipeline
from pipeal.run import team
from pipeal.run.build_language import LanguageModels
from pipeal.run.followers import Follower, Kind, with_own_data
from pipeal.run.team import Team, require_devices
from tests.engine.distributed.ranks import each, ranks


def test_a_device_that_one_rank_lacks_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: after minutes of reading data that rank alone said so, and the others that it was lost."""

    def rank_device(world: World, engine: EngineConfig, kind: str) -> str:
        return "cuda:99" if world.rank == 1 else "cpu"

    monkeypatch.setattr(team, "rank_device", rank_device)
    with ranks(3) as worlds:
        errors = each(worlds, lambda world: require_devices(world, EngineConfig(), "cuda"))
    assert [type(error) for error in errors] == [PlacementError] * 3
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 1 (stage 1) on {worlds[0].peers[1].host}: ")
    assert "cuda:99" in str(errors[0])


def test_each_rank_settles_on_its_gpu_before_anything_is_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction 12 of the GPU reading: what names no GPU came to be on the first one, from each of the processes."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(team, "own_gpu", lambda _, device: str(device))
    with ranks(2) as worlds:
        for number, world in enumerate(worlds):
            world.launch = replace(world.launch, local_rank=number, local_size=2)
        errors = each(worlds, lambda world: require_devices(world, EngineConfig(), "cuda"))
    assert errors == [None, None]
    assert sorted(current) == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (["a"] * 4, ["ranks that share a GPU: 0, 1, 2, 3"]),
        (["a", "b", "a", "b"], ["ranks that share a GPU: 0, 2; 1, 3"]),
        (["a", "b", "a", None], ["ranks that share a GPU: 0, 2"]),
        (["a", "b", "c", "d"], []),
        ([None] * 4, []),
    ],
    ids=str,
)
def test_ranks_that_share_a_gpu_are_told(
    gpus: list[str | None], line: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: with CUDA_VISIBLE_DEVICES=0 for all four processes of a machine, each took the one GPU that it saw, and
    the run said nothing of it."""
    monkeypatch.setattr(team, "rank_device", lambda *_: "cpu")
    monkeypatch.setattr(team, "own_gpu", lambda world, _: gpus[world.rank])
    with ranks(4) as worlds:
        assert each(worlds, lambda world: require_devices(world, EngineConfig(), "cuda")) == [None] * 4
    assert caplog.messages == line


@pytest.mark.parametrize(("seen", "wanted"), [(4, [0, 1, 2, 3]), (1, [0, 0, 0, 0]), (2, [0, 1, 0, 1])])
def test_a_process_that_sees_one_gpu_takes_that(monkeypatch: pytest.MonkeyPatch, seen: int, wanted: list[int]) -> None:
    """Prediction 11 of the GPU reading: with one GPU for each process in CUDA_VISIBLE_DEVICES, the second asked for
    cuda:1, which it does not see, and the run ended with exit code 2."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    mesh = SimpleNamespace(stages=4, stage_of=lambda rank: rank)
    for rank, gpu in enumerate(wanted):
        world: Any = SimpleNamespace(mesh=mesh, rank=rank, launch=SimpleNamespace(local_rank=rank))
        assert team.rank_device(world, EngineConfig(), "cuda") == f"cuda:{gpu}"
        assert str(parse_device(team.rank_device(world, EngineConfig(), "cuda"))) == f"cuda:{gpu}"


def test_stages_are_balanced_by_what_layers_cost_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were measured with exact matrix products, whatever ``engine.matmul`` said."""
    found: list[str] = []

    def balanced(*given: Any, **_: Any) -> list[int]:
        with Pipeline([VirtualLayer(0, 0)], "cpu", options=given[-1]):
            found.append(torch.get_float32_matmul_precision())
        return [2, 1]

    monkeypatch.setattr(team, "balance_one_by_one", balanced)
    monkeypatch.setattr(team, "sample_batches", lambda *_: [])
    monkeypatch.setattr(team, "stage_devices", lambda *_: ["cpu", "cpu"])
    mesh = SimpleNamespace(stages=2, replicas=1, size=2, check_layers=lambda *_: None, stage_of=lambda rank: rank)
    world: Any = SimpleNamespace(mesh=mesh, rank=0, attempts=None)
    experiment: Any = SimpleNamespace(
        config=load_config(TextConfig, None, overrides=["engine.matmul=medium", "train.mode=al"], values={}),
        layers=lambda *_, **__: iter([0, 0, 0]),
        train_batches=lambda *_: SimpleNamespace(close=lambda: None),
    )
    chosen = Team(world, "cpu").choose(experiment, "al")
    assert (chosen.engine.sizes, found) == ((2, 1), ["medium"])


@pytest.mark.parametrize(("others", "wanted"), [("bf16", "bf16"), ("fp32", "fp32")])
def test_all_ranks_have_what_is_fast_on_all(monkeypatch: pytest.MonkeyPatch, others: str, wanted: str) -> None:
    """Rank 0 decided by its own device, for GPUs of older machines too."""
    monkeypatch.setattr(team, "fastest_precision", lambda _: "bf16")
    monkeypatch.setattr(team, "sample_batches", lambda *_: [])
    mesh = SimpleNamespace(stages=2, replicas=1, size=2, check_layers=lambda *_: None, stage_of=lambda rank: rank)

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own, {"threads": 1, "precision": others, "facts": None}]

    launch = SimpleNamespace(local_size=1, local_rank=0)
    world: Any = SimpleNamespace(mesh=mesh, rank=0, launch=launch, attempts=None, tell=lambda _: None, gather=gather)
    experiment: Any = SimpleNamespace(
        config=load_config(TextConfig, None, overrides=["engine.sizes=[2,1]", "train.mode=al"], values={}),
        models=SimpleNamespace(blueprint={}),
        facts={},
        layers=lambda *_, **__: iter([0, 0, 0]),
        train_batches=lambda *_: SimpleNamespace(close=lambda: None),
    )
    lead = Team(world, "cpu")
    lead.gather(experiment)
    chosen = lead.choose(experiment, "al")
    assert (chosen.train.precision, chosen.engine.threads) == (wanted, 1)


def test_every_machine_reads_its_own_data_as_it_was_told_there() -> None:
    """Symptom: where the data lay on another machine was accepted, and then looked for where it lay on the first."""
    asked, told = LanguageConfig(), LanguageConfig()
    asked = replace(asked, data=replace(asked.data, root="/here", text="/here/verses.txt", prefetch=3, steps=7))
    told = replace(told, data=replace(told.data, root="/there", text="/there/verses.txt", steps=9), out="runs")
    found = with_own_data(told, asked)
    assert (found.data.root, found.data.text, found.data.prefetch) == ("/here", "/here/verses.txt", 3)
    assert replace(found, data=told.data) == told
    assert found.data.steps == 9


def test_a_rank_makes_its_own_layers_alone() -> None:
    """Each of them built the whole model, and then let go of what was another's."""
    config = load_config(
        LanguageConfig, values={"model": {"layers": 3}}, overrides=["engine.sizes=[1,2]", "train.precision=fp32"]
    )
    mesh, kind = SimpleNamespace(stage_of=lambda rank: rank), Kind(lambda _: None, LanguageModels.of)  # type: ignore[arg-type, return-value]
    world: Any = SimpleNamespace(mesh=mesh, rank=1)
    follower = Follower(world, kind, config, "cpu")
    follower._models = LanguageModels(config, 7)
    whole = list(follower._models.layers("al", 5))
    layers = list(follower._layers(config, 5, None, sees=True))
    assert [next(module_of(one).parameters()).is_meta for one in layers] == [True, False, False]
    for number in (1, 2):
        mine, theirs = (module_of(one[number]).state_dict().values() for one in (layers, whole))
        assert all(map(torch.equal, mine, theirs))
