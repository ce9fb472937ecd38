"""``pipeal plan``: from a model or a file of costs to a table, a picture and figures; mistakes in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.virtual import VirtualLayer

from pipeal.cli import plan
from pipeal.core.options import EngineOptions
from pipeal.engine.pipeline import Pipeline
from pipeal.planning.measure.layers import measure_in_turns
from pipeal.planning.pure.layer_cost import Costs, LayerCost, load_costs, save_costs
from pipeal.planning.pure.simulate import log_normal_factors
from pipeal.run import plan_costs
from tests.cli.running import run_command, told_one_line

MIB = 2**20


def saved(path: Path, kind: str = "gpu", layers: int = 4, **more: object) -> Path:
    """Costs of equal layers, 30 ms each, and of a cheaper network for backpropagation with a head."""
    layer = LayerCost(0.010, 0.018, 0.002, MIB, 10 * MIB, 20 * MIB, 5 * MIB, MIB)
    block = LayerCost(0.008, 0.016, 0.002, MIB, 8 * MIB, 16 * MIB, 4 * MIB, MIB)
    backprop = {
        micro: (*[replace(block, forward_s=0.008 / micro, backward_s=0.016 / micro)] * layers, LayerCost(0.001, 0.001))
        for micro in (1, 4, 8)
    }
    given = {"samples": 64, "facts": {"dataset": "made", "model": "up"}, **more}
    save_costs(Costs(kind, (layer,) * layers, backprop, **given), path)  # type: ignore[arg-type]
    return path


def planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str
) -> tuple[dict[str, dict[str, Any]], str]:
    """The forecasts by method, and what was printed."""
    code, out, err = run_command(plan.command, capsys, *arguments, "--out", str(tmp_path / "plan"))
    assert (code, err) == (0, "")
    figures = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (tmp_path / "plan" / "plan.png").read_bytes().startswith(b"\x89PNG")
    return {each["method"]: each for each in figures["forecasts"]}, out


@pytest.mark.draws
def test_costs_become_forecasts_of_every_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, out = planned(capsys, tmp_path, "--costs", str(saved(tmp_path / "c.json")), "--devices", "4")
    assert found["AL sequential"]["gain"] == pytest.approx(1)
    assert found["AL al-fm"]["gain"] == pytest.approx(120 / 60, rel=0.01)
    assert [found[f"BP {name}"]["micro_batches"] for name in ("naive", "gpipe", "1f1b")] == [1, 8, 8]
    assert "the best of 1, 4, 8, as measured" in out
    assert found["AL pipelined"]["gain"] == pytest.approx(4, rel=0.01)
    assert found["BP naive"]["gain"] < found["BP gpipe"]["gain"] <= found["BP 1f1b"]["gain"]
    assert found["AL pipelined"]["memory_bytes"][0] == (2 * 10 + 20 + 5 + 2) * MIB
    four, _ = planned(capsys, tmp_path, "--costs", str(tmp_path / "c.json"), "--devices", "4", "--micro-batches", "4")
    assert four["BP gpipe"]["micro_batches"] == 4
    assert four["BP gpipe"]["batch_s"] > found["BP gpipe"]["batch_s"]
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows[:9]}) == 1  # the columns line up
    assert len(rows) == 2 + 7 + 2 + 4


@pytest.mark.parametrize(("devices", "at_least"), [("4", 3.8), ("6", 5.6)])
def test_twelve_layers_on_four_and_six_devices(
    devices: str, at_least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = str(saved(tmp_path / "c.json"))
    found, _ = planned(capsys, tmp_path, "--costs", costs, "--devices", devices, "--layers", "12")
    assert found["AL pipelined"]["gain"] >= at_least


def test_kinds_speeds_memory_links_and_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = "--costs", str(saved(tmp_path / "a.json", "a100")), "--costs", str(saved(tmp_path / "b.json", "cpu"))
    fast, _ = planned(capsys, tmp_path, *both, "--devices", "a100*2,cpu*2", "--device-speed", "3,3,1,1")
    assert fast["AL pipelined"]["sizes"] == [2, 2]  # on the fast ones; the others would only slow them down
    assert fast["AL pipelined"]["gain"] == pytest.approx(2, rel=0.01)  # against one fast device
    turned, out = planned(capsys, tmp_path, *both, "--devices", "cpu*2,a100*2", "--device-speed", "1,1,3,3")
    assert turned["AL pipelined"]["gain"] == pytest.approx(2, rel=0.01)  # whichever is named first
    assert "on one, the fastest of the devices" in out
    one = both[:2]
    slow, _ = planned(capsys, tmp_path, *one, "--devices", "4", "--link", "0.01", "--latency", "50")
    free, _ = planned(capsys, tmp_path, *one, "--devices", "4")
    assert slow["AL pipelined"]["batch_s"] > free["AL pipelined"]["batch_s"]
    twice, out = planned(capsys, tmp_path, *one, "--devices", "8", "--replicas", "2")
    assert twice["AL pipelined"]["batch_s"] == pytest.approx(free["AL pipelined"]["batch_s"] / 2)
    assert "8 devices, 2 replicas" in out
    assert "run has batches 2 times as large" in out  # it was once left unsaid that a run shares each batch
    tight, _ = planned(capsys, tmp_path, *one, "--devices", "4", "--memory", "0.05")
    assert tight["AL pipelined"]["gain"] == pytest.approx(4, rel=0.01)


def test_a_line_of_far_machines_is_forecast_with_its_links_and_its_jitter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A queue of two packets lets each link of 100 ms be paid every second batch, so that two near stages are faster; a
    line has what its links need."""
    save_costs(Costs("cpu", (LayerCost(0.005, 0.010, out_bytes=250_000),) * 4), tmp_path / "c.json")
    asked = "--costs", str(tmp_path / "c.json"), "--devices", "4", "--batches", "400"
    far = "--latency", "0,50000,100000"
    held, _ = planned(capsys, tmp_path, *asked, *far)
    line, _ = planned(capsys, tmp_path, *asked, *far, "--queue-depth", "0")
    assert (held["AL pipelined"]["sizes"], held["AL pipelined"]["devices"]) == ([2, 2], 2)
    assert held["AL pipelined"]["batch_s"] == pytest.approx(0.030, rel=0.01)
    assert line["AL pipelined"]["batch_s"] == pytest.approx((3 * 0.005 + 0.150 + 400 * 0.015) / 400)
    slow, _ = planned(capsys, tmp_path, *asked, "--link", "1,0.01,1", "--queue-depth", "0")
    assert slow["AL pipelined"]["batch_s"] == pytest.approx(0.025, rel=0.02)  # 250 KB over 10 MB/s
    uneven, _ = planned(capsys, tmp_path, *asked, *far, "--queue-depth", "0", "--jitter", "0.5")
    rows = log_normal_factors(4, 400, 0.5)
    come = [0.0] * 400
    for stage, row in enumerate(rows):
        free = 0.0
        for batch, factor in enumerate(row):
            sent = max(free, come[batch]) + 0.005 * factor
            free = sent + 0.010 * factor
            come[batch] = sent + (0.0, 0.050, 0.100, 0.0)[stage]
    assert uneven["AL pipelined"]["batch_s"] == pytest.approx(free / 400)


