"""What tells a good epoch from a bad one, and that everybody who shows or keeps epochs goes by it."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipeal.reporting.page.rows import read_rows
from pipeal.reporting.plots import draw_curves
from pipeal.reporting.recorders import CsvRecorder, JsonLinesRecorder
from pipeal.training.checkpoint.policy import is_best
from pipeal.training.metric import ACCURACY, LOSS, MeanSd, best_rows, last_rows, measure_of
from pipeal.training.position import Position
from pipeal.training.row import EpochRow

ROW = EpochRow(1, 1, 0.6, 0.5, 10.0, 10.0, 100.0, 1000.0, ((0.1, 0.2),))
LOSSY = [
    replace(
        ROW,
        turn=turn,
        epoch=epoch,
        train_loss=loss - 0.2,
        test_loss=loss,
        test_acc=1 / loss,
        held_loss=3 - loss,
        held_acc=0.5,
    )
    for turn, losses in enumerate(([2.0, 1.5, 1.75], [3.0, 2.5, 2.25]), start=1)
    for epoch, loss in enumerate(losses, start=1)
]


def test_a_loss_is_the_better_the_lower_and_an_accuracy_the_higher() -> None:
    assert measure_of([ROW]) is measure_of([]) is measure_of([ROW, LOSSY[0]]) is ACCURACY
    assert measure_of(LOSSY) is LOSS
    # The held-out losses say the contrary of the validation's, and the best epochs are theirs.
    assert (LOSS.at_best(LOSSY), LOSS.last(LOSSY)) == (MeanSd((2.0, 3.0)), MeanSd((1.75, 2.25)))
    rows = [
        replace(ROW, epoch=n, test_acc=value, held_acc=1 - value) for n, value in enumerate((0.5, 0.9, 0.7), start=1)
    ]
    assert (ACCURACY.at_best(rows), ACCURACY.last(rows)) == (MeanSd((0.5,)), MeanSd((0.7,)))


def test_no_test_figure_can_change_what_is_chosen() -> None:
    rows = [replace(ROW, epoch=n, held_acc=value) for n, value in enumerate((0.5, 0.8, 0.8, 0.6), start=1)]
    for figures in ((0.1, 0.2, 0.9, 0.3), (0.9, 0.0, 0.0, 0.0), (math.nan,) * 4):
        seen = [replace(row, test_acc=figure, train_acc=figure) for row, figure in zip(rows, figures, strict=True)]
        (best,) = best_rows(seen)
        assert best.epoch == 2, "the first of equals"
        assert [row.score for row in seen] == [0.5, 0.8, 0.8, 0.6]
        marks = [is_best(Position(epoch=n, batches=n, rows=seen[:n])) for n in range(1, 5)]
        assert marks == [True, True, False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_turn_that_diverged_has_no_best_epoch_and_its_run_no_mean_of_them(bad: float) -> None:
    """Symptom: its first epoch was said to be chosen."""
    rows = [replace(row, held_loss=bad) if row.turn == 2 or row.epoch == 1 else row for row in LOSSY]
    assert [(row.turn, row.epoch) for row in best_rows(rows)] == [(1, 3)]
    assert LOSS.at_best(rows) is None, "a mean of those that did not diverge"
    assert LOSS.at_best(rows[:3]) == MeanSd((1.75,))


def test_without_held_out_samples_no_epoch_is_chosen() -> None:
    rows = [replace(ROW, epoch=n, test_acc=n / 10) for n in (1, 2)]
    assert best_rows(rows) == []
    assert ACCURACY.at_best(rows) is None
    assert ACCURACY.last(rows) == MeanSd((0.2,))
    assert not any(is_best(Position(epoch=n, batches=n, rows=rows[:n])) for n in (1, 2))


def test_the_last_epoch_is_that_of_turns_which_have_come_to_it() -> None:
    """A run is also shown while its second turn is under way."""
    rows = [replace(ROW, turn=turn, epoch=epoch) for turn, epoch in ((1, 1), (1, 2), (2, 1))]
    assert last_rows(rows) == [rows[1]]


def test_turns_give_their_mean_and_sample_standard_deviation() -> None:
    rows = [replace(ROW, turn=n, test_acc=value, held_acc=0.5) for n, value in enumerate((0.90, 0.92, 0.97), start=1)]
    found = ACCURACY.at_best(rows)
    assert found is not None
    assert (found.mean, found.sd) == (pytest.approx(0.93), pytest.approx(0.0360555))  # over two, not over three
    assert str(found) == "0.9300 ± 0.0361"
    assert str(MeanSd((0.5,))) == "0.5000"
    assert MeanSd((0.5, math.nan)).sd is None


def test_the_best_checkpoint_is_that_of_the_lowest_held_out_loss() -> None:
    best, worse = replace(ROW, held_loss=1.5, held_acc=0.4), replace(ROW, held_loss=1.6, held_acc=0.5)
    assert best.score == -1.5
    assert worse.score == -1.6
    assert replace(ROW, held_acc=0.4).score == 0.4
    assert ROW.score is None


def test_rows_of_a_run_that_an_older_version_began_have_blanks(tmp_path: Path) -> None:
    """Its rows have no held-out figures; those that come after it was taken up do."""
    rows = [ROW, replace(ROW, epoch=2, held_acc=0.75)]
    with CsvRecorder(tmp_path / "epochs.csv") as recorder:
        for row in rows:
            recorder.write(row)
    assert read_rows(tmp_path / "epochs.csv") == (rows, 0)
    head, *lines = (tmp_path / "epochs.csv").read_text().splitlines()
    assert head.startswith("turn,train_acc,test_acc,train_time,")
    assert head.endswith(",held_acc")
    (tmp_path / "epochs.csv").write_text("\n".join([head, *lines, lines[-1].rpartition(",")[0]]))
    assert read_rows(tmp_path / "epochs.csv") == (rows, 1), "a line that was cut is none"
    old = Position(epoch=1, rows=[ROW]).state()
    for name in ("held_acc", "held_loss"):
        del old["rows"][0][name]
    assert Position.of(old, []).rows == [ROW]


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
    told = [text.get_text() for text in by_epoch.get_legend().get_texts()]
    assert told == ["al", "test" if shares else "validation", "train", *([] if rows == [ROW] else ["held-out"])]
