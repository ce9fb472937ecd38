"""The memory benchmark counts what graphs hold, predicts only what it says it does, and its baselines are right."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pipeal.engine import Action
from pipeal.engine.schedule import SCHEDULES
from pipeal.planning.pure.simulate import simulate
from tests.benches import BENCH, Benches

KEPT = BENCH / "results" / "memory.json"


@pytest.fixture
def memory(bench: Benches) -> ModuleType:
    return bench["memory"]


@pytest.fixture
def forms(bench: Benches) -> ModuleType:
    return bench["memory_forms"]


@pytest.fixture
def report(bench: Benches) -> ModuleType:
    return bench["memory_report"]


def test_a_storage_counts_once_while_a_graph_holds_it(forms: ModuleType) -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    saved = forms.Saved([weight])
    with saved.watching():
        x = torch.ones(4, 8)
        y = x @ weight  # saves x, and the weight, which is not counted
        assert saved.now == 4 * 8 * 4
        loss = (y * y + y[:2].exp().sum()).sum()  # y is saved twice, and what the exponential gave
        assert saved.now == (2 * 4 * 8 + 2 * 8) * 4
        loss.backward()
    assert saved.now == 0
    assert saved.peak == (2 * 4 * 8 + 2 * 8) * 4


def trained(forms: ModuleType, block: str, form: str, depth: int) -> tuple[int, list[torch.Tensor]]:
    """The peak of activations, and the weights."""
    torch.manual_seed(0)
    layers = forms.layers_of_form(form, forms.BLOCKS[block].network(depth))
    batches = [forms.BLOCKS[block].batch(3) for _ in range(2)]
    saved = forms.Saved(forms.own_tensors(layers))
    with saved.watching():
        forms.train(form, layers, batches)
    assert saved.now == 0
    return saved.peak, [weight.detach() for layer in layers for weight in layer.parameters()]


@pytest.mark.parametrize("block", ["charlm", "transformer", "residual"])
def test_recomputing_changes_no_weight_and_saves_less(forms: ModuleType, block: str) -> None:
    """With dropout, too: the transformer has it."""
    plain, weights = trained(forms, block, "BP", 4)
    less, same = trained(forms, block, "BP, recomputed", 4)
    assert all(map(torch.equal, weights, same))
    assert less < 0.7 * plain


@pytest.mark.parametrize("block", ["charlm", "transformer", "residual"])
def test_by_layer_a_deeper_network_saves_no_more(forms: ModuleType, block: str) -> None:
    (two, _), (four, weights) = (trained(forms, block, "AL by layer", depth) for depth in (2, 4))
    more, same = trained(forms, block, "AL by stage", 4)
    assert all(map(torch.equal, weights, same))
    assert four <= 1.01 * two
    assert more > 1.7 * four


def test_what_is_beyond_a_limit_is_predicted_and_marked(
    memory: ModuleType, report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(_: object, case: Any) -> dict[str, Any]:
        sizes = {"activations": 100 * case.depth, "resident": 1000 + 100 * case.depth, "weights": 7, "optimizer": 9}
        about = {"block": case.block, "form": case.form, "depth": case.depth, "batches": 2}
        return {**about, **sizes, "predicted": [], "seconds": case.depth / 10, "digest": "0"}

    monkeypatch.setattr(memory, "in_fresh_process", made)
    found = list(memory.measure_depths("charlm", "BP", [2, 8, 32, 128], 5000, 100.0))
    assert [bool(one["predicted"]) for one in found] == [False, False, False, True]
    assert (found[-1]["resident"], found[-1]["weights"], found[-1]["digest"]) == (13800, 7, None)
    assert found[2]["would_predict"] == {"activations": 3200, "resident": 4200, "without_holes": 4200}
    assert report.in_mib(found[-1], "activations").startswith("~")
    slow = memory.measure_depths("charlm", "BP", [2, 8, 32], 10**9, 1.0)
    assert [bool(one["predicted"]) for one in slow] == [False, False, True]


@pytest.mark.parametrize("order", ["layer", "stage"])
def test_the_fill_is_what_the_simulator_finds(memory: ModuleType, order: str) -> None:
    virtual = memory.Virtual()
    before = (virtual.layers - 1) * virtual.learn_s * (order == "layer")
    rest = virtual.layers * virtual.learn_s - before
    stage = {Action.FORWARD: virtual.layers * virtual.forward_s + before, Action.BACKWARD: rest, Action.UPDATE: 0.0}
    schedule = SCHEDULES["pipelined"].within(order)  # type: ignore[arg-type]
    simulated = simulate(schedule, [stage] * virtual.stages, 6).makespan_s
    assert virtual.seconds(order, 6) == pytest.approx(simulated)


def test_an_interval_is_around_the_median(report: ModuleType) -> None:
    assert report.interval([1.0] * 20) == (1.0, 1.0)
    low, high = report.interval([0.9 + 0.01 * number for number in range(21)])
    assert 0.9 < low < 1.0 < high < 1.1


@pytest.mark.parametrize("wrong", [["--depths", "8", "2"], ["--depths", "0"], ["--turns", "1"]])
def test_options_that_do_not_fit_are_refused(memory: ModuleType, wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        memory.main(wrong)


def test_kept_figures_show_what_is_said_of_them(
    memory: ModuleType, report: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report.main([str(KEPT), "--plot", str(tmp_path / "memory.png")])
    out = capsys.readouterr().out
    assert out.count("equal bit for bit") == 3
    assert "False" not in out
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    for block in found["blocks"]:
        cases = report.cases_of(found, block, "AL by layer")
        assert [one["depth"] for one in cases] == list(memory.DEPTHS)
        assert not any("activations" in one["predicted"] for one in cases)
        assert cases[-1]["activations"] <= 1.2 * cases[0]["activations"]


@pytest.mark.slow
def test_a_process_of_its_own_measures(memory: ModuleType, forms: ModuleType) -> None:
    found = memory.in_fresh_process(forms.measure, forms.Case("charlm", "AL by layer", 2))
    least = found["weights"] + found["optimizer"] + found["activations"]
    assert least < found["resident"] < 8 * least