def test_replicas_average_gradients_as_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside other layers' backwards; in backpropagation beside those of the last micro-batch; of shared cores it is
    work. The help once left open what held for which."""
    weights = {"forward_s": 0.010, "update_s": 0.001, "parameter_bytes": 10**7}  # 10 ms over the link
    first, second = (LayerCost(backward_s=seconds, **weights) for seconds in (0.020, 0.004))
    small = LayerCost(0.005, 0.001, 0.001, 0, 10**7), LayerCost(0.005, 0.010, 0.001, 0, 10**7)
    costs = Costs("cpu", (second, first), {1: (second, first), 2: small}, {2: 1.0})
    save_costs(costs, tmp_path / "c.json")
    asked = "--costs", str(tmp_path / "c.json"), "--devices", "2", "--replicas", "2", "--link", "1"
    alone, out = planned(capsys, tmp_path, *asked, "--micro-batches", "2")
    assert 2e3 * alone["AL sequential"]["batch_s"] == pytest.approx(20 + 4 + 20 + 10 + 1)
    assert 2e3 * alone["BP naive"]["batch_s"] == pytest.approx(20 + 20 + 10 + 10 + 1)
    assert 2e3 * alone["BP gpipe"]["batch_s"] == pytest.approx(20 + 2 * 11 + 9 + 10 + 1)
    assert "each replica is forecast on whole batches" in out
    crowded, _ = planned(capsys, tmp_path, *asked, "--share-cores")
    for method in ("AL sequential", "BP naive"):
        assert 2e3 * crowded[method]["batch_s"] == pytest.approx(20 + 24 + 10 + 10 + 2)


def test_as_many_micro_batches_as_asked_for_even_if_fewer_are_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--micro-batches 4`` was once overruled by whole batches where small ones are dear; naive has no others."""
    whole, dear = LayerCost(0.010, 0.020), LayerCost(0.050, 0.100)
    save_costs(Costs("gpu", (whole,) * 2, {1: (whole,) * 2, 4: (dear,) * 2}), tmp_path / "c.json")
    costs = ["--costs", str(tmp_path / "c.json"), "--devices", "2"]
    best, _ = planned(capsys, tmp_path, *costs)
    found, out = planned(capsys, tmp_path, *costs, "--micro-batches", "4")
    assert [best[f"BP {name}"]["micro_batches"] for name in ("naive", "gpipe", "1f1b")] == [1, 1, 1]
    assert [found[f"BP {name}"]["micro_batches"] for name in ("naive", "gpipe", "1f1b")] == [1, 4, 4]
    assert found["BP gpipe"]["batch_s"] == pytest.approx(5 * 0.150)
    assert "M: micro-batches of a batch, 4 as asked" in out


