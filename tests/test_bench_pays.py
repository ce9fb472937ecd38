"""The table "Does it pay?": its formulas against cases worked by hand and against the ideals of distance.py."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest
import torch
from torch import nn

from pipeal import BP
from pipeal.planning.pure.hardware import Link
from pipeal.planning.pure.layer_cost import LayerCost
from tests.benches import BENCH, Benches


def even(bench: Benches, layers: int = 4, weights: int = 0) -> Any:
    """Layers of 1 s and 2 s, which hand on 100 bytes, and whose parts take their share."""
    times = bench["pays_times"]

    def row(cut: int) -> tuple[LayerCost, ...]:
        return (LayerCost(1 / cut, 2 / cut, out_bytes=100 // cut, parameter_bytes=weights),) * layers

    return times.Measured({cut: row(cut) for cut in times.CUTS}, {cut: 32 / cut for cut in times.CUTS}, 32.0)


@pytest.mark.parametrize("module", ["pays_curves", "pays_times"])
def test_the_examples_in_docstrings_hold(bench: Benches, module: str) -> None:
    found = doctest.testmod(bench[module], optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 1
    assert not found.failed


def test_stages_take_what_their_schedule_takes_where_all_are_alike(bench: Benches) -> None:
    times, ideals, link = bench["pays_times"], bench["distance_ideals"], Link(bytes_per_s=50.0, latency_s=0.5)
    (local,) = (way for way in times.local(even(bench), link, 4, 10) if way.layout == "4×1")
    assert local.seconds == pytest.approx(ideals.pipelined_s([[(1.0, 2.0)] * 10] * 4, 0.5, carried_s=2.0))
    assert local.devices == 4
    link = Link(bytes_per_s=250.0, latency_s=0.1)
    ways = times.pipelined_backprop(even(bench), link, 4, batches=10)
    least = min(way.seconds for way in ways if way.layout == "4×1, M 4")
    assert least == pytest.approx(10 * min(ideals.backprop_s(4, 4, (0.25, 0.5), 0.1, carried_s=0.1)))


def test_replicas_share_a_batch_and_wait_for_each_other(bench: Benches) -> None:
    """Halves take 0.5 s and 1 s; a ring of two carries 100 of 100 bytes in two messages: 2 (50 / 100 + 0.25) s."""
    times, link, layers = bench["pays_times"], Link(bytes_per_s=100.0, latency_s=0.25), even(bench, 1, weights=100)
    assert [way.seconds for way in times.data_parallel(layers, link, 2, 10)] == [30.0, 20.0]
    shared = {way.layout: way.seconds for way in times.local(layers, link, 2, 10)}
    assert shared == pytest.approx({"1×1": 30.0, "1×2": 30.0})  # 1.5 s of work, then 1.5 s of averaging
    alone = {way.layout for way in times.local(layers, link, 2, 10, shares=False)}
    assert alone == {"1×1"}


def test_workers_of_local_sgd_have_the_model_at_the_end_of_a_round(bench: Benches) -> None:
    """14 batches of two workers, 4 steps a round: 2 rounds, so 8 steps of 3 s and 2 averages of 1.5 s."""
    times, curve = bench["pays_times"], bench["pays_curves"].Curve
    measured = [(0, 0.0), (8, 0.4), (16, 0.8)]
    curves = [curve("bp", 1e-3, 2, 4, 16, measured), curve("bp", 1e-3, 4, 4, 16, measured)]
    link, layers = Link(bytes_per_s=100.0, latency_s=0.25), even(bench, 1, weights=100)
    (way,) = times.local_sgd(layers, link, 2, curves, 0.7)
    assert (way.seconds, way.devices) == (8 * 3 + 2 * 1.5, 2)
    assert not list(times.local_sgd(layers, link, 4, curves, 0.9))  # never


def test_workers_go_on_from_where_the_outer_optimizer_takes_their_mean(bench: Benches) -> None:
    """From 1, two workers come to 0 and 0.5: a way of 0.75, of which Nesterov takes 0.7 (1 + 0.9)."""
    team = [[BP(nn.Linear(1, 1, bias=False))] for _ in range(2)]
    weights = [next(layers[0].parameters()) for layers in team]
    with torch.no_grad():
        for weight in weights:
            weight.fill_(1.0)
        average = bench["pays_curves"]._Average(team)
        weights[0].fill_(0.0)
        weights[1].fill_(0.5)
    average.step()
    for weight in weights:
        assert weight.item() == pytest.approx(1 - 0.7 * 1.9 * 0.75, abs=1e-6)


def test_the_best_of_a_row_is_marked_and_what_never_comes_is_told(bench: Benches) -> None:
    row = {"AL": {"seconds": 2.0, "layout": "4×1"}, "BP": {"seconds": 11.06, "layout": "8"}, "SGD": None}
    assert list(bench["pays"]._cells(row)) == ["**2** (4×1)", "11.1 (8)", "never"]


def test_figures_of_a_quick_run_are_not_kept(bench: Benches, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench["pays"].main(["--quick"])
    assert raised.value.code == 2
    assert "name another file with --json" in capsys.readouterr().err


def test_the_tables_of_the_page_are_printed_from_kept_files(bench: Benches, capsys: pytest.CaptureFixture[str]) -> None:
    pays, results = bench["pays"], BENCH / "results"
    for name in ("pays", "pays-int8"):
        path = results / f"{name}.json"
        pays.show(pays.Kept(path, json.loads(path.read_text(encoding="utf-8"))["of"]))

    def rows(text: str) -> list[list[str]]:
        """The cells of seconds, behind the network and the number of devices, or behind how much is wanted."""
        cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "×" in line]
        return [row[2:] if row[1].isdecimal() else row[1:] for row in cells if len(row) >= 6]

    page = (BENCH.parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = rows(page[page.index("### Does it pay?") : page.index("## Memory over depth")])
    assert len(told) == 3 * 15 + 3
    printed = rows(capsys.readouterr().out)
    assert [row for row in told if row not in printed] == []
