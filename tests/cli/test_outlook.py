"""What a comparison ends with: figures that follow from costs and rows, and sentences that say no more than these."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeal.config import TextConfig
from pipeal.core.errors import ConfigError
from pipeal.engine.devices.cpus import ProcessorTime
from pipeal.engine.schedule import Action
from pipeal.engine.trace import Span
from pipeal.planning.pure.layer_cost import Costs, LayerCost
from pipeal.run import outlook
from pipeal.run.forms import Form
from pipeal.run.outcome import Outcome
from pipeal.run.outlook import Forecasts, show_outlook
from pipeal.training.position import Position, Totals
from pipeal.training.row import EpochRow


def outcome(mode: Any, *, test: float, seconds: float = 2.0, stages: int = 1, lr: float = 1e-3) -> Outcome:
    config = TextConfig(dataset="toynews")
    train = replace(config.train, mode=mode, lr=replace(config.train.lr, base=lr))
    engine = replace(config.engine, devices=("cpu",) * stages, threads=1)
    row = EpochRow(1, 1, 0.5, test, seconds, seconds, 6.0, 30.0, held_acc=0.5)
    position = Position(rows=[row], totals=Totals(seconds=seconds, batches=4, samples=12))
    data: Any = SimpleNamespace(facts={"test_samples": 1000}, under=lambda _: None)
    spans = [
        Span(stage, stage, action, batch, begin + stage, begin + stage + length)
        for stage in range(stages)
        for batch in range(4)
        for action, begin, length in ((Action.FORWARD, 3.0 * batch, 1.0), (Action.BACKWARD, 3.0 * batch + 1, 2.0))
    ]
    form = Form(mode, mode.upper(), mode, replace(config, train=train, engine=engine))
    return Outcome(form, data, Path(), position, spans=spans)


BUSY = ProcessorTime(0.0, 2, 0.0, 0.0), ProcessorTime(10.0, 2, 16.0, 10.0)


def shown(forms: list[Outcome], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    show_outlook(forms, folder, None)
    return capsys.readouterr().out


def sentences(out: str) -> dict[str, str]:
    found = re.sub(r"\n {10}", " ", out.partition("in short\n")[2])
    return dict(line.split(": ", 1) for line in found.splitlines())


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "MOST_S", 0.0)


def test_only_a_comparison_with_backpropagation_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([outcome("al", test=0.9)], tmp_path, capsys) == ""
    assert shown([outcome("greedy", test=0.9), outcome("bp", test=0.9)], tmp_path, capsys) == ""


def test_it_is_of_backpropagation_on_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second BP of a comparison on named devices is the one that is spread over them."""
    forms = [outcome("al", test=0.9), outcome("bp", test=0.8), outcome("bp", test=0.7, stages=2)]
    assert sentences(shown(forms, tmp_path, capsys))["accuracy"].startswith("AL 0.9000, BP 0.8000 on test samples")


def test_rows_of_both_forms_are_on_one_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([outcome("al", test=0.9, stages=2), outcome("bp", test=0.9)], tmp_path, capsys)
    rows = re.findall(r"(?m)^(AL|BP) stage (\d)  (\S+)$", out)
    assert [row[:2] for row in rows] == [("AL", "1"), ("AL", "0"), ("BP", "0")]
    assert len({len(row[2]) for row in rows}) == 1
    assert "2 stages of AL is at another batch, and has one to work on at least 100%" in sentences(out)["timeline"]