@pytest.mark.slow
def test_thousands_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = str(saved(tmp_path / "c.json"))
    found, _ = planned(
        capsys, tmp_path, "--costs", costs, "--layers", "64", "--devices", "4096", "--replicas", "64", "--link", "50"
    )
    assert 64 < found["AL pipelined"]["gain"] <= 4096


def test_a_form_that_fits_nowhere_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (LayerCost(1.0, 2.0, 0.0, parameter_bytes=size) for size in (MIB, 1024 * MIB))
    save_costs(Costs("gpu", (small, small), {1: (large, large)}), tmp_path / "c.json")
    found, out = planned(capsys, tmp_path, "--costs", str(tmp_path / "c.json"), "--devices", "2", "--memory", "1")
    assert {method[:2] for method in found} == {"AL"}
    assert "BP gpipe: no layout fits" in out


@pytest.mark.slow
def test_a_model_is_measured_and_its_costs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 2)
    monkeypatch.setattr("pipeal.run.plan_costs.MICRO_BATCHES", (2, 10**6))
    small = [f"model.{key}={value}" for key, value in (("x_hid", 8), ("y_hid", 8), ("embedding_dim", 12))]
    options = [part for key in [*small, "data.batching.budget_tokens=256"] for part in ("--set", key)]
    folder = tmp_path / "plan"
    code, out, _ = run_command(plan.command, capsys, "--devices", "2", "--share-cores", *options, "--out", str(folder))
    assert code == 0
    costs = load_costs(folder / "costs.json")
    assert (len(costs.layers), {len(rows) for rows in costs.backprop.values()}) == (4, {5})
    every = [*costs.layers, *(cost for rows in costs.backprop.values() for cost in rows)]
    assert all(cost.seconds > 0 and cost.parameter_bytes > 0 for cost in every)
    assert costs.samples > 1
    assert 2 in costs.backprop
    assert costs.backprop[2][1].out_bytes < costs.backprop[1][1].out_bytes
    assert costs.crowding[2] > 0
    assert costs.facts["model"] == "transformer"
    assert "AL pipelined" in out
    again, _ = planned(capsys, tmp_path, "--costs", str(folder / "costs.json"), "--devices", "2", "--share-cores")
    assert again["AL pipelined"]["batch_s"] > 0


