"""Curves are drawn for any run there may be, the broken ones included."""

import math
import threading
import warnings
from collections import Counter
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib import image

from pipeal.reporting import batches, plots
from pipeal.reporting.plots import draw_curves, measure_panels
from pipeal.training.metric import ACCURACY
from pipeal.training.row import EpochRow


def run(epochs, turns=1, layers=3, parts=2, loss=0.5):
    return [
        EpochRow(turn, epoch, 0.9, 0.8 + 0.01 * turn, 10.0 * epoch, 10.0, 100.0, 1000.0, ((loss,) * parts,) * layers)
        for turn in range(1, turns + 1)
        for epoch in range(1, epochs + 1)
    ]


@pytest.mark.parametrize(
    "runs",
    [
        {},
        {"al": []},
        {"al": run(1)},
        {"al": run(10), "bp": run(10, layers=1, parts=1)},
        {"al": run(3, turns=3)},
        {"al": run(3, turns=2)[:-1]},  # killed in the last epoch
        {"al": run(3, loss=math.nan), "bp": run(3, loss=math.inf)},
        {"al": run(2, layers=0)},
        {"al": run(2, layers=12)},
        {"al": [*run(1, loss=1e-5), *run(2, loss=10.0)[1:]]},
        {f"run {number}": run(2) for number in range(9)},
    ],
    ids=["none", "empty", "one", "compare", "turns", "killed", "not finite", "no loss", "deep", "log", "many"],
)
def test_any_run_gives_a_picture_without_a_warning(tmp_path, runs):
    path = tmp_path / "new" / "curves.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(runs, path, "50 $ a_b $ and more")
    height, width, _ = image.imread(path).shape
    assert width > 1400
    assert height > 450
    assert list(path.parent.iterdir()) == [path]


def panels(monkeypatch, tmp_path, runs, **titles):
    """The title and the legend of each panel."""
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.extend(figure.axes))
    draw_curves(runs, tmp_path / "curves.png", "title", **titles)
    legends = [axes.get_legend() for axes in drawn]
    texts = [[text.get_text() for text in legend.get_texts()] if legend else [] for legend in legends]
    return dict(zip([axes.get_title(loc="left") for axes in drawn], texts, strict=True))


def test_every_loss_of_every_form_has_a_panel(monkeypatch, tmp_path):
    """Three losses of a form had two panels, and what forms had in one was told in one title."""
    runs = {"AL": run(2), "BP": run(2, layers=1, parts=1), "InfoPro": run(2, parts=3)}
    titles = {"AL": ("associated", "autoencoder"), "BP": ("loss, end to end",), "InfoPro": ("one", "two", "three")}
    found = panels(monkeypatch, tmp_path, runs, titles_by_run=titles)
    layers = ["layer 1", "layer 2", "layer 3"]
    assert found == {
        "accuracy over epochs": ["AL", "BP", "InfoPro", "test", "train"],
        "accuracy over training time": [],
        "AL: associated": layers, "AL: autoencoder": layers, "BP: loss, end to end": ["end to end"],
        "InfoPro: one": layers, "InfoPro: two": layers, "InfoPro: three": layers,
    }  # fmt: skip


def test_of_one_epoch_each_kind_of_sample_has_a_mark_that_the_legend_has_and_none_is_cut(monkeypatch, tmp_path):
    """Training and held-out samples had the same ring, in the legend only lines, and the right edge cut the last."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    rows = [replace(row, held_acc=0.7) for row in run(1)]
    late = [replace(row, train_time=10.4) for row in rows]
    draw_curves({"AL": rows, "BP": late}, tmp_path / "curves.png", "title")
    epochs, time, *_ = figures[0].axes
    marks = [line.get_marker() for line in epochs.lines]
    assert len({*marks[:3]}) == 3
    assert marks[:3] == marks[3:]
    assert [handle.get_marker() for handle in epochs.get_legend().get_lines()[2:]] == marks[:3]
    figures[0].draw_without_rendering()
    last = time.transData.transform((10.4, 0.9))[0]
    assert last + 10 < time.get_window_extent().x1


@pytest.mark.parametrize("share", [0.02, 0.7])
def test_the_legend_lies_over_no_bar_and_a_grid_line_through_no_figure(share, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(batches, "save", lambda figure, path: figures.append(figure))
    lengths = np.arange(1, 50)
    batches.Batches(Counter({(16, 30): 20, (8, 49): 5}), lengths).draw(tmp_path / "batches.png", "title", share)
    figures[0].draw_without_rendering()
    axes = figures[0].axes[2]
    legend = axes.get_legend().get_window_extent()
    for artist in (*axes.patches, *axes.texts):
        assert not legend.overlaps(artist.get_window_extent()), artist
    for text in axes.texts:
        assert text.get_bbox_patch().get_facecolor() == (1, 1, 1, 1)


def test_ten_runs_have_ten_colours_and_test_samples_alone():
    runs = {f"run {number}": run(2, parts=1) for number in range(10)}
    (panel, _) = measure_panels(runs, ACCURACY)
    assert len({line.colour for line in panel.lines}) == len(panel.lines) == 10
    assert [key.label for key in panel.keys] == [*runs, "test"]


def test_the_global_state_of_matplotlib_is_left_alone(tmp_path):
    """Pictures are drawn from any thread, and beside whatever the user draws."""
    before = dict(matplotlib.rcParams)
    errors = []

    def draw(name):
        try:
            draw_curves({"al": run(2)}, tmp_path / name, "title")
        except Exception as error:  # noqa: BLE001  (whatever it is, the test shall see it)
            errors.append(error)

    threads = [threading.Thread(target=draw, args=(f"{number}.png",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
