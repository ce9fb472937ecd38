"""What is kept and shown of a run that came to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeal.config import TextConfig
from pipeal.reporting.attempts import Attempts
from pipeal.reporting.batches import Batches
from pipeal.run.form_costs import FormCosts
from pipeal.run.forms import Form
from pipeal.run.outcome import Outcome, show
from pipeal.training.position import Position, Totals
from pipeal.training.row import EpochRow


def data(lengths: object = None) -> Any:
    return SimpleNamespace(facts={}, lengths=lengths)


def outcome(folder: Path, **totals: object) -> Outcome:
    config = TextConfig(dataset="toynews")
    config = replace(config, engine=replace(config.engine, devices=("cpu",)))
    known = Totals(seconds=2.0, batches=4, samples=12, tokens=60, padded=70, shapes=Counter({(4, 10): 3}))
    row = EpochRow(1, 1, 0.5, 0.5, 2.0, 2.0, 6.0, 30.0)
    position = Position(rows=[row], totals=replace(known, **totals))  # type: ignore[arg-type]
    return Outcome(Form("al", "AL", "al", config), data(), folder, position, (1, 1))


def test_a_batch_that_was_left_out_makes_the_others_no_smaller(tmp_path: Path) -> None:
    """Its samples were not counted, and it was."""
    summary = outcome(tmp_path, left_out={(1, 2)}).summary()
    assert (summary["samples_per_batch"], summary["batches_left_out"]) == (4.0, 1)


def test_only_pictures_that_are_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a timeline was printed that a full disk had kept from being drawn."""
    one = outcome(tmp_path)
    (tmp_path / "curves.png").touch()
    one.totals.tokens = 0
    show([one], tmp_path)
    out = capsys.readouterr().out
    assert f"files:    {tmp_path}\ncurves:   {tmp_path / 'curves.png'}\n" in out
    assert "timeline" not in out
    (tmp_path / "timeline.png").touch()
    show([one], tmp_path)
    assert f"timeline: {tmp_path / 'timeline.png'}\n" in capsys.readouterr().out


def test_the_picture_of_batches_is_of_the_form_by_its_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its title was the whole ``Form``, with the configuration in it."""
    titles = []
    monkeypatch.setattr(Batches, "draw", lambda self, path, title, padding: titles.append(title))
    replace(outcome(tmp_path), experiment=data(np.array([3, 5]))).write(Attempts())
    assert titles == ["toynews transformer AL: batches"]


def test_the_table_says_of_which_split_seeds_and_epochs_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = outcome(tmp_path)
    config = replace(one.config, train=replace(one.config.train, repeat=2, seed=3, epochs=2))
    rows = [
        replace(one.rows[0], turn=turn, epoch=epoch, test_acc=test, held_acc=held, epoch_time=seconds)
        for turn, epoch, test, held, seconds in (
            (1, 1, 0.5, 0.9, 1.0), (1, 2, 0.7, 0.8, 2.0), (2, 1, 0.9, 0.1, 3.0), (2, 2, 0.6, 0.2, 4.0),
        )
    ]  # fmt: skip
    costs = FormCosts(3e6, 1e6, 2**20, 2**20, 2 * 2**20, 2**20, 0.0)
    one = replace(one, position=replace(one.position, rows=rows), costs=costs, parameters=(5, 2))
    forms = [replace(one, form=Form(name, name.upper(), name, config)) for name in ("al", "bp")]
    show(forms, tmp_path)
    out = capsys.readouterr().out
    assert "2 epochs, mean ± sd of seeds 3 to 4" in out
    assert "the epoch of each turn with the best held-out accuracy: AL 1 2, BP 1 2" in out
    results, taken = (line for line in out.splitlines() if line.startswith("| AL"))
    assert "0.5500 ± 0.0707" in results, "of the epochs that are best on held-out samples"
    assert "0.6500 ± 0.0707" in results, "of the last"
    assert [cell.strip() for cell in taken.split("|")[2:6]] == ["3.000", "1.000", "5.000", "2.50 ± 1.29"]
    assert all(len(line) <= 120 for line in out.splitlines() if line.startswith("|"))
    summary = forms[0].summary()
    assert (summary["test_accuracy_at_best_held_out"], summary["last_test_accuracy"]) == (0.55, pytest.approx(0.65))
    assert (summary["best_epochs"], summary["best_chosen_by"]) == ([1, 2], "held-out accuracy")
    first, second = summary["turns"]  # type: ignore[misc, attr-defined]
    assert (first["seed"], second["seed"]) == (3, 4)
    assert (first["best_epoch"], first["test_accuracy_of_best"], first["held_out_accuracy_of_best"]) == (1, 0.5, 0.9)
    assert (second["last_epoch"], second["test_accuracy_of_last"]) == (2, 0.6)
    assert (summary["seconds_per_epoch_least"], summary["seconds_per_epoch_most"]) == (1.0, 4.0)
    assert (summary["training_parameters"], summary["inference_parameters"]) == (7, 5)
    assert summary["batches_per_epoch"] == 1, "of four, in two epochs of two turns"


def test_speed_ups_are_over_backpropagation_on_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, forms = outcome(tmp_path), []
    for label, mode, seconds in (("AL", "al", 1.0), ("BP", "bp", 3.0), ("BP over 2", "bp", 2.0)):
        config = replace(one.config, train=replace(one.config.train, mode=mode))
        position = replace(one.position, rows=[replace(one.rows[0], epoch_time=seconds)])
        form = Form(label.lower(), label, mode, config)  # type: ignore[arg-type]
        forms.append(replace(one, form=form, position=position))
    show(forms, tmp_path)
    table = capsys.readouterr().out.partition("costs, speed-up over BP\n")[2]
    rows_shown = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| ")]
    speed_ups = {cells[1]: cells[-2] for cells in rows_shown}
    assert [speed_ups[one.form.label] for one in forms] == ["3.00×", "1.00×", "1.50×"]


def test_without_backpropagation_speed_ups_are_over_the_form_that_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, forms = outcome(tmp_path), []
    for label, mode, seconds in (("Greedy", "greedy", 3.0), ("AL", "al", 2.0)):
        config = replace(one.config, train=replace(one.config.train, mode=mode))
        position = replace(one.position, rows=[replace(one.rows[0], epoch_time=seconds)])
        forms.append(replace(one, form=Form(mode, label, mode, config), position=position))
    show(forms, tmp_path)
    table = capsys.readouterr().out.partition("costs, speed-up over Greedy\n")[2]
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    assert [(row[1].strip(), row[-2].strip()) for row in cells[2:]] == [("Greedy", "1.00×"), ("AL", "1.50×")]


def test_where_a_form_diverged_no_epoch_of_it_is_called_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = outcome(tmp_path), outcome(tmp_path)
    rows = [replace(one.rows[0], epoch=epoch, held_acc=held) for epoch, held in ((1, 0.3), (2, nan))]
    one.position.rows[:] = rows
    other.position.rows[:] = [replace(row, held_acc=nan) for row in rows]
    show([one, other], tmp_path)
    assert "the epoch with the best held-out accuracy: AL 1, AL none (none: it diverged)\n" in capsys.readouterr().out
    assert other.summary()["test_accuracy_at_best_held_out"] is None


def test_where_nothing_is_held_out_no_epoch_is_called_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show([outcome(tmp_path)], tmp_path)
    assert "no epoch, since nothing is held out to choose by (data.held_out is 0)" in capsys.readouterr().out
    summary = outcome(tmp_path).summary()
    assert (summary["test_accuracy_at_best_held_out"], summary["best_epochs"]) == (None, [])
    assert summary["last_test_accuracy"] == 0.5