@pytest.mark.slow
def test_a_language_model_is_planned_as_it_is_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's depth and the threads of a device are those of the configuration; they were once 2 and 1."""
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 2)
    monkeypatch.setattr("pipeal.run.plan_costs.MICRO_BATCHES", (2,))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    own = [f"data.text={tmp_path / 'text.txt'}", "data.batch_size=4", "engine.threads=2", "engine.queue_depth=5"]

    def alike(*arguments: Any, **options: Any) -> list[tuple[LayerCost, ...]]:
        """Layers that all take the same time, so that two devices have two stages."""
        measured = measure_in_turns(*arguments, **options)
        return [tuple(replace(row, forward_s=0.01, backward_s=0.02, update_s=0.0) for row in rows) for rows in measured]

    monkeypatch.setattr("pipeal.run.plan_costs.measure_in_turns", alike)
    options = [part for key in own for part in ("--set", key)]
    folder = tmp_path / "plan"
    arguments = ["--dataset", "text", "--model", "charlm", "--devices", "2", *options, "--out", str(folder)]
    code, _, _ = run_command(plan.command, capsys, *arguments)
    assert code == 0
    costs = load_costs(folder / "costs.json")
    assert (costs.samples, costs.facts["threads"], costs.facts["model"]) == (4, 2, "charlm")
    figures = json.loads((folder / "plan.json").read_text())
    pipelined = next(each for each in figures["forecasts"] if each["method"] == "AL pipelined")
    assert len(pipelined["sizes"]) == 2
    first = costs.layers[: pipelined["sizes"][0]]
    held = sum(cost.resident_bytes + cost.activation_bytes for cost in first) + 5 * first[-1].out_bytes
    assert pipelined["memory_bytes"][0] == held


SMALL = [f"model.{key}={value}" for key, value in (("x_hid", 8), ("y_hid", 8), ("embedding_dim", 12))]


@pytest.mark.slow
def test_another_optimizer_and_precision_of_products_are_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``embedding_updates=touched`` ended in a traceback, and ``engine.matmul`` changed nothing."""
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 2)
    monkeypatch.setattr("pipeal.run.plan_costs.MICRO_BATCHES", (2,))
    found: list[str] = []

    def told(cases: Any, options: Sequence[EngineOptions], **others: Any) -> list[tuple[LayerCost, ...]]:
        with Pipeline([VirtualLayer(0, 0)], "cpu", options=options[0]):
            found.append(torch.get_float32_matmul_precision())
        return measure_in_turns(cases, options, **others)

    monkeypatch.setattr("pipeal.run.plan_costs.measure_in_turns", told)
    keys = [*SMALL, "data.batching.budget_tokens=256", "model.embedding_updates=touched", "engine.matmul=medium"]
    options = [part for key in keys for part in ("--set", key)]
    before = torch.get_float32_matmul_precision()
    folder = tmp_path / "plan"
    code, _, _ = run_command(plan.command, capsys, "--devices", "2", *options, "--out", str(folder))
    assert (code, found, torch.get_float32_matmul_precision()) == (0, ["medium"], before)
    assert load_costs(folder / "costs.json").facts["matmul"] == "medium"


def test_only_layers_that_train_themselves_are_planned_with_thin_packets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through what blocks of backpropagation hand on, a gradient comes back."""
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 2)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    formats: list[str] = []

    def told(cases: Any, options: Sequence[EngineOptions], **_: Any) -> list[tuple[LayerCost, ...]]:
        formats.extend(own.packet for own in options)
        return [(LayerCost(1.0, 2.0),) for _ in cases]

    monkeypatch.setattr("pipeal.run.plan_costs.measure_in_turns", told)
    own = [f"data.text={tmp_path / 'text.txt'}", "data.batch_size=10", "engine.packet=int8"]
    options = [part for key in own for part in ("--set", key)]
    folder = tmp_path / "plan"
    arguments = ["--dataset", "text", "--model", "charlm", "--micro-batches", "4", *options, "--out", str(folder)]
    code, _, _ = run_command(plan.command, capsys, *arguments)
    assert (code, formats) == (0, ["int8", "as_is", "as_is"])
    assert load_costs(folder / "costs.json").facts["packet"] == "int8"


