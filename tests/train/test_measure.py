"""What tells a good epoch from a bad one, and that everybody who shows or keeps epochs goes by it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipeal.train.measure import ACCURACY, LOSS, measure_of
from pipeal.train.plots import draw_curves
from pipeal.train.position import Position
from pipeal.train.recorders import CsvRecorder, EpochRow, JsonLinesRecorder
from pipeal.train.report.rows import read_rows

ROW = EpochRow(1, 1, 0.6, 0.5, 10.0, 10.0, 100.0, 1000.0, ((0.1, 0.2),))
LOSSY = [
    replace(ROW, turn=turn, epoch=epoch, train_loss=loss - 0.2, test_loss=loss, test_acc=1 / loss)
    for turn, losses in enumerate(([2.0, 1.5, 1.75], [3.0, 2.5, 2.25]), start=1)
    for epoch, loss in enumerate(losses, start=1)
]


def test_a_loss_is_the_better_the_lower_and_an_accuracy_the_higher() -> None:
    assert measure_of([ROW]) is measure_of([]) is measure_of([ROW, LOSSY[0]]) is ACCURACY
    assert measure_of(LOSSY) is LOSS
    assert (LOSS.best(LOSSY), LOSS.last(LOSSY)) == ((1.5 + 2.25) / 2, (1.75 + 2.25) / 2)
    rows = [replace(ROW, epoch=n, test_acc=value) for n, value in enumerate((0.5, 0.9, 0.7), start=1)]
    assert (ACCURACY.best(rows), ACCURACY.last(rows)) == (0.9, 0.7)


def test_the_best_checkpoint_is_that_of_the_lowest_loss() -> None:
    best, worse = replace(ROW, test_loss=1.5, test_acc=0.4), replace(ROW, test_loss=1.6, test_acc=0.5)
    assert best.score > worse.score
    assert ROW.score == ROW.test_acc


def test_losses_come_back_from_every_file(tmp_path: Path) -> None:
    with CsvRecorder(tmp_path / "epochs.csv") as rows, JsonLinesRecorder(tmp_path / "epochs.jsonl") as lines:
        for row in LOSSY:
            rows.write(row)
            lines.write(row)
    assert read_rows(tmp_path / "epochs.csv") == (LOSSY, 0)
    told = [json.loads(line) for line in (tmp_path / "epochs.jsonl").open()]
    assert [(row["train_loss"], row["test_loss"]) for row in told] == [(row.train_loss, row.test_loss) for row in LOSSY]
    position = Position(turn=2, epoch=3, rows=LOSSY)
    assert Position.of(json.loads(json.dumps(position.state())), []).rows == LOSSY


def test_rows_of_classifiers_are_as_they_were(tmp_path: Path) -> None:
    with CsvRecorder(tmp_path / "epochs.csv") as rows, JsonLinesRecorder(tmp_path / "epochs.jsonl") as lines:
        rows.write(ROW)
        lines.write(ROW)
    assert not [column for column in next(csv.reader((tmp_path / "epochs.csv").open())) if column.endswith("t_loss")]
    assert json.loads((tmp_path / "epochs.jsonl").read_text())["test_loss"] is None
    assert read_rows(tmp_path / "epochs.csv") == ([ROW], 0)


@pytest.mark.parametrize(("rows", "title", "shares"), [(LOSSY, "loss", False), ([ROW], "accuracy", True)])
def test_curves_name_what_they_show(
    rows: list[EpochRow], title: str, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_curves({"al": rows}, tmp_path / "curves.png", "a title")
    by_epoch, by_second, *_ = drawn[0].axes
    assert by_epoch.get_title(loc="left") == f"{title} over epochs"
    assert by_second.get_title(loc="left") == f"{title} over training time"
    assert ("%" in by_epoch.yaxis.get_major_formatter()(0.5)) == shares