@pytest.mark.parametrize(("bp", "within"), [(0.89, "no more than what"), (0.80, "more than what")])
def test_what_is_chance_follows_from_the_test_samples(
    bp: float, within: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sentences(shown([outcome("al", test=0.9), outcome("bp", test=bp)], tmp_path, capsys))["accuracy"]
    assert f"{0.9 - bp:.4f} apart, {within} 1,000 samples leave to chance" in said
    bound = 2 * ((0.9 * 0.1 + bp * (1 - bp)) / 1000) ** 0.5
    assert said.endswith(f"({bound:.4f}); another seed may differ by more")


def test_terms_are_those_of_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = [outcome("al", test=0.9, stages=2, seconds=4.0), outcome("bp", test=0.9, seconds=3.0)]
    said = sentences(shown(forms, tmp_path, capsys))["terms"]
    assert "the same batches, epochs, seeds, learning rate, precision; neither was tuned" in said
    assert "AL 2 stages of 1 thread, 4.00 s/epoch; BP 1 stage of 1 thread, 3.00 s/epoch" in said
    assert said.endswith("AL was 0.75 times as fast as BP here")
    (tmp_path / "tune.json").touch()
    forms[1] = outcome("bp", test=0.9, lr=1e-2)
    said = sentences(shown(forms, tmp_path, capsys))["terms"]
    assert "the same batches, epochs, seeds, precision, another learning rate; both were tuned" in said


def test_a_busy_machine_is_named_by_what_was_counted() -> None:
    before, now = BUSY
    assert "other programs had 30% of the time" in (said := outlook._machine(before, now, "accuracy"))
    assert "it was busy" in said
    quiet = outlook._machine(before, replace(now, own_s=15.0), "accuracy")
    assert "other programs had 5% of the time" in quiet
    assert "busy" not in quiet
    assert "does not tell" in outlook._machine(None, now, "accuracy")


def test_what_would_take_long_is_left_to_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = [outcome("al", test=0.9), outcome("bp", test=0.9)]
    out = shown(forms, tmp_path, capsys)
    assert "\nno forecast: it would take about 1 min; pipeal plan and pipeal memory make one\n" in out


def test_whatever_a_model_raises_the_comparison_comes_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm refuses one sample, with a ValueError: a run that was over ended with a traceback."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise ValueError("Expected more than 1 value per channel when training")

    monkeypatch.setattr(outlook, "MOST_S", 1e9)
    monkeypatch.setattr(outlook, "_devices", refuses)
    out = shown([outcome("al", test=0.9), outcome("bp", test=0.8)], tmp_path, capsys)
    assert "\nno forecast: ValueError: Expected more than 1 value per channel when training\n" in out
    assert {"accuracy", "terms", "machine"} <= set(sentences(out))


def test_updates_of_several_batches_are_not_forecast() -> None:
    al, bp = outcome("al", test=0.9), outcome("bp", test=0.9)
    config = replace(al.config, train=replace(al.config.train, accumulate=4))
    with pytest.raises(ConfigError, match=r"train.accumulate is 4"):
        outlook._measurable(replace(al, form=replace(al.form, config=config)), bp)


rows = st.builds(LayerCost, st.floats(0.1, 5), st.floats(0.1, 5))


@given(st.lists(rows, min_size=2, max_size=4), st.lists(rows, min_size=2, max_size=4))
def test_forecasts_follow_from_costs(al: list[LayerCost], bp: list[LayerCost]) -> None:
    """On one device there is nothing to gain; on more the slowest stage, or all of a batch, is what it takes."""
    depth = min(len(al), len(bp))
    costs = Costs("cpu", tuple(al[:depth]), {1: tuple(bp[:depth])})
    config = TextConfig(dataset="toynews")
    one = Forecasts.of(costs, 1, config)
    assert (one.al_gain, one.bp_gain) == (pytest.approx(1), pytest.approx(1))
    assert one.al_over_bp == pytest.approx(
        sum(row.seconds for row in bp[:depth]) / sum(row.seconds for row in al[:depth])
    )
    many = Forecasts.of(costs, 8, config)
    assert many.layers == 8
    slowest = max(row.seconds for row in al[:depth])
    assert slowest <= many.al.batch_s <= 1.05 * slowest + 1e-9
    assert many.bp_gain == pytest.approx(1), "whole batches, one stage at a time"
    assert many.al_over_bp >= many.bp_alone_s / (1.05 * slowest + 1e-9), "on eight devices both"
    assert many.bp_schedule == "whole batches"