def test_micro_batches_to_choose_from_have_two_samples_at_least() -> None:
    """Batch norm has no variance of one: the plan of a small batch ended with a traceback."""
    assert [plan_costs._cuts(None, fewest) for fewest in (1, 3, 4, 7, 8)] == [[1], [1], [1, 2], [1, 2], [1, 2, 4]]
    assert plan_costs._cuts(4, 4) == [1, 4]


@pytest.mark.parametrize("own_s", [0.0, 5.0])
def test_backpropagation_has_no_more_samples_in_its_micro_batches_than_in_its_batches(
    own_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten samples in four parts were charged as four parts of three: a fifth more than there is. Then they were charged
    as five sixths of these, and with that, of what a part takes however small it is."""
    monkeypatch.setattr("pipeal.run.plan_costs.BATCHES", 2)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)

    def by_sample(cases: Any, *_: Any, **__: Any) -> list[tuple[LayerCost, ...]]:
        """A second for each sample, beside what any number of them takes; one layer or block."""
        sizes = [len(batches[0][0]) for _, batches in cases]
        packets = [12 * size for size in sizes]
        rows = zip(sizes, packets, strict=True)
        return [
            (LayerCost(own_s + size, own_s + 2 * size, 1.0, sent, 0, 0, size, mean_out_bytes=sent),)
            for size, sent in rows
        ]

    monkeypatch.setattr("pipeal.run.plan_costs.measure_in_turns", by_sample)
    own = [f"data.text={tmp_path / 'text.txt'}", "data.batch_size=10"]
    options = [part for key in own for part in ("--set", key)]
    folder = tmp_path / "plan"
    arguments = ["--dataset", "text", "--model", "charlm", "--micro-batches", "4", *options, "--out", str(folder)]
    code, _, _ = run_command(plan.command, capsys, *arguments)
    assert code == 0
    whole, part = (load_costs(folder / "costs.json").backprop[number][0] for number in (1, 4))
    for parts_s, whole_s in ((part.forward_s, whole.forward_s), (part.backward_s, whole.backward_s)):
        assert 4 * parts_s == whole_s + 3 * own_s
    assert (part.update_s, part.activation_bytes, part.out_bytes, part.mean_out_bytes) == (1.0, 3, 36, 30)


def test_a_model_of_one_layer_shares_no_cores_and_is_told_before_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was once measured for minutes, and then told to measure again with --share-cores."""
    monkeypatch.setattr("pipeal.run.plan_costs.measure_in_turns", None)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    own = [f"data.text={tmp_path / 'text.txt'}", "data.batch_size=4", "model.layers=1"]
    options = [part for key in own for part in ("--set", key)]
    arguments = ["--dataset", "text", "--model", "charlm", "--share-cores", *options, "--out", str(tmp_path / "plan")]
    told_one_line("--share-cores: the model has one layer", *run_command(plan.command, capsys, *arguments))
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", ""], "unknown model ''"),
        (["--model", "transfomer"], "unknown model 'transfomer'; did you mean 'transformer'"),
        (["--dataset", "agnew"], "did you mean 'agnews'"),
        (["--dataset", "cifar10", "--model", "lstm"], "cifar10 is for vgg and resnet; expected agnews, dbpedia"),
        (["--costs", "none.json"], "none.json: No such file"),
        (["--costs", "c.json", "--costs", "c.json"], "kind 'gpu', as another file"),
        (["--costs", "c.json", "--costs", "other.json"], "c.json and other.json are of different models: the model"),
        (["--costs", "c.json", "--dataset", "agnews"], "--dataset: found agnews beside --costs"),
        (["--costs", "c.json", "--model", "lstm"], "--model: found lstm beside --costs"),
        (["--costs", "c.json", "--set", "train.seed=1"], "--set: found train.seed=1 beside --costs"),
        (["--costs", "c.json", "--micro-batches", "3"], "measured for 1, 4, 8"),
        (["--set", "engine.devices=cpu*2"], "expected --devices"),
        (["--model", "charlm"], "charlm has no embedded data; expected shakespeare"),
        (["--set", "train.accumulate=4"], "train.accumulate: found 4, but a plan"),
        (["--costs", "al.json", "--micro-batches", "4"], "these costs hold none of backpropagation"),
        (["--preset", "cpu"], "transformer has none; they are for charlm"),
        (["--share-cores", "--set", "engine.threads=2"], "found engine.threads=2; expected 1"),
        (["--devices", "0"], "found '0', expected a number such as 8"),
        (["--devices", "a*2"], "kinds have names in --costs"),
        (["--costs", "c.json", "--devices", "a*2"], "no costs of the kind 'a'; measured: gpu"),
        (["--costs", "c.json", "--devices", "gpu*-1"], "expected a number such as 8"),
        (["--devices", "9999999"], "expected a number such as 8"),
        (["--devices", "4", "--replicas", "3"], "3 replicas cannot share 4 devices"),
        (["--devices", "4", "--device-speed", "1,2"], "one for each of 4 devices"),
        (["--device-speed", "0"], "above 0"),
        (["--device-speed", "fast"], "found 'fast'"),
        (["--memory", "nan"], "--memory: found 'nan'"),
        (["--costs", "c.json", "--memory", "0.001"], "no layout fits"),
        (["--link", "-1"], "--link: found '-1'"),
        (["--link", "nan"], "--link: found 'nan'"),
        (
            ["--link", "1,2", "--devices", "4"],
            "--link: found '1,2', expected GB/s, one number above 0, or one for each of 3",
        ),
        (["--link", "1,2", "--devices", "3", "--device-speed", "1,1,2"], "devices that are all alike"),
        (["--latency", "1,2", "--devices", "6", "--replicas", "2"], "--latency: found '1,2', expected microseconds"),
        (["--jitter", "-1"], "--jitter"),
        (["--latency", "-1"], "--latency: found '-1', expected microseconds, one number of at least 0"),
        (["--costs", "c.json", "--share-cores"], "say nothing of stages that share cores"),
        (["--costs", "one.json", "--layers", "3"], "expected one with a layer to repeat"),
        (["--batches", "0"], "--batches"),
        (["--costs", "c.json", "--layers", "9" * 30], "--layers"),
        (["--costs", "long.json", "--devices", "80", "--micro-batches", "2000"], "on up to 80 stages are too many"),
        (["--devices", "4096", "--stage-replicas", "2000"], "expected at most 24 with so many devices"),
        (["--out", "c.json"], "--out c.json: c.json is no folder; choose another"),
        pytest.param(["--out", "n" * 300], "--out n+: File name too long", id="a long name"),
        (["--costs", "idle.json", "--layers", "1"], "--layers: found 1, but the first 1 of 2 take no time"),
        (["--set", "model.x_hid=none"], "model.x_hid"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_is_done(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("c.json"))
    saved(Path("one.json"), layers=1)
    save_costs(Costs("gpu", (LayerCost(0.01, 0.02),)), "al.json")
    saved(Path("long.json"), layers=100)
    save_costs(Costs("gpu", (LayerCost(0.0, 0.0), LayerCost(0.01, 0.02))), "idle.json")
    saved(Path("other.json"), "cpu", facts={"dataset": "made", "model": "down"})
    told_one_line(line, *run_command(plan.command, capsys, *arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "al.json",
        "c.json",
        "idle.json",
        "long.json",
        "one.json",
        "other.json",
    ]


def test_a_folder_that_cannot_be_made_is_told_before_a_plan_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Symptom: of a link to nowhere it was said after all, or with a traceback."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    costs = saved(tmp_path / "c.json")
    ended = run_command(plan.command, capsys, "--costs", str(costs), "--out", str(tmp_path / "link"))
    told_one_line("link is no folder; choose another", *ended)


def test_a_run_keeps_its_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: a plan in a run's folder replaced the costs that the run had measured."""
    (tmp_path / "asked.yaml").touch()
    costs = saved(tmp_path / "costs.json")
    ended = run_command(plan.command, capsys, "--costs", str(costs), "--out", str(tmp_path))
    told_one_line("a run is there; choose another", *ended)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    for inside in ("checkpoints", "link"):
        ended = run_command(plan.command, capsys, "--costs", str(costs), "--out", str(tmp_path / inside))
        told_one_line("checkpoints there is the run's own; name another --out", *ended)
